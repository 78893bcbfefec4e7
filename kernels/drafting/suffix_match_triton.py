# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `suffix_match`: one launch to record, two to look up, one to attach."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.drafting.suffix_match import MatchLimits
from aerie.kernels.tree.nodes import NO_TOKEN, Tree

_BLOCK = 1024  # positions that a program compares at once
_MAX_PROGRAMS = 32  # programs per request: with 128k tokens each has four blocks


@triton.jit
def _record_tokens(
    history_ptr,
    history_stride,
    slot_ptr,
    length_ptr,
    token_ptr,
    count_ptr,
    chain_ptr,
    out_ptr,
    M: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Append a request's `count` tokens to its history, and write how many of them its chain had proposed; -1 without a
    chain.

    history_ptr: [slots, history_stride] int32 tokens of each slot, written.
    slot_ptr, length_ptr, count_ptr: [requests] slot, committed tokens before, and new tokens.
    token_ptr: [requests, M] the new tokens, then others.
    chain_ptr: [slots, K] the proposed chain; a negative first token: none.
    out_ptr: [requests] int64, written.
    PADDED: the larger of M and K, padded.
    """
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    count = tl.load(count_ptr + b)
    column = tl.arange(0, PADDED)
    valid = (column < count) & (column < M)
    token = tl.load(token_ptr + b * M + column, mask=valid, other=-1)
    index = slot * history_stride + tl.load(length_ptr + b).to(tl.int64) + 1 + column
    tl.store(history_ptr + index, token.to(tl.int32), mask=valid)
    chain = tl.load(chain_ptr + slot * K + column, mask=column < K, other=-1)
    differs = (chain != token) | (valid == 0)
    equal = tl.min(tl.where(differs, column, PADDED), 0)
    equal = tl.minimum(equal, M if M < K else K)
    has_chain = tl.max(tl.where(column == 0, chain, -1), 0) >= 0
    tl.store(out_ptr + b, tl.where(has_chain, equal, -1).to(tl.int64))


def record_tokens(
    history: Tensor, slots: Tensor, length: Tensor, tokens: Tensor, counts: Tensor, chains: Tensor
) -> Tensor:
    """Implement `aerie.kernels.drafting.suffix_match.record_tokens`: append emitted tokens to the history, and compare
    them with the chains that were proposed for them."""
    batch, width, num_nodes = tokens.shape[0], tokens.shape[1], chains.shape[1]
    equal = torch.empty(batch, dtype=torch.int64, device=slots.device)
    _record_tokens[(batch,)](
        history,
        history.stride(0),
        slots,
        length,
        tokens,
        counts,
        chains,
        equal,
        M=width,
        K=num_nodes,
        PADDED=triton.next_power_of_2(max(width, num_nodes)),
        num_warps=1,
    )
    return equal


@triton.jit
def _scan(
    history_ptr,
    history_stride,
    slot_ptr,
    seq_len_ptr,
    best_ptr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Store the best of this program's positions: the match's length << 32 | the position where it ends; 0 for none.

    history_ptr: [slots, history_stride] int32 tokens of each slot.
    slot_ptr: [requests] slot. seq_len_ptr: [slots] position of the newest token.
    best_ptr: [requests, PROGRAMS] int64, written.
    LONGEST: tokens compared at most.
    BLOCK: positions compared at once.
    """
    b, program = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + b)
    last = tl.load(seq_len_ptr + slot)
    text_ptr = history_ptr + slot * history_stride
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(program * BLOCK, last, PROGRAMS * BLOCK):
        position = start + tl.arange(0, BLOCK)
        run = position < last
        length = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(LONGEST):
            wanted = tl.load(text_ptr + last - back, mask=back <= last, other=-2)
            earlier = tl.load(text_ptr + position - back, mask=run & (position >= back), other=-1)
            run = run & (earlier == wanted)
            length += run.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, length << 32 | position.to(tl.int64), 0))
    tl.store(best_ptr + b * PROGRAMS + program, tl.max(best, 0))


@triton.jit
def _propose(
    history_ptr,
    history_stride,
    slot_ptr,
    seq_len_ptr,
    best_ptr,
    chain_ptr,
    length_ptr,
    shortest,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Write the K tokens after the best match in a request's history, repeated if the history ends before; EMPTY
    without a match of at least `shortest` tokens.

    history_ptr: [slots, history_stride] int32 tokens of each slot.
    slot_ptr: [requests] slot. seq_len_ptr: [slots] position of the newest token.
    best_ptr: [requests, PROGRAMS] int64, from `_scan`.
    chain_ptr: [slots, K] int64 tokens, written.
    length_ptr: [requests] int64 length of the match, written; 0 without one.
    K_PADDED: K, padded.
    """
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    last = tl.load(seq_len_ptr + slot).to(tl.int64)
    best = tl.max(tl.load(best_ptr + b * PROGRAMS + tl.arange(0, PROGRAMS)), 0)
    length, at = best >> 32, best & 0xFFFFFFFF
    is_match = length >= shortest
    ahead = tl.arange(0, K_PADDED)
    source = at + 1 + ahead % tl.maximum(last - at, 1)
    mask = (ahead < K) & is_match
    token = tl.load(history_ptr + slot * history_stride + source, mask=mask, other=EMPTY)
    tl.store(chain_ptr + slot * K + ahead, token.to(tl.int64), mask=ahead < K)
    tl.store(length_ptr + b, tl.where(is_match, length, 0))


def find_matches(
    history: Tensor, slots: Tensor, seq_len: Tensor, limits: MatchLimits, chains: Tensor, max_tokens: int
) -> Tensor:
    """Implement `aerie.kernels.drafting.suffix_match.find_matches`: look up each request's newest tokens in its earlier
    text, and propose the tokens that followed them. Programs loop over the slot's text, so the grid does not depend on
    its length, and a captured graph works for all lengths.

    history: [S, T] int32 tokens by slot.
    slots, seq_len: [B] int64; [S] int32 committed tokens.
    chains: [S, K] int64, written: the proposals; NO_TOKEN without a match.
    limits: lengths of matches that count. max_tokens: bound on the tokens of each slot.
    Returns [B] int64: length of the match, 0 without one.
    """
    batch, num_nodes = slots.shape[0], chains.shape[1]
    programs = min(_MAX_PROGRAMS, triton.next_power_of_2(triton.cdiv(history.shape[1], _BLOCK)))
    best = torch.empty((batch, programs), dtype=torch.int64, device=slots.device)
    length = torch.empty(batch, dtype=torch.int64, device=slots.device)
    text = history, history.stride(0), slots, seq_len
    _scan[(batch, programs)](*text, best, LONGEST=limits.longest, BLOCK=_BLOCK, PROGRAMS=programs, num_warps=4)
    _propose[(batch,)](
        *text,
        best,
        chains,
        length,
        limits.shortest,
        K=num_nodes,
        K_PADDED=triton.next_power_of_2(num_nodes),
        PROGRAMS=programs,
        EMPTY=NO_TOKEN,
        num_warps=1,
    )
    return length


@triton.jit
def _attach_chains(
    token_ptr,
    parent_ptr,
    depth_ptr,
    mask_ptr,
    slot_ptr,
    chain_ptr,
    first,
    W: tl.constexpr,
    W_PADDED: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Append a request's chain to its tree of `first` nodes. A chain that begins with a path of the tree continues that
    path.

    token_ptr, parent_ptr, depth_ptr, mask_ptr: [slots, W], fields of `Tree`; nodes from `first` on are written.
    slot_ptr: [requests] int64.
    chain_ptr: [slots, K] tokens of the chain.
    W_PADDED, K_PADDED: W and K, padded.
    EMPTY: token of a node that cannot be accepted.
    """
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    index = tl.arange(0, W_PADDED)
    inside = index < first
    token = tl.load(token_ptr + slot * W + index, mask=inside, other=EMPTY)
    parent = tl.load(parent_ptr + slot * W + index, mask=inside, other=-1)
    depth = tl.load(depth_ptr + slot * W + index, mask=inside, other=0)
    mask = tl.load(mask_ptr + slot * W + index, mask=inside, other=0)
    node = slot * 0
    merged = slot * 0
    alive = slot >= 0
    for step in tl.static_range(K):
        wanted = tl.load(chain_ptr + slot * K + step)
        hit = inside & (index > 0) & (parent == node) & (token == wanted) & (wanted >= 0)
        child = tl.max(tl.where(hit, index, -1), 0).to(tl.int64)
        alive = alive & (child >= 0)
        node = tl.where(alive, child, node)
        merged += alive.to(tl.int64)
    ahead = tl.arange(0, K_PADDED)
    used = ahead < K
    left = tl.load(chain_ptr + slot * K + merged + ahead, mask=used & (merged + ahead < K), other=EMPTY)
    branch = slot * W + first + ahead
    at = index == node
    tl.store(token_ptr + branch, left, mask=used)
    tl.store(parent_ptr + branch, tl.where(ahead == 0, node, first + ahead - 1).to(tl.int64), mask=used)
    tl.store(depth_ptr + branch, tl.sum(tl.where(at, depth, 0), 0) + 1 + ahead, mask=used)
    own = ((tl.full([K_PADDED], 2, tl.int64) << ahead.to(tl.int64)) - 1) << first
    tl.store(mask_ptr + branch, tl.sum(tl.where(at, mask, 0), 0) | own, mask=used)


def attach_chains(trees: Tree, slots: Tensor, chains: Tensor, first: int) -> None:
    """Implement `aerie.kernels.drafting.suffix_match.attach_chains`: add each slot's chain to its tree as a branch, in
    the nodes from `first` on. One program of one warp per request."""
    fields, num_nodes = trees.fields, chains.shape[1]
    width = fields[0].shape[1]
    _attach_chains[(slots.shape[0],)](
        *fields,
        slots,
        chains,
        first,
        W=width,
        W_PADDED=triton.next_power_of_2(width),
        K=num_nodes,
        K_PADDED=triton.next_power_of_2(num_nodes),
        EMPTY=NO_TOKEN,
        num_warps=1,
    )
