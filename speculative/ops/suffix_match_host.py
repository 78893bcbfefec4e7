"""`suffix_match.find_matches` on a CPU. Each compared token leaves fewer candidates, so for most requests one
comparison with the whole text suffices."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from speculative.ops.suffix_match import MatchLimits
from speculative.tree.nodes import NO_TOKEN


def find_matches(
    history: Tensor, slots: Tensor, seq_len: Tensor, limits: MatchLimits, chains: Tensor, max_tokens: int
) -> Tensor:
    """`speculative.ops.suffix_match.find_matches`."""
    texts, lengths, proposed = history.numpy(), seq_len.numpy(), chains.numpy()
    found = slots.new_zeros(slots.shape[0])
    ahead = np.arange(proposed.shape[1])
    for row, slot in enumerate(slots.tolist()):
        text = texts[slot, : lengths[slot] + 1]
        length, at = _longest(text, limits.longest)
        if length < limits.shortest:
            proposed[slot] = NO_TOKEN
            continue
        found[row] = length
        proposed[slot] = text[at + 1 + ahead % (len(text) - 1 - at)]
    return found


def _longest(text: npt.NDArray[np.int32], longest: int) -> tuple[int, int]:
    """Return the length of the longest match of the text's end, and where the newest such match ends."""
    last = len(text) - 1
    ends = np.flatnonzero(text[:last] == text[last])
    if len(ends) == 0:
        return 0, 0
    for length in range(1, longest):
        inside = ends[ends >= length]
        longer = inside[text[inside - length] == text[last - length]]
        if len(longer) == 0:
            return length, int(ends[-1])
        ends = longer
    return longest, int(ends[-1])
