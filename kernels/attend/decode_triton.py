# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention of a few rows per request over paged KV (see `DecodeBatch`). All lengths are read on the device.

All query heads of a KV head and all rows of a request share a tile, so KV is read once. Grid: KV heads (x blocks of
rows) x items of `split_kv_triton`.

Partial results are merged in one of two ways:
- If the batch is so small that all requests are split, a second kernel merges.
- If only unusually long requests are split, the programs that finish last merge, without another launch: the last of
  every FAN items merges these items, and the last group to finish merges all groups.

In a `fixed` plan a row's bits do not depend on the other requests, on the number of rows, or on the positions of its
ancestors in a tree, and are those of `fixed_prefill_triton`. Tiles have one number of columns, and items are spans that
depend on positions only (`spans_triton`). Each span is stored for a second kernel, which adds them in order; but a
request's leading item adds its own (LEADS), and stores the sum or, if it has all spans, the result. In trees (PATHS)
this kernel computes the tiles without suffix columns, and `path_triton` continues each row along its path in chain
order. Masked columns leave a row's sums bitwise unchanged (weight 2^-inf = 0, factor 2^0 = 1), and so does an empty
span.

`latent_decode_triton` shares plan, merging and softmax. Its loop differs: K and V are one tile, which is read once and
multiplied in either orientation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.decode_plan_triton import FAN, DecodePlan, partial_rows
from aerie.kernels.attend.fixed.path_triton import finish_paths
from aerie.kernels.attend.fixed.spans_triton import finished, fold, folded, span_of, span_start
from aerie.kernels.attend.merge_states_triton import launch_merge, store_item
from aerie.kernels.attend.online_softmax_triton import SUM_COLUMNS, accumulate, both, load_queries, score_tile
from aerie.kernels.attend.scores import LOG2_E, ScoreRule
from aerie.kernels.attend.scores_triton import cap_scales, sink_scores, soft_capped
from aerie.kernels.attend.split_kv_triton import ITEM_FIELDS
from aerie.kernels.attend.tree_mask_triton import oldest_seen, path_length, sees
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import DecodeBatch, LayerKV
from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.kv.stored_values import FP8, weight_unit
from aerie.kernels.pdl import pdl_wait


@triton.jit
def _store_rows(part_ptr, lse_ptr, part_row, live, part, lse, D: tl.constexpr):
    d = tl.arange(0, D)
    tl.store((part_ptr + part_row.to(tl.int64) * D)[:, None] + d[None, :], part, mask=live[:, None])
    tl.store(lse_ptr + part_row, lse, mask=live)


@triton.jit
def _store_out(out, live, values, D: tl.constexpr):
    d = tl.arange(0, D)
    tl.store(out[:, None] + d[None, :], values.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit(
    do_not_specialize=[
        "mask_request_stride",
        "mask_row_stride",
        "table_stride",
        "suffix_len",
        "num_tickets",
        "span",
    ]
)
def _attend_decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    mask_ptr,
    prefix_ptr,
    table_ptr,
    items_ptr,
    part_ptr,
    lse_ptr,
    sums_ptr,
    ticket_ptr,
    scale_log2,
    v_scale,
    q_row_stride,
    q_head_stride,
    mask_request_stride,
    mask_row_stride,
    table_stride,
    suffix_len,
    num_tickets,
    sinks_ptr,
    span,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    FAN: tl.constexpr,
    APART: tl.constexpr,
    PATHS: tl.constexpr,
    FIXED: tl.constexpr,
    LEADS: tl.constexpr,
    SPANS: tl.constexpr,
    PART_M: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Attend for one KV head, and one tile of a request's rows x query heads of that head, over one item of its
    context.

    items_ptr: fields of `split_kv_triton`: request, first and last position, index of the item's partial result, the
        request's first partial, and its number of items.
    ROWS, GROUP: rows of a request, and query heads per KV head, packed into tiles of BLOCK_M; COLUMNS tiles of all
        heads.
    APART: a second kernel merges partial results; else the programs that finish last, FAN at a time and SLICE of the D
        numbers at once.
    FIXED, LEADS, PATHS: see the module's head.
    SPANS: masks are spans of the tree's numbering, for trees of more than MASK_BITS nodes; else bits.
    PART_M: rows stored per partial result.
    WINDOW: 0 without one.
    SOFT_CAP: None without one.
    UNIT: factor on softmax weights (`weight_unit`), undone by v_scale.
    PAIRS: pages are FP8, read as pairs of numbers (`score_tile`); acc has the even columns, acc_odd the odd ones.
    UPCAST: multiply in float32, for the interpreter.
    PDL: launched early: wait for the previous kernel before the first read of its results (`aerie.kernels.pdl`).
    q_ptr, out_ptr: [requests * ROWS, KV_HEADS * GROUP, D].
    k_ptr, v_ptr: [pages, PAGE, KV_HEADS, D], the pool.
    mask_ptr: [requests, ROWS] int64, which suffix columns each row sees.
    prefix_ptr: [requests] int32 KV tokens before the suffix of suffix_len tokens.
    table_ptr: [requests, table_stride] int32 page table.
    part_ptr, lse_ptr, sums_ptr, ticket_ptr: the plan's workspace: partial results, log2 of their sums of weights, with
        FIXED their sums, and num_tickets counters.
    sinks_ptr: score of each query head's sink, or None.
    span: base size of the spans of FIXED plans.
    scale_log2: factor on scores, including log2(e). v_scale: factor on the output.
    """
    WIDTH: tl.constexpr = D // 2 if PAIRS else D
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    block, item = tl.program_id(0), items_ptr + tl.program_id(1) * ITEM_FIELDS
    head = block % KV_HEADS
    packed = block // KV_HEADS * BLOCK_M + m
    live = packed < ROWS * GROUP
    request = tl.load(item)
    if request < 0:
        return
    low, high = tl.load(item + 1), tl.load(item + 2)
    partial, first, count = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    row, query_head = packed // GROUP, head * GROUP + packed % GROUP
    prefix = tl.load(prefix_ptr + request)
    bits = tl.load(mask_ptr + request * mask_request_stride + row * mask_row_stride, mask=live, other=0)
    last = prefix + suffix_len - 1
    if WINDOW:
        oldest = oldest_seen(bits, prefix, WINDOW, SPANS)
    # Triton keeps several tiles of K and V in flight only if page numbers are loaded one tile ahead. Positions after
    # the last one read other rows of the last page and are masked.
    table = table_ptr + request * table_stride
    page = tl.load(table + tl.minimum(low if PAGE % BLOCK_N == 0 else low + n, last) // PAGE)
    if SOFT_CAP is not None:
        factor, scale_log2 = cap_scales(scale_log2, SOFT_CAP)
    if PDL:
        # All data read so far, including the plan, was written before the layer's store: see `aerie.kernels.pdl`.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if sinks_ptr is not None:
        own, sinks = prefix + path_length(bits, SPANS) - 1, sink_scores(sinks_ptr, query_head, live)
    row += request * ROWS
    q_row = q_ptr + row[:, None] * q_row_stride + query_head[:, None] * q_head_stride
    q, q_odd = load_queries(q_row, d, live, UNIT, UPCAST, PAIRS)
    out = out_ptr + (row * KV_HEADS * GROUP + query_head) * D
    if FIXED:
        leading, first_span = LEADS and partial == first, span_of(low, span)
        mean = tl.zeros([BLOCK_M, D], tl.float32)
        weight, largest = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    # A fixed plan's item has several spans, others one.
    for run in range(0, span_of(high - 1, span) + 1 - first_span if FIXED else 1):
        begin, end = low, high
        if FIXED:
            span_end = span_start(first_span + run + 1, span)
            begin, end = tl.maximum(low, span_start(first_span + run, span)), tl.minimum(span_end, high)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M, SUM_COLUMNS] if FIXED else [BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, WIDTH], tl.float32) if PAIRS else acc
        if sinks_ptr is not None:
            # The sink is added in the item of the row's own position, in a fixed plan in its span.
            has_own = (own >= begin) & (own < (span_end if FIXED else end))
            top = tl.where(has_own, sinks, top)
            total = tl.where(has_own[:, None] if FIXED else has_own, 1.0, total)
        for start in range(begin, end, BLOCK_N):
            column = start + n
            token = page.to(tl.int64) * PAGE + column % PAGE
            page = tl.load(table + tl.minimum((start if PAGE % BLOCK_N == 0 else column) + BLOCK_N, last) // PAGE)
            scores, v, v_odd = score_tile(q, q_odd, k_ptr, v_ptr, token, head, d, KV_HEADS, D, UPCAST, PAIRS)
            if SOFT_CAP is not None:
                scores = soft_capped(scores, factor)
            if not PATHS and start + BLOCK_N > prefix:
                over = column - prefix  # column of the suffix: a node of the tree, which the row's mask shows or hides
                if SPANS:
                    there = (over >= 0) & (over < suffix_len)
                    spans = mask_ptr + request * mask_request_stride + over * mask_row_stride
                    seen = sees(bits, tl.load(spans, mask=there, other=0))
                else:
                    seen = (bits[:, None] >> tl.maximum(tl.minimum(over, 63), 0).to(tl.int64)[None, :]) & 1 != 0
                seen = (over < 0)[None, :] | ((over < suffix_len)[None, :] & seen)
                scores = tl.where(seen, scores, float("-inf"))
            if WINDOW:
                scores = tl.where(column[None, :] >= oldest[:, None], scores, float("-inf"))
            top, total, acc, acc_odd = accumulate(
                scores, v, v_odd, scale_log2, top, total, acc, acc_odd, FIXED, UNIT, PAIRS
            )
        if PAIRS:
            acc = both(acc, acc_odd, BLOCK_M, D)
        # Store the span's or the item's result: to `out`, or as a partial result, which is merged at the end.
        part_row = ((partial + run) * COLUMNS + block) * PART_M + m
        if FIXED:
            if PATHS and end < span_end:  # the rows' paths continue this span
                part_row = ((first + count) * COLUMNS + block) * PART_M + m
                _store_rows(part_ptr, lse_ptr, part_row, live, acc, top, D)
                tl.store(sums_ptr + part_row, tl.max(total, 1), mask=live)
            else:
                part, lse = finished(acc, tl.max(total, 1), top, v_scale)
                if leading:
                    mean, weight, largest = fold(mean, weight, largest, part, lse)
                elif not LEADS and not PATHS and count == 1:  # the request's only span, which nothing merges
                    _store_out(out, live, part, D)
                else:
                    _store_rows(part_ptr, lse_ptr, part_row, live, part, lse, D)
        else:
            acc, lse = finished(acc, total, top, v_scale)
            store_item(
                acc, lse, out, part_ptr, lse_ptr, ticket_ptr, part_row, partial, first, count, m, live, num_tickets,
                1, COLUMNS, BLOCK_M, D, SLICE, FAN, APART,
            )  # fmt: skip
    if FIXED and leading:
        if PATHS or count > 1:
            part_row = (first * COLUMNS + block) * PART_M + m
            _store_rows(part_ptr, lse_ptr, part_row, live, mean, largest, D)
            tl.store(sums_ptr + part_row, weight, mask=live)
        else:
            _store_out(out, live, folded(mean, weight), D)


def attend_decode(
    q: Tensor,
    kv: LayerKV,
    batch: DecodeBatch,
    plan: DecodePlan,
    rule: ScoreRule,
    sinks: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Return attention of q, [B * R, q_heads, head_dim] in q's dtype.

    q: [B * R, q_heads, head_dim], any row and head strides.
    plan: plan for this batch and these numbers of heads.
    rule: with the batch's window.
    sinks: [q_heads] float32, contiguous, if the rule has them.
    early: launch before the previous kernel ends. A fence (`aerie.kernels.pdl`) must stand between this kernel
        and the writers of the plan, prefix lengths, masks and pages.
    """
    tiles, workspace = plan.tiles, plan.workspace
    page_size, num_kv_heads, head_dim = kv.k.shape[1:]
    group, unit = q.shape[1] // num_kv_heads, weight_unit(kv.k.dtype)
    columns = num_kv_heads * -(-batch.rows * group // tiles.block_m)
    assert q.stride(2) == 1 and kv.k.is_contiguous() and kv.v.is_contiguous() and rule.scale > 0
    assert rule.has_sinks == (sinks is not None) and (sinks is None or sinks.is_contiguous())
    assert batch.page_table.stride(1) == 1 and batch.prefix_len.is_contiguous()
    assert batch.suffix_len <= MASK_BITS or (batch.suffix_len == batch.rows and not plan.fixed)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = {"ROWS": batch.rows, "GROUP": group, "KV_HEADS": num_kv_heads, "D": head_dim, "COLUMNS": columns}
    part_m = partial_rows(tiles, batch.rows * group) if plan.fixed else tiles.block_m
    # A fixed plan disables FMA fusion: FMAs round differently, and each variant of a kernel fuses different operations.
    constants = {
        **shape,
        "BLOCK_N": tiles.block_n,
        "PART_M": part_m,
        "WINDOW": batch.window or 0,
        "SOFT_CAP": rule.soft_cap,
        "UPCAST": INTERPRETED,
        "UNIT": unit,
        "PAIRS": kv.k.dtype == FP8,
        "enable_fp_fusion": not plan.fixed,
    }
    scales = (rule.scale * kv.k_scale * LOG2_E, kv.v_scale / unit)
    strides = (q.stride(0), q.stride(1), batch.mask.stride(0), batch.mask.stride(1))
    _attend_decode[columns, plan.items.items.shape[0]](
        q, *kv.pages, out, batch.mask, batch.prefix_len, batch.page_table, plan.items.items,
        workspace.part, workspace.lse, workspace.sums, workspace.tickets, *scales, *strides,
        batch.page_table.stride(0), batch.suffix_len, workspace.tickets.shape[0] // 2, sinks, plan.span,
        **constants, PAGE=page_size, BLOCK_M=tiles.block_m, SLICE=tiles.merge_slice(head_dim), FAN=FAN,
        APART=plan.merges_separately, PATHS=plan.paths is not None, FIXED=plan.fixed, LEADS=plan.leads,
        SPANS=batch.suffix_len > MASK_BITS, num_warps=tiles.warps, num_stages=tiles.stages,
        **pdl_wait(q.device, early),
    )  # fmt: skip
    if plan.paths is not None:
        finish_paths(q, kv, batch, plan, (*scales, *strides, sinks), out, constants)
    elif plan.merges_separately:
        launch_merge(out, batch, plan, shape, part_m, workspace.part, workspace.sums if plan.leads else None)
    return out
