"""`TreeShape`: the shape of a draft tree, and every number that follows from it. The only place that derives them.

Read by
    `speculative.config`          which trees are possible
    `speculative.drafts.drafter`  the steps that draft a tree
    `speculative.decoding`        rows and masks of its verification
    the scheduler                 the part that is a `workers.config.RoundShape`: rows, tokens, KV positions
    `workers.runner.graphs`       the same part: which steps are captured
"""

from collections.abc import Iterator
from dataclasses import dataclass

from workers.config import PLAIN, RoundShape, RoundShapes

MAX_WIDTH = 63  # a row's ancestors are the bits of one signed 64-bit integer


@dataclass(frozen=True)
class DraftStep:
    """One step of drafting a tree, per request.

    depth: of the nodes that it proposes; the step after the root's has depth 1.
    rows: nodes that it reads: the root, or those of the level above.
    first_candidate: index, among all candidates, of the first node that it proposes.
    suffix: KV positions after the committed ones that its rows see, their own included. It writes the last `rows` of
        them; the first step writes none, since draft-extend has written the root's.
    is_last: nothing is read after the nodes that it proposes.
    """

    depth: int
    rows: int
    first_candidate: int
    suffix: int
    is_last: bool


@dataclass(frozen=True)
class TreeShape(RoundShape):
    """A tree (EAGLE-2, arXiv 2406.16858, section 4) or, with top_k 1, a chain. Made by `TreeShape.of`.

    num_steps: levels that are drafted.
    top_k: children of each expanded node, and nodes expanded per level.
    """

    num_steps: int
    top_k: int

    @staticmethod
    def of(num_steps: int, top_k: int, width: int) -> "TreeShape":
        """The trees of which `width` nodes are verified, the root included."""
        return TreeShape(
            name=f"{num_steps}/{top_k}/{width}",
            width=width,
            max_new_tokens=min(num_steps + 1, width),
            draft_tokens=num_scratch_tokens(num_steps, top_k),
            num_steps=num_steps,
            top_k=top_k,
        )

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    @property
    def steps(self) -> tuple[DraftStep, ...]:
        """The steps that draft it, in order."""
        return tuple(self._steps())

    def _steps(self) -> Iterator[DraftStep]:
        first, rows = 0, 1
        for level in range(self.num_steps):
            yield DraftStep(level + 1, rows, first, level * self.top_k, level + 1 == self.num_steps)
            first, rows = first + rows * self.top_k, self.top_k

    @property
    def candidate_depths(self) -> tuple[int, ...]:
        """The depth of every candidate, in the order in which they are drafted."""
        return tuple(step.depth for step in self.steps for _ in range(step.rows * self.top_k))

    def smaller(self) -> "tuple[TreeShape, ...]":
        """What may pay where this is too much, ascending. Each shape costs start time and memory for its graphs, so
        they are few and far apart: of a chain a single guess and, if it is long, half of it; of a tree a chain half as
        deep and, if it is wide, a tree of half its width."""
        half = (self.num_steps + 1) // 2
        depths = {1, half} if self.is_chain and self.num_steps > 4 else {1} if self.is_chain else {half}
        smaller = [TreeShape.of(depth, 1, depth + 1) for depth in sorted(depths) if depth < self.num_steps]
        if not self.is_chain and self.num_steps > 2 and self.width >= 2 * self.max_new_tokens:
            steps, top_k = self.num_steps - 1, max(2, self.top_k // 2)
            smaller.append(TreeShape.of(steps, top_k, min(self.width // 2, max_nodes(steps, top_k))))
        return tuple(smaller)


def max_nodes(num_steps: int, top_k: int) -> int:
    """Nodes of the whole candidate tree, the root included."""
    return 1 + top_k + (num_steps - 1) * top_k**2


def num_scratch_tokens(num_steps: int, top_k: int) -> int:
    """KV positions after the committed ones that drafting writes: top_k per step after the first."""
    return (num_steps - 1) * top_k


def shapes_of(bound: TreeShape, adaptive: bool) -> RoundShapes:
    """The shapes of an engine that drafts `bound`: plain decoding, `bound` and, where the scheduler may choose, one or
    two between."""
    between = bound.smaller() if adaptive else ()
    return RoundShapes((PLAIN, *between, bound), default=1 + len(between), adaptive=adaptive)
