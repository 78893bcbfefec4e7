# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Which rows each expert has, in one launch: for products whose programs each have rows of one expert. A counting sort:
the routing has counted pairs of a row and an expert, and a pair's place is its rank behind its expert's first.

Blocks of shared experts come first in the order, and programs take one of them after every few others
(`block_of_program`): all but the first block of an expert find its weights in L2, and programs of such blocks, side by
side or last, would leave the memory's bandwidth unused.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.ops.pdl import pdl_wait
from workers.ops.experts.route import Routed

_PAIRS = 256  # that a program places
_BLOCKS = 32  # that a program describes


@triton.jit
def _place_pairs(chosen_ptr, rank_ptr, pair_ptr, firsts, first, num_pairs, PAIRS: tl.constexpr):
    """first .. first + PAIRS - 1. firsts: [BINS], each expert's first place."""
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
    """Whose blocks first .. first + BLOCKS - 1 are, and nobody in their free places. ends, pair_ends: [BINS], where
    each expert's blocks and pairs end."""
    block = first + tl.arange(0, BLOCKS)
    is_used = block < tl.max(ends, 0)
    of_shared = block < shared_blocks
    passed = (ends[:, None] <= block[None, :]) & (is_shared[:, None] == of_shared[None, :])
    expert = tl.sum(passed.to(tl.int32), 0) + tl.where(of_shared, ROUTED, 0)
    expert = tl.where(is_used, expert, -1)
    tl.store(expert_ptr + block, expert, mask=block < max_blocks)
    end = tl.gather(pair_ends, tl.maximum(expert, 0), 0)
    place = block[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(
        pair_ptr + place, tl.full([BLOCKS, BLOCK_M], -1, tl.int32), mask=is_used[:, None] & (place >= end[:, None])
    )


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
    """Programs of PAIRS pairs, then programs of BLOCKS blocks."""
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
    """For a kernel after `_order`, which is the last to read them."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        number = tl.arange(0, BINS)
        tl.store(count_ptr + number, tl.zeros([BINS], tl.int32), mask=number < EXPERTS)


@triton.jit
def block_of_program(program, shared, stride):
    """Which block of an `ExpertOrder` a program takes: every `stride`-th program one of the first `shared`, while there
    are any."""
    turn = program // stride
    is_first = (program % stride == 0) & (turn < shared)
    return tl.where(is_first, turn, shared + program - tl.minimum(turn + 1, shared))


@dataclass(frozen=True)
class ExpertOrder:
    """Rows of a pass by expert, in blocks of block_m that have one expert each.

    pairs: [blocks * block_m] int32, row * slots + slot; NO_EXPERT (`workers.ops.experts.route_triton`) where a block
        has fewer. Of blocks without an expert nothing is written.
    experts: [blocks] int32, whose block it is: first those of shared experts, then those of the others, both ascending;
        NO_EXPERT after the last.
    shared: how many of the first blocks may be shared experts'.
    stride: how many programs apart those are taken.
    count: of `Routed`; the kernel that reads the order first puts zeros there again (`clear_counts`).
    """

    pairs: Tensor
    experts: Tensor
    block_m: int
    shared: int
    stride: int
    count: Tensor


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """How many blocks there may be."""
    return num_pairs // block_m + min(num_experts, num_pairs)


def order_by_expert(routed: Routed, num_experts: int, block_m: int, num_shared: int = 0) -> ExpertOrder:
    """routed: of `workers.ops.experts.route_triton`, which has counted rows. num_shared: of the experts, the last
    ones. An expert's pairs stand in the order of their ranks.

    Reference: `torch.sort(routed.chosen.flatten(), stable=True)`, but for the order within an expert.
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
    usual = max(min(num_experts, num_pairs), num_pairs // block_m)  # blocks, when rows choose evenly
    return ExpertOrder(pairs, experts, block_m, shared, max(1, usual // max(1, shared)), count)


def bins_of(num_experts: int) -> int:
    """Counts of so many, as kernels have them."""
    return max(32, int(triton.next_power_of_2(num_experts)))
