"""Which rounds are captured, in which order and how far, with a strategy that only notes what it runs."""

from collections.abc import Callable
from threading import BrokenBarrierError
from typing import TypeVar

import pytest
import torch

from aerie.attention.backend import NewUnderCaptureError
from aerie.workers.config import MAX_STEP_TOKENS, PLAIN, GraphCapture, RoundShape, RoundShapes
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.runner.batch import StepBatch, StepTensors
from aerie.workers.runner.decoding import FillMasks, Passed
from aerie.workers.runner.graphs.cuda_graph import CaptureCost, GraphedDecoding
from aerie.workers.runner.graphs.graph_keys import (
    TOKEN_BUCKETS,
    GraphKey,
    bucket_sizes,
    buckets_of,
    is_always_captured,
    mixed_buckets,
    token_buckets,
)
from aerie.workers.runner.graphs.kernel_compilation import CompileAhead
from aerie.workers.runner.graphs.step_capture import BrokenStepError
from aerie.workers.sampling import CAPTURED_NEEDS, SamplingNeeds
from aerie.workers.slots import SlotTable
from tests.support.kernels.eager_graphs import EagerRecorder
from tests.support.thread_group import on_ranks

T = TypeVar("T")
CPU = torch.device("cpu")
BUCKETS = bucket_sizes(40)
PLENTY = GraphCapture(limit_s=1e9, limit_gb=1e9)
NEEDS = (
    SamplingNeeds(False),
    SamplingNeeds(True),
    SamplingNeeds(True, filtered=True),
    SamplingNeeds(False, shaping=True),
    SamplingNeeds(False, num_logprobs=0),
    SamplingNeeds(True, True, True, 20),
    SamplingNeeds(False, masked=True),
    SamplingNeeds(True, filtered=True, masked=True),
    SamplingNeeds(False, shaping=True, num_logprobs=2, masked=True),
)


class NotingStrategy:
    """Emits its slots; notes each step's batch."""

    shapes = RoundShapes((PLAIN, RoundShape("wide", 4, 4, 2)), default=1)

    def __init__(self) -> None:
        self.ran: list[StepBatch] = []

    def forward(self, batch: StepBatch) -> Passed:
        return Passed(batch.slots.unsqueeze(1).clone())

    def choose(self, batch: StepBatch, passed: Passed) -> StepTensors:
        assert torch.equal(passed.hidden, batch.slots.unsqueeze(1)), "the halves of a step ran different batches"
        return self.step(batch)

    def step(self, batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
        if fill_masks is not None:
            fill_masks()
        self.ran.append(batch)
        ones = torch.ones_like(batch.slots)
        return StepTensors(batch.slots.unsqueeze(1).clone(), ones, ones * 0, -ones, None)


def graphed(
    bytes_each: int = 0, recorder: EagerRecorder | None = None
) -> tuple[GraphedDecoding, NotingStrategy, EagerRecorder]:
    strategy, recorder = NotingStrategy(), recorder or EagerRecorder(bytes_each)
    slots = SlotTable(40, 4, 16, CPU)
    return GraphedDecoding(strategy, slots, BUCKETS, 64, recorder), strategy, recorder


def batch_of(size: int, shape: int, needs: SamplingNeeds) -> StepBatch:
    slots = torch.arange(size)
    return StepBatch(slots, shape, shape, slots, 64, None, needs)


def test_rarer_kinds_have_fewer_buckets() -> None:
    for largest in (1, 3, 8, 40, 100, 256, 300):
        buckets = bucket_sizes(largest)
        for needs in CAPTURED_NEEDS:
            sizes = buckets_of(needs, buckets)
            assert set(sizes) <= set(buckets) and sizes[-1] == buckets[-1] and sorted(sizes) == list(sizes)
            for count in range(1, largest + 1):
                assert next(size for size in sizes if size >= count) < 2 * count
            assert len(sizes) == len(buckets) or needs.full_logits or needs.masked
    assert len(buckets_of(CAPTURED_NEEDS[-1], bucket_sizes(256))) == 9


def test_what_auto_plans_on_a_gpu_is_captured() -> None:
    """No step of prompts runs eagerly unless `max_step_tokens` asks for longer ones."""
    assert token_buckets(MAX_STEP_TOKENS["cuda"]) == TOKEN_BUCKETS and TOKEN_BUCKETS[-1] == MAX_STEP_TOKENS["cuda"]
    assert token_buckets(8192) == TOKEN_BUCKETS and token_buckets(600) == (16, 64, 128, 256, 384, 512, 600)


@pytest.mark.parametrize("max_running", [1, 2, 8, 40, 128])
def test_many_prompt_tokens_are_captured_beside_fewer_batch_sizes(max_running: int) -> None:
    """Padding is at most three requests of four, or twelve of sixteen, of 640 rows and more."""
    few, many = (mixed_buckets(tokens, bucket_sizes(max_running)) for tokens in (512, 640))
    assert set(many) <= set(few) and many[-1] == few[-1] == max_running
    for count in range(1, max_running + 1):
        padded = next(size for size in many if size >= count)
        assert padded < 2 * count or padded <= 16


def test_wide_rounds_are_captured_beside_prompts_in_sizes_that_save_rows() -> None:
    """33 requests of four rows each run as 48, not as 64: 64 rows less, a sixteenth of a step with 768 tokens."""
    buckets = bucket_sizes(192)
    assert mixed_buckets(768, buckets, width=0) == (1, 4, 16, 32, 64, 128, 192)
    assert mixed_buckets(768, buckets, width=4) == (1, 4, 16, 24, 32, 48, 64, 96, 128, 192)
    assert mixed_buckets(768, buckets, width=8) == (1, 4, 16, 24, 32, 48, 64, 96, 128, 192)
    assert mixed_buckets(768, buckets, width=1) == (1, 4, 16, 32, 64, 96, 128, 192)


@pytest.mark.parametrize("limits", [PLENTY, GraphCapture(limit_s=1e9), GraphCapture(), GraphCapture(1e9, 0.0)])
def test_no_step_captures_anything(limits: GraphCapture) -> None:
    """Whatever was captured at start: each step is one replay or runs as it is, and emits what it should."""
    graphs, strategy, recorder = graphed()
    report = graphs.capture(limits, SOLO)
    at_start = graphs.captured
    num_recorded = recorder.num_recorded
    assert list(report.rounds) == list(graphs._captured)
    assert num_recorded == len(at_start) + sum(key.needs.masked for key in at_start), "only masks cut a step in two"
    for size in range(1, 42):
        for shape in range(2):
            for needs in NEEDS:
                batch = batch_of(size, shape, needs)
                strategy.ran.clear()
                replays = recorder.num_replays
                out = graphs.step(batch)
                assert out.tokens.flatten().tolist() == list(range(size))
                (ran,) = strategy.ran
                captured = (limits.limit_s > 0 and limits.limit_gb > 0) or not (needs.full_logits or needs.masked)
                assert recorder.num_replays - replays == (captured and size <= 40) * (2 if needs.masked else 1)
                assert ran.needs.masked == needs.masked, "who has no grammar pays for none"
                assert (ran is batch) == (recorder.num_replays == replays)
                assert ran.needs.covers(needs) and ran.num_requests < 2 * size + (size > 40)
    assert recorder.num_recorded == num_recorded and graphs.captured == at_start


def test_masks_are_filled_once_between_the_halves() -> None:
    for limits in (PLENTY, GraphCapture()):
        graphs, strategy, _ = graphed()
        graphs.capture(limits, SOLO)
        for needs in NEEDS:
            strategy.ran.clear()
            filled: list[int] = []
            ran = strategy.ran
            graphs.step(batch_of(3, 1, needs), lambda filled=filled, ran=ran: filled.append(len(ran)))
            if needs.masked:
                assert filled == [0]


def test_captures_stop_at_the_allowance() -> None:
    """Greedy and random rounds are captured whatever they take, the rest until seconds or bytes are used up."""
    always = 2 * 2 * len(BUCKETS)
    wanted = always + (len(CAPTURED_NEEDS) - 2) * 2 * len(buckets_of(CAPTURED_NEEDS[-1], BUCKETS))
    for limits, expected in (
        (PLENTY, wanted),
        (GraphCapture(1e9, 0.0), always),
        (GraphCapture(1e9, 0.0045), always + 5),
        (GraphCapture(0.0, 1e9), always),
        (GraphCapture(35.0, 1e9), always + 4),
    ):
        graphs, _, recorder = graphed(bytes_each=10**6)
        # every recording takes ten seconds
        report = graphs.capture(limits, SOLO, clock=lambda recorder=recorder: 10.0 * recorder.num_recorded)
        assert len(graphs.captured) == expected and report.num_left_out == wanted - expected
        assert report.total == CaptureCost(10.0 * recorder.num_recorded, 10**6 * recorder.num_recorded)
        optional = [key for key in graphs.captured if not is_always_captured(key)]
        order = [CAPTURED_NEEDS.index(key.needs) for key in optional]
        assert not order or max(order) == 2 or expected == wanted


def test_ranks_stop_at_the_same_round() -> None:
    """Their clocks and memories differ; rounds run collectives, so what they capture must not."""

    def run(group: TPGroup) -> tuple[frozenset[GraphKey], int]:
        graphs, _, recorder = graphed(bytes_each=10**6 * (group.rank + 1))
        seconds = (10.0, 1.0, 3.0)[group.rank]
        report = graphs.capture(GraphCapture(65.0, 0.0145), group, clock=lambda: seconds * recorder.num_recorded)
        return graphs.captured, report.num_left_out

    outcomes = on_ranks(3, run)
    assert len(set(outcomes)) == 1
    # rank 2 takes 3 MB each, so that 14.5 MB are used up by the fifth; seconds would last for seven
    assert len(outcomes[0][0]) == 2 * 2 * len(BUCKETS) + 5


MEASURED = [(0, 1, 0, 0), (0, 40, 0, 0), (1, 1, 0, 0), (1, 8, 0, 0), (1, 40, 0, 0)]


def capture_few(graphs: GraphedDecoding, group: TPGroup = SOLO, limits: GraphCapture = GraphCapture()) -> None:  # noqa: B008
    heard: list[tuple[int, int]] = []
    graphs.capture(limits, group, graphs.first_graphs(MEASURED), advance=lambda *far: heard.append(far))
    assert [done for done, _ in heard] == list(range(1, len(heard) + 1)) and heard[-1][0] == heard[-1][1]


def test_a_start_captures_what_it_measures_rounds_with_filters_and_greedy_ones_of_one_request() -> None:
    graphs, _, recorder = graphed()
    capture_few(graphs)
    greedy, random, filtered = SamplingNeeds(False), SamplingNeeds(True), SamplingNeeds(True, filtered=True)
    expected = {GraphKey(shape, shape, count, random) for shape, count, *_ in MEASURED}
    expected |= {GraphKey(shape, shape, count, filtered) for shape in (0, 1) for count in (1, 8, 40)}
    expected |= {GraphKey(shape, shape, 1, greedy) for shape in (0, 1)}
    assert graphs.captured == expected and recorder.num_recorded == len(expected)
    assert graphs.report.num_left_out > graphs.graphs.num_waiting > 0, "those with grammars wait for a grammar"


def test_the_next_larger_graph_stands_in_until_a_step_has_its_own() -> None:
    """Whatever is captured, a batch takes the graph of the fewest rows that holds it, and none at all where shape or
    masks differ."""
    graphs, strategy, recorder = graphed()
    capture_few(graphs)
    graphs.want_masked()
    while True:
        for size, shape, needs in (
            (2, 1, NEEDS[0]),
            (9, 0, NEEDS[1]),
            (5, 1, NEEDS[2]),
            (3, 1, NEEDS[6]),
            (1, 0, NEEDS[5]),
        ):
            batch, replays = batch_of(size, shape, needs), recorder.num_replays
            strategy.ran.clear()
            assert graphs.step(batch).tokens.flatten().tolist() == list(range(size))
            able = [
                key.bucket
                for key in graphs.captured
                if key.shape == shape and key.bucket >= size
                if key.needs.covers(needs) and key.needs.masked == needs.masked
            ]
            assert strategy.ran[0].num_requests == min(able, default=size)
            assert (recorder.num_replays > replays) == bool(able)
        before = graphs.graphs
        if before.num_waiting == 0:
            break
        graphs.capture_next(SOLO)
        assert graphs.graphs.num_captured == before.num_captured + 1
        assert graphs.graphs.num_waiting == before.num_waiting - 1
    everything, _, _ = graphed()
    everything.capture(PLENTY, SOLO)
    assert graphs.captured == everything.captured


def test_what_steps_have_missed_most_is_captured_next() -> None:
    """Most padded rows first, then the next in order."""
    graphs, _, _ = graphed()
    capture_few(graphs)
    assert graphs.graphs.missed_rows == 0 and graphs.graphs.capture_ms > 0.0
    seldom, often = (GraphKey(1, 1, count, NEEDS[1]) for count in (2, 16))
    assert not {seldom, often} & graphs.captured
    graphs.step(batch_of(2, 1, NEEDS[1]))
    for size in (9, 13, 16):
        graphs.step(batch_of(size, 1, NEEDS[1]))
    missed_rows = graphs.graphs.missed_rows
    assert missed_rows == 3 * graphs.shapes[1].width * (40 - 16)
    for expected in (often, seldom):
        before = graphs.captured
        graphs.capture_next(SOLO)
        assert graphs.captured - before == {expected}
    assert graphs.graphs.missed_rows == 0
    graphs.step(batch_of(16, 1, NEEDS[1]))
    assert graphs.graphs.missed_rows == 0, "it has its own"
    graphs.capture_next(SOLO)


def test_steps_with_grammars_are_captured_once_one_has_come() -> None:
    graphs, _, _ = graphed()
    capture_few(graphs)
    while graphs.graphs.num_waiting:
        graphs.capture_next(SOLO)
    assert not any(key.needs.masked for key in graphs.captured)
    graphs.want_masked()
    num_masked = graphs.graphs.num_waiting
    graphs.want_masked()
    assert graphs.graphs.num_waiting == num_masked > 0
    while graphs.graphs.num_waiting:
        graphs.capture_next(SOLO)
    assert sum(key.needs.masked for key in graphs.captured) == num_masked


class FailingRecorder(EagerRecorder):
    """Fails in recordings `failing`, counted from 0."""

    def __init__(self, failing: tuple[int, ...]) -> None:
        super().__init__(bytes_each=10**6)
        self._failing = failing

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        run, kept = super().record(function, was_run)
        if self.num_recorded - 1 in self._failing:
            raise torch.OutOfMemoryError("out of memory")
        return run, kept


def test_a_capture_that_fails_while_serving_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    num_first = 13
    graphs, strategy, _ = graphed(recorder=FailingRecorder((num_first, num_first + 2)))
    capture_few(graphs)
    assert len(graphs.captured) == num_first
    waiting = graphs.graphs.num_waiting
    for _ in range(4):
        graphs.capture_next(SOLO)
    assert len(graphs.captured) == num_first + 2 and graphs.graphs.num_waiting == waiting - 4
    assert caplog.text.count("out of memory") == 1, "logged once"
    strategy.ran.clear()
    for size in range(1, 41):
        for shape in range(2):
            assert graphs.step(batch_of(size, shape, NEEDS[2])).tokens.flatten().tolist() == list(range(size))
    assert all(ran.needs.filtered for ran in strategy.ran)


def test_late_captures_stop_where_their_memory_ends(caplog: pytest.LogCaptureFixture) -> None:
    """What is always captured comes all the same, the rest as far as `limit_gb` goes."""
    graphs, _, _ = graphed(bytes_each=10**6)
    capture_few(graphs, limits=GraphCapture(limit_gb=0.0095))
    while graphs.graphs.num_waiting:
        graphs.capture_next(SOLO)
    assert sum(not is_always_captured(key) for key in graphs.captured) == 10
    assert sum(is_always_captured(key) for key in graphs.captured) == 2 * 2 * len(BUCKETS)
    assert caplog.text.count("limit_gb is used up") == 1


def test_ranks_capture_the_same_while_serving() -> None:
    """One's memory ends sooner, another's captures fail: all have the same graphs after every capture."""

    def run(group: TPGroup) -> list[frozenset[GraphKey]]:
        recorder = FailingRecorder((13, 17) if group.rank == 1 else (15,) if group.rank == 2 else ())
        recorder._bytes_each = 10**6 * (group.rank + 1)
        graphs, _, _ = graphed(recorder=recorder)
        capture_few(graphs, group, GraphCapture(limit_gb=0.04))
        each = []
        while graphs.graphs.num_waiting:
            graphs.capture_next(group)
            each.append(graphs.captured)
        return each

    outcomes = on_ranks(3, run)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(outcomes[0]) > 8


def test_ranks_capture_the_same_of_what_they_have_missed() -> None:
    """Each counts by itself; all of them run the same steps."""

    def run(group: TPGroup) -> list[frozenset[GraphKey]]:
        graphs, _, _ = graphed()
        capture_few(graphs, group)
        each = []
        for size in (5, 17, 3, 17, 30, 9, 3, 3):
            graphs.step(batch_of(size, 1, NEEDS[1]))
            if size == 3 or size == 30:
                graphs.capture_next(group)
                each.append(graphs.captured)
        return each

    alone = run(SOLO)
    assert on_ranks(3, run) == [alone] * 3
    assert all(GraphKey(1, 1, bucket, NEEDS[1]) in alone[-1] for bucket in (4, 24))


class MissingRecorder(EagerRecorder):
    """Misses something in recordings `missing`, counted from 0, of what has not run."""

    def __init__(self, missing: tuple[int, ...]) -> None:
        super().__init__()
        self._missing = missing

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        run, kept = super().record(function, was_run)
        if not was_run and self.num_recorded - 1 in self._missing:
            raise NewUnderCaptureError("a kernel")
        return run, kept


def test_a_step_runs_before_its_capture_if_it_is_the_first_of_its_kind_or_misses_something() -> None:
    def run(group: TPGroup, missing: tuple[int, ...] = ()) -> tuple[frozenset[GraphKey], int]:
        recorder = MissingRecorder(missing if group.rank == 1 or group.size == 1 else ())
        graphs, _, _ = graphed(recorder=recorder)
        graphs.capture(PLENTY, group)
        num_kinds = len({(key.shape, key.needs) for key in graphs.captured if not key.needs.masked})
        num_masked = sum(key.needs.masked for key in graphs.captured)
        return graphs.captured, recorder.num_run_apart - num_kinds - 2 * num_masked

    captured, more_runs = run(SOLO)
    assert more_runs == 0
    for outcome in (run(SOLO, (5, 9)), *on_ranks(2, lambda group: run(group, (5, 9)))):
        assert outcome == (captured, 2), "what one rank misses, all run"


def test_a_dry_run_of_steps_runs_nothing() -> None:
    graphs, strategy, recorder = graphed()
    keys = graphs.first_graphs(MEASURED)
    ahead = CompileAhead(1)
    graphs.dry_run(keys, ahead, SOLO)
    ahead.close()
    assert recorder.num_dry_runs == 3 and not strategy.ran, "the largest round, two with grammars; no kernel was new"


class CompilerError(Exception):
    """As Triton's are: no RuntimeError."""


class UncompiledRecorder(EagerRecorder):
    """Kernels of the captures numbered in `failing` cannot be compiled."""

    def __init__(self, failing: tuple[int, ...]) -> None:
        super().__init__()
        self._failing = failing

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        if self.num_recorded in self._failing:
            self.num_recorded += 1
            raise CompilerError("out of resource: shared memory")
        return super().record(function, was_run)


def test_a_kernel_that_cannot_be_compiled_costs_its_graph_alone(caplog: pytest.LogCaptureFixture) -> None:
    """On one rank of two; the other agrees, and neither runs the step, which would fail likewise."""

    def run(group: TPGroup) -> tuple[int, int, int]:
        recorder = UncompiledRecorder((13, 14) if group.rank == 1 else ())
        graphs, _, _ = graphed(recorder=recorder)
        capture_few(graphs, group)
        apart, waiting = recorder.num_run_apart, graphs.graphs.num_waiting
        for _ in range(3):
            graphs.capture_next(group)
        return len(graphs.captured), graphs.graphs.num_waiting - waiting, recorder.num_run_apart - apart

    first, second = on_ranks(2, run)
    assert first == second and first[:2] == (13 + 1, -3)


class BreakingRecorder(EagerRecorder):
    """A step fails when it runs eagerly, once `breaks` is set."""

    breaks = False

    def run_on_own_stream(self, function: Callable[[], object]) -> None:
        if self.breaks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().run_on_own_stream(function)


class SummingStrategy(NotingStrategy):
    """Its steps end in a sum over ranks."""

    def __init__(self, group: TPGroup) -> None:
        super().__init__()
        self._group = group

    def step(self, batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
        out = super().step(batch, fill_masks)
        self._group.all_reduce(out.tokens)
        return out


def test_a_rank_that_fails_within_a_step_ends_instead_of_waiting() -> None:
    """The others wait in the step's sum, and would take what it says of its failure for its part of that."""

    def run(group: TPGroup) -> None:
        recorder = BreakingRecorder()
        slots = SlotTable(40, 4, 16, CPU)
        graphs = GraphedDecoding(SummingStrategy(group), slots, BUCKETS, 64, recorder)
        capture_few(graphs, group)
        graphs.want_masked()  # of a kind that has not run
        recorder.breaks = group.rank == 1
        try:
            while graphs.graphs.num_waiting:
                graphs.capture_next(group)
        except BrokenStepError as error:
            if not isinstance(error.__cause__, BrokenBarrierError):  # of the rank that waits, once the other has ended
                raise

    with pytest.raises(BrokenStepError, match="a step to be captured failed: OutOfMemoryError: CUDA out of memory"):
        on_ranks(2, run)


def test_a_rank_alone_that_fails_within_a_step_goes_on_without_its_graph(caplog: pytest.LogCaptureFixture) -> None:
    recorder = BreakingRecorder()
    graphs, _, _ = graphed(recorder=recorder)
    capture_few(graphs)
    graphs.want_masked()
    recorder.breaks = True
    before, waiting = len(graphs.captured), graphs.graphs.num_waiting
    while graphs.graphs.num_waiting:
        graphs.capture_next(SOLO)
    assert before <= len(graphs.captured) < before + waiting
    assert caplog.text.count("runs without a CUDA graph of its own") == 1
