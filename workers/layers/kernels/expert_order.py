# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Which rows each expert has, in one launch, or two for very many: for products whose programs each have rows of one
expert."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.pdl import pdl_wait, supports_pdl

_CHUNK = 2048  # pairs that are looked at together
_COUNTED = 4096  # pairs from which on a launch counts each expert's, which else every program does for all experts


@triton.jit(do_not_specialize=["num_pairs"])
def _count(chosen_ptr, count_ptr, num_pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, lane = tl.program_id(0), tl.arange(0, CHUNK)
    mine = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        mine += tl.load(chosen_ptr + start + lane, mask=start + lane < num_pairs, other=-1) == expert
    tl.store(count_ptr + expert, tl.sum(mine, 0))


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _order(
    chosen_ptr,
    count_ptr,
    pair_ptr,
    expert_ptr,
    num_pairs,
    max_blocks,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    number, lane = tl.arange(0, BINS), tl.arange(0, CHUNK)
    if count_ptr is None:
        counts = tl.zeros([BINS], tl.int32)
        for start in range(0, num_pairs, CHUNK):
            chosen = tl.load(chosen_ptr + start + lane, mask=start + lane < num_pairs, other=-1)
            counts += tl.histogram(tl.where(chosen < 0, BINS - 1, chosen), BINS)
    else:
        counts = tl.load(count_ptr + number, mask=number < EXPERTS, other=0)
    blocks = tl.where(number < EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(number < expert, blocks, 0), 0)
    count = tl.sum(tl.where(number == expert, counts, 0), 0)
    num_blocks = (count + BLOCK_M - 1) // BLOCK_M
    place = first * BLOCK_M
    for start in range(0, num_pairs, CHUNK):
        chosen = tl.load(chosen_ptr + start + lane, mask=start + lane < num_pairs, other=-1)
        is_mine = (chosen == expert).to(tl.int32)
        tl.store(pair_ptr + place + tl.cumsum(is_mine, 0) - 1, start + lane, mask=is_mine > 0)
        place += tl.sum(is_mine, 0)
    end, free = (first + num_blocks) * BLOCK_M, tl.arange(0, BLOCK_M)
    tl.store(pair_ptr + place + free, -1, mask=place + free < end)
    step = tl.arange(0, 128)
    for start in range(first, first + num_blocks, 128):
        tl.store(expert_ptr + start + step, expert, mask=start + step < first + num_blocks)
    if expert == EXPERTS - 1:
        for start in range(first + num_blocks, max_blocks, 128):
            tl.store(expert_ptr + start + step, -1, mask=start + step < max_blocks)


@dataclass(frozen=True)
class ExpertOrder:
    """Rows of a pass by expert, in blocks of block_m that have one expert each.

    pairs: [blocks * block_m] int32, row * slots + slot; NOBODY (`workers.layers.kernels.route`) where a block has
        fewer. Of blocks without an expert nothing is written.
    experts: [blocks] int32, whose block it is, ascending; NOBODY after the last.
    """

    pairs: Tensor
    experts: Tensor
    block_m: int


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """How many blocks there may be."""
    return num_pairs // block_m + min(num_experts, num_pairs)


def order_by_expert(chosen: Tensor, num_experts: int, block_m: int) -> ExpertOrder:
    """chosen: [rows, slots] int32, contiguous, NOBODY for padding rows. An expert's pairs stay in their order.

    Reference: `torch.sort(chosen.flatten(), stable=True)`.
    """
    assert chosen.is_contiguous()
    blocks = max_blocks(chosen.numel(), num_experts, block_m)
    pairs = torch.empty(blocks * block_m, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=chosen.device)
    chunk = min(_CHUNK, max(128, triton.next_power_of_2(chosen.numel())))
    wait = pdl_wait(supports_pdl(chosen.device))
    counts = None
    if chosen.numel() > _COUNTED:
        counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
        _count[(num_experts,)](chosen, counts, chosen.numel(), CHUNK=chunk, num_warps=8, **wait)
    _order[(num_experts,)](
        chosen,
        counts,
        pairs,
        experts,
        chosen.numel(),
        blocks,
        EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK_M=block_m,
        CHUNK=chunk,
        num_warps=8,
        **wait,
    )
    return ExpertOrder(pairs, experts, block_m)
