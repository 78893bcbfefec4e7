"""What drafts follow under grammars: for each request of a step a small automaton, its guide, on the device. Written by
`workers.structured_output.draft_guide`, read by `speculative.drafts.guidance`.

A guide begins at the nodes of the tree that the step verifies: each has a state, the newest token leads to another one,
and every drafted token to the next. What a guide does not know has no state, and is drafted freely: a guide says what
is worth proposing, never what may be chosen.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NOWHERE = -1  # in the place of a guide, a state, a token or a mask: there is none
MAX_STATES = 64
MAX_EDGES = 256  # powers of two, for the kernels
_NO_ORIGIN = -2  # of an edge that is not there: no state, and not `NOWHERE` either


@dataclass(frozen=True)
class GuideTable:
    """Guides of a step's requests, packed in the order of the step. All int32.

    index: [num_slots + 1], the guide of each slot, or `NOWHERE`.
    blocks: [num_slots, block_size(width)], a row for each guide; what follows are parts of it.
    nodes: [num_slots, width], the state of each node of the tree.
    forced: [num_slots, MAX_STATES], the token to propose in a state; beside it only those that have an edge.
    other: [num_slots, MAX_STATES], the state after a token that has no edge.
    rows: [num_slots, MAX_STATES], which of the step's masks says what may come.
    origins, tokens, targets: [num_slots, MAX_EDGES], the states that an edge joins, and its token; at most one edge for
        a state and a token.
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
        """Nodes of a tree."""
        return width_of(self.blocks)


class GuideBlock:
    """A guide as it is written: block [block_size] int32, a row of a table. States and edges for which there is no room
    are left out."""

    def __init__(self, block: npt.NDArray[np.int32]) -> None:
        width = block.shape[0] - sum(_PARTS)
        places = np.cumsum([width, *_PARTS])[:-1]
        self.block = block
        self._nodes, self._forced, self._other, self._rows, *edges = np.split(block, places)
        self._origins, self._tokens, self._targets = edges
        self.num_states = 0
        self._num_edges = 0

    def clear(self) -> None:
        """Nothing of it is left."""
        self.block.fill(NOWHERE)
        self._origins.fill(_NO_ORIGIN)
        self.num_states = self._num_edges = 0

    @property
    def room(self) -> int:
        """States that can be added."""
        return MAX_STATES - self.num_states

    def set_node(self, node: int, state: int) -> None:
        self._nodes[node] = state

    def add_state(self, forced: int = NOWHERE, row: int = NOWHERE, stays: bool = False) -> int:
        """stays: tokens that have no edge lead back to it. Returns the state, or `NOWHERE`."""
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
        """All [n]."""
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
        """States that each force one of tokens [n], which have room. Returns the first."""
        since = self.num_states
        self.num_states += len(tokens)
        self._forced[since : self.num_states] = tokens
        return since


_PARTS = [MAX_STATES] * 3 + [MAX_EDGES] * 3


def block_size(width: int) -> int:
    """Numbers of one guide for trees of so many nodes."""
    return width + sum(_PARTS)


def width_of(blocks: Tensor) -> int:
    """The nodes of a tree, of blocks [n, block_size]."""
    return blocks.shape[1] - sum(_PARTS)
