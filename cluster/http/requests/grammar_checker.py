"""Whether a grammar can be used, found out before its request runs: in a process of its own for each, off the event
loop, within a time. Called by the routes that generate.

Such a process is a fork of one that has imported torch, which the ingress does not: that takes seconds, and 0.3 GB. An
ingress begins it once an engine is ready.
"""

import asyncio
import collections
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Protocol

import msgspec

from cluster.http.errors import ApiError, invalid, overloaded, unsupported
from workers.scheduling.plan import Grammar
from workers.structured_output.faults import VocabularyError
from workers.structured_output.framing import send
from workers.structured_output.template_process import ForkedProcess, TemplateError, Work, template
from workers.structured_output.trial import WALK_LIMIT_S, Trial, Verdict

MAX_REMEMBERED = 1024  # grammars and what was found
MAX_WAITING = 256  # grammars to try; more are refused
QUICK_S = 0.5  # a trial that takes longer gives its place to the next one, and goes on behind
MAX_SLOW = 8  # trials that have given their places; more are refused
WALK_WALL_S = 8.0  # for what takes `workers.structured_output.trial.WALK_LIMIT_S` of a processor
STARVED_SHARE = 0.5  # of the time that a trial may use: one that had less when its time was over was not too slow
PARAM = "response_format"


class GrammarChecker(Protocol):
    """What the edge needs."""

    async def check(self, grammar: Grammar) -> None:
        """Raises ApiError if the grammar cannot be used."""


class NoChecker:
    """Leaves it to the engine; for engines without a model's folder."""

    async def check(self, grammar: Grammar) -> None:
        pass


class ProcessChecker:
    """Tries grammars for the tokenizer in `folder`, several at a time, for `timeout_s` each. What is known is answered
    at once, and quick ones pass slow ones."""

    def __init__(self, folder: str | Path, timeout_s: float) -> None:
        self._work = Work("trial", str(folder), 0)
        self._timeout_s = timeout_s
        self._quick = asyncio.Semaphore(max(2, (os.cpu_count() or 1) // 4))
        self._num_slow = 0
        self._trials: dict[Grammar, asyncio.Task[Verdict]] = {}
        self._known: collections.OrderedDict[Grammar, Verdict] = collections.OrderedDict()

    async def begin(self) -> None:
        """Start what the processes are forked from, so that the first grammar need not wait for it; if that fails, the
        first one starts it."""
        with contextlib.suppress(OSError, TemplateError, VocabularyError):
            process, own = await asyncio.to_thread(self._forked, ())
            own.close()
            process.kill()

    async def check(self, grammar: Grammar) -> None:
        found = self._known.get(grammar)
        if found is None:
            found = await self._found(grammar)
        if found.fault:
            raise _refusal(grammar, found)

    def close(self) -> None:
        """End all trials."""
        for trial in self._trials.values():
            trial.cancel()

    async def _found(self, grammar: Grammar) -> Verdict:
        """What a trial finds, of which there is one for all that ask; remembered."""
        trial = self._trials.get(grammar)
        if trial is None:
            if len(self._trials) >= MAX_WAITING:
                raise overloaded(f"{len(self._trials)} new grammars wait to be tried; retry later", 1.0)
            trial = self._trials[grammar] = asyncio.create_task(self._try(grammar))
            trial.add_done_callback(lambda done: self._keep(grammar, done))
        return await asyncio.shield(trial)  # others may wait for it when this client leaves

    def _keep(self, grammar: Grammar, trial: "asyncio.Task[Verdict]") -> None:
        del self._trials[grammar]
        if trial.cancelled() or trial.exception() is not None:
            return
        self._known[grammar] = trial.result()
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    async def _try(self, grammar: Grammar) -> Verdict:
        """Raises ApiError where it cannot be tried now."""
        async with contextlib.AsyncExitStack() as place:
            await place.enter_async_context(self._quick)
            try:
                process, own = await asyncio.to_thread(self._forked, grammar.end_token_ids)
            except VocabularyError as error:
                return Verdict(str(error), with_model=True)
            except (OSError, TemplateError) as error:
                raise overloaded(f"the grammar cannot be tried: {error}", 5.0) from None
            began_s, is_slow = time.monotonic(), False
            verdicts = asyncio.create_task(_verdicts(own, process, Trial(grammar), self._timeout_s))
            try:
                done, _ = await asyncio.wait([verdicts], timeout=QUICK_S)
                if not done:
                    await place.aclose()  # the next one may begin
                    if self._num_slow >= MAX_SLOW:
                        raise overloaded(
                            f"the grammar takes longer than {QUICK_S:g} s to try, and {self._num_slow} such are being "
                            "tried; retry later",
                            5.0,
                        )
                    is_slow = True
                    self._num_slow += 1
                    process.give_way()
                verdict = await verdicts
            finally:
                self._num_slow -= is_slow
                verdicts.cancel()
                process.kill()
                own.close()
        if not verdict.fault or not is_slow:
            return verdict
        took_s = time.monotonic() - began_s
        return msgspec.structs.replace(verdict, fault=f"{verdict.fault} (found after {took_s:.1f} s)")

    def _forked(self, end_token_ids: tuple[int, ...]) -> tuple[ForkedProcess, socket.socket]:
        """A process that waits for a grammar, and the socket to it."""
        own, its = socket.socketpair()
        try:
            with its:
                work = msgspec.structs.replace(self._work, end_token_ids=end_token_ids)
                process = template().fork(work, [its.fileno()])
        except BaseException:
            own.close()
            raise
        return process, own


async def _verdicts(own: socket.socket, process: ForkedProcess, trial: Trial, timeout_s: float) -> Verdict:
    """The last verdict on a grammar, or why there is none. Raises ApiError where that is this machine's fault, which
    shall not be remembered of the grammar."""
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
            verdict = msgspec.msgpack.decode(raw, type=Verdict)
            if not verdict.is_compiled:
                return verdict
            limit_s, is_compiled, compiled_s = WALK_WALL_S, True, process.processor_s()
    except TimeoutError:
        used_s = process.processor_s() - compiled_s
        if used_s < STARVED_SHARE * (WALK_LIMIT_S if is_compiled else timeout_s):
            raise overloaded(
                f"the grammar got {used_s:.1f} s of a busy core in {limit_s:g} s; retry later", 5.0
            ) from None
        if is_compiled:
            return Verdict("one token of an answer takes longer than it may; nest fewer repetitions")
        return Verdict(f"it takes longer than {timeout_s:g} s to compile; make it smaller")
    except (asyncio.IncompleteReadError, ConnectionError):
        if is_compiled:
            return Verdict("one token of an answer takes more time or memory than it may; nest fewer repetitions")
        return Verdict("it takes too much memory to compile; make it smaller")
    finally:
        writer.close()


def _refusal(grammar: Grammar, found: Verdict) -> ApiError:
    kind = {"json_schema": "JSON schema", "regex": "regular expression", "ebnf": "grammar"}.get(
        grammar.kind, grammar.kind.replace("_", " ")
    )
    if found.with_model:
        return unsupported(PARAM, found.fault)
    return invalid(PARAM, f"The {kind} cannot be used: {found.fault}", "unsupported_grammar")
