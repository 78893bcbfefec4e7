# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Which rows each expert has, in one or two launches: for products whose programs each have rows of one expert.

A counting sort. Few pairs the routing has counted: a pair's place is its rank behind its expert's first. Of more it is
parallel over chunks of pairs: each chunk's pairs of each expert are counted, then each chunk finds its pairs' places by
the counts of the chunks before it.

Blocks of shared experts come first in the order, and programs take one of them after every few others
(`block_of_program`): all but the first block of an expert find its weights in L2, and programs of such blocks, side by
side or last, would leave the memory's bandwidth unused.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.pdl import pdl_wait, supports_pdl
from workers.layers.kernels.experts.route import Routed

_STEP = 256  # pairs that are compared with each other
_MAX_CHUNKS = 144  # where a chunk may have more pairs than _STEP: each program reads the counts of all
_BLOCKS = 32  # that a program describes


@triton.jit(do_not_specialize=["num_pairs"])
def _count(chosen_ptr, count_ptr, num_pairs, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=-1)
    counts = tl.histogram(chosen, BINS, mask=chosen >= 0)  # by atomic additions of integers, whose sums have no order
    tl.store(count_ptr + chunk * BINS + tl.arange(0, BINS), counts.to(tl.int16))


@triton.jit
def _table_sums(count_ptr, chunk, num_chunks, EXPERTS: tl.constexpr, BINS: tl.constexpr):
    """[BINS] int32 each: the pairs of each expert, and of these the ones before the chunk."""
    rows: tl.constexpr = 16
    read: tl.constexpr = (EXPERTS + 15) // 16 * 16  # whole vectors; the others are zeros
    row, number = tl.arange(0, rows), tl.arange(0, BINS)
    all_counts = tl.zeros([rows, BINS], tl.int32)
    before = tl.zeros([rows, BINS], tl.int32)
    for first in range(0, num_chunks, rows):
        theirs = (first + row)[:, None]
        inside = (theirs < num_chunks) & (number < read)[None, :]
        counts = tl.load(count_ptr + theirs * BINS + number[None, :], mask=inside, other=0).to(tl.int32)
        all_counts += counts
        before += tl.where(theirs < chunk, counts, 0)
    return tl.sum(all_counts, 0), tl.sum(before, 0)


@triton.jit
def _place_pairs(
    chosen_ptr, pair_ptr, places, first, num_pairs, BINS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr
):
    """Of one chunk. places: [BINS], each expert's next."""
    lane, other = tl.arange(0, STEP), tl.arange(0, 32)
    for start in range(first, tl.minimum(first + CHUNK, num_pairs), STEP):
        pair = start + lane
        chosen = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=-1)
        key = chosen * STEP + lane - 1
        earlier = tl.zeros([STEP, 32], tl.int32)
        for others in tl.static_range(0, STEP, 32):
            other_pair = start + others + other
            theirs = tl.load(chosen_ptr + other_pair, mask=other_pair < num_pairs, other=-1)
            distance = key[:, None] - (theirs * STEP + others + other)[None, :]
            # of the same expert and before: 0 .. lane - 1; every other distance is negative or larger
            earlier += (distance.to(tl.uint32, bitcast=True) < lane[:, None].to(tl.uint32, bitcast=True)).to(tl.int32)
        place = tl.gather(places, tl.maximum(chosen, 0), 0) + tl.sum(earlier, 1)
        tl.store(pair_ptr + place, pair, mask=chosen >= 0)
        if CHUNK > STEP:
            places += tl.histogram(chosen, BINS, mask=chosen >= 0)


@triton.jit
def _place_ranked_pairs(chosen_ptr, rank_ptr, pair_ptr, firsts, first, num_pairs, CHUNK: tl.constexpr):
    """Of one chunk. firsts: [BINS], each expert's first place."""
    pair = first + tl.arange(0, CHUNK)
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
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs of chunks, then programs of BLOCKS blocks. rank_ptr: None where counts are those of chunks."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, num_chunks = tl.program_id(0), tl.cdiv(num_pairs, CHUNK)
    if rank_ptr is None:
        counts, before = _table_sums(count_ptr, chunk, num_chunks, EXPERTS, BINS)
    else:
        counts = tl.load(count_ptr + tl.arange(0, BINS), mask=tl.arange(0, BINS) < EXPERTS, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    is_shared = tl.arange(0, BINS) >= EXPERTS - SHARED
    shared_blocks = tl.sum(tl.where(is_shared, blocks, 0), 0)
    ends = tl.cumsum(blocks, 0) + shared_blocks - tl.where(is_shared, tl.sum(blocks, 0), 0)
    firsts = (ends - blocks) * BLOCK_M
    if chunk < num_chunks:
        if rank_ptr is None:
            _place_pairs(chosen_ptr, pair_ptr, firsts + before, chunk * CHUNK, num_pairs, BINS, CHUNK, STEP)
        else:
            _place_ranked_pairs(chosen_ptr, rank_ptr, pair_ptr, firsts, chunk * CHUNK, num_pairs, CHUNK)
    else:
        first = (chunk - num_chunks) * BLOCKS
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

    pairs: [blocks * block_m] int32, row * slots + slot; NOBODY (`workers.layers.kernels.experts.route`) where a block
        has fewer. Of blocks without an expert nothing is written.
    experts: [blocks] int32, whose block it is: first those of shared experts, then those of the others, both ascending;
        NOBODY after the last.
    shared: how many of the first blocks may be shared experts'.
    stride: how many programs apart those are taken.
    count: of `Routed`; the kernel that reads the order first puts zeros there again (`clear_counts`). None if rows were
        not counted.
    """

    pairs: Tensor
    experts: Tensor
    block_m: int
    shared: int
    stride: int
    count: Tensor | None


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """How many blocks there may be."""
    return num_pairs // block_m + min(num_experts, num_pairs)


def order_by_expert(routed: Routed, num_experts: int, block_m: int, num_shared: int = 0) -> ExpertOrder:
    """routed: of `workers.layers.kernels.experts.route`. num_shared: of the experts, the last ones. An expert's pairs
    stand in the order of their ranks if it has such, else in their own.

    Reference: `torch.sort(routed.chosen.flatten(), stable=True)`.
    """
    chosen, rank, counts = routed.chosen, routed.rank, routed.count
    assert chosen.is_contiguous() and (rank is None) == (counts is None)
    assert counts is None or counts.shape == (num_experts,)
    num_pairs, blocks = chosen.numel(), max_blocks(chosen.numel(), num_experts, block_m)
    pairs = torch.empty(blocks * block_m, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=chosen.device)
    bins, chunk = bins_of(num_experts), chunk_of(num_pairs)
    num_chunks = triton.cdiv(num_pairs, chunk)
    wait = pdl_wait(supports_pdl(chosen.device))
    if counts is None:
        counts = torch.empty((num_chunks, bins), dtype=torch.int16, device=chosen.device)
        _count[(num_chunks,)](chosen, counts, num_pairs, BINS=bins, CHUNK=chunk, num_warps=8, **wait)
    _order[(num_chunks + triton.cdiv(blocks, _BLOCKS),)](
        chosen,
        rank,
        counts,
        pairs,
        experts,
        num_pairs,
        blocks,
        EXPERTS=num_experts,
        SHARED=num_shared,
        BINS=bins,
        BLOCK_M=block_m,
        CHUNK=chunk,
        STEP=_STEP,
        BLOCKS=_BLOCKS,
        num_warps=8,
        **wait,
    )
    shared = num_shared * triton.cdiv(chosen.shape[0], block_m)
    usual = max(min(num_experts, num_pairs), num_pairs // block_m)  # blocks, when rows choose evenly
    return ExpertOrder(pairs, experts, block_m, shared, max(1, usual // max(1, shared)), routed.count)


def bins_of(num_experts: int) -> int:
    """Counts of so many, as kernels have them."""
    return max(32, int(triton.next_power_of_2(num_experts)))


def chunk_of(num_pairs: int) -> int:
    """Pairs of a chunk."""
    steps = triton.cdiv(num_pairs, _STEP * _MAX_CHUNKS)
    chunk: int = _STEP * triton.next_power_of_2(max(1, steps))
    assert chunk < 1 << 15, "counts of a chunk have 16 bits"
    return chunk
