# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Sorts rows by expert in one launch, so that each program of a GEMM has rows of one expert. It is a counting sort: the
routing has counted the pairs (row, expert), and a pair's index is its rank plus its expert's first index.

Blocks of shared experts come first in the order, but programs take them interleaved with the others
(`block_of_program`). All but the first block of an expert read its weights from L2, so running these at the same time
would leave memory bandwidth unused.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.experts.route import Routed
from aerie.kernels.pdl import pdl_wait

_PAIRS = 256  # per program
_BLOCKS = 32  # per program


@triton.jit
def _place_pairs(chosen_ptr, rank_ptr, pair_ptr, firsts, first, num_pairs, PAIRS: tl.constexpr):
    """Place pairs first .. first + PAIRS - 1. firsts: [BINS] first index of each expert."""
    pair = first + tl.arange(0, PAIRS)
    chosen = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=-1)
    rank = tl.load(rank_ptr + pair, mask=chosen >= 0, other=0)
    tl.store(pair_ptr + tl.gather(firsts, tl.maximum(chosen, 0), 0) + rank, pair, mask=chosen >= 0)


@triton.jit
def _describe_blocks(
    pair_ptr,
    expert_ptr,
    ends,
    pair_ends,
    is_shared,
    shared_blocks,
    first,
    max_blocks,
    ROUTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the expert of blocks first .. first + BLOCKS - 1, and NO_EXPERT to their unused pairs. ends, pair_ends:
    [BINS] end of each expert's blocks and pairs."""
    block = first + tl.arange(0, BLOCKS)
    is_used = block < tl.max(ends, 0)
    block_is_shared = block < shared_blocks
    passed = (ends[:, None] <= block[None, :]) & (is_shared[:, None] == block_is_shared[None, :])
    expert = tl.sum(passed.to(tl.int32), 0) + tl.where(block_is_shared, ROUTED, 0)
    expert = tl.where(is_used, expert, -1)
    tl.store(expert_ptr + block, expert, mask=block < max_blocks)
    end = tl.gather(pair_ends, tl.maximum(expert, 0), 0)
    cell = block[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(pair_ptr + cell, tl.full([BLOCKS, BLOCK_M], -1, tl.int32), mask=is_used[:, None] & (cell >= end[:, None]))


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _order(
    chosen_ptr,
    rank_ptr,
    count_ptr,
    pair_ptr,
    expert_ptr,
    num_pairs,
    max_blocks,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the fields of `ExpertOrder`. The first programs place PAIRS pairs each; the others describe BLOCKS blocks
    each.

    chosen_ptr, rank_ptr: [num_pairs] expert of each pair, and its rank among the expert's pairs.
    count_ptr: [EXPERTS] pairs of each expert, the last SHARED of which are shared experts; padded to BINS.
    pair_ptr: [max_blocks * BLOCK_M], written: pair of each row of the blocks, -1 for none.
    expert_ptr: [max_blocks], written: expert of each block, -1 for unused blocks.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, placing = tl.program_id(0), tl.cdiv(num_pairs, PAIRS)
    counts = tl.load(count_ptr + tl.arange(0, BINS), mask=tl.arange(0, BINS) < EXPERTS, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    is_shared = tl.arange(0, BINS) >= EXPERTS - SHARED
    shared_blocks = tl.sum(tl.where(is_shared, blocks, 0), 0)
    ends = tl.cumsum(blocks, 0) + shared_blocks - tl.where(is_shared, tl.sum(blocks, 0), 0)
    firsts = (ends - blocks) * BLOCK_M
    if program < placing:
        _place_pairs(chosen_ptr, rank_ptr, pair_ptr, firsts, program * PAIRS, num_pairs, PAIRS)
    else:
        first = (program - placing) * BLOCKS
        _describe_blocks(
            pair_ptr, expert_ptr, ends, firsts + counts, is_shared, shared_blocks, first, max_blocks,
            EXPERTS - SHARED, BLOCK_M, BLOCKS,
        )  # fmt: skip


@triton.jit
def clear_counts(count_ptr, BINS: tl.constexpr, EXPERTS: tl.constexpr):
    """Zero the counts. Called by the kernel after `_order`, the last reader."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        number = tl.arange(0, BINS)
        tl.store(count_ptr + number, tl.zeros([BINS], tl.int32), mask=number < EXPERTS)


@triton.jit
def block_of_program(program, shared, stride):
    """Return a program's block of an `ExpertOrder`: every `stride`-th program takes one of the first `shared` blocks
    until none is left."""
    period = program // stride
    is_first = (program % stride == 0) & (period < shared)
    return tl.where(is_first, period, shared + program - tl.minimum(period + 1, shared))


@dataclass(frozen=True)
class ExpertOrder:
    """Rows sorted by expert, in blocks of `block_m` with one expert each.

    pairs: [blocks * block_m] int32, row * slots + slot; NO_EXPERT after a block's last row. Not written for blocks
        without an expert.
    experts: [blocks] int32 expert of each block: shared ones, then routed ones, both ascending, then NO_EXPERT.
    shared: maximum number of blocks of shared experts.
    stride: see `block_of_program`.
    count: `Routed.count`; the first kernel that reads this order zeroes it (`clear_counts`).
    """

    pairs: Tensor
    experts: Tensor
    block_m: int
    shared: int
    stride: int
    count: Tensor


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Maximum number of blocks."""
    return num_pairs // block_m + min(num_experts, num_pairs)


def order_by_expert(routed: Routed, num_experts: int, block_m: int, num_shared: int = 0) -> ExpertOrder:
    """Sort rows by expert, and within an expert by rank.

    routed: from `aerie.kernels.experts.route_triton`, with counted rows.
    num_shared: shared experts, the last of `num_experts`.

    Reference: `torch.sort(routed.chosen.flatten(), stable=True)`, up to the order within an expert.
    """
    chosen, rank, count = routed.chosen, routed.rank, routed.count
    assert rank is not None and count is not None and chosen.is_contiguous() and count.shape == (num_experts,)
    num_pairs, blocks = chosen.numel(), max_blocks(chosen.numel(), num_experts, block_m)
    pairs = torch.empty(blocks * block_m, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=chosen.device)
    _order[(triton.cdiv(num_pairs, _PAIRS) + triton.cdiv(blocks, _BLOCKS),)](
        chosen,
        rank,
        count,
        pairs,
        experts,
        num_pairs,
        blocks,
        EXPERTS=num_experts,
        SHARED=num_shared,
        BINS=bins_of(num_experts),
        BLOCK_M=block_m,
        PAIRS=_PAIRS,
        BLOCKS=_BLOCKS,
        num_warps=8,
        **pdl_wait(chosen.device),
    )
    shared = num_shared * triton.cdiv(chosen.shape[0], block_m)
    expected_blocks = max(min(num_experts, num_pairs), num_pairs // block_m)  # blocks under even routing
    return ExpertOrder(pairs, experts, block_m, shared, max(1, expected_blocks // max(1, shared)), count)


def bins_of(num_experts: int) -> int:
    """Return the power of two, at least 32, that holds `num_experts` counts."""
    return max(32, int(triton.next_power_of_2(num_experts)))
