"""Grammars are tried before their requests run: each in a process of its own, quick ones past slow ones."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.requests import grammar_checker
from aerie.cluster.http.requests.grammar_checker import ProcessChecker
from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.mask_process import template_process
from tests.support.embedded import embedded_spec

DIGITS = Grammar("regex", "[0-9]+", (0,))
BROKEN = Grammar("regex", "(", (0,))
HOSTILE = [
    Grammar("regex", "(([a-z ]{0,50}){0,50}){0,50}", (0,)),
    Grammar("ebnf", 'root ::= s s s\ns ::= [a-z ] | s s | s s s | ""', (0,)),
]


@pytest.fixture
def checker() -> Iterator[ProcessChecker]:
    made = ProcessChecker(embedded_spec(None).worker.model.path, timeout_s=10.0)
    yield made
    made.close()


async def tried(checker: ProcessChecker, grammar: Grammar) -> None:
    """Again where the machine had no core for it."""
    for _ in range(20):
        try:
            return await checker.check(grammar, "regex")
        except ApiError as error:
            if error.status != 429:
                raise
        await asyncio.sleep(0.2)
    raise AssertionError("the machine had no core for it")


async def test_a_grammar_is_tried(checker: ProcessChecker) -> None:
    await asyncio.gather(checker.begin(), tried(checker, DIGITS))
    with pytest.raises(ApiError, match="cannot be used"):
        await checker.check(BROKEN, "regex")


async def test_what_cannot_be_begun_is_tried_again_by_the_first_grammar(
    checker: ProcessChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(template_process.Template, "fork", fail)
        await checker.begin()
        with pytest.raises(ApiError, match="cannot be tried: no memory"):
            await checker.check(DIGITS, "regex")
    await tried(checker, DIGITS)


@pytest.mark.parametrize("texts", [["да", "нет"], ["北京", "北海"], ["😀", "😁"], ["é"]])
async def test_texts_of_any_language_are_accepted(checker: ProcessChecker, texts: list[str]) -> None:
    await tried(checker, Grammar("regex", f"({'|'.join(texts)})", (0,)))


async def test_quick_grammars_pass_slow_ones_and_slow_ones_are_refused_with_the_time(checker: ProcessChecker) -> None:
    await tried(checker, DIGITS)
    slow = [asyncio.create_task(checker.check(each, "regex")) for each in HOSTILE]
    await asyncio.sleep(0.1)
    began_s = time.monotonic()
    await asyncio.gather(*(tried(checker, Grammar("regex", f"[a-z]{{{n}}}", (0,))) for n in range(3, 8)))
    quick_s = time.monotonic() - began_s
    refusals = await asyncio.gather(*slow, return_exceptions=True)
    slow_s = time.monotonic() - began_s
    assert quick_s < slow_s
    for refusal in refusals:
        assert isinstance(refusal, ApiError)
        if refusal.status != 429:  # of a machine that runs much else
            assert refusal.status == 400 and " s" in str(refusal) and "token" in str(refusal)


async def test_a_grammar_that_got_no_core_is_not_called_too_slow(
    checker: ProcessChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped as soon as it is slow, and goes on when it is tried the next time."""
    await tried(checker, DIGITS)
    slow = Grammar("regex", "(([a-z ]{0,20}){0,20}){0,9}", (0,))
    with monkeypatch.context() as patched:
        patched.setattr(grammar_checker, "QUICK_S", 0.0)
        patched.setattr(grammar_checker, "WALK_WALL_S", 0.5)
        patched.setattr(checker, "_timeout_s", 0.5)
        lower_priority = lambda process: os.kill(process._pid, signal.SIGSTOP)  # noqa: E731
        patched.setattr(template_process.ForkedProcess, "lower_priority", lower_priority)
        with pytest.raises(ApiError, match="of a busy core in 0.5 s; retry later") as caught:
            await checker.check(slow, "regex")
        assert caught.value.status == 429
    monkeypatch.setattr(grammar_checker, "QUICK_S", 60.0)  # at low priority it gets no core of a busy machine
    for _ in range(5):  # nor a whole one otherwise
        if slow not in checker._known:
            with contextlib.suppress(ApiError):
                await checker.check(slow, "regex")
    assert slow in checker._known


async def test_a_slow_trial_runs_where_nothing_else_wants_to(
    checker: ProcessChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower_priority, seen = template_process.ForkedProcess.lower_priority, list[int]()

    def watched(process: template_process.ForkedProcess) -> None:
        lower_priority(process)
        seen.append(os.sched_getscheduler(process._pid))

    monkeypatch.setattr(grammar_checker, "QUICK_S", 0.0)
    monkeypatch.setattr(template_process.ForkedProcess, "lower_priority", watched)
    with contextlib.suppress(ApiError):
        await checker.check(DIGITS, "regex")
    assert seen == [os.SCHED_IDLE]


async def test_no_more_slow_trials_go_on_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    busy = ProcessChecker(embedded_spec(None).worker.model.path, timeout_s=10.0)
    monkeypatch.setattr(grammar_checker, "QUICK_S", 0.0)
    lower_priority = lambda process: os.kill(process._pid, signal.SIGSTOP)  # noqa: E731
    monkeypatch.setattr(template_process.ForkedProcess, "lower_priority", lower_priority)
    trials = [asyncio.create_task(busy.check(Grammar("regex", f"[a-z]{{{n}}}", (0,)), "regex")) for n in range(3)]
    await asyncio.wait(trials, return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
    [refused] = [trial for trial in trials if trial.done()]
    with pytest.raises(ApiError, match="and 2 such are being tried; retry later"):
        await refused
    busy.close()
    await asyncio.gather(*trials, return_exceptions=True)


async def test_one_trial_serves_all_that_ask_for_the_same(
    checker: ProcessChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tried(checker, DIGITS)
    forks = []
    fork = template_process.Template.fork

    def counted(self: template_process.Template, *arguments: object) -> template_process.ForkedProcess:
        forks.append(arguments)
        return fork(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(template_process.Template, "fork", counted)
    same = Grammar("regex", "[a-f]{3}", (0,))
    await asyncio.gather(*(checker.check(same, "regex") for _ in range(5)))
    await checker.check(same, "regex")
    assert len(forks) == 1
