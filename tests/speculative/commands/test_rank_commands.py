"""Commands on real ranks, alone and as two processes: what a command sees, and what comes of one that fails."""

import itertools
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.workers.runner.build import build_rank
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.commands.command import Captured, CaptureGraph, CommandAnswer, first_error
from aerie.workers.scheduling.plan import GraphCount, SamplingParams
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.scheduler import Scheduler
from tests.speculative.conftest import EOS, Pair
from tests.support.ranks import run_ranks
from tests.support.repository.pages import page_code

GREEDY = SamplingParams(24, 0.0, stop_token_ids=(EOS,))
RANDOM = msgspec.structs.replace(GREEDY, temperature=1.0, seed=5)


class Look(msgspec.Struct, frozen=True):
    """A test's command. fails: raise an error on this rank."""

    fails: int = -1
    extra_s: ClassVar[float] = 0.0


def looks_of(rank: int, size: int, address: str, spec: EngineSpec, prompts: Sequence[list[int]]) -> list[Any]:
    """Run requests on one rank, with commands between random steps; every rank has a scheduler of its own, which makes
    the same plans. Return outputs, and for each command its error, and committed length and root token of each running
    request on the rank and by the results so far."""
    built = build_rank(spec.worker, plan_engine(spec), rank, address)
    worker, ticks = built.worker, itertools.count()
    scheduler = Scheduler.of(built.layout, lambda: next(ticks) / 1e3)
    engine = LocalEngine(scheduler, worker)
    by_slot, found = scheduler.queues.by_slot, list[Any]()

    def look(work: Look) -> Any:
        if work.fails == rank:
            raise ValueError("asked to fail")
        table = worker._slots
        return {slot: (int(table.seq_len[slot]), int(table.bonus[slot])) for slot in range(table.padding_slot)}

    def noted(answers: Sequence[CommandAnswer]) -> None:
        (answer,) = answers
        known = {}
        for slot in scheduler.slot_pages.round_slots().tolist():
            request = by_slot[slot].request
            known[slot] = len(request.prompt) + len(request.output) - 1, request.output[-1]
        on_rank: Any = answer.result
        found.append((answer.error, on_rank and {slot: on_rank[slot] for slot in known}, known))

    worker.handlers.add(Look, look)  # type: ignore[type-var]
    draw = random.Random(7)
    requests = [Request(f"r{i}", prompt, (GREEDY, RANDOM)[i % 2]) for i, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.submit(request)
    while scheduler.num_running or scheduler.num_waiting or worker.num_pending:
        if scheduler.commands.is_empty and draw.random() < 0.4:
            scheduler.commands.add(Look(draw.choice((-1, -1, 0, 1))), noted)  # type: ignore[arg-type]
        engine.step()
    return [[request.output for request in requests], found]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("shape", ["plain", "tree"])
def test_a_command_sees_what_the_plan_before_it_left_on_every_rank(
    pair: Pair, tensor_parallel: int, shape: str
) -> None:
    """A request's committed length and root follow from its results so far. Commands that fail on one rank change
    nothing."""
    spec = pair.spec(pair.tree() if shape == "tree" else None, tensor_parallel=tensor_parallel)
    with local_engine(pair.spec(pair.tree() if shape == "tree" else None)) as engine:
        requests = [Request(f"r{i}", prompt, (GREEDY, RANDOM)[i % 2]) for i, prompt in enumerate(pair.prompts)]
        engine.run(requests, len(requests))
    outcomes = (
        run_ranks(looks_of, 2, spec, pair.prompts) if tensor_parallel == 2 else [looks_of(0, 1, "", spec, pair.prompts)]
    )
    for rank, (outputs, looks) in enumerate(outcomes):
        assert outputs == [request.output for request in requests]
        assert len(looks) > 8 and sum(len(known) for _, _, known in looks) > 15
        for error, on_rank, known in looks:
            assert error in ("", "asked to fail")
            assert error or on_rank == known, f"rank {rank}"
        assert any(error for error, _, _ in looks) and not all(error for error, _, _ in looks)
    assert all([known for _, _, known in looks] == [known for _, _, known in outcomes[0][1]] for _, looks in outcomes)


def test_the_example_of_the_page_sums_weights(pair: Pair) -> None:
    """docs/add-a-command.md, as it is written there."""
    page, answered = page_code("add-a-command.md"), list[Sequence[CommandAnswer]]()
    with local_engine(pair.spec()) as engine:
        worker: Any = engine.executor
        model = worker._strategy._target.model
        worker.handlers.add(page.SumWeights, page.handler(model))
        engine.scheduler.commands.add(page.SumWeights(), answered.append)
        engine.step()
        ((answer,),) = answered
        sums: Any = answer.result
        assert first_error([answer]) == ""
        assert sums.by_name["lm_head.method.weight"] == pytest.approx(float(model.lm_head.method.weight.double().sum()))
        assert len(sums.by_name) == len(list(model.parameters())) > 10


def test_rank_processes_answer_commands_between_steps(pair: Pair) -> None:
    with local_engine(pair.spec(pair.chain())) as engine:
        expected = [request.output for request in engine.generate(pair.prompts, GREEDY)]
    answered: list[Sequence[CommandAnswer]] = []
    with local_engine(pair.spec(pair.chain(), tensor_parallel=2)) as engine:
        requests = [Request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(pair.prompts)]
        for request in requests:
            engine.scheduler.submit(request)
        for number in range(1000):
            if number % 5 == 0:
                engine.scheduler.commands.add(CaptureGraph(), answered.append)
            if not engine.scheduler.num_running and not engine.scheduler.num_waiting and number:
                break
            engine.step()
    assert [request.output for request in requests] == expected
    assert len(answered) > 5
    for answers in answered:
        assert [(answer.rank, answer.result) for answer in answers] == [
            (rank, Captured(GraphCount())) for rank in (0, 1)
        ]
