# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `aerie.kernels.sampling.filters`: a search over gaps instead of a sort.

A token's gap is the distance of its logit from the row's largest, an integer of 24 bits (`filters`). The limit that is
searched is the smallest gap such that the tokens up to it suffice: their number for top-k, or their mass for top-p. As
gaps are integers, the search is exact. Its bracket is the range of gaps that may still be the limit: first all, of
which each pass keeps an eighth. A pass counts the tokens, or sums their masses, up to seven gaps that divide the
bracket into eighths. That determines three bits of the limit, so a search has eight passes.

The split of a row into parts depends only on its size, and parts are summed in a fixed order, so a row's limits do not
depend on other rows. Each pass first sums the results of the previous pass over the parts, because only a kernel
boundary is a barrier. Programs return at once for rows without the filter or with a finished search.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.sampling import filters as reference
from aerie.kernels.sampling.filters import Filters, Limits
from aerie.kernels.sampling.gumbel_triton import log

UNITS = tl.constexpr(reference.UNITS)
MAX_GAP = tl.constexpr(reference.MAX_GAP)
PER_UNIT = tl.constexpr(-1.4426950408889634 / reference.UNITS)  # log2 of a token's mass, per unit of its gap
LEVELS = 8  # passes of a search
PART, TILE = 4096, 512  # logits per program, and of these at a time


@triton.jit
def is_filtered(slot, temperature_ptr, top_p_ptr, min_p_ptr, float_stride, top_k_ptr, int_stride):
    """Return whether the request in a slot uses filters."""
    top_k, top_p = tl.load(top_k_ptr + slot * int_stride), tl.load(top_p_ptr + slot * float_stride)
    filtered = (top_k > 0) | (top_p < 1) | (tl.load(min_p_ptr + slot * float_stride) > 0)
    return filtered & (tl.load(temperature_ptr + slot * float_stride) > 0)


@triton.jit
def gap_of(x, peak, temperature):
    """Return the gaps of x, int32, bitwise equal to `aerie.kernels.sampling.filters.gaps`."""
    return tl.minimum((peak - x) * tl.div_rn(UNITS, temperature), MAX_GAP * 1.0).to(tl.int32)


@triton.jit
def _totals(sum_ptr, parts, PARTS: tl.constexpr):
    """Return the sums of a row over its parts: [8]. sum_ptr: [parts, 8]. PARTS: parts, padded."""
    part, column = tl.arange(0, PARTS)[:, None], tl.arange(0, 8)[None, :]
    return tl.sum(tl.load(sum_ptr + part * 8 + column, mask=part < parts, other=0.0), 0)


@triton.jit
def _advance(lowest, shift, needed, totals):
    """Return the next lower end of a bracket from `lowest`: that of the first of eight intervals, 2^shift gaps wide,
    whose sum reaches `needed`. totals: [8] sums up to the end of each interval; the eighth is not read."""
    short = (totals < needed) & (tl.arange(0, 8) < 7)
    return lowest + (tl.sum(short.to(tl.int32), 0) << shift)


@triton.jit
def _encoded(limit):
    """Encode or decode a found limit: a negative number that is stored in place of a bracket's lower end."""
    return -1 - limit


@triton.jit
def _final_limit(lowest, needed, sum_ptr, parts, PARTS: tl.constexpr):
    """Return the limit found by a search.

    lowest, sum_ptr: as its last pass wrote them; `_encoded` if it ended before.
    needed: sum that the kept tokens must reach. parts, PARTS: parts of a row; padded.
    """
    limit = _encoded(lowest)
    if lowest >= 0:
        limit = _advance(lowest, 0, needed, _totals(sum_ptr, parts, PARTS))
    return limit


@triton.jit(do_not_specialize=["width"])
def _peaks(
    x_ptr,
    x_stride,
    size,
    slot_ptr,
    width,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    float_stride,
    top_k_ptr,
    int_stride,
    peak_ptr,
    BLOCK: tl.constexpr,
):
    """Find the largest logit of each part of filtered rows.

    x_ptr: [rows, size] logits, x_stride between rows.
    slot_ptr: [requests]; a request has `width` rows.
    temperature_ptr to int_stride: `Filters.arguments`.
    peak_ptr: [rows, parts] float32, written; a part has BLOCK logits.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + row // width)
    if is_filtered(slot, temperature_ptr, top_p_ptr, min_p_ptr, float_stride, top_k_ptr, int_stride):
        column = part * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
        tl.store(peak_ptr + row * tl.num_programs(1) + part, tl.max(x, 0))


@triton.jit(do_not_specialize=["width", "level"])
def _narrow(
    x_ptr,
    x_stride,
    size,
    slot_ptr,
    width,
    temperature_ptr,
    top_p_ptr,
    float_stride,
    top_k_ptr,
    int_stride,
    peak_ptr,
    before_lowest_ptr,
    before_sum_ptr,
    lowest_ptr,
    sum_ptr,
    needed_ptr,
    level,
    BY_MASS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the bracket of pass `level` from the previous pass, and write the sums of one part of a row up to each of
    seven gaps, which divide the bracket into eighths. The eighth sum is, in the first pass, the mass that top-k keeps;
    in later passes the number of tokens in the bracket. The search ends when one token is left.

    x_ptr: [rows, size] logits, x_stride between rows.
    slot_ptr: slots of the requests, which have `width` rows each.
    temperature_ptr .. int_stride: `Filters.arguments`, without min_p.
    peak_ptr: [rows, parts] float32, from `_peaks`.
    before_lowest_ptr, before_sum_ptr: lowest_ptr and sum_ptr of the previous pass. In the first pass of top-p, those of
        top-k's last pass.
    lowest_ptr: [rows] int32, written: the bracket's lower end; `_encoded` once the search has ended.
    sum_ptr: [rows, parts, 8] float32, written.
    needed_ptr: [rows] float32: what the tokens up to the limit must reach, top_k tokens or a share top_p of the mass
        that top-k keeps, which is known from the second pass on. Written by each pass.
    BY_MASS: search top-p's limit; else top-k's.
    PARTS: parts, padded.
    PART, TILE: logits per program, and of these at a time.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    slot = tl.load(slot_ptr + row // width)
    temperature = tl.load(temperature_ptr + slot * float_stride)
    top_k, top_p = tl.load(top_k_ptr + slot * int_stride), tl.load(top_p_ptr + slot * float_stride)
    wanted = (temperature > 0) & (top_p < 1) if BY_MASS else (temperature > 0) & (top_k > 0)
    if wanted:
        shift = 21 - 3 * level
        lowest, last_limit = level * 0, level * 0 + MAX_GAP
        needed = top_k.to(tl.float32)
        before = before_sum_ptr + row * parts * 8
        if level > 0:
            lowest = tl.load(before_lowest_ptr + row)
            if lowest >= 0:
                totals = _totals(before, parts, PARTS)
                last = tl.sum(tl.where(tl.arange(0, 8) == 7, totals, 0.0), 0)
                if BY_MASS:
                    needed = top_p * last if level == 1 else tl.load(needed_ptr + row)
                if (level > 1) & (last < 2):
                    lowest = _encoded(lowest + (8 << (shift + 3)) - 1)
                else:
                    lowest = _advance(lowest, shift + 3, needed, totals)
            last_limit = lowest + (8 << shift) - 1
        elif BY_MASS & (top_k > 0):
            last_limit = _final_limit(tl.load(before_lowest_ptr + row), needed, before, parts, PARTS)
        if part == 0:
            tl.store(lowest_ptr + row, lowest)
            tl.store(needed_ptr + row, needed)
        if lowest >= 0:
            part_index = tl.arange(0, PARTS)
            peak = tl.max(tl.load(peak_ptr + row * parts + part_index, mask=part_index < parts, other=float("-inf")), 0)
            pivot = tl.arange(0, 8)
            limit = tl.where(pivot < 7, lowest + ((pivot + 1) << shift) - 1, last_limit)
            column = part * PART + tl.arange(0, TILE)
            total = tl.zeros([8, TILE], tl.float32)
            ahead = tl.load(x_ptr + row * x_stride + column, mask=column < size, other=float("-inf"))
            for start in range(0, PART, TILE):
                x, inside = ahead.to(tl.float32), column < size
                column += TILE
                there = (column < size) & (start + TILE < PART)
                ahead = tl.load(x_ptr + row * x_stride + column, mask=there, other=0.0)
                gap = tl.where(inside, gap_of(x, peak, temperature), MAX_GAP + 1)
                mass = tl.exp2(gap.to(tl.float32) * PER_UNIT) if BY_MASS else tl.full([TILE], 1.0, tl.float32)
                last = tl.where(level > 0, (gap >= lowest).to(tl.float32), mass)
                summand = tl.where(pivot[:, None] < 7, mass[None, :], last[None, :])
                total += tl.where(gap[None, :] <= limit[:, None], summand, 0.0)
            tl.store(sum_ptr + (row * parts + part) * 8 + pivot, tl.sum(total, 1))


@triton.jit(do_not_specialize=["width"])
def _limits(
    slot_ptr,
    width,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    float_stride,
    top_k_ptr,
    int_stride,
    peak_ptr,
    lowest_ptr,
    sum_ptr,
    needed_ptr,
    row_peak_ptr,
    limit_ptr,
    parts,
    PARTS: tl.constexpr,
):
    """Write a row's limit: the smaller of the one that the searches found and min-p's, which needs no search.

    slot_ptr .. peak_ptr: as in `_narrow`.
    lowest_ptr, sum_ptr, needed_ptr: of the last pass of the last search.
    row_peak_ptr, limit_ptr: fields of `Limits`, written.
    parts: parts of a row; PARTS: padded.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row // width)
    top_k, top_p = tl.load(top_k_ptr + slot * int_stride), tl.load(top_p_ptr + slot * float_stride)
    min_p, temperature = tl.load(min_p_ptr + slot * float_stride), tl.load(temperature_ptr + slot * float_stride)
    searched = (top_k > 0) | (top_p < 1)
    peak = float("inf")
    limit = slot.to(tl.int32) * 0 + MAX_GAP
    if (searched | (min_p > 0)) & (temperature > 0):
        part_index = tl.arange(0, PARTS)
        peak = tl.max(tl.load(peak_ptr + row * parts + part_index, mask=part_index < parts, other=float("-inf")), 0)
        if searched:
            needed = tl.load(needed_ptr + row)
            limit = _final_limit(tl.load(lowest_ptr + row), needed, sum_ptr + row * parts * 8, parts, PARTS)
        if min_p > 0:
            by_share = tl.minimum(tl.maximum(-log(min_p) * UNITS, 0.0), MAX_GAP * 1.0).to(tl.int32)
            limit = tl.minimum(limit, by_share)
    tl.store(row_peak_ptr + row, peak)
    tl.store(limit_ptr + row, limit)


def find_limits(logits: Tensor, slots: Tensor, filters: Filters) -> Limits:
    """Implement `aerie.kernels.sampling.filters.find_limits`: return the limits of each row."""
    rows, size = logits.shape
    device, parts = logits.device, triton.cdiv(size, PART)
    temperature, top_p, min_p, *top_k = filters.arguments()
    head = (logits, logits.stride(0), size, slots, rows // slots.shape[0], temperature, top_p)
    peaks = torch.empty((rows, parts), dtype=torch.float32, device=device)
    # separate tensors, because a slice may be less aligned, and Triton compiles a kernel for each alignment
    lowest = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2)]
    sums = [torch.empty((rows, parts, 8), dtype=torch.float32, device=device) for _ in range(2)]
    needed = torch.empty(rows, dtype=torch.float32, device=device)
    padded = triton.next_power_of_2(parts)
    _peaks[(rows, parts)](*head, min_p, *top_k, peaks, BLOCK=PART, num_warps=8)
    for pass_index in range(2 * LEVELS):
        now, before = pass_index % 2, 1 - pass_index % 2
        _narrow[(rows, parts)](
            *head,
            *top_k,
            peaks,
            lowest[before],
            sums[before],
            lowest[now],
            sums[now],
            needed,
            pass_index % LEVELS,
            BY_MASS=pass_index >= LEVELS,
            PARTS=padded,
            PART=PART,
            TILE=TILE,
            num_warps=4,
        )
    limits = Limits(torch.empty_like(needed), torch.empty_like(lowest[0]))
    _limits[(rows,)](
        *head[3:],
        min_p,
        *top_k,
        peaks,
        lowest[1],
        sums[1],
        needed,
        limits.peaks,
        limits.gaps,
        parts,
        PARTS=padded,
        num_warps=1,
    )
    return limits
