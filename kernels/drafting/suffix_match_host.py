"""The operations of `suffix_match` on a CPU, in numpy: a call takes 1 us, one of torch 5 to 10, and a round of a small
model has about forty. Each compared token leaves fewer candidates, so most searches compare the whole text only
once."""

import itertools

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy, int64, tensor

from aerie.kernels.drafting.suffix_match import MatchLimits
from aerie.kernels.tree.nodes import NO_TOKEN, Tree


def record_tokens(
    history: Tensor, slots: Tensor, length: Tensor, tokens: Tensor, counts: Tensor, chains: Tensor
) -> Tensor:
    """Implement `aerie.kernels.drafting.suffix_match.record_tokens`: append emitted tokens to the history, and compare
    them with the chains that were proposed for them."""
    texts, proposed = history.numpy(), chains.numpy()
    columns = zip(slots.tolist(), length.tolist(), tokens.tolist(), counts.tolist(), strict=True)
    num_equal = []
    for slot, committed, row, count in columns:
        new = row[:count]
        texts[slot, committed + 1 : committed + 1 + count] = new
        chain = proposed[slot, : max(1, count)].tolist()
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(new, chain, strict=False))
        num_equal.append(-1 if chain[0] == NO_TOKEN else sum(1 for _ in equal))
    return tensor(num_equal, dtype=int64)


def find_matches(
    history: Tensor, slots: Tensor, seq_len: Tensor, limits: MatchLimits, chains: Tensor, max_tokens: int
) -> Tensor:
    """Implement `aerie.kernels.drafting.suffix_match.find_matches`: look up each request's newest tokens in its earlier
    text, and propose the tokens that followed them.

    limits: lengths of matches that count. max_tokens: bound on the tokens of each slot.
    """
    texts, lengths, proposed = history.numpy(), seq_len.numpy(), chains.numpy()
    matched = np.zeros(slots.shape[0], np.int64)
    ahead = np.arange(proposed.shape[1])
    for row, slot in enumerate(slots.tolist()):
        text = texts[slot, : lengths[slot] + 1]
        length, at = _longest(text, limits.longest)
        if length < limits.shortest:
            proposed[slot] = NO_TOKEN
            continue
        matched[row] = length
        proposed[slot] = text[at + 1 + ahead % (len(text) - 1 - at)]
    return from_numpy(matched)


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


def attach_chains(trees: Tree, slots: Tensor, chains: Tensor, first: int) -> None:
    """Implement `aerie.kernels.drafting.suffix_match.attach_chains`: add each slot's chain to its tree as a branch, in
    the nodes from `first` on."""
    tokens, parents, depths, masks = (field.numpy() for field in trees.fields)
    proposed, num_nodes = chains.numpy(), chains.shape[1]
    ahead = np.arange(num_nodes)
    own = ((1 << (ahead + 1)) - 1) << first
    branch = slice(first, first + num_nodes)
    for slot in slots.tolist():
        chain, node, merged = proposed[slot], 0, 0
        if first > 1:  # a root alone has no child to merge with
            node, merged = _end_of_path(tokens[slot, :first].tolist(), parents[slot, :first].tolist(), chain.tolist())
        left = num_nodes - merged
        tokens[slot, first : first + left] = chain[merged:]
        tokens[slot, first + left : first + num_nodes] = NO_TOKEN
        parents[slot, branch] = first + ahead - 1
        parents[slot, first] = node
        depths[slot, branch] = depths[slot, node] + 1 + ahead
        masks[slot, branch] = masks[slot, node] | own


def _end_of_path(tokens: list[int], parents: list[int], chain: list[int]) -> tuple[int, int]:
    """Return the last node of the longest path from the root that a chain begins with, and its depth."""
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens)) if tokens[node] >= 0}
    node = merged = 0
    while merged < len(chain) and (node, chain[merged]) in children:
        node = children[node, chain[merged]]
        merged += 1
    return node, merged
