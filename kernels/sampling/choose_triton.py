# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `aerie.kernels.sampling.choose`: sampling in one pass over the logits, with two numbers of scratch per
part; log-probabilities in one pass over the logits, then one over a few blocks.

The k largest logits of a row are in the k blocks with the largest maxima. So `topk` runs over one number per block, and
then over k blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.sampling.choose import Draws
from aerie.kernels.sampling.filters import Limits
from aerie.kernels.sampling.filters_triton import gap_of
from aerie.kernels.sampling.gumbel_triton import draw_of_row, noisy
from aerie.kernels.vocabulary.topk_log_softmax import NOT_FINITE
from aerie.kernels.vocabulary.topk_log_softmax_triton import combine

TILE = 1024  # logits that a program reads at a time


@triton.jit(do_not_specialize=["width", "position_row", "position_column", "first"])
def _choose(
    x_ptr,
    x_stride,
    value_ptr,
    index_ptr,
    size,
    first,
    peak_ptr,
    limit_ptr,
    slot_ptr,
    position_ptr,
    position_row,
    position_column,
    width,
    temperature_ptr,
    temperature_stride,
    seed_ptr,
    seed_stride,
    FILTERED: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the largest value of one part of a row's logits, and its column: of greedy requests the logit, of others
    the logit / temperature + Gumbel noise. Infinity if any is NaN or infinity.

    x_ptr: [rows, size], the shard of the vocabulary that begins at token id `first`, x_stride between rows.
    value_ptr, index_ptr: [rows, parts], written.
    peak_ptr, limit_ptr: `Limits` of each row, with FILTERED.
    slot_ptr to seed_stride: `Draws.arguments`; a request has `width` rows.
    PART, TILE: logits of a part, and those that are read at once.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, hashed = draw_of_row(
        row,
        slot_ptr,
        position_ptr,
        position_row,
        position_column,
        width,
        temperature_ptr,
        temperature_stride,
        seed_ptr,
        seed_stride,
    )
    lane = part * PART + tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    index = tl.zeros([TILE], tl.int32) + size
    if FILTERED:
        peak, limit = tl.load(peak_ptr + row), tl.load(limit_ptr + row)
    for start in range(0, PART, TILE):
        column = lane + start
        x = tl.load(x_ptr + row * x_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
        is_finite = x < float("inf")  # also false for NaN
        if temperature > 0:
            score = noisy(x, tl.div_rn(1.0, temperature), hashed, (column + first).to(tl.int64))
            if FILTERED:
                score = tl.where(gap_of(x, peak, temperature) <= limit, score, float("-inf"))
            x = score
        # tl.max ignores NaN, so NaN becomes infinity
        x = tl.where(is_finite, x, float("inf"))
        # among equals, a lane keeps the earlier column
        index = tl.where(x > best, column, index)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    cell = row * tl.num_programs(1) + part
    tl.store(value_ptr + cell, largest)
    tl.store(index_ptr + cell, tl.min(tl.where(best == largest, index, size), 0))


def choose(logits: Tensor, draws: Draws, first: int, limits: Limits | None = None) -> tuple[Tensor, Tensor]:
    """Implement `aerie.kernels.sampling.choose.choose`: return each row's largest perturbed logit and its column; the
    largest logit for greedy rows.

    draws: temperatures, seeds and positions of the rows, from which the noise follows.
    first: token id of the first column, on which the noise depends.
    limits: top-k, top-p and min-p as a limit per row; None without filters.
    """
    rows, size = logits.shape
    # with few rows, small parts fill the device; results do not depend on the size
    part = 4 * TILE if rows > 8 else TILE
    parts = triton.cdiv(size, part)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    peaks, gaps = (limits.peaks, limits.gaps) if limits is not None else (values, indices)  # not read without
    _choose[(rows, parts)](
        logits,
        logits.stride(0),
        values,
        indices,
        size,
        first,
        peaks,
        gaps,
        *draws.arguments(),
        FILTERED=limits is not None,
        PART=part,
        TILE=TILE,
        num_warps=4,
    )
    return combine(values, indices, size, NOT_FINITE)


PART, BLOCK = 4096, 128


@triton.jit
def _summarize(x_ptr, x_stride, size, norm_ptr, peak_ptr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Write log(sum(exp)) of a part of PART logits, and the maximum of each of its blocks of BLOCK logits.

    x_ptr: [rows, size] logits, x_stride between rows.
    norm_ptr: [rows, parts] float32, written.
    peak_ptr: [rows, blocks] float32, written.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.arange(0, PART // BLOCK)
    column = part * PART + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    peaks = tl.max(x, 1)
    peak = tl.max(peaks, 0)
    shifted = tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak))
    # the sum is at least 1, except in a part that is all minus infinity
    total = tl.maximum(tl.sum(tl.sum(shifted, 1), 0), 1.0)
    tl.store(norm_ptr + row * tl.num_programs(1) + part, peak + tl.log(total))
    block += part * (PART // BLOCK)
    blocks = tl.cdiv(size, BLOCK)
    tl.store(peak_ptr + row * blocks + block, peaks, mask=block < blocks)


def norms_and_top(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `aerie.kernels.sampling.choose.norms_and_top`: return logsumexp, the k largest logits in descending
    order, and their columns."""
    rows, size = logits.shape
    parts, blocks = triton.cdiv(size, PART), triton.cdiv(size, BLOCK)
    norms = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    peaks = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    _summarize[(rows, parts)](logits, logits.stride(0), size, norms, peaks, PART=PART, BLOCK=BLOCK, num_warps=4)
    best = peaks.topk(min(k, blocks), -1).indices
    column = (best.unsqueeze(2) * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    inside = column.clamp_max(size - 1)
    near = logits.gather(1, inside).float().masked_fill(column >= size, float("-inf"))
    top, index = near.topk(k, -1)
    return torch.logsumexp(norms, -1), top, inside.gather(1, index)
