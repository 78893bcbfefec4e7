"""Where the requests of a rank stand in their grammars, in the process that fills masks. Used by
`workers.structured_output.mask_host`; each request by one thread at a time."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.scheduling.plan import Failure, unpack_i32
from workers.structured_output.draft_guide import MaskRows, TreeWalk
from workers.structured_output.faults import InvalidGrammarError
from workers.structured_output.grammar_cache import GrammarCache, KeptGrammar
from workers.structured_output.guide_table import GuideBlock
from workers.structured_output.mask_messages import Advanced, Entered
from workers.structured_output.token_texts import TokenTexts

if TYPE_CHECKING:
    from workers.structured_output.matcher import Matcher

logger = logging.getLogger(__name__)


class GrammarLostError(Exception):
    """The request cannot go on: it has left its grammar, or its grammar leaves it no token."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


LEFT = Failure("the answer left its grammar")
NO_TOKEN = Failure("the grammar allows no token after what was written; it cannot be used with this model", True)


@dataclass(frozen=True)
class Tree:
    """What a request verifies: tokens of its nodes, and the children of each. Nodes without a token are padding."""

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
class Guest:
    """A request with a grammar.

    kept: its grammar, perhaps not compiled yet.
    forgives: it begins its grammar anew where it leaves it.
    pending: tokens that it has emitted and the matcher has not taken.
    num_taken: those that it has.
    drafted, parents: of the tree that it verifies next.
    verified: the tree whose masks were filled last, and of its nodes whether a text was demanded after them.
    ended: the newest token, if it stood in an open place.
    root: the mask where it stands, [w] int32, if it was filled beside the steps.
    is_slow: its last mask took long.
    failure: why it cannot go on.
    """

    kept: KeptGrammar
    forgives: bool
    pending: list[int]
    num_taken: int = 0
    drafted: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    verified: Tree = ROOT
    is_demanded: dict[int, bool] = field(default_factory=dict)
    ended: int | None = None
    root: npt.NDArray[np.int32] | None = None
    is_slow: bool = False
    failure: Failure | None = None
    _matcher: "Matcher | None" = None

    @property
    def num_known(self) -> int:
        """Tokens that it has emitted, as far as was said here."""
        return self.num_taken + len(self.pending)

    def advanced(self, tokens: list[int], drafted: list[int], parents: list[int]) -> None:
        """It has emitted tokens, and has a tree to verify."""
        self.pending += tokens
        self.drafted, self.parents = drafted, parents
        if tokens:
            self.root = None

    def learn(self, tokens: Sequence[int], texts: TokenTexts) -> int:
        """What tokens that were emitted show of the grammar. Returns how many of them were drafts within a text that
        was demanded."""
        path = self.verified.path(tokens[:-1])
        demanded = [self.is_demanded.get(node, False) for node in path]
        self.ended = None if demanded[-1] else tokens[-1]
        if self.kept.grammar.any_whitespace:
            _, _, after = b"".join(texts[token] for token in tokens).partition(b'":')
            if after:
                self.kept.endings.is_spaced = after.startswith(b" ")
        return sum(demanded[:-1])

    def stand(self) -> "Matcher":
        """The matcher, advanced through all that was emitted. Waits for the compiler. Raises GrammarLostError, and
        InvalidGrammarError, which the trial should have found."""
        if self._matcher is None:
            from workers.structured_output.matcher import Matcher

            self._matcher = Matcher(self.kept.compiled.result())
        matcher = self._matcher
        matcher.rewind()
        while self.pending:
            token = self.pending.pop(0)
            self.num_taken += 1
            if matcher.take(token):
                continue
            if not self.forgives:
                raise GrammarLostError(LEFT)
            matcher.reset()
        return matcher

    def settle(self, scratch: Tensor) -> None:
        """Find the mask where it stands, beside the steps. scratch: [1, w] int32. Raises as `stand` does."""
        matcher = self.stand()
        if matcher.is_terminated():
            self.root = np.full(scratch.shape[1], -1, np.int32)
            return
        matcher.fill(scratch)
        self.root = scratch[0].numpy().copy()
        if not self.root.any():
            raise GrammarLostError(NO_TOKEN)

    def fill(self, rows: MaskRows, count: int, guide: GuideBlock | None, num_guided: int, texts: TokenTexts) -> bool:
        """The masks of a step's rows, and the guide; whether there is one. count: nodes of the tree. Raises as `stand`
        does, and StepClosedError."""
        self.verified, self.is_demanded = ROOT, {}
        if self.root is not None and count == 1:
            rows.array[0] = self.root
            return False
        matcher = self.stand()
        if matcher.is_terminated():
            rows.array[:count] = -1
            return False
        if guide is None:
            rows.fill(matcher, 0)
        else:
            guide.clear()
            tree = Tree.of(self.drafted[:count], self.parents[:count]) if count > 1 and self.drafted else ROOT
            kept = self.kept
            walk = TreeWalk(
                matcher,
                texts,
                kept.endings,
                kept.grammar.end_token_ids,
                rows,
                guide,
                num_guided,
                kept.grammar.any_whitespace,
                self.ended,
            )
            walk.run(tree.tokens, tree.children)
            self.verified, self.is_demanded = tree, walk.is_demanded
        if not rows.array[0].any():
            raise GrammarLostError(NO_TOKEN)
        return guide is not None


class Guests:
    """A rank's requests by their number, brought up to date by its orders."""

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache
        self._by_number: dict[int, Guest] = {}

    def find(self, number: int) -> Guest | None:
        """The request, unless it has ended."""
        return self._by_number.get(number)

    def drop(self, number: int) -> None:
        """A request has ended."""
        self._by_number.pop(number, None)

    def follow(self, entered: Sequence[Entered], advanced: Sequence[Advanced]) -> int:
        """Take in requests that have a slot from now on, and what a step emitted. Returns how many accepted drafts
        stood within texts that grammars demanded."""
        for enters in entered:
            output = unpack_i32(enters.output).tolist()
            guest = self._by_number.get(enters.guest)
            if guest is None or guest.num_known > len(output):
                self._by_number[enters.guest] = Guest(self._cache.of(enters.grammar), enters.forgives, output)
            else:
                guest.advanced(output[guest.num_known :], [], [])
        num_forced = 0
        for advances in advanced:
            guest = self._by_number.get(advances.guest)
            if guest is None:
                continue
            guest.advanced(advances.tokens, advances.drafted, advances.parents)
            if advances.tokens and guest.kept.compiled.done() and guest.failure is None:
                num_forced += self._learn(guest, advances.tokens)
        return num_forced

    def _learn(self, guest: Guest, tokens: list[int]) -> int:
        try:
            return guest.learn(tokens, self._cache.texts)
        except Exception:
            logger.exception("nothing was learnt of a grammar")
            return 0


def failure_of(error: Exception) -> Failure:
    """Why a request whose masks raised this cannot go on."""
    if isinstance(error, GrammarLostError):
        return error.failure
    if isinstance(error, InvalidGrammarError):
        return Failure(f"the grammar cannot be compiled: {error}", True)
    if isinstance(error, MemoryError):
        return Failure("the grammar takes too much memory", True)
    logger.error("a request's masks failed", exc_info=error)
    return Failure(f"its grammar failed: {type(error).__name__}: {error}")


def scratch_of(num_words: int) -> Tensor:
    """[1, num_words] int32."""
    return torch.zeros((1, num_words), dtype=torch.int32)
