"""Reads the trees that a round verifies from the slots, and resets trees to their root."""

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.operation import Implementation, on_gpu, on_host, operation
from aerie.kernels.tree.nodes import NO_TOKEN, RoundRows, Tree, check_trees, trimmed


def _check_read(
    trees: Tree,
    slots: Tensor,
    width: int,
    max_depth: int,
    as_chain: bool,
    seq_len: Tensor,
    mask_words: Tensor | None = None,
) -> None:
    check_trees(trees)
    assert width <= trees.tokens.shape[1] and seq_len.dtype == torch.int32 and seq_len.is_contiguous()
    check_slots(slots)
    if mask_words is not None:
        assert width <= MASK_BITS and mask_words.shape[:2] == (slots.shape[0], width) and mask_words.shape[2] % 2 == 0
        assert mask_words.dtype == torch.uint16 and mask_words.is_contiguous()


def _check_roots(trees: Tree, slots: Tensor, bonus: Tensor) -> None:
    check_trees(trees)
    check_slots(slots)
    assert bonus.dtype == torch.int64


@operation(
    Implementation("triton", "aerie.kernels.tree.tree_read_triton:read_trees", on_gpu),
    Implementation(
        "numpy",
        "aerie.kernels.tree.tree_read_host:read_trees",
        on_host,
        lambda trees, *_: trees.tokens.shape[1] <= MASK_BITS,
        f"tables of at most {MASK_BITS} nodes",
    ),
    contract=_check_read,
)
def read_trees(
    trees: Tree,
    slots: Tensor,
    width: int,
    max_depth: int,
    as_chain: bool,
    seq_len: Tensor,
    mask_words: Tensor | None = None,
) -> RoundRows:
    """Return the first `width` nodes of the trees of some slots as rows, without those that `max_depth` and `as_chain`
    exclude (`aerie.kernels.tree.nodes.trimmed`).

    trees       [num_slots + 1, W] per field, contiguous, W >= width
    slots       [B] int64
    max_depth   deeper nodes are not accepted
    as_chain    reduce each tree to its leading nodes that form a chain
    seq_len     [num_slots + 1] int32, committed KV tokens
    mask_words  [B, width, words] uint16, contiguous, words even, written: the low 16 * words bits of each node's mask,
                lowest first; None: not needed
    ->          trees of `width` nodes, their fields contiguous
    """
    spans = trees.tokens.shape[1] > MASK_BITS
    tree = trimmed(Tree(*(field[slots, :width] for field in trees.fields)), max_depth, as_chain, spans)
    tree = Tree(*(field.contiguous() for field in tree.fields))
    if mask_words is not None:
        bits = tree.masks.view(torch.uint16).view(*mask_words.shape[:2], 4)
        mask_words.copy_(bits[..., : mask_words.shape[2]])
    length = seq_len[slots]
    positions = (length.long().unsqueeze(1) + tree.depths).flatten()
    return RoundRows(tree, length, tree.tokens.clamp_min(0).flatten(), positions, mask_words)


@operation(
    Implementation("triton", "aerie.kernels.tree.tree_read_triton:write_roots", on_gpu),
    Implementation("numpy", "aerie.kernels.tree.tree_read_host:write_roots", on_host),
    contract=_check_roots,
)
def write_roots(trees: Tree, slots: Tensor, bonus: Tensor) -> None:
    """Reset the trees of some slots to their root, the newest token.

    trees  [num_slots + 1, W] per field, contiguous; the tokens of `slots` are written
    slots  [B] int64, contiguous
    bonus  [num_slots + 1] int64, the newest token of each slot
    """
    trees.tokens[slots] = NO_TOKEN
    trees.tokens[slots, 0] = bonus[slots]
