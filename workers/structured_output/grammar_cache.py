"""Compiled grammars of one rank: a thread compiles them beside what runs. Used by
`workers.structured_output.slot_grammars`."""

import contextlib
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.scheduling.plan import Grammar
from workers.structured_output.draft_guide import Endings
from workers.structured_output.token_texts import TokenTexts

if TYPE_CHECKING:
    import xgrammar

    from workers.structured_output.compiler import GrammarCompiler

MAX_KEPT = 64  # compiled grammars beside those in use, up to 10 MB each; the compiler keeps some too


@dataclass(frozen=True)
class KeptGrammar:
    """A grammar that is compiled, or will be.

    endings: what its requests have shown of it.
    """

    grammar: Grammar
    compiled: "Future[xgrammar.CompiledGrammar]"
    endings: Endings = field(default_factory=Endings)


def import_compiler() -> None:
    """Begin to import what compiles grammars: a second of Python's lock, which the rounds of a rank that serves would
    lack once the first grammar comes."""

    def read() -> None:
        with contextlib.suppress(ImportError):  # the first grammar says so
            import workers.structured_output.compiler  # noqa: F401

    threading.Thread(target=read, name="grammar compiler", daemon=True).start()


class GrammarCache:
    """folder: of the model, whose tokenizer is read with the first grammar."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._kept: OrderedDict[Grammar, KeptGrammar] = OrderedDict()
        self._announced: deque[KeptGrammar] = deque()
        self._num_prepared = 0
        self._thread: ThreadPoolExecutor | None = None
        self._compiler: GrammarCompiler | None = None
        self._texts: TokenTexts | None = None

    @property
    def texts(self) -> TokenTexts:
        """What the model's tokens spell; known once a grammar is compiled."""
        assert self._texts is not None, "asked before a grammar was compiled"
        return self._texts

    def prepare(self, grammars: Iterable[Grammar]) -> None:
        """Compile grammars of requests that will come, beside what runs."""
        self._announced.extend(self.of(grammar) for grammar in grammars)

    @property
    def num_prepared(self) -> int:
        """How many of all that were to be prepared are done with, in their order."""
        while self._announced and self._announced[0].compiled.done():
            self._announced.popleft()
            self._num_prepared += 1
        return self._num_prepared

    def of(self, grammar: Grammar) -> KeptGrammar:
        """The grammar, compiled in a thread, or before."""
        found = self._kept.pop(grammar, None)
        if found is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            found = KeptGrammar(grammar, self._thread.submit(self._compile, grammar))
        self._kept[grammar] = found
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        from workers.structured_output.compiler import GrammarCompiler

        if self._compiler is None:
            # few threads: those of what else this machine runs must not wait
            num_threads = max(1, min(4, (os.cpu_count() or 1) // 4))
            self._compiler = GrammarCompiler(self._folder, self._vocab_size, num_threads)
        compiled = self._compiler.compile(grammar)
        if self._texts is None:
            self._texts = self._compiler.texts_of(compiled)
        return compiled
