# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `aerie.kernels.sampling.choose`: one pass over the logits; scratch is two numbers per part."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.sampling.filters import Limits
from aerie.kernels.sampling.filters_triton import gap_of
from aerie.kernels.sampling.gumbel import Draws
from aerie.kernels.sampling.gumbel_triton import draw_of_row, noisy
from aerie.kernels.vocabulary.largest import NOT_FINITE
from aerie.kernels.vocabulary.largest_triton import combine

TILE = 1024


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
    place = row * tl.num_programs(1) + part
    tl.store(value_ptr + place, largest)
    tl.store(index_ptr + place, tl.min(tl.where(best == largest, index, size), 0))


def choose(logits: Tensor, draws: Draws, first: int, limits: Limits | None = None) -> tuple[Tensor, Tensor]:
    """`aerie.kernels.sampling.choose.choose`."""
    rows, size = logits.shape
    # with few rows, small parts fill the device; results do not depend on the size
    part = 4 * TILE if rows > 8 else TILE
    parts = triton.cdiv(size, part)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    peaks, gaps = (limits.peaks, limits.gaps) if limits is not None else (values, indices)
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
