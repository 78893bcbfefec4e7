"""The state of each request's grammar in the process that fills masks: matcher, emitted tokens and draft tree.

Used by `aerie.workers.structured_output.mask_process.mask_host`. Only one thread at a time uses a request.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aerie.workers.scheduling.plan import Failure, unpack_i32
from aerie.workers.structured_output.mask_messages import Advanced, Entered, InvalidGrammarError
from aerie.workers.structured_output.mask_process.draft_guide import MAX_SEARCHES, MaskRows, TreeWalk, may_jump
from aerie.workers.structured_output.mask_process.grammar_cache import CachedGrammar, GrammarCache
from aerie.workers.structured_output.mask_process.token_texts import TokenTexts
from aerie.workers.structured_output.mask_table import GuideBlock

if TYPE_CHECKING:
    from aerie.workers.structured_output.mask_process.matcher import Matcher

logger = logging.getLogger(__name__)


class RequestFailedError(Exception):
    """The request must end: a token violated its grammar, or the grammar allows no token."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


LEFT = Failure("the answer left its grammar")
NO_TOKEN = Failure("the grammar allows no token after what was written; it cannot be used with this model", True)


@dataclass(frozen=True)
class Tree:
    """A draft tree: token and children of each node. Nodes with a negative token are padding."""

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
        """Return the nodes along `tokens`, from the root, as far as the tree has them."""
        nodes = [0]
        for token in tokens:
            below = next((child for child in self.children[nodes[-1]] if self.tokens[child] == token), None)
            if below is None:
                break
            nodes.append(below)
        return nodes


ROOT = Tree([0], [[]])  # tree of a request without drafts; its token is not used


@dataclass
class RequestGrammar:
    """A request with a grammar.

    cached: its grammar, perhaps not compiled yet.
    tolerates_violations: whether a token that violates the grammar restarts it.
    pending: emitted tokens that the matcher has not taken.
    num_taken: emitted tokens that the matcher has taken.
    drafted, parents: token and parent of each node of the tree to verify next.
    verified: the last tree whose masks were filled.
    is_forced: for nodes of `verified`, whether the grammar forces the text after them.
    ended: the newest token, unless it was forced.
    root: [w] int32, the mask of the next token, if it was filled in the background.
    is_slow: whether its last mask took long.
    failure: why the request must end.
    """

    cached: CachedGrammar
    tolerates_violations: bool
    pending: list[int]
    num_taken: int = 0
    drafted: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    verified: Tree = ROOT
    is_forced: dict[int, bool] = field(default_factory=dict)
    ended: int | None = None
    root: npt.NDArray[np.int32] | None = None
    is_slow: bool = False
    failure: Failure | None = None
    _matcher: "Matcher | None" = None

    @property
    def num_known(self) -> int:
        """Number of emitted tokens received from the rank."""
        return self.num_taken + len(self.pending)

    def advanced(self, tokens: list[int], drafted: list[int], parents: list[int]) -> None:
        """Add emitted tokens and the tree to verify next."""
        self.pending += tokens
        self.drafted, self.parents = drafted, parents
        if tokens:
            self.root = None

    def observe(self, tokens: Sequence[int], texts: TokenTexts) -> int:
        """Learn from emitted tokens where the grammar forces texts. Return the number of accepted drafts in forced
        texts."""
        path = self.verified.path(tokens[:-1])
        demanded = [self.is_forced.get(node, False) for node in path]
        self.ended = None if demanded[-1] else tokens[-1]
        if self.cached.grammar.any_whitespace:
            _, _, after = b"".join(texts[token] for token in tokens).partition(b'":')
            if after:
                self.cached.endings.is_spaced = after.startswith(b" ")
        return sum(demanded[:-1])

    def advanced_matcher(self) -> "Matcher":
        """Return the matcher after all emitted tokens. Waits for the compiler. Raises RequestFailedError, and
        InvalidGrammarError, although the trial should have found that."""
        if self._matcher is None:
            from aerie.workers.structured_output.mask_process.matcher import Matcher

            self._matcher = Matcher(self.cached.compiled.result())
        matcher = self._matcher
        matcher.rewind()
        while self.pending:
            token = self.pending.pop(0)
            self.num_taken += 1
            if matcher.take(token):
                continue
            if not self.tolerates_violations:
                raise RequestFailedError(LEFT)
            matcher.reset()
        return matcher

    def fill_root(self, scratch: Tensor) -> None:
        """Fill `root`. scratch: [1, w] int32. Raises as `advanced_matcher` does."""
        matcher = self.advanced_matcher()
        if matcher.is_terminated():
            self.root = np.full(scratch.shape[1], -1, np.int32)
            return
        matcher.fill(scratch)
        self.root = scratch[0].numpy().copy()
        if not self.root.any():
            raise RequestFailedError(NO_TOKEN)

    def fill(self, rows: MaskRows, count: int, guide: GuideBlock | None, num_guided: int, texts: TokenTexts) -> bool:
        """Fill the masks of a tree of `count` nodes, and its guide. Return whether there is a guide. Raises as
        `advanced_matcher` does, and StepClosedError.

        rows: masks of the nodes, written.
        guide: written; None for an engine whose drafts need none.
        num_guided: number of leading nodes that the guide covers.
        texts: the vocabulary.
        """
        self.verified, self.is_forced = ROOT, {}
        if self.root is not None and count == 1:
            rows.array[0] = self.root
            return False
        matcher = self.advanced_matcher()
        if matcher.is_terminated():
            rows.array[:count] = -1
            return False
        if guide is None:
            rows.fill(matcher, 0)
        else:
            guide.clear()
            tree = Tree.of(self.drafted[:count], self.parents[:count]) if count > 1 and self.drafted else ROOT
            cached = self.cached
            walk = TreeWalk(
                matcher,
                texts,
                endings=cached.endings,
                stop_token_ids=cached.grammar.end_token_ids,
                rows=rows,
                guide=guide,
                num_guided=num_guided,
                any_whitespace=cached.grammar.any_whitespace,
                jumps=may_jump(cached.grammar),
                ended=self.ended,
                max_searches=min(MAX_SEARCHES, num_guided),
            )
            walk.run(tree.tokens, tree.children)
            self.verified, self.is_forced = tree, walk.is_forced
        if not rows.array[0].any():
            raise RequestFailedError(NO_TOKEN)
        return guide is not None


class RequestGrammars:
    """A rank's requests with a grammar, by number."""

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache
        self._by_number: dict[int, RequestGrammar] = {}

    def find(self, number: int) -> RequestGrammar | None:
        """Return the request; None if it has ended."""
        return self._by_number.get(number)

    def drop(self, number: int) -> None:
        """Forget a request that has ended."""
        self._by_number.pop(number, None)

    def follow(self, entered: Sequence[Entered], advanced: Sequence[Advanced]) -> int:
        """Add admitted requests and emitted tokens. Return the number of accepted drafts in forced texts."""
        for enters in entered:
            output = unpack_i32(enters.output).tolist()
            request = self._by_number.get(enters.request)
            if request is None or request.num_known > len(output):
                self._by_number[enters.request] = RequestGrammar(
                    self._cache.of(enters.grammar), enters.tolerates_violations, output
                )
            else:
                request.advanced(output[request.num_known :], [], [])
        num_forced = 0
        for advances in advanced:
            request = self._by_number.get(advances.request)
            if request is None:
                continue
            request.advanced(advances.tokens, advances.drafted, advances.parents)
            if advances.tokens and request.cached.compiled.done() and request.failure is None:
                num_forced += self._observe(request, advances.tokens)
        return num_forced

    def _observe(self, request: RequestGrammar, tokens: list[int]) -> int:
        try:
            return request.observe(tokens, self._cache.texts)
        except Exception:
            logger.exception("emitted tokens could not be used to improve draft guides")
            return 0


def failure_of(error: Exception) -> Failure:
    """Return the failure of a request whose masks raised `error`."""
    if isinstance(error, RequestFailedError):
        return error.failure
    if isinstance(error, InvalidGrammarError):
        return Failure(f"the grammar cannot be compiled: {error}", True)
    if isinstance(error, MemoryError):
        return Failure("the grammar takes too much memory", True)
    logger.error("a request's masks failed", exc_info=error)
    return Failure(f"its grammar failed: {type(error).__name__}: {error}")


def scratch_of(num_words: int) -> Tensor:
    """Allocate [1, num_words] int32."""
    return torch.zeros((1, num_words), dtype=torch.int32)
