"""Requests whose grammar mask is late: preempted in the step that ran without them, resumed with their output."""

import msgspec

from aerie.workers.scheduling.plan import Grammar, StepPlan, StepResult, pack_i32, unpack_i32
from aerie.workers.scheduling.request import FinishReason, Request
from tests.support.scripted import scripted_output
from tests.support.simulation.grammar_engine import GrammarEngine


def _without(result: StepResult, plan: StepPlan, late: tuple[int, ...]) -> StepResult:
    """The result of ranks that had no mask for the requests in the slots `late`."""
    slots, counts, tokens = unpack_i32(plan.slots).tolist(), unpack_i32(result.counts).tolist(), []
    given, finish = unpack_i32(result.tokens).tolist(), bytearray(result.finish)
    for entry, count in enumerate(list(counts)):
        own, given = given[:count], given[count:]
        if entry < len(slots) and slots[entry] in late:
            counts[entry], finish[entry] = 0, 0
        else:
            tokens += own
    return msgspec.structs.replace(result, counts=pack_i32(counts), tokens=pack_i32(tokens), finish=bytes(finish))


def applied(
    engine: GrammarEngine, plan: StepPlan, late: tuple[int, ...] = (), ready: tuple[int, ...] = ()
) -> list[FinishReason | None]:
    """Apply the result of `plan`, which ran without the slots `late`; the masks of the requests `ready` have come."""
    result = _without(engine.executor.take(), plan, late)
    return engine.apply(result, masks_ready=pack_i32(ready))


def started() -> tuple[GrammarEngine, Request, Request]:
    """Two requests that run, one with a grammar; no step is in flight."""
    engine = GrammarEngine()
    engine.compiled = [0]
    free = engine.submit("free", None, 12, seed=2)
    for number in range(4):
        if number == 1:  # beside another, so that its grammar is announced and known to be compiled
            masked = engine.submit("masked", Grammar("regex", "a", (1,)), 12, seed=1)
        plan = engine.plan()
        assert plan is not None
        applied(engine, plan)
    assert engine.slot("masked") >= 0 and engine.slot("free") >= 0
    return engine, masked, free


def test_a_late_mask_costs_its_request_steps_and_no_token() -> None:
    engine, masked, free = started()
    number, before = engine.scheduler.queues.find("masked").number, list(masked.output)  # type: ignore[union-attr]
    late_in, also_planned = engine.plan(), engine.plan()
    assert late_in is not None and also_planned is not None
    slot, length = engine.slot("masked"), len(free.output)
    applied(engine, late_in, late=(slot,))
    assert engine.slot("masked") < 0 and masked.output == before and len(free.output) == length + 1
    assert engine.scheduler.stats.num_late_masks == 1 and masked.num_preemptions == 1
    applied(engine, also_planned, late=(slot,), ready=(number,))
    assert masked.num_preemptions == 1, "the next step, which was planned with it, is late for the same reason"
    plan = engine.plan()
    assert plan is not None and [init.slot for init in plan.inits] and engine.slot("masked") >= 0
    applied(engine, plan)
    while (plan := engine.plan()) is not None:
        applied(engine, plan)
    for request in (masked, free):
        assert request.output == scripted_output(3, request.sampling)


def test_it_enters_no_slot_before_the_result_of_the_last_step_that_could_run_it() -> None:
    engine, _, _ = started()
    number = engine.scheduler.queues.find("masked").number  # type: ignore[union-attr]
    late_in, also_planned = engine.plan(), engine.plan()
    assert late_in is not None and also_planned is not None
    slot = engine.slot("masked")
    applied(engine, late_in, late=(slot,), ready=(number,))
    third = engine.plan()
    assert third is not None and third.inits == (), "the second step is in flight and may still write to its slot"
    applied(engine, also_planned, late=(slot,))
    fourth = engine.plan()
    assert fourth is not None and len(fourth.inits) == 1, "the third was planned after its preemption"


def test_while_its_mask_is_awaited_others_go_on_and_it_stays_out() -> None:
    engine, masked, _ = started()
    plan = engine.plan()
    assert plan is not None
    applied(engine, plan, late=(engine.slot("masked"),))
    for _ in range(4):
        plan = engine.plan()
        assert plan is not None and plan.inits == ()
        applied(engine, plan)
    assert masked.num_preemptions == 1


def test_a_request_without_a_grammar_that_a_rank_could_not_start_ends_with_an_error() -> None:
    engine, masked, free = started()
    plan = engine.plan()
    assert plan is not None
    reasons = applied(engine, plan, late=(engine.slot("free"),))
    assert [reason for reason in reasons if reason is not None] == [FinishReason.ERROR]
    assert engine.scheduler.queues.find("free") is None and engine.slot("masked") >= 0
    assert free.num_preemptions == 0 and engine.scheduler.stats.num_late_masks == 0
