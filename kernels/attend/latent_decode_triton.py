# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention of a few rows per request over paged latent rows (MLA, arXiv 2405.04434). All lengths are read on the
device. Items, partial results, merging and fixed plans are those of `decode_triton`.

All heads read the same latent rows. Rows x heads of a request are packed into tiles of BLOCK_M. A program computes one
tile over one item. Programs of one item are adjacent, so all but the first read its latent rows from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.decode_plan_triton import FAN, DecodePlan, partial_rows, token_axis
from aerie.kernels.attend.latent_tile_triton import (
    accumulate_latent,
    accumulate_latent_pairs,
    both_latent,
    finish_latent,
    latent_maps,
    load_latent_rows,
    load_latent_tile,
    load_queries,
    log_sum,
    no_state,
    pages_of_rows,
    score_latent_pairs,
    score_latent_tile,
)
from aerie.kernels.attend.merge_states_triton import launch_merge, store_item
from aerie.kernels.attend.scores import LOG2_E
from aerie.kernels.attend.split_kv_triton import ITEM_FIELDS
from aerie.kernels.attend.tree_mask_triton import oldest_seen, path_tile
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import DecodeBatch, LatentKV
from aerie.kernels.kv.stored_values import FP8, weight_unit
from aerie.kernels.pdl import pdl_wait


@triton.jit(do_not_specialize=["mask_request_stride", "mask_row_stride", "table_stride", "suffix_len", "num_tickets"])
def _attend_latent(
    q_ptr,
    rows_ptr,
    latent_desc,
    rotated_desc,
    out_ptr,
    mask_ptr,
    prefix_ptr,
    table_ptr,
    items_ptr,
    part_ptr,
    lse_ptr,
    ticket_ptr,
    scale_log2,
    value_scale,
    q_row_stride,
    q_head_stride,
    mask_request_stride,
    mask_row_stride,
    table_stride,
    suffix_len,
    num_tickets,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    FAN: tl.constexpr,
    APART: tl.constexpr,
    PATHS: tl.constexpr,
    FIXED: tl.constexpr,
    PART_M: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Attend for one tile of rows x heads of a request over one item of its context.

    q_ptr: [requests * ROWS, HEADS, D + ROTATED].
    rows_ptr: [pages, PAGE, D + ROTATED], the latent rows of the pool, contiguous; as pairs with PAIRS.
    latent_desc, rotated_desc: tensor maps of the same rows (`latent_maps`), which load tiles that lie on one page. None
        if BLOCK_N does not divide PAGE or tensor maps do not support the rows; then tiles are loaded by rows_ptr.
    out_ptr: [requests * ROWS, HEADS, D], contiguous.
    mask_ptr: [requests, ROWS] int64 bits of the suffix columns that each row sees.
    prefix_ptr: [requests] int32 KV tokens before the suffix.
    table_ptr: [requests, table_stride] int32 page table.
    items_ptr: fields of `split_kv_triton`: request, first and last position, index of the item's partial result, the
        request's first partial, and its number of items.
    ROWS, HEADS: rows and heads of a request, packed into tiles of BLOCK_M; COLUMNS tiles.
    D, ROTATED: numbers of a latent row that are key and value, and that belong to the key alone.
    TOKENS: axis of the tokens in the scores: see `latent_tile_triton`.
    APART: a second kernel merges partial results; else the programs that finish last, FAN at a time and SLICE of the D
        numbers at once.
    FIXED: a row's bits do not depend on other requests (`DecodePlan.fixed`).
    PATHS: the batch verifies trees in a fixed plan. A row then sums over its own path (root to node) as a chain does:
        tiles beyond the prefix are read once per row, with the nodes of that row's path as adjacent tokens. A node's
        result thus has the bits that it has in non-speculative decoding.
    PART_M: rows stored per partial result.
    WINDOW: 0 without one.
    UNIT: factor on softmax weights (`weight_unit`), undone by value_scale.
    PAIRS: rows are FP8, read as pairs of numbers; the sums of even and odd columns are separate (acc, acc_odd).
    PDL: launched early: wait for the previous kernel before the first read of its results (`aerie.kernels.pdl`).
    UPCAST: multiply in float32, for the interpreter.
    part_ptr, lse_ptr, ticket_ptr: partial results, their log-sum-exps and num_tickets counters: the plan's workspace.
    scale_log2: factor on scores, including log2(e). value_scale: factor on the output.
    suffix_len: tokens after the prefix, at most 63.
    """
    item = items_ptr + tl.program_id(1) * ITEM_FIELDS
    request = tl.load(item)
    if request < 0:
        return
    low, high = tl.load(item + 1), tl.load(item + 2)
    partial, first, count = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    packed = tl.program_id(0) * BLOCK_M + m
    live = packed < ROWS * HEADS
    row, head = packed // HEADS, packed % HEADS
    bits = tl.load(mask_ptr + request * mask_request_stride + row * mask_row_stride, mask=live, other=0)
    prefix = tl.load(prefix_ptr + request)
    last = prefix + suffix_len - 1
    if WINDOW:
        oldest = tl.expand_dims(oldest_seen(bits, prefix, WINDOW), TOKENS)
    # Page numbers are loaded one tile ahead: see `decode_triton`.
    table = table_ptr + request * table_stride
    page = tl.load(table + tl.minimum(low if PAGE % BLOCK_N == 0 else low + n, last) // PAGE)
    # FP8 rows are read as pairs of numbers: `score_latent_pairs`.
    STEP: tl.constexpr = 2 if PAIRS else 1
    top, total, acc = no_state(BLOCK_M, BLOCK_N, D // STEP, TOKENS)
    if PAIRS:
        _, _, acc_odd = no_state(BLOCK_M, BLOCK_N, D // STEP, TOKENS)
    if PDL:
        # All data read so far, including the plan, was written before the layer's store: see `aerie.kernels.pdl`.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row += request * ROWS
    W: tl.constexpr = D // STEP
    R: tl.constexpr = ROTATED // STEP
    q, q_rotated = load_queries(q_ptr, row, head, live, q_row_stride, q_head_stride, W, R, UPCAST, UNIT, STEP)
    if PAIRS:
        q_odd, q_rotated_odd = load_queries(
            q_ptr + 1, row, head, live, q_row_stride, q_head_stride, W, R, UPCAST, UNIT, STEP
        )
    shared_end = high  # from here on, rows read tiles of their own paths
    if PATHS:
        shared_end = tl.minimum(high, prefix // BLOCK_N * BLOCK_N)
    for start in range(low, shared_end, BLOCK_N):
        column = start + n
        latent, rotated = load_latent_tile(rows_ptr, latent_desc, rotated_desc, page, start, BLOCK_N, PAGE, W, R)
        page = tl.load(table + tl.minimum((start if PAGE % BLOCK_N == 0 else column) + BLOCK_N, last) // PAGE)
        if PAIRS:
            scores = score_latent_pairs(q, q_odd, q_rotated, q_rotated_odd, latent, rotated, scale_log2, TOKENS, UPCAST)
        else:
            scores, latent = score_latent_tile(q, q_rotated, latent, rotated, scale_log2, TOKENS)
        if start + BLOCK_N > prefix:
            over = column - prefix  # column of the suffix, whose bit in a row's mask says whether the row sees it
            place = tl.expand_dims(tl.maximum(tl.minimum(over, 63), 0).to(tl.int64), 1 - TOKENS)
            seen = ((tl.expand_dims(bits, TOKENS) >> place) & 1) != 0
            seen = tl.expand_dims(over < 0, 1 - TOKENS) | (tl.expand_dims(over < suffix_len, 1 - TOKENS) & seen)
            scores = tl.where(seen, scores, float("-inf"))
        if WINDOW:
            scores = tl.where(tl.expand_dims(column, 1 - TOKENS) >= oldest, scores, float("-inf"))
        if PAIRS:
            top, total, acc, acc_odd = accumulate_latent_pairs(
                scores, latent, q.dtype, top, total, acc, acc_odd, TOKENS, FIXED, UNIT, UPCAST
            )
        else:
            top, total, acc = accumulate_latent(scores, latent, top, total, acc, TOKENS, FIXED, UNIT)
    if PATHS:
        first_row = tl.program_id(0) * BLOCK_M // HEADS
        end_row = tl.minimum(ROWS, (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // HEADS + 1)
        for start in range(tl.maximum(low, shared_end), high, BLOCK_N):
            for r in range(first_row, end_row):
                path = tl.load(mask_ptr + request * mask_request_stride + r * mask_row_stride)
                column, there = path_tile(path, start, n, prefix, WINDOW)
                token = tl.load(table + column // PAGE).to(tl.int64) * PAGE + column % PAGE
                latent, rotated = load_latent_rows(rows_ptr, token, W, R)
                if PAIRS:
                    scores = score_latent_pairs(
                        q, q_odd, q_rotated, q_rotated_odd, latent, rotated, scale_log2, TOKENS, UPCAST
                    )
                else:
                    scores, latent = score_latent_tile(q, q_rotated, latent, rotated, scale_log2, TOKENS)
                seen = tl.expand_dims(packed // HEADS == r, TOKENS) & tl.expand_dims(there, 1 - TOKENS)
                scores = tl.where(seen, scores, float("-inf"))
                if PAIRS:
                    top, total, acc, acc_odd = accumulate_latent_pairs(
                        scores, latent, q.dtype, top, total, acc, acc_odd, TOKENS, FIXED, UNIT, UPCAST
                    )
                else:
                    top, total, acc = accumulate_latent(scores, latent, top, total, acc, TOKENS, FIXED, UNIT)
    if PAIRS:
        acc = both_latent(acc, acc_odd, BLOCK_M, D, TOKENS)
    total, acc = finish_latent(total, acc, TOKENS)
    acc = acc * value_scale
    out = out_ptr + (row * HEADS + head) * D
    part_row = (partial * COLUMNS + tl.program_id(0)) * PART_M + m
    store_item(
        acc, log_sum(total, top), out, part_ptr, lse_ptr, ticket_ptr, part_row, partial, first, count, m, live,
        num_tickets, TOKENS, COLUMNS, BLOCK_M, D, SLICE, FAN, APART,
    )  # fmt: skip


def attend_latent(
    q: Tensor, kv: LatentKV, batch: DecodeBatch, plan: DecodePlan, scale: float, early: bool = False
) -> Tensor:
    """Return attention of q, [B * R, heads, latent] in q's dtype.

    q: [B * R, heads, latent + rotated], any row and head strides.
    plan: plan for this batch and this number of heads, with one KV head.
    scale: positive.
    early: as in `aerie.kernels.attend.decode_triton.attend_decode`.
    """
    tiles, workspace, latent = plan.tiles, plan.workspace, kv.latent
    heads, packed_rows = q.shape[1], batch.rows * q.shape[1]
    assert q.stride(2) == 1 and kv.rows.dtype in (q.dtype, FP8) and kv.rows.is_contiguous() and scale > 0
    assert q.shape[2] == kv.rows.shape[2] and batch.suffix_len <= 63
    assert batch.page_table.stride(1) == 1 and batch.prefix_len.is_contiguous()
    out = torch.empty((q.shape[0], heads, latent), dtype=q.dtype, device=q.device)
    columns = -(-packed_rows // tiles.block_m)
    part_m = partial_rows(tiles, packed_rows) if plan.fixed else tiles.block_m
    part, unit = _partials(plan, out.dtype), weight_unit(kv.rows.dtype)
    pairs = kv.rows.dtype == FP8 and tiles.block_m == 16  # for more rows, products from shared memory are faster
    _attend_latent[(columns, plan.items.items.shape[0])](
        q,
        pages_of_rows(kv, pairs),
        *latent_maps(kv, tiles.block_n, pairs),
        *(out, batch.mask, batch.prefix_len, batch.page_table, plan.items.items),
        *(part, workspace.lse, workspace.tickets),
        *(scale * kv.scale * LOG2_E, kv.scale / unit),
        *(q.stride(0), q.stride(1), batch.mask.stride(0), batch.mask.stride(1), batch.page_table.stride(0)),
        batch.suffix_len,
        workspace.tickets.shape[0] // 2,
        ROWS=batch.rows,
        HEADS=heads,
        D=latent,
        ROTATED=q.shape[2] - latent,
        PAGE=kv.rows.shape[1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        TOKENS=1 if pairs else token_axis(tiles),
        COLUMNS=columns,
        SLICE=tiles.merge_slice(latent),
        FAN=FAN,
        APART=plan.merges_separately,
        PATHS=plan.fixed and not batch.is_causal,
        FIXED=plan.fixed,
        PART_M=part_m,
        WINDOW=batch.window or 0,
        UPCAST=INTERPRETED,
        UNIT=unit,
        PAIRS=pairs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=not plan.fixed,
        **pdl_wait(q.device, early),
    )
    if plan.merges_separately:
        shape = {"ROWS": batch.rows, "GROUP": heads, "KV_HEADS": 1, "D": latent, "COLUMNS": columns}
        launch_merge(out, batch, plan, shape, part_m, part)
    return out


def _partials(plan: DecodePlan, dtype: torch.dtype) -> Tensor:
    """Return the memory for partials: float32, but float16 if a second kernel merges them to bfloat16 (8 significant
    bits; float16 has 11). That halves the bytes. dtype: of results."""
    part = plan.workspace.part
    return part.view(torch.float16) if dtype == torch.bfloat16 and plan.merges_separately and not plan.fixed else part
