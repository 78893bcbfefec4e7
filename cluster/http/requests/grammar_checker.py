"""Checks a grammar before its request runs, in a process of its own and within a time limit. Called by the routes that
generate.

The process is a fork of one that has imported torch, which takes seconds and 0.3 GB: the ingress itself does not import
it. The ingress starts the template once an engine is ready.
"""

import asyncio
import collections
import contextlib
import os
import socket
import time
from pathlib import Path

import msgspec

from aerie.cluster.http.errors import ApiError, invalid, overloaded, unsupported
from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.mask_messages import VocabularyError, send
from aerie.workers.structured_output.mask_process.template_process import ForkedProcess, TemplateError, Work, template
from aerie.workers.structured_output.mask_process.trial import WALK_LIMIT_S, Trial, TrialResult

MAX_CACHED = 1024  # results
MAX_WAITING = 256  # waiting grammars; more are refused
QUICK_S = 0.5  # a longer trial makes room for the next one, and continues at low priority
MAX_SLOW = 8  # trials that continue at low priority, at most one per core; more are refused
WALK_WALL_S = 8.0  # wall time for `WALK_LIMIT_S` of CPU time
STARVED_SHARE = 0.5  # a trial that got less than this share of its CPU time is not called too slow


class GrammarChecker:
    """Accepts all grammars and leaves errors to the engine; for engines without a model folder."""

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raise ApiError if the grammar cannot be used. param: the parameter that asks for it."""


class ProcessChecker(GrammarChecker):
    """Tries grammars for the tokenizer in `folder` and a model of `vocab_size` tokens (0: the tokenizer's), several at
    a time, each for at most `timeout_s`.

    Results are cached, and quick trials overtake slow ones.
    """

    def __init__(self, folder: str | Path, timeout_s: float, vocab_size: int = 0) -> None:
        self._work = Work(str(folder), vocab_size)
        self._timeout_s = timeout_s
        self._quick = asyncio.Semaphore(max(2, (os.cpu_count() or 1) // 4))
        # With eight slow trials on two busy cores, 26 of 29 got too little CPU time to end with a result.
        self._max_slow = min(MAX_SLOW, max(2, os.cpu_count() or 1))
        self._num_slow = 0
        self._trials: dict[Grammar, asyncio.Task[TrialResult]] = {}
        self._known: collections.OrderedDict[Grammar, TrialResult] = collections.OrderedDict()

    async def begin(self) -> None:
        """Start the template process, so that the first grammar need not wait. If that fails, the first grammar starts
        it."""
        with contextlib.suppress(OSError, TemplateError, VocabularyError):
            process, own = await asyncio.to_thread(self._forked, ())
            own.close()
            process.kill()

    async def check(self, grammar: Grammar, param: str) -> None:
        result = self._known.get(grammar)
        if result is None:
            result = await self._result(grammar)
        if result.fault:
            raise _refusal(grammar, param, result)

    def close(self) -> None:
        """End all trials."""
        for trial in self._trials.values():
            trial.cancel()

    async def _result(self, grammar: Grammar) -> TrialResult:
        """Return the result of a trial. Requests with the same grammar share one trial."""
        trial = self._trials.get(grammar)
        if trial is None:
            if len(self._trials) >= MAX_WAITING:
                raise overloaded(f"{len(self._trials)} new grammars wait to be tried; retry later", 1.0)
            trial = self._trials[grammar] = asyncio.create_task(self._try(grammar))
            trial.add_done_callback(lambda done: self._keep(grammar, done))
        return await asyncio.shield(trial)  # if this client disconnects, other requests may still wait for the trial

    def _keep(self, grammar: Grammar, trial: "asyncio.Task[TrialResult]") -> None:
        """Cache the result of a finished trial, and drop the oldest one if there are too many. Failed trials may be
        repeated."""
        del self._trials[grammar]
        if trial.cancelled() or trial.exception() is not None:
            return
        self._known[grammar] = trial.result()
        if len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)

    async def _try(self, grammar: Grammar) -> TrialResult:
        """Try a grammar. Raises ApiError if that is not possible now."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._quick)
            try:
                process, own = await asyncio.to_thread(self._forked, grammar.end_token_ids)
            except VocabularyError as error:
                return TrialResult(str(error), is_model_fault=True)
            except (OSError, TemplateError) as error:
                raise overloaded(f"the grammar cannot be tried: {error}", 5.0) from None
            began_s, is_slow = time.monotonic(), False
            trying = asyncio.create_task(_trial_result(own, process, Trial(grammar), self._timeout_s))
            try:
                done, _ = await asyncio.wait([trying], timeout=QUICK_S)
                if not done:
                    await stack.aclose()  # the next one may begin
                    if self._num_slow >= self._max_slow:
                        raise overloaded(
                            f"the grammar takes longer than {QUICK_S:g} s to try, and {self._num_slow} such are being "
                            "tried; retry later",
                            5.0,
                        )
                    is_slow = True
                    self._num_slow += 1
                    process.lower_priority()
                result = await trying
            finally:
                self._num_slow -= is_slow
                trying.cancel()
                process.kill()
                own.close()
        if not result.fault or not is_slow:
            return result
        took_s = time.monotonic() - began_s
        return msgspec.structs.replace(result, fault=f"{result.fault} (found after {took_s:.1f} s)")

    def _forked(self, end_token_ids: tuple[int, ...]) -> tuple[ForkedProcess, socket.socket]:
        """Fork a process that waits for a grammar. Return it and the socket to it."""
        own, its = socket.socketpair()
        try:
            with its:
                work = msgspec.structs.replace(self._work, end_token_ids=end_token_ids)
                process = template("trial").fork(work, [its.fileno()])
        except BaseException:
            own.close()
            raise
        return process, own


async def _trial_result(own: socket.socket, process: ForkedProcess, trial: Trial, timeout_s: float) -> TrialResult:
    """Return the final result of a trial. Raises ApiError, which is not cached, if the machine is too busy."""
    with contextlib.suppress(OSError):
        await asyncio.to_thread(send, own, trial)
    own.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=own)
    limit_s, is_compiled, compiled_s = timeout_s, False, 0.0
    try:
        while True:
            async with asyncio.timeout(limit_s):
                head = await reader.readexactly(4)
                raw = await reader.readexactly(int.from_bytes(head, "little"))
            result = msgspec.msgpack.decode(raw, type=TrialResult)
            if not result.is_compiled:
                return result
            limit_s, is_compiled, compiled_s = WALK_WALL_S, True, process.processor_s()
    except TimeoutError:
        used_s = process.processor_s() - compiled_s
        if used_s < STARVED_SHARE * (WALK_LIMIT_S if is_compiled else timeout_s):
            raise overloaded(
                f"the grammar got {used_s:.1f} s of a busy core in {limit_s:g} s; retry later", 5.0
            ) from None
        if is_compiled:
            return TrialResult("one token of an answer takes longer than it may; nest fewer repetitions")
        return TrialResult(f"it takes longer than {timeout_s:g} s to compile; make it smaller")
    except (asyncio.IncompleteReadError, ConnectionError):
        if is_compiled:
            return TrialResult("one token of an answer takes more time or memory than it may; nest fewer repetitions")
        return TrialResult("it takes too much memory to compile; make it smaller")
    finally:
        writer.close()


def _refusal(grammar: Grammar, param: str, result: TrialResult) -> ApiError:
    """Return the error for a grammar whose trial has failed."""
    kind = {"json_schema": "JSON schema", "regex": "regular expression", "ebnf": "grammar"}.get(
        grammar.kind, grammar.kind.replace("_", " ")
    )
    if result.is_model_fault:
        return unsupported(param, result.fault)
    return invalid(param, f"The {kind} cannot be used: {result.fault}", "unsupported_grammar")
