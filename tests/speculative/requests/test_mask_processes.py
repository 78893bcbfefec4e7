"""The processes that fill masks may end at any time, and be late on one rank alone: answers stay what they were."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from aerie.kernels.drafting.guides import NOWHERE
from aerie.kernels.sampling.penalties import FREE
from aerie.speculative.build import local_engine
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import Grammar, SamplingParams
from aerie.workers.scheduling.request import FinishReason, Request, RequestOutput
from aerie.workers.slots import SlotTable
from aerie.workers.structured_output.host_link import HostLink
from aerie.workers.structured_output.mask_messages import Filled, Order
from aerie.workers.structured_output.mask_table import HELD, MaskTable
from aerie.workers.structured_output.slot_grammars import SlotGrammars
from tests.support.embedded import CHAIN, embedded_spec
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.structured_output.hostile import STOPS
from tests.support.thread_group import on_ranks

PROMPTS = tokenized(held_out_prompts(4))
GRAMMARS = (
    Grammar("regex", "[a-z ]{20,30}", STOPS),
    Grammar("choice", json.dumps(["да, конечно", "нет, никогда"]), STOPS),
    Grammar("regex", "([A-Z][a-z]+ ){3}", STOPS),
)


def _asked() -> list[Request]:
    found = [
        Request(f"r{i}", PROMPTS[i], SamplingParams(24, 0.8, seed=i, stop_token_ids=STOPS, grammar=grammar))
        for i, grammar in enumerate(GRAMMARS)
    ]
    return [*found, Request("free", PROMPTS[3], SamplingParams(24, 0.0))]


@dataclass(frozen=True)
class OtherRank(TPGroup):
    """What this rank gathers, and what another one would have given whose masks are late as `late` says, given an index
    in `GRAMMARS` and how often a mask of it was there."""

    slots: SlotTable | None = None
    late: Callable[[int, int], bool] = lambda grammar, times: False
    times: Counter[int] = field(default_factory=Counter)

    def all_gather(self, x: Tensor) -> Tensor:
        assert self.slots is not None
        other = x.clone()
        if x.shape != (2, self.slots.finished.shape[0]):
            return torch.stack((x, other))  # not of masks
        for slot in ((x[0] != FREE) & (x[0] != HELD)).nonzero().flatten().tolist():
            grammar = GRAMMARS.index(self.slots.facts[slot].sampling.grammar)
            self.times[grammar] += 1
            if self.late(grammar, self.times[grammar]):
                other[0, slot] = HELD
        return torch.stack((x, other))


Late = Callable[[Callable[[int, int], bool]], None]


def _ends(engine: LocalEngine, requests: list[Request]) -> dict[str, RequestOutput]:
    """The last output of each request. Beside them runs a long answer: without rounds, the scheduler waits for no mask.
    It must not end before them, and is aborted then."""
    beside = Request("long", PROMPTS[3], LONG)
    for request in (*requests, beside):
        engine.scheduler.submit(request)
    ends: dict[str, RequestOutput] = {}
    limit_s = time.monotonic() + 200
    while len(ends) < len(requests) and time.monotonic() < limit_s:
        ends |= {each.request.request_id: each for each in engine.step() if each.finish_reason is not None}
    assert "long" not in ends and len(beside.output) > 0, "the long answer was waited for"
    engine.scheduler.abort("long")
    while engine.scheduler.num_running or engine.executor.num_pending:
        engine.step()
    return ends


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    torch.set_num_threads(1)
    with local_engine(embedded_spec(CHAIN)) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(engine: LocalEngine) -> list[list[int]]:
    asked = _asked()
    engine.run(asked, 4)
    return [request.output for request in asked]


def test_answers_are_the_same_though_the_process_is_killed_again_and_again(
    engine: LocalEngine, undisturbed: list[list[int]]
) -> None:
    disturbed, worker = _asked(), engine.executor
    assert isinstance(worker, Worker) and worker._grammars is not None
    link = worker._grammars._link
    for request in disturbed:
        engine.scheduler.submit(request)
    num_unfinished, num_steps, first = len(disturbed), 0, link.generation
    while num_unfinished:
        num_steps += 1
        # while a mask is filled, which takes long on a busy machine, its request would be blamed
        if num_steps >= 4 and not bool((worker._grammars.masks.running >= 0).any()):
            link.kill("killed by a test")
            num_steps = 0
        num_unfinished -= sum(output.finish_reason is not None for output in engine.step())
    assert [request.output for request in disturbed] == undisturbed
    assert link.generation > first


@pytest.fixture
def others(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Late:
    """Gives the engine another rank."""
    worker = engine.executor
    assert isinstance(worker, Worker)
    return lambda late: monkeypatch.setattr(worker, "_group", OtherRank(0, 2, slots=worker._slots, late=late))


LONG = SamplingParams(1200, 0.0, speculative=False)


@pytest.mark.parametrize(("number", "share"), [(1, 0.3), pytest.param(2, 0.6, marks=pytest.mark.slow)])
def test_masks_that_are_late_on_another_rank_delay_their_request_alone(
    engine: LocalEngine, others: Late, undisturbed: list[list[int]], number: int, share: float
) -> None:
    disturbed = _asked()
    others(lambda grammar, times: random.Random(f"{number} {grammar} {times}").random() < share)
    _ends(engine, disturbed)
    assert [request.output for request in disturbed] == undisturbed


@pytest.mark.parametrize("is_sent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_that_the_process_does_not_answer_in_time_delays_its_requests_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, undisturbed: list[list[int]], is_sent: bool
) -> None:
    """Its masks may all be filled, of which nothing is said any more. is_sent: whether the process has the order; the
    orders after an overdue one are not sent."""
    disturbed = _asked()
    ask, draw = HostLink.ask, random.Random(1)

    def late(link: HostLink, order: Order, wait_s: float) -> Filled | None:
        if draw.random() >= 0.3:
            return ask(link, order, wait_s)
        if is_sent:
            ask(link, order, wait_s)
        return None

    monkeypatch.setattr(HostLink, "ask", late)
    _ends(engine, disturbed)
    assert [request.output for request in disturbed] == undisturbed


def test_a_mask_that_never_comes_on_another_rank_ends_its_request_alone(
    engine: LocalEngine, others: Late, monkeypatch: pytest.MonkeyPatch, undisturbed: list[list[int]]
) -> None:
    monkeypatch.setattr("aerie.workers.scheduling.queues.waiting_queue.LATE_LIMIT_S", 2.0)
    disturbed = _asked()
    others(lambda grammar, times: grammar == 1)
    ends = _ends(engine, disturbed)
    assert ends["r1"].finish_reason is FinishReason.ERROR and "was not there in time" in str(ends["r1"].error)
    assert [request.output for request in disturbed[::2]] == undisturbed[::2]


@pytest.mark.parametrize("late", [0, 1])
def test_what_one_rank_holds_all_hold(late: int) -> None:
    """Slot 1 is late on one rank, slot 2 has another guide there."""

    def of_rank(group: TPGroup) -> tuple[list[bool], list[int], list[int]]:
        masks = MaskTable(4, 4, 64, torch.device("cpu"))
        grammars = SlotGrammars("", 64, masks)
        assert masks.guides is not None
        masks.index[:4] = torch.tensor([0, 4, 8, FREE])
        masks.guides.index[:3] = torch.tensor([0, 1, 2])
        masks.guides.blocks.zero_()
        if group.rank == late:
            masks.index[1] = HELD
            masks.guides.blocks[2] += 1
        finished = torch.tensor([False, False, False, True, True])
        grammars.agree(group, finished)
        return finished.tolist(), masks.index.tolist(), masks.guides.index.tolist()

    for finished, index, guides in on_ranks(2, of_rank):
        assert finished == [False, True, False, True, True]
        assert index == [0, FREE, 8, FREE, FREE]
        assert guides[0] == 0 and guides[2] == NOWHERE
