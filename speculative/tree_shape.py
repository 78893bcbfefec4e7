"""`TreeShape`: the shape of a draft tree. All sizes that follow from it are derived here.

Read by
    `aerie.speculative.config`          which trees are possible
    `aerie.speculative.drafts.drafter`  the steps that draft a tree
    `aerie.speculative.decoding`        rows and masks of its verification
    the scheduler                 the part that is a `aerie.workers.config.RoundShape`: rows, tokens, KV positions
    `aerie.workers.runner.graphs`       the same part: which steps are captured
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from aerie.kernels.kv.mask_bits import MASK_BITS, MAX_NODES
from aerie.workers.config import PLAIN, RoundShape, RoundShapes

# Widths of a block's trees that an engine may choose. Finer than powers of two, because the time of a round grows in
# steps, at the tiles of its products (CAST, arXiv 2610.00321: a width chosen between steps gains 20 %, 128 nodes 2 %).
BLOCK_WIDTHS = (16, 24, 32, 48, 63, 128)
MAX_WIDTH = MAX_NODES
MAX_COLUMNS = (
    MASK_BITS  # maximum columns of chains, of drafting, and of trees with a copied branch: their masks are bits
)


@dataclass(frozen=True)
class DraftStep:
    """One step of drafting a tree, per request.

    depth: depth of the nodes that it proposes; 1 for the first step.
    rows: nodes that it reads: the root, or those of the level above.
    first_candidate: index of its first proposal among all candidates.
    suffix: number of KV positions after the committed ones that its rows see, including their own. It writes the last
        `rows` of them; the first step writes none, because draft-extend has written the root's.
    is_last: its proposals are not expanded.
    """

    depth: int
    rows: int
    first_candidate: int
    suffix: int
    is_last: bool


@dataclass(frozen=True)
class TreeShape(RoundShape):
    """A tree (EAGLE-2, arXiv 2406.16858, section 4; of a block, the best nodes of all:
    `aerie.kernels.tree.tree_growth`) or, with top_k 1, a chain. Built by `TreeShape.of`.

    num_steps: drafted levels.
    top_k: children per expanded node, and except in a block expanded nodes per level.
    in_block: one pass over a block drafts all levels (`aerie.speculative.drafts.blocks`).
    branch: number of nodes after the model's, for a branch copied from the text (`aerie.speculative.decoding`).
    """

    num_steps: int
    top_k: int
    in_block: bool = False
    branch: int = 0

    @staticmethod
    def of(num_steps: int, top_k: int, width: int, in_block: bool = False) -> "TreeShape":
        """Return the shape whose trees have `width` verified nodes, including the root."""
        return TreeShape(
            name=f"{num_steps}/{top_k}/{width}",
            width=width,
            max_new_tokens=min(num_steps + 1, width),
            draft_tokens=num_steps + 1 if in_block else num_scratch_tokens(num_steps, top_k),
            num_steps=num_steps,
            top_k=top_k,
            in_block=in_block,
        )

    def with_branch(self, num_nodes: int) -> "TreeShape":
        """Return the shape with a copied branch of `num_nodes` nodes."""
        max_new_tokens = max(self.max_new_tokens, num_nodes + 1)
        name, width = f"{self.name}+{num_nodes}", self.width + num_nodes
        return replace(self, name=name, width=width, max_new_tokens=max_new_tokens, branch=num_nodes)

    @property
    def model_part(self) -> "TreeShape":
        """Return the part that the model drafts: the first nodes."""
        return TreeShape.of(self.num_steps, self.top_k, self.width - self.branch, self.in_block)

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1 and not self.branch

    @property
    def steps(self) -> tuple[DraftStep, ...]:
        """Return the steps that draft it, in order."""
        return tuple(self._steps())

    def _steps(self) -> Iterator[DraftStep]:
        first, rows = 0, 1
        for level in range(self.num_steps):
            yield DraftStep(level + 1, rows, first, level * self.top_k, level + 1 == self.num_steps)
            first, rows = first + rows * self.top_k, self.top_k

    @property
    def candidate_depths(self) -> tuple[int, ...]:
        """Return the depth of every candidate, in the order of drafting."""
        return tuple(step.depth for step in self.steps for _ in range(step.rows * self.top_k))

    def smaller(self) -> "tuple[TreeShape, ...]":
        """Return smaller shapes that may be faster under load, in order of width. Each costs start time and memory for
        its graphs, so there are few.

        Chain: one draft token, and half of a long chain; for block drafts, whose length is for the most predictable
        text, also a quarter.
        Tree: a chain of half the depth, and half the width of a wide tree.
        Tree of a block: chains of a quarter, half and all of the depth, and the `BLOCK_WIDTHS` below its own.
        """
        if self.in_block and not self.is_chain:
            return self._smaller_of_block()
        half = (self.num_steps + 1) // 2
        depths = {1, half} if self.is_chain and self.num_steps > 4 else {1} if self.is_chain else {half}
        if self.in_block:
            depths |= {half // 2} if half > 3 else set()
        smaller = [self._chain(depth) for depth in sorted(depths) if 0 < depth < self.num_steps]
        if not self.is_chain and self.num_steps > 2 and self.width >= 2 * self.max_new_tokens:
            steps, top_k = self.num_steps - 1, max(2, self.top_k // 2)
            width = min(self.width // 2, max_nodes(steps, top_k))
            smaller.append(TreeShape.of(steps, top_k, width, self.in_block))
        return tuple(smaller)

    def _smaller_of_block(self) -> "tuple[TreeShape, ...]":
        """Return smaller shapes for a block draft: chains of some depths, and narrower trees of full depth."""
        half = (self.num_steps + 1) // 2
        depths = {half // 2, half, self.num_steps} - {0}
        chains = [self._chain(depth) for depth in depths if depth + 1 <= self.width]
        widths = [width for width in BLOCK_WIDTHS if self.num_steps < width < self.width]
        trees = [TreeShape.of(self.num_steps, self.top_k, width, self.in_block) for width in widths]
        return tuple(sorted((*chains, *trees), key=lambda shape: (shape.width, shape.top_k)))

    def _chain(self, depth: int) -> "TreeShape":
        return TreeShape.of(depth, 1, depth + 1, self.in_block)


def max_nodes(num_steps: int, top_k: int, in_block: bool = False) -> int:
    """Return the number of nodes that drafting proposes in all, including the root: the maximum width of a shape.

    num_steps: levels. top_k: children of an expanded node.
    in_block: one pass over a block drafts all levels, so all nodes of a level are expanded, and the result is at most
        MAX_WIDTH. Otherwise each level takes a draft step, which expands the best top_k nodes of the level above
        (EAGLE-2).
    """
    if in_block:
        nodes, level = 1, 1
        for _ in range(num_steps):
            level = min(level * top_k, MAX_WIDTH)
            nodes += level
        return min(nodes, MAX_WIDTH)
    return 1 + top_k + (num_steps - 1) * top_k**2


def num_scratch_tokens(num_steps: int, top_k: int) -> int:
    """Return the KV positions after the committed ones that drafting writes: top_k per step after the first."""
    return (num_steps - 1) * top_k


def shapes_of(bound: TreeShape, adaptive: bool, branch: int = 0) -> RoundShapes:
    """Return the shapes of an engine that drafts `bound`: non-speculative decoding, `bound` and, if adaptive,
    `bound.smaller()`. branch: nodes of a copied branch. With one, the widest shape is `bound` with the branch, and
    `bound` alone is one of the smaller shapes."""
    between = bound.smaller() if adaptive else ()
    if branch:
        between, bound = ((*between, bound) if adaptive else ()), bound.with_branch(branch)
    return RoundShapes((PLAIN, *between, bound), default=1 + len(between), adaptive=adaptive, keeps_tokens=branch > 0)


def suffix_shape(num_tokens: int) -> RoundShape:
    """Return the shape of a chain of `num_tokens` drafts. Drafting writes no KV."""
    return RoundShape(f"suffix/{num_tokens}", num_tokens + 1, num_tokens + 1, draft_tokens=0)


def suffix_shapes(num_tokens: int, adaptive: bool) -> RoundShapes:
    """Return the shapes of non-speculative decoding and of chains of `num_tokens` drafts; if adaptive, also of a half
    and a quarter of them. If num_tokens is 2**n - 1, so are these."""
    fewer = {(num_tokens - 1) // 2, (num_tokens - 3) // 4} if adaptive else set()
    between = tuple(suffix_shape(number) for number in sorted(fewer) if number > 0)
    return RoundShapes(
        (PLAIN, *between, suffix_shape(num_tokens)),
        default=1 + len(between),
        adaptive=adaptive,
        keeps_tokens=True,
        model_free=True,
        drafted_by="suffix",
    )
