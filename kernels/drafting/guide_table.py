"""Draft guides: a small automaton on the device for each request with a grammar, which proposes draft tokens.

Each node of a verified tree has a state. The bonus token and each drafted token lead to the next state. Without a
state, drafts are unconstrained. A guide never affects which token is chosen. Read by
`guides`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NOWHERE = -1  # marks no guide, state, token or mask
MAX_STATES = 64
MAX_EDGES = 256  # powers of two, for the kernels
NO_ORIGIN = -2  # origin of an unused edge: neither a state nor `NOWHERE`
PARTS = [MAX_STATES] * 3 + [MAX_EDGES] * 3  # int32 numbers of each part of a guide but the first, `nodes`


@dataclass(frozen=True)
class GuideTable:
    """Guides of a step's requests, packed in the order of the step. All tensors are int32.

    index: [num_slots + 1], guide of each slot, or `NOWHERE`.
    blocks: [num_slots, block_size(width)], one row per guide; the following tensors are views of it.
    nodes: [num_slots, width], state of each node of the tree.
    forced: [num_slots, MAX_STATES], token to propose in a state; other proposals need an edge.
    other: [num_slots, MAX_STATES], state after a token without an edge.
    rows: [num_slots, MAX_STATES], index of the mask with the allowed tokens of a state.
    origins, tokens, targets: [num_slots, MAX_EDGES], origin state, token and target state of each edge; at most one
        edge per state and token.
    """

    index: Tensor
    blocks: Tensor
    nodes: Tensor
    forced: Tensor
    other: Tensor
    rows: Tensor
    origins: Tensor
    tokens: Tensor
    targets: Tensor

    @staticmethod
    def of(index: Tensor, blocks: Tensor) -> "GuideTable":
        return GuideTable(index, blocks, *torch.split(blocks, [width_of(blocks), *PARTS], dim=1))

    @property
    def width(self) -> int:
        """Number of nodes of a tree."""
        return width_of(self.blocks)


def block_size(width: int) -> int:
    """Return the size of one guide, in int32 numbers, for trees of `width` nodes."""
    return width + sum(PARTS)


def width_of(blocks: Tensor) -> int:
    """Return the number of nodes of a tree, from blocks [n, block_size]."""
    return blocks.shape[1] - sum(PARTS)
