"""Compiled grammars of the process that fills masks: threads compile them. Used by
`workers.structured_output.mask_host`."""

import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.scheduling.plan import Grammar
from workers.structured_output.draft_guide import Endings
from workers.structured_output.token_texts import TokenTexts

if TYPE_CHECKING:
    import xgrammar

    from workers.structured_output.compiler import GrammarCompiler, Vocabulary

COMPILER_NICENESS = 10
MAX_THREADS = 4  # so that a grammar of many seconds holds up no other
MAX_KEPT = 64  # compiled grammars beside those in use, up to 10 MB each; the compiler keeps some too


@dataclass(frozen=True)
class KeptGrammar:
    """A grammar that is compiled, or will be.

    endings: what its requests have shown of it.
    """

    grammar: Grammar
    compiled: "Future[xgrammar.CompiledGrammar]"
    endings: Endings = field(default_factory=Endings)


class GrammarCache:
    """Grammars over one vocabulary."""

    def __init__(self, vocabulary: "Vocabulary") -> None:
        self._vocabulary = vocabulary
        self._kept: OrderedDict[Grammar, KeptGrammar] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._compiler: GrammarCompiler | None = None
        self._texts: TokenTexts | None = None

    @property
    def texts(self) -> TokenTexts:
        """What the model's tokens spell; known once a grammar is compiled."""
        assert self._texts is not None, "asked before a grammar was compiled"
        return self._texts

    def of(self, grammar: Grammar) -> KeptGrammar:
        """The grammar, compiled in a thread, or before."""
        found = self._kept.pop(grammar, None)
        if found is None:
            if self._thread is None:
                # ranks compute on the same cores; the compiler's own threads are as nice as the one that starts them
                self._thread = ThreadPoolExecutor(MAX_THREADS, "grammar", os.nice, (COMPILER_NICENESS,))
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
            self._compiler = GrammarCompiler(self._vocabulary, num_threads)
        compiled = self._compiler.compile(grammar)
        if self._texts is None:
            self._texts = self._compiler.texts_of(compiled)
        return compiled
