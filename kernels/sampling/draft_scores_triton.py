# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `aerie.kernels.sampling.draft_scores`.

With filters a draft step has one more launch, which counts the tokens of each band and part. The programs that add
noise sum the counts over the parts of their row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend import scores
from aerie.kernels.sampling import draft_scores
from aerie.kernels.sampling.choose import Draws
from aerie.kernels.sampling.filters import Filters
from aerie.kernels.sampling.filters_triton import is_filtered
from aerie.kernels.sampling.gumbel_triton import draw_of_row, noisy

BANDS = tl.constexpr(draft_scores.BANDS)
LOG2_E = tl.constexpr(scores.LOG2_E)
SUMMARY = 1 + draft_scores.BANDS  # numbers per part: its largest scaled logit, then counts
DROPPED = tl.constexpr(draft_scores.DROPPED)
PART, TILE = draft_scores.PART, 128
BLOCK = 1024


@triton.jit
def scale_of(temperature):
    """Return the factor of a row's scaled logits, bitwise equal to that of the reference, `scaled_logits`."""
    return tl.div_rn(1.0, temperature) * LOG2_E


@triton.jit(do_not_specialize=["width"])
def _count_bands(
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
    summary_ptr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the summary of one part of a filtered row: its largest scaled logit, and the number of its tokens in each
    band, that is with each integer part of the scaled logit.

    x_ptr: [rows, size] logits, x_stride between rows.
    slot_ptr: [requests]; a request has `width` rows.
    temperature_ptr to int_stride: `Filters.arguments`.
    summary_ptr: [rows, parts, SUMMARY] float32, written.
    PART, TILE: logits of a part, and those that are counted at once.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + row // width)
    if is_filtered(slot, temperature_ptr, top_p_ptr, min_p_ptr, float_stride, top_k_ptr, int_stride):
        scale = scale_of(tl.load(temperature_ptr + slot * float_stride))
        column = part * PART + tl.arange(0, PART)
        x = tl.load(x_ptr + row * x_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
        peak = tl.max(x, 0) * scale
        top = tl.floor(peak)
        band = tl.arange(0, BANDS)
        total = tl.zeros([BANDS, TILE], tl.int32)
        column = part * PART + tl.arange(0, TILE)
        for _ in range(0, PART, TILE):
            tile = tl.load(x_ptr + row * x_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
            below = tl.where(tile > float("-inf"), top - tl.floor(tile * scale), BANDS * 1.0)
            total += (below[None, :] == band[:, None].to(tl.float32)).to(tl.int32)
            column += TILE
        out_ptr = summary_ptr + (row * tl.num_programs(1) + part) * (1 + BANDS)
        tl.store(out_ptr, peak)
        tl.store(out_ptr + 1 + band, tl.sum(total, 1).to(tl.float32))


@triton.jit
def _lower_bound(
    row,
    slot,
    summary_ptr,
    parts,
    top_p_ptr,
    min_p_ptr,
    float_stride,
    top_k_ptr,
    int_stride,
    PARTS: tl.constexpr,
):
    """Return the lowest scaled logit that a filtered row keeps, to the precision of a band.

    Band b has the tokens whose scaled logit (log2 of the probability, up to a constant) is b to b + 1 below `top`. In
    sums of probabilities each of them counts 2^(BANDS - 1 - b).
    row, slot: the row, and its request's slot.
    summary_ptr: [rows, parts, SUMMARY], from `_count_bands`. PARTS: parts, padded.
    top_p_ptr to int_stride: `Filters.arguments` without the temperature.
    """
    part, band = tl.arange(0, PARTS), tl.arange(0, BANDS)
    summary = summary_ptr + (row * parts + part) * (1 + BANDS)
    peaks = tl.load(summary, mask=part < parts, other=float("-inf"))
    peak = tl.max(peaks, 0)
    top = tl.floor(peak)
    # bands of a part count from its own largest logit: move them by the difference to the row's
    lower = tl.where(peaks > float("-inf"), tl.minimum(top - tl.floor(peaks), BANDS * 1.0), BANDS * 1.0)
    column = band[None, :] - lower.to(tl.int32)[:, None]
    counts = tl.sum(tl.load(summary[:, None] + 1 + column, mask=column >= 0, other=0.0), 0).to(tl.int64)
    top_k, top_p = tl.load(top_k_ptr + slot * int_stride), tl.load(top_p_ptr + slot * float_stride)
    by_count = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0)
    by_count = tl.where(top_k > 0, by_count, BANDS)
    # top-p applies to what top-k leaves
    mass = tl.where(band <= by_count, counts, 0) << (band * -1 + (BANDS - 1)).to(tl.int64)
    needed = top_p * tl.sum(mass, 0).to(tl.float32)
    by_mass = tl.sum((tl.cumsum(mass, 0).to(tl.float32) < needed).to(tl.int32), 0)
    last = tl.minimum(by_count, tl.where(top_p < 1, by_mass, BANDS))
    lowest = tl.where(last < BANDS, top - last.to(tl.float32), float("-inf"))
    min_p = tl.load(min_p_ptr + slot * float_stride)
    share = peak + tl.log2(tl.where(min_p > 0, min_p, 1.0))
    return tl.where(min_p > 0, tl.maximum(lowest, share), lowest)


def count_bands(logits: Tensor, slots: Tensor, filters: Filters) -> Tensor:
    """Count the tokens in each band of scaled logits: `aerie.kernels.sampling.draft_scores.count_bands`."""
    rows, size = logits.shape
    parts = triton.cdiv(size, PART)
    summary = torch.empty((rows, parts, SUMMARY), dtype=torch.float32, device=logits.device)
    _count_bands[(rows, parts)](
        logits,
        logits.stride(0),
        size,
        slots,
        rows // slots.shape[0],
        *filters.arguments(),
        summary,
        PART=PART,
        TILE=TILE,
        num_warps=8,
    )
    return summary


@triton.jit(do_not_specialize=["width", "position_row", "position_column"])
def _perturb(
    x_ptr,
    x_stride,
    out_ptr,
    size,
    id_ptr,
    id_stride,
    summary_ptr,
    parts,
    top_p_ptr,
    min_p_ptr,
    float_stride,
    top_k_ptr,
    int_stride,
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
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of a row's logits [size], divided by the temperature and with Gumbel noise; of a greedy request
    they are copied. Tokens that its filters drop are DROPPED lower.

    x_ptr, out_ptr: [rows, size] logits, x_stride between rows, and float32 results.
    id_ptr: target token ids of the columns, which the noise depends on, id_stride between rows.
    summary_ptr: [rows, parts, SUMMARY] of `_count_bands`, with FILTERED. PARTS: parts, padded.
    top_p_ptr to int_stride: `Filters.arguments` without the temperature.
    slot_ptr to seed_stride: `Draws.arguments`; a request has `width` rows.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
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
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if temperature > 0:
        token = tl.load(id_ptr + row * id_stride + column, mask=inside, other=0)
        score = noisy(x, tl.div_rn(1.0, temperature), hashed, token)
        if FILTERED:
            slot = tl.load(slot_ptr + row // width)
            if is_filtered(slot, temperature_ptr, top_p_ptr, min_p_ptr, float_stride, top_k_ptr, int_stride):
                lowest = _lower_bound(
                    row,
                    slot,
                    summary_ptr,
                    parts,
                    top_p_ptr,
                    min_p_ptr,
                    float_stride,
                    top_k_ptr,
                    int_stride,
                    PARTS,
                )
                score = tl.where(x * scale_of(temperature) >= lowest, score, score - DROPPED)
        x = score
    tl.store(out_ptr + row * size + column, x, mask=inside)


def perturb(logits: Tensor, draws: Draws, ids: Tensor, filters: Filters, summary: Tensor | None) -> Tensor:
    """Implement `aerie.kernels.sampling.draft_scores.perturb`: return logits / temperature + noise, with filtered
    tokens below all others; greedy rows unchanged.

    ids: token ids of the columns. summary: from `count_bands`, tokens by distance from the largest logit, from
    which the limits of the filters follow.
    """
    rows, size = logits.shape
    out = torch.empty((rows, size), dtype=torch.float32, device=logits.device)
    filtered = summary is not None
    summary = out if summary is None else summary.contiguous()
    parts = summary.shape[1] if filtered else 1
    _perturb[(rows, triton.cdiv(size, BLOCK))](
        logits,
        logits.stride(0),
        out,
        size,
        ids,
        ids.stride(0) if ids.dim() == 2 else 0,
        summary,
        parts,
        *filters.arguments()[1:],
        *draws.arguments(),
        FILTERED=filtered,
        PARTS=triton.next_power_of_2(parts),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
