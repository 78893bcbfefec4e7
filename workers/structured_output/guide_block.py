"""`GuideBlock` writes one draft guide, in the layout of `aerie.kernels.drafting.guide_table.GuideTable`. Used by
`aerie.workers.structured_output.mask_process.draft_guide`."""

import numpy as np
import numpy.typing as npt

from aerie.kernels.drafting.guide_table import MAX_EDGES, MAX_STATES, NO_ORIGIN, NOWHERE, PARTS


class GuideBlock:
    """Writer of one guide. States and edges that do not fit are left out.

    block: [block_size] int32, a row of `GuideTable.blocks`.
    """

    def __init__(self, block: npt.NDArray[np.int32]) -> None:
        width = block.shape[0] - sum(PARTS)
        places = np.cumsum([width, *PARTS])[:-1]
        self.block = block
        self._nodes, self._forced, self._other, self._rows, *edges = np.split(block, places)
        self._origins, self._tokens, self._targets = edges
        self.num_states = 0
        self._num_edges = 0

    def clear(self) -> None:
        """Remove all states and edges."""
        self.block.fill(NOWHERE)
        self._origins.fill(NO_ORIGIN)
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
