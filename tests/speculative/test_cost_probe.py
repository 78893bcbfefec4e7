"""Step costs are measured by real steps, without effect on requests; every rank finds the same."""

import dataclasses
import math

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import local_engine, plan_engine
from aerie.workers.config import RoundShapes, SchedulerConfig
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.batch import StepBatch, StepTensors
from aerie.workers.runner.costs.cost_points import least_ms, points_to_measure, table_of
from aerie.workers.runner.costs.cost_probe import LIMIT_S, CostProbe, probe_costs, probe_extent
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.graphs.graph_keys import token_buckets
from aerie.workers.runner.layout import slot_table
from aerie.workers.scheduling.cost_table import CostTable, default_itl_target_ms
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.slots import SlotTable
from aerie.workers.timer import Timer
from tests.speculative.conftest import Pair
from tests.support.drafts.oracle import capture
from tests.support.engine_plans import build_worker
from tests.support.slow import slow

CPU = torch.device("cpu")
PAGE = 4


class ModelOfCosts:
    """A `DecodingStrategy` that computes nothing: its steps take what a formula says, on its own clock."""

    def __init__(self, layout: EngineLayout, slots: SlotTable, slowness: float = 1.0) -> None:
        self.shapes: RoundShapes = layout.shapes
        self.now_ms = 0.0
        self.batches: list[StepBatch] = []
        self._num_pages = layout.num_pages
        self._slots = slots
        self._slowness = slowness

    def clock(self) -> float:
        return self.now_ms / 1e3

    def step(self, batch: StepBatch) -> StepTensors:
        num_requests, kv_tokens, chunk, context = batch.num_requests, self._kv_tokens(batch), 0, 0
        if batch.chunks is not None:
            lists = batch.chunks.batch.host_lists
            chunk, context = sum(lists.counts), lists.starts[0]
        self.now_ms += self._slowness * self.ms(batch.shape, num_requests, kv_tokens, chunk, context)
        self.batches.append(batch)
        empty = batch.slots.new_zeros(0)
        return StepTensors(empty.view(0, 1), empty, empty, empty, None)

    @staticmethod
    def ms(shape: int, num_requests: int, kv_tokens: int, chunk: int, context: int) -> float:
        rounds = (4 + shape) + 0.1 * (1 + shape) * num_requests if num_requests else 4.0
        return rounds + 1e-3 * kv_tokens + 0.02 * chunk + 1e-5 * chunk * context

    def _kv_tokens(self, batch: StepBatch) -> int:
        """Return the KV tokens of all requests, after checking that each has existing pages of its own."""
        length = self._slots.seq_len[batch.slots]
        used = [
            page
            for slot, n in zip(batch.slots, length, strict=True)
            for page in self._slots.page_table[slot, : n // PAGE]
        ]
        pages = [int(page) for page in used]
        assert len(set(pages)) == len(pages) and all(0 < page <= self._num_pages for page in pages)
        return int(length.sum())


def fake_engine(pair: Pair, max_running: int, max_step_tokens: int, pages: int = 400) -> tuple[EngineLayout, SlotTable]:
    tree = dataclasses.replace(pair.tree(), adaptive=False)  # two shapes
    spec = pair.spec(tree, CacheConfig(PAGE, num_pages=pages), SchedulerConfig(max_running, max_step_tokens))
    engine = plan_engine(spec)
    return engine.layout, slot_table(engine.layout, engine.target.vocab_size, CPU)


def measured(pair: Pair, limit_s: float, max_running: int, max_step_tokens: int) -> tuple[CostTable, ModelOfCosts]:
    layout, slots = fake_engine(pair, max_running, max_step_tokens)
    model = ModelOfCosts(layout, slots)
    extent = probe_extent(layout, PAGE, (), CPU)
    probe = CostProbe(model, slots, SOLO, layout, PAGE, Timer(CPU, model.clock))
    return table_of(probe.measure(points_to_measure(extent), limit_s), extent), model


@pytest.mark.parametrize(("max_running", "max_step_tokens"), [(1, 1), (13, 300), *slow((6, 32), (64, 1500))])
def test_the_table_is_what_the_steps_took(pair: Pair, max_running: int, max_step_tokens: int) -> None:
    table, model = measured(pair, 1e9, max_running, max_step_tokens)
    for shape in range(2):
        for n in {1, max_running // 2, max_running} - {0}:
            assert table.round_ms(shape, n) == pytest.approx(model.ms(shape, n, 0, 0, 0))
            assert table.round_ms(shape, n, 1000) == pytest.approx(model.ms(shape, n, 1000, 0, 0))
    for tokens in {16, 128, 250, 512, max_step_tokens}:
        if 16 <= tokens <= max_step_tokens:
            assert table.step_ms(1, 0, 0, tokens) == pytest.approx(model.ms(0, 0, 0, tokens, 0))
            assert table.step_ms(1, max_running, 0, tokens) == pytest.approx(model.ms(1, max_running, 0, tokens, 0))
            assert table.chunk_kv_ms(tokens, 100) == pytest.approx(1e-5 * tokens * 100)
    assert math.isfinite(default_itl_target_ms(table))


def test_tokens_differ_and_their_kv_has_pages(pair: Pair) -> None:
    """Else all rows of a mixture of experts would choose the same ones, or none."""
    layout, slots = fake_engine(pair, 6, 32)
    num_rounds, num_chunks = 0, 0

    class Watching(ModelOfCosts):
        def step(self, batch: StepBatch) -> StepTensors:
            nonlocal num_rounds, num_chunks
            for slot in batch.slots.tolist():
                place = int(slots.seq_len[slot]) // PAGE
                assert slots.page_table[slot, place] > 0
            assert len(set(slots.bonus[batch.slots].tolist())) == batch.num_requests
            num_rounds += batch.num_requests > 1
            if batch.chunks is not None:
                assert len(set(batch.chunks.ids.tolist())) == min(len(batch.chunks.ids), slots.vocab_size)
                num_chunks += 1
            return super().step(batch)

    model = Watching(layout, slots)
    probe = CostProbe(model, slots, SOLO, layout, PAGE, Timer(CPU, model.clock))
    probe.measure(points_to_measure(probe_extent(layout, PAGE, (), CPU)), 1e9)
    assert num_rounds and num_chunks
    assert not slots.page_table.any() and not slots.bonus.any() and not slots.seq_len.any()


def test_a_slow_device_measures_only_what_must_be_known(pair: Pair) -> None:
    table, model = measured(pair, 0.0, 64, 512)
    assert len(model.batches) == 8  # both shapes alone, twice, and full, two chunks
    assert table.rounds[1].num_requests == (1, 64) and table.chunk_tokens == (16, 128, 512)
    assert table.step_ms(1, 0, 0, 512) == pytest.approx(model.ms(0, 0, 0, 512, 0)), "on as from 16 to 128"
    assert table.step_ms(1, 64, 0, 512) >= model.ms(1, 64, 0, 512, 0), "costs that were not measured are not too low"


def test_the_limit_is_kept(pair: Pair) -> None:
    """But for points that are larger than all that were measured before, which may take more than those."""
    needed_s = measured(pair, 0.0, 64, 512)[1].clock()
    for limit_s in (0.2, 0.4, 1.0):
        assert needed_s < measured(pair, limit_s, 64, 512)[1].clock() <= 1.05 * limit_s


def test_ranks_with_different_clocks_run_the_same_steps_and_make_the_same_table(pair: Pair) -> None:
    """The other rank is slower by a half: what it measures is known here in advance, up to the noise of neither."""
    layout, _ = fake_engine(pair, 16, 512)
    extent = probe_extent(layout, PAGE, (), CPU)

    class Group(TPGroup):
        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack((x, x * 1.5) if self.rank == 0 else (x / 1.5, x))

    found = []
    for rank, slowness in enumerate((1.0, 1.5)):
        slots = fake_engine(pair, 16, 512)[1]
        model = ModelOfCosts(layout, slots, slowness)
        probe = CostProbe(model, slots, Group(rank, 2), layout, PAGE, Timer(CPU, model.clock))
        table = table_of(probe.measure(points_to_measure(extent), 0.5), extent)
        found.append((table, [(b.shape, b.num_requests, b.max_kv_len) for b in model.batches]))
    assert found[0][1] == found[1][1]
    assert found[0][0].round_ms(1, 16) == pytest.approx(found[1][0].round_ms(1, 16)) == pytest.approx(8.2 * 1.5)


def test_a_step_is_expected_to_take_what_smaller_ones_took(pair: Pair) -> None:
    layout, _ = fake_engine(pair, 16, 512)
    alone, full, *_ = points_to_measure(probe_extent(layout, PAGE, (), CPU))
    points = alone.points + full.points
    found = {point: 1.0 + point.num_requests for point in points}
    largest = dataclasses.replace(points[0], num_requests=16, chunk_tokens=128)
    assert least_ms(points[0], found) == 2.0 and least_ms(largest, found) == 17.0
    assert least_ms(dataclasses.replace(largest, num_requests=0), found) == 0.0


def test_answers_and_slots_are_as_if_nothing_had_been_measured(pair: Pair) -> None:
    answers = []
    for measure_costs in (False, True):
        spec = pair.spec(pair.tree(), measure_costs=measure_costs)
        with local_engine(spec) as engine:
            costs = engine.executor.costs
            step_time = engine.scheduler.step_time
            assert (costs is not None) == measure_costs and (step_time.costs if step_time else None) is costs
            requests = engine.generate(pair.prompts[:6], SamplingParams(12, 0.8, seed=5), 6)
        answers.append([request.output for request in requests])
    assert answers[0] == answers[1]


def test_steps_that_are_captured_are_measured_as_they_are_replayed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them: on a busy machine the usual limit leaves some out."""
    monkeypatch.setitem(LIMIT_S, "cpu", 1e9)
    spec = pair.spec(pair.tree(), scheduler=SchedulerConfig(max_running=2, max_step_tokens=70))
    engine = plan_engine(spec)
    layout, worker = engine.layout, build_worker(spec, engine)
    capture(worker, layout)
    graphed, slots = worker._strategy, worker._slots
    assert isinstance(graphed, GraphedDecoding)
    before = graphed._recorder.num_replays  # type: ignore[attr-defined]
    table = probe_costs(graphed, slots, SOLO, layout, PAGE, graphed.token_buckets)
    assert graphed._recorder.num_replays > before  # type: ignore[attr-defined]
    assert token_buckets(70) == (16, 64, 70)
    assert table.chunk_tokens == (16, 17, 64, 65, 70), "chunks cost what the size does that they are padded to"
    for row in table.chunk_ms:
        assert row[1] == row[2] and row[3] == row[4] and list(row) == sorted(row) and row[0] > 0
    for rounds in table.rounds:
        assert rounds.num_requests[-1] == 2 and list(rounds.ms) == sorted(rounds.ms) and rounds.ms[0] > 0
        assert all(math.isfinite(x) and x >= 0 for x in rounds.ms_per_kv_token)
    assert not slots.page_table.any() and not slots.seq_len.any() and slots.finished.all()
