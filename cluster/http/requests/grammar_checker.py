"""Whether a grammar compiles, found out before its request runs: in a process of its own, off the event loop, within a
time. Called by the routes that generate.

The process imports torch, which the ingress does not: it takes seconds to start, and 0.3 GB. An ingress begins it once
an engine is ready. One that takes too long over a grammar is killed, and the grammar refused; the next begins another.
"""

import asyncio
import collections
import contextlib
import select
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from cluster.http.errors import ApiError, invalid, overloaded, unsupported
from workers.scheduling.plan import Grammar
from workers.structured_output.trial import Trial, Verdict, receive, send

MAX_REMEMBERED = 1024  # grammars and what was found
MAX_WAITING = 16  # grammars to try; more are refused, since each may take the whole time
START_TIMEOUT_S = 60.0
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
    """Tries grammars for the tokenizer in `folder`, one at a time, for `timeout_s` each."""

    def __init__(self, folder: str | Path, timeout_s: float) -> None:
        self._folder = str(folder)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._known: collections.OrderedDict[Grammar, Verdict] = collections.OrderedDict()

    async def begin(self) -> None:
        """Start the process, so that the first grammar need not wait for it; if that fails, the first one starts it."""
        async with self._lock:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._started)

    async def check(self, grammar: Grammar) -> None:
        found = self._known.get(grammar)
        if found is None:
            found = await self._found(grammar)
        if found.fault:
            raise _refusal(grammar, found)

    async def _found(self, grammar: Grammar) -> Verdict:
        """What the process finds; remembered."""
        if self._num_waiting >= MAX_WAITING:
            raise overloaded(f"{self._num_waiting} new grammars wait to be compiled; retry later", 1.0)
        self._num_waiting += 1
        try:
            async with self._lock:
                known = self._known.get(grammar)
                found = await asyncio.to_thread(self._try, grammar) if known is None else known
        finally:
            self._num_waiting -= 1
        self._known[grammar] = found
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return found

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _try(self, grammar: Grammar) -> Verdict:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, Trial(self._folder, grammar))
            readable, _, _ = select.select([process.stdout], [], [], self._timeout_s)
            if not readable:
                self.close()
                return Verdict(f"it takes longer than {self._timeout_s:g} s to compile; make it smaller")
            found = receive(process.stdout, Verdict)
        except OSError:
            found = None
        if not isinstance(found, Verdict):
            self.close()
            return Verdict("it takes too much memory to compile; make it smaller")
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, ready to compile: starting it counts against nobody's time."""
        if self._process is None or self._process.poll() is not None:
            # the parent's own path, which need not be in the environment
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; from workers.structured_output.trial import main; main()"
            )
            pipe = subprocess.PIPE
            self._process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe)
            assert self._process.stdin is not None and self._process.stdout is not None
            send(self._process.stdin, Trial(self._folder, Grammar("regex", "a", (0,))))
            select.select([self._process.stdout], [], [], START_TIMEOUT_S)
            receive(self._process.stdout, Verdict)
        return self._process


def _refusal(grammar: Grammar, found: Verdict) -> ApiError:
    kind = {"json_schema": "JSON schema", "regex": "regular expression", "ebnf": "grammar"}.get(
        grammar.kind, grammar.kind.replace("_", " ")
    )
    if found.with_model:
        return unsupported(PARAM, found.fault)
    return invalid(PARAM, f"The {kind} cannot be used: {found.fault}", "unsupported_grammar")
