"""Where each running request stands in its grammar, the masks of a step's rows, and what the drafts after them follow.

Every rank keeps all of this by itself: what it follows are the tokens that were emitted, which are equal on all ranks,
and so are masks and guides. A step's masks are filled while the target's pass runs: what the step before emitted and
drafted was copied to the host meanwhile. Used by `workers.runner.worker`.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from workers.scheduling.plan import FINISH_NONE, Grammar, SlotInit, unpack_i32
from workers.structured_output.draft_guide import MaskRows, TreeWalk
from workers.structured_output.grammar_cache import GrammarCache, KeptGrammar
from workers.structured_output.guide_table import GuideBlock
from workers.structured_output.mask_table import NUM_SPARE, MaskTable
from workers.structured_output.token_texts import TokenTexts

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)

GUIDED_NODES = 256  # of a step: each takes some 20 us of the host, which the target's pass must hide
LEAST_GUIDED = 4  # of each tree


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


@dataclass(frozen=True)
class Tree:
    """What a request verifies: tokens of its nodes, and the children of each. Nodes without a token are nobody's."""

    tokens: list[int]
    children: list[list[int]]

    @staticmethod
    def of(tokens: Sequence[int], parents: Sequence[int]) -> "Tree":
        children: list[list[int]] = [[] for _ in tokens]
        for node, token in enumerate(tokens):
            if node and token >= 0:
                children[parents[node]].append(node)
        return Tree(list(tokens), children)

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that these tokens go through, the root first; as far as there are any."""
        nodes = [0]
        for token in tokens:
            below = next((child for child in self.children[nodes[-1]] if self.tokens[child] == token), None)
            if below is None:
                break
            nodes.append(below)
        return nodes


ROOT = Tree([0], [[]])  # of a request that verifies nothing; whatever its token is


@dataclass
class _Standing:
    """One request's place in its grammar.

    grammar: perhaps not compiled yet.
    output: tokens that it had emitted before it got its slot.
    matcher: where it stands, once the first mask was asked for.
    drafted: tokens and parents [W] int64 of what it verifies next.
    verified: the tree whose masks were filled last, and of its nodes whether a text was demanded after them.
    ended: the newest token, if it stood in an open place.
    is_over: it has ended.
    is_lost: it left its grammar.
    """

    grammar: KeptGrammar
    output: list[int]
    forgives: bool
    matcher: "xgrammar.GrammarMatcher | None" = None
    drafted: Tensor | None = None
    verified: Tree = ROOT
    is_demanded: dict[int, bool] = field(default_factory=dict)
    ended: int | None = None
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

            self.matcher = xgrammar.GrammarMatcher(self.grammar.compiled.result())
            output, self.output = self.output, []
            self.advance(output)
        return self.matcher

    def learn(self, tokens: Sequence[int], texts: TokenTexts) -> int:
        """What tokens that were taken show of the grammar. Returns how many of them were drafts within a text that was
        demanded."""
        path = self.verified.path(tokens[:-1])
        demanded = [self.is_demanded.get(node, False) for node in path]
        self.ended = None if demanded[-1] else tokens[-1]
        if self.grammar.grammar.any_whitespace:
            _, _, after = b"".join(texts[token] for token in tokens).partition(b'":')
            if after:
                self.grammar.endings.is_spaced = after.startswith(b" ")
        return sum(demanded[:-1])


class SlotGrammars:
    """The grammars of an engine's slots on one rank.

    folder: of the model, whose tokenizer is read with the first grammar.
    forgives: requests begin their grammar anew where they leave it; for synthetic acceptance, which heeds no mask.
    fill_s, num_fills: seconds that filling masks took so far, without waiting for the device, and how often that was.
    num_forced: drafts that were accepted within texts that grammars demanded.
    """

    def __init__(self, folder: str, vocab_size: int, masks: MaskTable, forgives: bool = False) -> None:
        self.masks = masks
        self.fill_s = 0.0
        self.num_fills = 0
        self.num_forced = 0
        self._forgives = forgives
        self._standing: dict[int, _Standing] = {}
        self._unread: list[tuple[Emitted, list[tuple[int, _Standing]]]] = []
        self._cache = GrammarCache(folder, vocab_size)
        self._scratch = torch.zeros((1, masks.words.shape[1]), dtype=torch.int32)
        self._array = masks.host_words.numpy()
        self._guides = None if masks.host_guides is None else [GuideBlock(b) for b in masks.host_guides.blocks.numpy()]

    def enter(self, inits: Iterable[SlotInit]) -> None:
        """Take over a plan's new requests; their grammars are compiled meanwhile."""
        for init in inits:
            self._standing.pop(init.slot, None)
            grammar = init.sampling.grammar
            if grammar is not None:
                output = unpack_i32(init.output).tolist()
                self._standing[init.slot] = _Standing(self._cache.of(grammar), output, self._forgives)

    def prepare(self, grammars: Iterable[Grammar]) -> None:
        """Compile grammars of requests that will come, beside what runs."""
        self._cache.prepare(grammars)

    @property
    def num_prepared(self) -> int:
        """How many of all that were to be prepared are done with, in their order."""
        return self._cache.num_prepared

    def fill(self, rounds: Sequence[int], width: int, finals: Sequence[int]) -> list[int]:
        """Bring the masks and guides of a step to the device: for each of `rounds`, slots that verify trees of `width`
        nodes, and for `finals`, slots whose prompts end. Waits for the step before. Returns the slots whose requests
        have left their grammars, so that nothing they emit may be shown."""
        for emitted, _ in self._unread:
            emitted.wait()
        began_s = time.perf_counter()
        self._read()
        masks, lost, row, number = self.masks, list[int](), 0, 0
        masks.clear()
        entries = [(slot, width) for slot in rounds] + [(slot, 1) for slot in finals]
        for slot, count in entries:
            standing = self._standing.get(slot)
            if standing is None or standing.is_over:
                continue
            masks.host_index[slot] = row
            rows = MaskRows(masks.host_words, self._array, row, row + count, row + count + NUM_SPARE, self._scratch)
            if not self._fill(standing, rows, count, number, len(entries)):
                lost.append(slot)
            elif masks.host_guides is not None:
                masks.host_guides.index[slot] = number
            row, number = rows.end, number + 1
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
                new = tokens[entry, : counts[entry]].tolist()
                standing.advance(new)
                standing.is_over |= finish[entry] != FINISH_NONE
                standing.drafted = None if drafts is None else drafts[entry]
                if new and not standing.is_over and not standing.is_lost:
                    self.num_forced += standing.learn(new, self._cache.texts)
        self._unread.clear()

    def _fill(self, standing: _Standing, rows: MaskRows, count: int, number: int, num_requests: int) -> bool:
        """The masks of one request's rows, and its guide; False if it has left its grammar, or its grammar leaves it no
        token."""
        try:
            matcher = standing.begun()
        except ValueError as error:
            logger.error("a grammar cannot be compiled: %s", error)
            standing.is_lost = True
        standing.verified, standing.is_demanded = ROOT, {}
        if standing.is_lost or matcher.is_terminated():
            rows.array[rows.first : rows.end] = -1
            return not standing.is_lost
        if self._guides is None:
            matcher.fill_next_token_bitmask(rows.words, rows.first)
        else:
            drafted = standing.drafted if count > 1 else None
            tree = ROOT if drafted is None else Tree.of(*drafted[:, :count].tolist())
            kept, guide = standing.grammar, self._guides[number]
            guide.clear()
            walk = TreeWalk(
                matcher,
                self._cache.texts,
                kept.endings,
                kept.grammar.end_token_ids,
                rows,
                guide,
                max(LEAST_GUIDED, GUIDED_NODES // num_requests),
                kept.grammar.any_whitespace,
                standing.ended,
            )
            walk.run(tree.tokens, tree.children)
            standing.verified, standing.is_demanded = tree, walk.is_demanded
        if not rows.array[rows.first].any():
            standing.is_lost = True
        return not standing.is_lost
