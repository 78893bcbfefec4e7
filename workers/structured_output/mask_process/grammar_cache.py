"""Compiles and caches the grammars of the process that fills masks, in threads. Used by
`aerie.workers.structured_output.mask_process.mask_host`."""

import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.mask_process.draft_guide import Endings
from aerie.workers.structured_output.mask_process.token_texts import TokenTexts

if TYPE_CHECKING:
    import xgrammar

    from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary

COMPILER_NICENESS = 10  # lowers the priority of threads that compile
MAX_THREADS = 4  # so that a grammar that takes seconds does not delay others
MAX_CACHED = 64  # compiled grammars, up to 10 MB each; the compiler has a cache of its own


@dataclass(frozen=True)
class CachedGrammar:
    """A grammar that is compiled or being compiled.

    endings: tokens after which the grammar forced a text in earlier answers.
    """

    grammar: Grammar
    compiled: "Future[xgrammar.CompiledGrammar]"
    endings: Endings = field(default_factory=Endings)


class GrammarCache:
    """An LRU cache of grammars compiled for one vocabulary."""

    def __init__(self, vocabulary: "Vocabulary") -> None:
        self._vocabulary = vocabulary
        self._cached: OrderedDict[Grammar, CachedGrammar] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._compiler: GrammarCompiler | None = None
        self._texts: TokenTexts | None = None

    @property
    def texts(self) -> TokenTexts:
        """Return the bytes of the model's tokens. Available once a grammar is compiled."""
        assert self._texts is not None, "asked before a grammar was compiled"
        return self._texts

    def of(self, grammar: Grammar) -> CachedGrammar:
        """Return the cached grammar; a thread compiles a new one."""
        cached = self._cached.pop(grammar, None)
        if cached is None:
            if self._thread is None:
                # ranks compute on the same cores; the compiler's threads inherit the niceness
                self._thread = ThreadPoolExecutor(MAX_THREADS, "grammar", os.nice, (COMPILER_NICENESS,))
            cached = CachedGrammar(grammar, self._thread.submit(self._compile, grammar))
        self._cached[grammar] = cached
        if len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return cached

    def _compile(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        """Compile a grammar; the compiler is made at the first one."""
        from aerie.workers.structured_output.compiler import GrammarCompiler

        if self._compiler is None:
            # few threads, because the machine runs other work
            num_threads = max(1, min(4, (os.cpu_count() or 1) // 4))
            self._compiler = GrammarCompiler(self._vocabulary, num_threads)
        compiled = self._compiler.compile(grammar)
        if self._texts is None:
            self._texts = self._compiler.texts_of(compiled)
        return compiled
