"""The tree of every slot, from the round that drafts it to the round that verifies it. Written by
`speculative.drafter`, read by `speculative.decoding`."""

import torch
from torch import Tensor

from speculative.shapes import is_chain
from speculative.tree import MAX_CUT_CANDIDATES, NO_TOKEN, Candidates, RoundRows, Tree, bare_roots, trimmed
from speculative.tree_growth import best_tree
from workers.config import RoundShape


class TreeTable:
    """The tree that each slot will verify next: [num_slots + 1, W] per field, W being that of the widest shape.
    is_chain: none of them ever branches.

    A tree whose nodes after the root are `NO_TOKEN` verifies nothing: that is how a slot without drafts is told from
    others, and nothing else on the device says it.

    A round may verify another shape than was drafted. Nodes stand best first, so that a smaller shape is the beginning
    of a larger tree; where a larger shape is verified, the nodes that were not drafted are `NO_TOKEN`.
    """

    def __init__(self, num_slots: int, width: int, is_chain: bool, device: torch.device) -> None:
        empty = bare_roots(torch.zeros(num_slots + 1, dtype=torch.int64, device=device), width)
        self._fields = [t.contiguous().clone() for t in (empty.tokens, empty.parents, empty.depths, empty.masks)]
        self._is_chain = is_chain

    def read(self, slots: Tensor, shape: RoundShape, seq_len: Tensor, mask_words: Tensor | None = None) -> RoundRows:
        """The trees of slots [B] int64 as far as `shape` holds them, behind seq_len [num_slots + 1] int32. mask_words:
        on GPUs the verifying backend's buffer, which is filled (`attention.backend.AttentionBackend.verify_buffer`)."""
        straight, max_depth = is_chain(shape) and not self._is_chain, shape.max_new_tokens - 1
        if slots.is_cuda:
            from speculative.kernels.read_trees import read_trees

            return read_trees(self._fields, slots, shape.width, max_depth, straight, seq_len, mask_words)
        assert mask_words is None, "no backend of a CPU has a buffer of its own"
        tree = trimmed(Tree(*(field[slots, : shape.width] for field in self._fields)), max_depth, straight)
        length = seq_len[slots]
        positions = (length.long().unsqueeze(1) + tree.depths).flatten()
        return RoundRows(tree, length, tree.tokens.clamp_min(0).flatten(), positions)

    def drafted(self, slots: Tensor) -> Tensor:
        """[B, 2, W] int64: tokens and parents of the trees of slots [B] int64."""
        tokens, parents = self._fields[:2]
        return torch.stack((tokens[slots], parents[slots]), dim=1)

    def write(self, slots: Tensor, tree: Tree) -> None:
        """Replace the trees of slots [B] int64, which must be distinct or padding."""
        fields = (tree.tokens,) if self._is_chain else (tree.tokens, tree.parents, tree.depths, tree.masks)
        for field, value in zip(self._fields, fields, strict=False):
            field[slots, : value.shape[1]] = value

    def write_roots(self, slots: Tensor, bonus: Tensor) -> None:
        """Trees of slots [B] int64 that are their newest token, of bonus [num_slots + 1] int64, and no drafts."""
        tokens = self._fields[0]
        if slots.is_cuda:
            from speculative.kernels.read_trees import write_roots

            write_roots(slots, bonus, tokens)
            return
        tokens[slots] = NO_TOKEN
        tokens[slots, 0] = bonus[slots]

    def write_best(self, slots: Tensor, bonus: Tensor, candidates: Candidates, width: int) -> None:
        """Replace the trees of slots [B] int64 by the best `width` - 1 of their candidates, under bonus
        [num_slots + 1] int64."""
        if slots.is_cuda and candidates.scores.shape[1] <= MAX_CUT_CANDIDATES:
            from speculative.kernels.tree_growth import cut

            cut(candidates, slots, bonus, self._fields, width)
        else:
            self.write(slots, best_tree(bonus[slots], candidates, width))
