# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Causal attention of prompt chunks over paged latent rows. A program computes all heads, or a block of them if there
are many, of a tile of adjacent rows from `prefill_plan_triton`.

With spans (FIXED), a row has the bits that `latent_decode_triton` computes for it in a fixed plan: the columns of a
tile and the operations on them are the same, and so are the spans, which are folded in order (`spans_triton`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.fixed.spans_triton import fold, folded, span_of, span_start
from aerie.kernels.attend.latent_tile_triton import (
    accumulate_latent,
    finish_latent,
    latent_maps,
    load_latent_tile,
    load_queries,
    log_sum,
    no_state,
    score_latent_tile,
)
from aerie.kernels.attend.prefill_plan_triton import TILE_FIELDS
from aerie.kernels.attend.prefill_triton import PrefillTiles
from aerie.kernels.attend.scores import LOG2_E
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import LatentKV, PrefillBatch
from aerie.kernels.kv.stored_values import FP8, weight_unit


@triton.jit(do_not_specialize=["table_stride", "span"])
def _attend_latent_prefill(
    q_ptr,
    rows_ptr,
    latent_desc,
    rotated_desc,
    out_ptr,
    table_ptr,
    tiles_ptr,
    scale_log2,
    value_scale,
    q_row_stride,
    q_head_stride,
    table_stride,
    span,
    HEADS: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    FIXED: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Attend for one tile of adjacent rows of a chunk, and HEADS_OF_TILE of its HEADS heads, packed into BLOCK_M.

    tiles_ptr: fields of `prefill_plan_triton`: chunk, first row, the chunk's end, position of the first row.
    D, ROTATED: numbers of a latent row that are key and value, and that belong to the key alone.
    FIXED: contexts are split into spans of base size `span`, whose results are added in order.
    WINDOW: 0 without one.
    UNIT: factor on softmax weights (`weight_unit`), undone by value_scale.
    UPCAST: multiply in float32, for the interpreter.
    q_ptr: [rows, HEADS, D + ROTATED]. out_ptr: [rows, HEADS, D].
    rows_ptr: [pages, PAGE, D + ROTATED], the latent rows of the pool.
    latent_desc, rotated_desc: tensor maps of the same rows (`latent_maps`), or None.
    table_ptr: [chunks, table_stride] int32 page table.
    scale_log2: factor on scores, including log2(e). value_scale: factor on the output.
    """
    ROWS: tl.constexpr = BLOCK_M // HEADS_OF_TILE
    tile = tiles_ptr + tl.program_id(1) * TILE_FIELDS
    chunk = tl.load(tile)
    if chunk < 0:
        return
    first, end, start_position = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    row, head = first + m // HEADS_OF_TILE, tl.program_id(0) * HEADS_OF_TILE + m % HEADS_OF_TILE
    live = (m < ROWS * HEADS_OF_TILE) & (row < end) & (head < HEADS)
    position = start_position + m // HEADS_OF_TILE
    last = start_position + tl.minimum(ROWS, end - first) - 1
    row = row.to(tl.int64)
    q, q_rotated = load_queries(q_ptr, row, head, live, q_row_stride, q_head_stride, D, ROTATED, UPCAST, UNIT)
    top, total, acc = no_state(BLOCK_M, BLOCK_N, D, 1)
    table = table_ptr + chunk * table_stride
    low = 0
    if WINDOW:
        low = tl.maximum(start_position + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    # Page numbers are loaded one tile ahead: see `decode_triton`.
    page = tl.load(table + tl.minimum(low if PAGE % BLOCK_N == 0 else low + n, last) // PAGE)
    if FIXED:
        mean, weight, largest = acc, total, top  # state of the earlier spans
        end_of_span = span_start(span_of(low, span) + 1, span)
    for start in range(low, last + 1, BLOCK_N):
        if FIXED:  # noqa: SIM102 - a constant: the variables exist with it only
            if start == end_of_span:
                total, acc = finish_latent(total, acc, 1)
                mean, weight, largest = fold(mean, weight, largest, acc * value_scale, log_sum(total, top))
                top, total, acc = no_state(BLOCK_M, BLOCK_N, D, 1)
                end_of_span = span_start(span_of(start, span) + 1, span)
        column = start + n
        latent, rotated = load_latent_tile(rows_ptr, latent_desc, rotated_desc, page, start, BLOCK_N, PAGE, D, ROTATED)
        page = tl.load(table + tl.minimum((start if PAGE % BLOCK_N == 0 else column) + BLOCK_N, last) // PAGE)
        scores, latent = score_latent_tile(q, q_rotated, latent, rotated, scale_log2, 1)
        if start + BLOCK_N > start_position:
            scores = tl.where(column[None, :] <= position[:, None], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(column[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
        top, total, acc = accumulate_latent(scores, latent, top, total, acc, 1, FIXED, UNIT)
    total, acc = finish_latent(total, acc, 1)
    acc = acc * value_scale
    if FIXED:
        mean, weight, largest = fold(mean, weight, largest, acc, log_sum(total, top))
        acc = folded(mean, weight)
    out = out_ptr + ((row * HEADS + head) * D)[:, None] + d[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])


def latent_prefill_tiles(itemsize: int) -> PrefillTiles:
    """Return the largest tiles whose sums fit in registers, as in `decode_plan_triton.latent_tiles`."""
    # block_m, block_n, warps, stages
    if INTERPRETED or itemsize == 4:
        return PrefillTiles(16, 16, 4, 1)
    return PrefillTiles(64, 32, 8, 4)


def heads_of_tile(num_heads: int, tiles: PrefillTiles) -> int:
    """Return the number of heads that share a tile."""
    return min(num_heads, tiles.block_m)


def attend_latent_prefill(
    q: Tensor,
    kv: LatentKV,
    batch: PrefillBatch,
    tile_list: Tensor,
    tiles: PrefillTiles,
    scale: float,
    span: int | None = None,
) -> Tensor:
    """Return attention of q, [rows, heads, latent] in q's dtype; zeros for padding rows.

    q: [rows, heads, latent + rotated], any row and head strides.
    tile_list: [num_tiles, TILE_FIELDS] int32, from `plan_tiles` with block_m // `heads_of_tile` rows each.
    scale: positive.
    span: base size of spans in tokens, a multiple of block_n, which is that of rounds. None: without spans.
    """
    page_table, heads, latent = batch.page_table, q.shape[1], kv.latent
    assert q.stride(2) == 1 and kv.rows.dtype in (q.dtype, FP8) and kv.rows.is_contiguous() and scale > 0
    assert page_table.stride(1) == 1 and tile_list.is_contiguous() and q.shape[2] == kv.rows.shape[2]
    assert span is None or span % tiles.block_n == 0
    # Padding rows pass through the model and write KV to page 0. Masked reads of page 0 must give finite values.
    make = torch.zeros if batch.is_padded else torch.empty
    out = make((q.shape[0], heads, latent), dtype=q.dtype, device=q.device)
    together, unit = heads_of_tile(heads, tiles), weight_unit(kv.rows.dtype)
    _attend_latent_prefill[(triton.cdiv(heads, together), tile_list.shape[0])](
        q,
        kv.rows,
        *latent_maps(kv, tiles.block_n),
        out,
        page_table,
        tile_list,
        scale * kv.scale * LOG2_E,
        kv.scale / unit,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        span or 0,
        HEADS=heads,
        HEADS_OF_TILE=together,
        D=latent,
        ROTATED=q.shape[2] - latent,
        PAGE=kv.rows.shape[1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        WINDOW=batch.window or 0,
        FIXED=span is not None,
        UPCAST=INTERPRETED,
        UNIT=unit,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=span is None,
    )
    return out
