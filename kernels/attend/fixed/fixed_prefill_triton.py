# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Causal attention of prompt chunks for deterministic engines: a row has the bits that `decode_triton` computes for it
in a round with a fixed plan. A program computes all query heads of one KV head for a tile of adjacent rows.

Spans, the columns of a tile, and the operations on them are those of rounds: `spans_triton`, `online_softmax_triton`.
Rows of a tile may differ, because the tensor core computes each of its rows alone. A program computes the spans one
after another and folds each into the results of earlier ones, as rounds do in a second kernel.
"""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.fixed.spans_triton import finished, fold, folded, span_of, span_start
from aerie.kernels.attend.online_softmax_triton import SUM_COLUMNS, both, load_queries
from aerie.kernels.attend.prefill_plan_triton import TILE_FIELDS
from aerie.kernels.attend.prefill_triton import PrefillTiles, add_span, launch_arguments
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.attend.scores_triton import cap_scales, sink_scores
from aerie.kernels.kv.batches import LayerKV, PrefillBatch
from aerie.kernels.kv.stored_values import FP8


@triton.jit(do_not_specialize=["table_stride", "span"])
def _attend_fixed_prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    tiles_ptr,
    scale_log2,
    v_scale,
    q_row_stride,
    q_head_stride,
    table_stride,
    sinks_ptr,
    span,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Attend for one KV head and one tile of adjacent rows of a chunk x GROUP query heads, packed into BLOCK_M.

    tiles_ptr: fields of `prefill_plan_triton`: chunk, first row, the chunk's end, position of the first row.
    span: base size of the spans of contexts, whose results are added in order.
    WINDOW: 0 without one.
    SOFT_CAP: None without one.
    UNIT: factor on softmax weights (`weight_unit`), undone by v_scale.
    PAIRS: pages are FP8, read as pairs of numbers.
    UPCAST: multiply in float32, for the interpreter.
    q_ptr, out_ptr: [rows, KV_HEADS * GROUP, D].
    k_ptr, v_ptr: [pages, PAGE, KV_HEADS, D], the pool.
    table_ptr: [chunks, table_stride] int32 page table.
    sinks_ptr: score of each query head's sink, or None.
    scale_log2: factor on scores, including log2(e). v_scale: factor on the output.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    WIDTH: tl.constexpr = D // 2 if PAIRS else D
    head = tl.program_id(0)
    tile = tiles_ptr + tl.program_id(1) * TILE_FIELDS
    chunk = tl.load(tile)
    if chunk < 0:
        return
    first, end, start = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    row, query_head = first + m // GROUP, head * GROUP + m % GROUP
    live = (m < ROWS * GROUP) & (row < end)
    position = start + m // GROUP
    last = start + tl.minimum(ROWS, end - first) - 1
    q_row = q_ptr + row.to(tl.int64)[:, None] * q_row_stride + query_head[:, None] * q_head_stride
    q, q_odd = load_queries(q_row, d, live, UNIT, UPCAST, PAIRS)
    factor = 0.0
    if SOFT_CAP is not None:
        factor, scale_log2 = cap_scales(scale_log2, SOFT_CAP)
    if sinks_ptr is not None:
        sinks = sink_scores(sinks_ptr, query_head, live)
    table = table_ptr + chunk * table_stride
    common = (start + 1) // BLOCK_N * BLOCK_N  # tiles before it are seen by all rows
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(start + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    mean = tl.zeros([BLOCK_M, D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for i in range(span_of(oldest, span), span_of(last, span) + 1):
        span_low = span_start(i, span)
        span_high = span_start(i + 1, span)
        low, high = tl.maximum(span_low, oldest), tl.minimum(span_high, last + 1)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M, SUM_COLUMNS], tl.float32)
        if sinks_ptr is not None:
            # in the span of the row's own position, as in `decode_triton`
            has_own = (position >= span_low) & (position < span_high)
            top = tl.where(has_own, sinks, top)
            total = tl.where(has_own[:, None], 1.0, total)
        acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, WIDTH], tl.float32) if PAIRS else acc
        for masked in tl.static_range(1 if WINDOW else 0, 2):
            middle = low if WINDOW else tl.minimum(tl.maximum(common, low), high)
            top, total, acc, acc_odd = add_span(
                middle if masked else low, high if masked else middle,
                q, q_odd, k_ptr, v_ptr, table, position, position, last, head, scale_log2, factor, top, total, acc,
                acc_odd, n, d, KV_HEADS, D, PAGE, BLOCK_N, masked == 1, WINDOW, SOFT_CAP, UPCAST, UNIT, PAIRS, True,
            )  # fmt: skip
        if PAIRS:
            part, lse = finished(both(acc, acc_odd, BLOCK_M, D), tl.max(total, 1), top, v_scale)
        else:
            part, lse = finished(acc, tl.max(total, 1), top, v_scale)
        mean, weight, largest = fold(mean, weight, largest, part, lse)
    columns = tl.arange(0, D)
    out = out_ptr + ((row.to(tl.int64) * KV_HEADS * GROUP + query_head) * D)[:, None] + columns[None, :]
    tl.store(out, folded(mean, weight).to(out_ptr.dtype.element_ty), mask=live[:, None])


def attend_fixed_prefill(
    q: Tensor,
    kv: LayerKV,
    batch: PrefillBatch,
    tile_list: Tensor,
    tiles: PrefillTiles,
    span: int,
    rule: ScoreRule,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of q, [rows, q_heads, head_dim] in q's dtype; zeros for padding rows.

    q: [rows, q_heads, head_dim], any row and head strides.
    tile_list: [num_tiles, TILE_FIELDS] int32, from `plan_tiles` with block_m // group rows each.
    tiles: with the block_n of rounds.
    span: base size of spans in tokens, a multiple of block_n.
    rule: with the batch's window.
    sinks: [q_heads] float32, contiguous, if the rule has them.

    Reference: `aerie.kernels.attend.references.prefill`.
    """
    assert span % tiles.block_n == 0
    out, arguments, constants = launch_arguments(q, kv, kv.pages, batch, tile_list, tiles, rule, sinks)
    _attend_fixed_prefill[(kv.k.shape[2], tile_list.shape[0])](
        *arguments, span, PAIRS=kv.k.dtype == FP8, enable_fp_fusion=False, **constants
    )
    return out
