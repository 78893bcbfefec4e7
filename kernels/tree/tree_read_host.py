"""The operations of `tree_read` on a CPU, in numpy, whose calls take a fifth of torch's."""

import numpy as np
from torch import Tensor, from_numpy, uint16

from aerie.kernels.tree.nodes import NO_TOKEN, RoundRows, Tree


def read_trees(
    trees: Tree,
    slots: Tensor,
    width: int,
    max_depth: int,
    as_chain: bool,
    seq_len: Tensor,
    mask_words: Tensor | None = None,
) -> RoundRows:
    """Implement `aerie.kernels.tree.tree_read.read_trees`: return the first `width` nodes of the trees of some slots as
    rows. Nodes deeper than max_depth become padding; with as_chain, so do nodes after the first that is not a child of
    the node before it. mask_words receives the nodes' masks as 16-bit words."""
    rows = slots.numpy()
    tokens, parents, depths, masks = (field.numpy()[rows, :width] for field in trees.fields)
    alive = depths <= max_depth
    if as_chain:
        node = np.arange(width)
        before = np.maximum(node - 1, 0)
        alive &= np.logical_and.accumulate(parents == before, axis=1)
        parents[:], depths[:], masks[:] = before, node, (1 << (node + 1)) - 1
    tokens[~alive] = NO_TOKEN
    if mask_words is not None:
        bits = from_numpy(masks).view(uint16).view(*mask_words.shape[:2], 4)
        mask_words.copy_(bits[..., : mask_words.shape[2]])
    length = seq_len.numpy()[rows]
    positions = (length[:, None] + depths).reshape(-1)
    tree = Tree(*map(from_numpy, (tokens, parents, depths, masks)))
    ids = np.maximum(tokens, 0).reshape(-1)
    return RoundRows(tree, from_numpy(length), from_numpy(ids), from_numpy(positions), mask_words)


def write_roots(trees: Tree, slots: Tensor, bonus: Tensor) -> None:
    """Implement `aerie.kernels.tree.tree_read.write_roots`: reset the trees of some slots to their root, the newest
    token."""
    tokens, rows = trees.tokens.numpy(), slots.numpy()
    tokens[rows] = NO_TOKEN
    tokens[rows, 0] = bonus.numpy()[rows]
