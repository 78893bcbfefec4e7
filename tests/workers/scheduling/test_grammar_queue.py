"""Grammars are compiled before their requests are admitted, unless nobody would wait for the compiler."""

import msgspec

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.plan import Failure, Grammar, unpack_i32
from aerie.workers.scheduling.request import FinishReason
from tests.support.scripted import ScriptedExecutor
from tests.support.simulation.grammar_engine import GrammarEngine

FIRST, SECOND = Grammar("regex", "a", (1,)), Grammar("regex", "b", (1,))


def test_a_request_alone_is_admitted_at_once() -> None:
    engine = GrammarEngine()
    engine.submit("a", FIRST)
    plan, _ = engine.step()
    assert len(plan.inits) == 1 and plan.grammars == ()


def test_beside_others_it_waits_for_the_compiler_and_lets_others_pass() -> None:
    engine = GrammarEngine()
    engine.submit("running", None)
    engine.step()
    for name, grammar in (("a", FIRST), ("b", SECOND), ("c", FIRST), ("free", None)):
        engine.submit(name, grammar)
    plan, _ = engine.step()
    assert plan.grammars == (FIRST, SECOND)
    assert len(plan.inits) == 1 and plan.inits[0].sampling.grammar is None
    plan, _ = engine.step()
    assert plan.inits == () and plan.grammars == ()
    engine.compiled = [0]
    engine.step()
    plan, _ = engine.step()
    assert [init.sampling.grammar for init in plan.inits] == [FIRST, FIRST]


def test_new_ranks_are_told_again() -> None:
    engine = GrammarEngine()
    engine.submit("running", None)
    engine.step()
    engine.submit("a", FIRST)
    engine.compiled = [0]
    assert engine.step()[0].grammars == (FIRST,)
    engine.scheduler.requeue_all(epoch=1)
    engine.scheduler.abort("a")
    engine.executor, engine.compiled = ScriptedExecutor(RoundShapes(), 4, 200), []
    engine.step()
    engine.submit("b", FIRST)
    assert engine.step()[0].grammars == (FIRST,)


def test_a_request_that_left_its_grammar_ends_with_an_error() -> None:
    engine = GrammarEngine()
    request = engine.submit("a", FIRST)
    engine.step()
    num_tokens = len(request.output)
    _, reasons = engine.step(failed={0: Failure("it left")})
    assert reasons == [FinishReason.ERROR] and len(request.output) == num_tokens
    assert engine.scheduler.num_running == 0


def test_one_that_was_preempted_meanwhile_shows_nothing_of_the_step_that_left_its_grammar() -> None:
    engine = GrammarEngine()
    request = engine.submit("a", FIRST)
    engine.submit("old", None)
    engine.step()
    engine.step()
    num_tokens = len(request.output)
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.executor.submit(plan)
    queues = engine.scheduler.queues
    sequence = queues.find("a")
    assert sequence is not None
    entry = unpack_i32(plan.slots).tolist().index(sequence.slot)
    queues.preempt(sequence, plan.step)
    result = msgspec.structs.replace(engine.executor.take(), failed={entry: Failure("it left")})
    outputs = [output for output in engine.scheduler.apply(result) if output.request is request]
    assert [(output.tokens, output.finish_reason) for output in outputs] == [([], FinishReason.ERROR)]
    assert len(request.output) == num_tokens
