"""The shapes of draft trees: their own parameters, and what they cost the scheduler."""

from dataclasses import dataclass

from speculative.config import SpeculativeConfig
from workers.config import PLAIN, RoundShape, RoundShapes


@dataclass(frozen=True)
class TreeShape(RoundShape):
    """A tree (EAGLE-2, arXiv 2406.16858, section 4) or, with top_k 1, a chain.

    num_steps: its depth. top_k: children of each expanded node, and nodes expanded per step.
    """

    num_steps: int
    top_k: int

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    @property
    def depth(self) -> int:
        """Draft tokens that a round can accept."""
        return self.max_new_tokens - 1


def is_chain(shape: RoundShape) -> bool:
    """Whether trees of a shape never branch, and have one that could."""
    return isinstance(shape, TreeShape) and shape.is_chain


def tree_shape(num_steps: int, top_k: int, num_draft_tokens: int) -> TreeShape:
    """The shape of trees with num_draft_tokens nodes, the root included (see `SpeculativeConfig`)."""
    return TreeShape(
        name=f"{num_steps}/{top_k}/{num_draft_tokens}",
        width=num_draft_tokens,
        max_new_tokens=min(num_steps + 1, num_draft_tokens),
        draft_tokens=(num_steps - 1) * top_k,  # the first step reads what draft-extend left and writes nothing
        num_steps=num_steps,
        top_k=top_k,
    )


def shapes_of(config: SpeculativeConfig) -> RoundShapes:
    """The shapes that a configuration asks for: its own tree, plain decoding and, where they may be chosen, one or two
    between (`_smaller`)."""
    bound = tree_shape(config.num_steps, config.top_k, config.num_draft_tokens)
    between = _smaller(bound) if config.adaptive else ()
    return RoundShapes((PLAIN, *between, bound), default=1 + len(between), adaptive=config.adaptive)


def _smaller(bound: TreeShape) -> tuple[TreeShape, ...]:
    """What may pay where `bound` is too much, ascending. Each shape costs start time and memory for its graphs, so they
    are few and far apart: of a chain one guess and, if it is long, half of it; of a tree a chain half as deep and, if
    it is wide, a tree of half its width."""
    half = (bound.num_steps + 1) // 2
    depths = {1, half} if bound.is_chain and bound.num_steps > 4 else {1} if bound.is_chain else {half}
    smaller = [tree_shape(depth, 1, depth + 1) for depth in sorted(depths) if depth < bound.num_steps]
    if not bound.is_chain and bound.num_steps > 2 and bound.width >= 2 * bound.max_new_tokens:
        steps, top_k = bound.num_steps - 1, max(2, bound.top_k // 2)
        smaller.append(tree_shape(steps, top_k, min(bound.width // 2, 1 + top_k + (steps - 1) * top_k**2)))
    return tuple(smaller)
