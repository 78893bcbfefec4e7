# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `tree_read`: one launch instead of ten. One program of one warp per request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.kv.tree_masks import ALONE
from aerie.kernels.tree.nodes import NO_TOKEN, RoundRows, Tree


@triton.jit(do_not_specialize=["field_size"])
def _read_trees(
    slot_ptr,
    token_ptr,
    parent_ptr,
    depth_ptr,
    mask_ptr,
    seq_len_ptr,
    tree_ptr,
    id_ptr,
    position_ptr,
    length_ptr,
    word_ptr,
    field_size,
    W: tl.constexpr,
    W_TABLE: tl.constexpr,
    W_PADDED: tl.constexpr,
    WORDS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    AS_CHAIN: tl.constexpr,
    SPANS: tl.constexpr,
    BITS: tl.constexpr,
    ALONE: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Read one request's tree from the tables [slots, W_TABLE], cut to W nodes, and write the rows of its round.

    tree_ptr: four fields, field_size apart: tokens, parents, depths and masks [requests, W].
    id_ptr, position_ptr: [requests * W], as the target reads them.
    length_ptr: [requests].
    word_ptr: the masks again as WORDS words each, in the backend's own buffer.
    MAX_DEPTH: deeper nodes are EMPTY.
    AS_CHAIN: nodes are EMPTY from the first one on whose parent is not the node before it.
    SPANS: the table's masks are spans (`aerie.kernels.kv.tree_masks`).
    BITS: write them as bits.
    ALONE: first number of the spans of EMPTY nodes, which only see themselves.
    """
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    node = tl.arange(0, W_PADDED)
    inside = node < W
    source, target = slot * W_TABLE + node, b * W + node
    token = tl.load(token_ptr + source, mask=inside, other=0)
    parent = tl.load(parent_ptr + source, mask=inside, other=0)
    depth = tl.load(depth_ptr + source, mask=inside, other=0)
    mask = tl.load(mask_ptr + source, mask=inside, other=0)
    length = tl.load(seq_len_ptr + slot)
    alive = depth <= MAX_DEPTH
    if AS_CHAIN:
        before = tl.maximum(node - 1, 0).to(tl.int64)
        alive &= tl.cumsum((parent != before).to(tl.int32), 0) == 0
        parent, depth = before, node.to(tl.int64)
        mask = (tl.full([W_PADDED], 2, tl.int64) << depth) - 1
    token = tl.where(alive, token, EMPTY)
    if SPANS and not AS_CHAIN:
        number, end, length_of = tl.where(token >= 0, mask & 0xFFFF, ALONE + node), (mask >> 16) & 0xFFFF, mask >> 32
        end, length_of = tl.where(token >= 0, end, ALONE + node + 1), tl.where(token >= 0, length_of, 1)
        mask = number | (end << 16) | (length_of << 32)
        if BITS:
            seen = (number[None, :] <= number[:, None]) & (number[:, None] < end[None, :]) & inside[None, :]
            column = tl.full([W_PADDED], 1, tl.int64) << node.to(tl.int64)
            mask = tl.sum(tl.where(seen, column[None, :], 0), 1)
    tl.store(tree_ptr + target, token, mask=inside)
    tl.store(tree_ptr + field_size + target, parent, mask=inside)
    tl.store(tree_ptr + 2 * field_size + target, depth, mask=inside)
    tl.store(tree_ptr + 3 * field_size + target, mask, mask=inside)
    for i in tl.static_range(WORDS):
        tl.store(word_ptr + target * WORDS + i, (mask >> 32 * i & 0xFFFFFFFF).to(tl.uint32), mask=inside)
    tl.store(id_ptr + target, tl.maximum(token, 0), mask=inside)
    tl.store(position_ptr + target, length.to(tl.int64) + depth, mask=inside)
    tl.store(length_ptr + b, length)


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
    fields = trees.fields
    batch, device = slots.shape[0], slots.device
    tree = torch.empty((4, batch, width), dtype=torch.int64, device=device)
    ids, positions = torch.empty((2, batch * width), dtype=torch.int64, device=device).unbind(0)
    length = torch.empty(batch, dtype=torch.int32, device=device)
    words = 0
    if mask_words is not None:
        words = mask_words.shape[2] // 2
    _read_trees[(batch,)](
        slots,
        *fields,
        seq_len,
        tree,
        ids,
        positions,
        length,
        length if mask_words is None else mask_words.view(torch.uint32),
        batch * width,
        W=width,
        W_TABLE=fields[0].shape[1],
        W_PADDED=triton.next_power_of_2(width),
        WORDS=words,
        MAX_DEPTH=max_depth,
        AS_CHAIN=as_chain,
        SPANS=fields[0].shape[1] > MASK_BITS,
        BITS=width <= MASK_BITS,
        ALONE=ALONE,
        EMPTY=NO_TOKEN,
        num_warps=1,
    )
    return RoundRows(Tree(*tree.unbind(0)), length, ids, positions, mask_words)


@triton.jit
def _write_roots(
    slot_ptr, bonus_ptr, bonus_stride, token_ptr, EMPTY: tl.constexpr, W: tl.constexpr, NODES: tl.constexpr
):
    """Write the root and padding to the tree of one slot.

    slot_ptr: [requests] slots. bonus_ptr: newest token by slot, bonus_stride apart.
    token_ptr: [slots, W] tokens of trees, written. EMPTY: the token of padding nodes. NODES: W, padded.
    """
    slot = tl.load(slot_ptr + tl.program_id(0))
    node = tl.arange(0, NODES)
    bonus = tl.load(bonus_ptr + slot * bonus_stride)
    tl.store(token_ptr + slot * W + node, tl.where(node == 0, bonus, EMPTY), mask=node < W)


def write_roots(trees: Tree, slots: Tensor, bonus: Tensor) -> None:
    """Implement `aerie.kernels.tree.tree_read.write_roots`: reset the trees of some slots to their root, the newest
    token."""
    tokens = trees.tokens
    width = tokens.shape[1]
    _write_roots[(slots.shape[0],)](
        slots,
        bonus,
        bonus.stride(0),
        tokens,
        EMPTY=NO_TOKEN,
        W=width,
        NODES=triton.next_power_of_2(width),
        num_warps=1,
    )
