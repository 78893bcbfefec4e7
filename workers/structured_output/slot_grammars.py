"""Where each running request stands in its grammar, and the masks of a step's rows.

Every rank keeps all of this by itself: what it follows are the tokens that were emitted, which are equal on all ranks,
and so are the masks. A step's masks are filled while the target's pass runs: what the step before emitted and drafted
was copied to the host meanwhile. Used by `workers.runner.worker`.
"""

import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from workers.scheduling.plan import FINISH_NONE, Grammar, SlotInit, unpack_i32
from workers.structured_output.mask_table import FREE, MaskTable

if TYPE_CHECKING:
    import xgrammar

    from workers.structured_output.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

MAX_KEPT = 64  # compiled grammars beside those in use, up to 10 MB each; the compiler keeps some too


class Emitted(Protocol):
    """What a step's entries emitted and drafted, on the host or on its way there."""

    def wait(self) -> None:
        """Until it is here."""

    @property
    def tokens(self) -> Tensor:
        """[n, M] int64."""

    @property
    def counts(self) -> Tensor:
        """[n] int64, tokens of each."""

    @property
    def finish(self) -> Tensor:
        """[n] int64, FINISH_*."""

    @property
    def drafts(self) -> Tensor | None:
        """[n, 2, W] int64, tokens and parents of the tree that each verifies next; None without a draft."""


@dataclass
class _Standing:
    """One request's place in its grammar.

    compiled: the grammar, perhaps not yet.
    output: tokens that it had emitted before it got its slot.
    matcher: where it stands, once the first mask was asked for.
    tree: tokens and parents [W] int64 of what it verifies next.
    is_over: it has ended.
    is_lost: it left its grammar.
    """

    compiled: "Future[xgrammar.CompiledGrammar]"
    output: list[int]
    forgives: bool
    matcher: "xgrammar.GrammarMatcher | None" = None
    tree: tuple[Tensor, Tensor] | None = None
    is_over: bool = False
    is_lost: bool = False

    def advance(self, tokens: Sequence[int]) -> None:
        """Take tokens that were emitted."""
        matcher = self.begun()
        for token in tokens:
            if self.is_lost:
                return
            if not matcher.is_terminated() and matcher.accept_token(token):
                continue
            if self.forgives:
                matcher.reset()
                continue
            self.is_lost = True

    def begun(self) -> "xgrammar.GrammarMatcher":
        """The matcher; waits for the compiler at its first call. Raises InvalidGrammarError, which the edge's trial
        should have found."""
        if self.matcher is None:
            import xgrammar

            self.matcher = xgrammar.GrammarMatcher(self.compiled.result())
            output, self.output = self.output, []
            self.advance(output)
        return self.matcher


class SlotGrammars:
    """The grammars of an engine's slots on one rank.

    folder: of the model, whose tokenizer is read with the first grammar.
    forgives: requests begin their grammar anew where they leave it; for synthetic acceptance, which heeds no mask.
    fill_s, num_fills: seconds that filling masks took so far, without waiting for the device, and how often that was.
    """

    def __init__(self, folder: str, vocab_size: int, masks: MaskTable, forgives: bool = False) -> None:
        self.masks = masks
        self.fill_s = 0.0
        self.num_fills = 0
        self._folder = folder
        self._vocab_size = vocab_size
        self._forgives = forgives
        self._standing: dict[int, _Standing] = {}
        self._unread: list[tuple[Emitted, list[tuple[int, _Standing]]]] = []
        self._futures: OrderedDict[Grammar, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._announced: deque[Future[xgrammar.CompiledGrammar]] = deque()
        self._num_prepared = 0
        self._thread: ThreadPoolExecutor | None = None
        self._compiler: GrammarCompiler | None = None

    def enter(self, inits: Iterable[SlotInit]) -> None:
        """Take over a plan's new requests; their grammars are compiled meanwhile."""
        for init in inits:
            self._standing.pop(init.slot, None)
            grammar = init.sampling.grammar
            if grammar is not None:
                output = unpack_i32(init.output).tolist()
                self._standing[init.slot] = _Standing(self._compiled(grammar), output, self._forgives)

    def prepare(self, grammars: Iterable[Grammar]) -> None:
        """Compile grammars of requests that will come, beside what runs."""
        self._announced.extend(self._compiled(grammar) for grammar in grammars)

    @property
    def num_prepared(self) -> int:
        """How many of all that were to be prepared are done with, in their order."""
        while self._announced and self._announced[0].done():
            self._announced.popleft()
            self._num_prepared += 1
        return self._num_prepared

    def _compiled(self, grammar: Grammar) -> "Future[xgrammar.CompiledGrammar]":
        """The grammar, compiled in a thread, or before."""
        found = self._futures.pop(grammar, None)
        if found is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            found = self._thread.submit(self._compile, grammar)
        self._futures[grammar] = found
        if len(self._futures) > MAX_KEPT:
            self._futures.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        from workers.structured_output.compiler import GrammarCompiler

        if self._compiler is None:
            # few threads: those of what else this machine runs must not wait
            num_threads = max(1, min(4, (os.cpu_count() or 1) // 4))
            self._compiler = GrammarCompiler(self._folder, self._vocab_size, num_threads)
        return self._compiler.compile(grammar)

    def fill(self, rounds: Sequence[int], width: int, finals: Sequence[int]) -> list[int]:
        """Bring the masks of a step to the device: for each of `rounds`, slots that verify trees of `width` nodes, and
        for `finals`, slots whose prompts end. Waits for the step before. Returns the slots whose requests have left
        their grammars, so that nothing they emit may be shown."""
        for emitted, _ in self._unread:
            emitted.wait()
        began_s = time.perf_counter()
        self._read()
        masks, lost, row = self.masks, list[int](), 0
        masks.host_index.fill_(FREE)
        for slot, count in [(slot, width) for slot in rounds] + [(slot, 1) for slot in finals]:
            standing = self._standing.get(slot)
            if standing is None or standing.is_over:
                continue
            masks.host_index[slot] = row
            if not self._fill(standing, row, count):
                lost.append(slot)
            row += count
        masks.upload(row)
        self.fill_s += time.perf_counter() - began_s
        self.num_fills += 1
        return lost

    def ran(self, entries: Sequence[int], emitted: Emitted) -> None:
        """A step was launched whose entries are these slots."""
        mine = [(i, self._standing[slot]) for i, slot in enumerate(entries) if slot in self._standing]
        self._unread.append((emitted, mine))

    def _read(self) -> None:
        """Follow what the steps before emitted."""
        for emitted, entries in self._unread:
            counts, finish = emitted.counts.tolist(), emitted.finish.tolist()
            tokens, drafts = emitted.tokens, emitted.drafts
            for entry, standing in entries:
                standing.advance(tokens[entry, : counts[entry]].tolist())
                standing.is_over |= finish[entry] != FINISH_NONE
                standing.tree = None if drafts is None else (drafts[entry, 0], drafts[entry, 1])
        self._unread.clear()

    def _fill(self, standing: _Standing, row: int, count: int) -> bool:
        """The masks of one request's rows; False if it has left its grammar, or its grammar leaves it no token."""
        words = self.masks.host_words
        try:
            matcher = standing.begun()
        except ValueError as error:
            logger.error("a grammar cannot be compiled: %s", error)
            standing.is_lost = True
        if standing.is_lost or matcher.is_terminated():
            words[row : row + count].fill_(-1)
            return not standing.is_lost
        if count == 1 or standing.tree is None:
            words[row : row + count].fill_(-1)
            matcher.fill_next_token_bitmask(words, row)
        else:
            tokens, parents = (part[:count] for part in standing.tree)
            children, siblings = links(tokens, parents)
            matcher.traverse_draft_tree(children, siblings, tokens, words[row : row + count])
        if not words[row].any():
            standing.is_lost = True
        return not standing.is_lost


def links(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """First child and next sibling of each node [W] int64, -1 where there is none, of tokens and parents [W] int64.
    Nodes without a token are nobody's children."""
    width = tokens.shape[0]
    children, siblings = [-1] * width, [-1] * width
    parent = parents.tolist()
    for node, token in reversed(list(enumerate(tokens.tolist()))):
        if node and token >= 0:
            siblings[node], children[parent[node]] = children[parent[node]], node
    return torch.tensor(children), torch.tensor(siblings)
