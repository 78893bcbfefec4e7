"""Draft guides: a small automaton on the device for each request with a grammar, which proposes draft tokens.

Each node of a verified tree has a state. The bonus token and each drafted token lead to the next state. Without a
state, drafts are unconstrained. A guide never affects which token is chosen. Written by
`aerie.workers.structured_output.mask_process.draft_guide`, read by `aerie.speculative.drafts.guidance`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NOWHERE = -1  # marks no guide, state, token or mask
MAX_STATES = 64
MAX_EDGES = 256  # powers of two, for the kernels
_NO_ORIGIN = -2  # origin of an unused edge: neither a state nor `NOWHERE`


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
        return GuideTable(index, blocks, *torch.split(blocks, [width_of(blocks), *_PARTS], dim=1))

    @property
    def width(self) -> int:
        """Number of nodes of a tree."""
        return width_of(self.blocks)


class GuideBlock:
    """Writer of one guide. States and edges that do not fit are left out.

    block: [block_size] int32, a row of `GuideTable.blocks`.
    """

    def __init__(self, block: npt.NDArray[np.int32]) -> None:
        width = block.shape[0] - sum(_PARTS)
        places = np.cumsum([width, *_PARTS])[:-1]
        self.block = block
        self._nodes, self._forced, self._other, self._rows, *edges = np.split(block, places)
        self._origins, self._tokens, self._targets = edges
        self.num_states = 0
        self._num_edges = 0

    def clear(self) -> None:
        """Remove all states and edges."""
        self.block.fill(NOWHERE)
        self._origins.fill(_NO_ORIGIN)
        self.num_states = self._num_edges = 0

    @property
    def room(self) -> int:
        """Number of states that still fit."""
        return MAX_STATES - self.num_states

    def set_node(self, node: int, state: int) -> None:
        self._nodes[node] = state

    def add_state(self, forced: int = NOWHERE, row: int = NOWHERE, stays: bool = False) -> int:
        """Add a state. stays: whether a token without an edge leads back to it. Returns the state, or `NOWHERE`."""
        state = self.num_states
        if state == MAX_STATES:
            return NOWHERE
        self._forced[state], self._rows[state] = forced, row
        if stays:
            self._other[state] = state
        self.num_states += 1
        return state

    def add_edges(
        self, origins: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]
    ) -> None:
        """Add edges. All arguments are [n]."""
        since = self._num_edges
        count = min(len(tokens), MAX_EDGES - since)
        for part, given in ((self._origins, origins), (self._tokens, tokens), (self._targets, targets)):
            part[since : since + count] = given[:count]
        self._num_edges += count

    def add_edge(self, origin: int, token: int, target: int) -> None:
        if self._num_edges < MAX_EDGES:
            edge, self._num_edges = self._num_edges, self._num_edges + 1
            self._origins[edge], self._tokens[edge], self._targets[edge] = origin, token, target

    def add_forced_states(self, tokens: npt.NDArray[np.int32]) -> int:
        """Add a state for each of tokens [n], which it forces; all must fit. Returns the first."""
        since = self.num_states
        self.num_states += len(tokens)
        self._forced[since : self.num_states] = tokens
        return since


_PARTS = [MAX_STATES] * 3 + [MAX_EDGES] * 3


def block_size(width: int) -> int:
    """Return the size of one guide, in int32 numbers, for trees of `width` nodes."""
    return width + sum(_PARTS)


def width_of(blocks: Tensor) -> int:
    """Return the number of nodes of a tree, from blocks [n, block_size]."""
    return blocks.shape[1] - sum(_PARTS)
