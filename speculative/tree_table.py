"""The tree of every slot, between the round that drafts it and the round that verifies it. Written by
`aerie.speculative.drafts.drafter`, read by `aerie.speculative.decoding`."""

from dataclasses import replace

import torch
from torch import Tensor

from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.kv.tree_masks import chain_spans
from aerie.kernels.tree.nodes import Candidates, RoundRows, Tree, root_only_trees
from aerie.kernels.tree.tree_growth import write_best, write_trees
from aerie.kernels.tree.tree_read import read_trees, write_roots
from aerie.workers.config import RoundShape


class TreeTable:
    """The tree that each slot will verify next.

    trees: [num_slots + 1, W] per field, W the width of the widest shape.
    is_chain: no tree branches.

    The tree of a slot without drafts has only `NO_TOKEN` after the root; there is no other mark of it on the device. A
    round may verify another shape than was drafted: nodes are sorted best first, so a smaller tree is the first part of
    a larger one, and missing nodes of a larger tree are `NO_TOKEN`.
    """

    def __init__(self, num_slots: int, width: int, is_chain: bool, device: torch.device) -> None:
        empty = root_only_trees(torch.zeros(num_slots + 1, dtype=torch.int64, device=device), width)
        self.trees = Tree(*(field.contiguous().clone() for field in empty.fields))
        self._is_chain = is_chain

    def read(self, slots: Tensor, shape: RoundShape, seq_len: Tensor, mask_words: Tensor | None = None) -> RoundRows:
        """Return the trees of slots [B] int64, cut to `shape`, at committed lengths seq_len [num_slots + 1] int32.

        mask_words: the verifying backend's `AttentionBackend.tree_mask_buffer`, written.
        """
        as_chain = shape.is_chain and not self._is_chain
        return read_trees(self.trees, slots, shape.width, shape.depth, as_chain, seq_len, mask_words)

    def drafted(self, slots: Tensor) -> Tensor:
        """Return tokens and parents of the trees of slots [B] int64: [B, 2, W] int64."""
        return torch.stack((self.trees.tokens[slots], self.trees.parents[slots]), dim=1)

    def write(self, slots: Tensor, tree: Tree) -> None:
        """Replace the trees of slots [B] int64, which must be distinct or padding, by chains."""
        if self._is_chain:
            self.trees.tokens[slots, : tree.tokens.shape[1]] = tree.tokens
        else:
            write_trees(self.trees, slots, self._encoded(tree))

    def _encoded(self, tree: Tree) -> Tree:
        """Return chains with masks in the table's encoding."""
        if self.trees.tokens.shape[1] <= MASK_BITS:
            return tree
        spans = chain_spans(tree.tokens.shape[1], tree.tokens.device)
        return replace(tree, masks=spans.expand_as(tree.masks))

    def write_roots(self, slots: Tensor, bonus: Tensor) -> None:
        """Reset the trees of slots [B] int64 to their newest token, from bonus [num_slots + 1] int64."""
        write_roots(self.trees, slots, bonus)

    def write_best(self, slots: Tensor, bonus: Tensor, candidates: Candidates, width: int) -> None:
        """Replace the trees of slots [B] int64. A new tree has the slot's token in bonus [num_slots + 1] int64 as root,
        and the best `width` - 1 candidates."""
        write_best(self.trees, slots, bonus, candidates, width)
