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
    """The shapes that a configuration asks for."""
    return RoundShapes((PLAIN, tree_shape(config.num_steps, config.top_k, config.num_draft_tokens)), default=1)
