# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The second kernel of trees in fixed plans, which `decode_triton` launches: continues each row along its path.

A tile with suffix columns differs from row to row, because it has the row's own path in chain order. So a program
computes all query heads of one KV head for a single row: it adds the results of spans that `decode_triton` computed for
all rows together, continues the softmax of the span that is open at the first tile with suffix columns, and stores the
row's result. The first of these tiles is loaded while `decode_triton` is running.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.decode_plan_triton import DecodePlan
from aerie.kernels.attend.fixed.spans_triton import finished, fold, folded, span_of, span_start
from aerie.kernels.attend.online_softmax_triton import both, load_queries, softmax_step
from aerie.kernels.attend.scores_triton import cap_scales, sink_scores, soft_capped
from aerie.kernels.attend.tree_mask_triton import num_seen, path_tile
from aerie.kernels.kv.batches import DecodeBatch, LayerKV
from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.kv.stored_values_triton import even, odd
from aerie.kernels.pdl import pdl_wait

PATH_COLUMNS = 128  # columns for a row's path and the prefix's last tile
AT_ONCE = 4  # partial results that a program loads at a time
_SUM_COLUMNS = tl.constexpr(64)  # equal sums of weights; with fewer, Triton repeats the fold of spans in every warp


def num_warps(head_dim: int) -> int:
    """Return the warps of a program; more dimensions need more registers."""
    return 4 if head_dim <= 128 else 8


@triton.jit(do_not_specialize=["mask_request_stride", "mask_row_stride", "table_stride"])
def _plan_paths(
    tokens_ptr,
    mask_ptr,
    prefix_ptr,
    table_ptr,
    mask_request_stride,
    mask_row_stride,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Write the token indices of a row's path to tokens_ptr [requests, rows, COLUMNS], -1 after the last; see
    `_finish_paths`.

    mask_ptr: [requests, rows] tree masks, mask_request_stride and mask_row_stride apart.
    prefix_ptr: [requests] tokens before the tree.
    table_ptr: [requests, ..] pages of PAGE tokens, table_stride apart.
    BLOCK_N: columns of a tile. WINDOW: tokens that a row sees; 0: all.
    """
    row, request, n = tl.program_id(0), tl.program_id(1), tl.arange(0, COLUMNS)
    prefix = tl.load(prefix_ptr + request)
    path = tl.load(mask_ptr + request * mask_request_stride + row * mask_row_stride)
    column, seen = path_tile(path, prefix // BLOCK_N * BLOCK_N, n, prefix, WINDOW)
    page = tl.load(table_ptr + request * table_stride + column // PAGE, mask=seen, other=0)
    tokens = tokens_ptr + (request * tl.num_programs(0) + row) * COLUMNS + n
    tl.store(tokens, tl.where(seen, page * PAGE + column % PAGE, -1))


def plan_paths(batch: DecodeBatch, page_size: int, block_n: int) -> Tensor:
    """Return the pool's tokens that each row sees from the first tile with suffix columns on, in the order of its path:
    [B * R, PATH_COLUMNS] int32; -1 where it sees none. Launches one small kernel.

    batch: cut to the window of the layers that use it.
    block_n: columns of a tile.
    """
    shape = (batch.num_rows, PATH_COLUMNS)
    tokens = torch.empty(shape, dtype=torch.int32, device=batch.prefix_len.device)
    assert block_n + MASK_BITS <= PATH_COLUMNS
    _plan_paths[batch.rows, batch.num_requests](
        tokens,
        batch.mask,
        batch.prefix_len,
        batch.page_table,
        batch.mask.stride(0),
        batch.mask.stride(1),
        batch.page_table.stride(0),
        PAGE=page_size,
        BLOCK_N=block_n,
        COLUMNS=PATH_COLUMNS,
        WINDOW=batch.window or 0,
        num_warps=4,
    )
    return tokens


@triton.jit
def _load_rows(part_ptr, rows, d, there, D: tl.constexpr):
    # L1 is not coherent: read other programs' results from L2.
    cells = part_ptr + rows.to(tl.int64)[:, None] * D + d[None, :]
    return tl.load(cells, mask=there[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _load_number(ptr, rows, there, other):
    return tl.load(ptr + rows, mask=there, other=other, cache_modifier=".cg")


@triton.jit
def _product(a, b, c, always):
    """Return a @ b + c. Of products whose operands depend on each other Triton repeats each in every warp, except those
    in different blocks. always: a condition that holds, which the compiler cannot know."""
    if always:
        c = tl.dot(a, b, c, input_precision="ieee")
    return c


@triton.jit
def _path_scores(q, q_odd, k, seen, factor, always, SOFT_CAP: tl.constexpr, UPCAST: tl.constexpr, PAIRS: tl.constexpr):
    """Return scores [M, N] of q and K, as `online_softmax_triton.score_tile` does.

    q, q_odd: [M, D]; with PAIRS [M, D / 2] even and odd dimensions, for K of pairs of 8-bit numbers.
    k: [N, D], or [N, D / 2] pairs.
    seen: [N], other scores are minus infinity.
    factor, SOFT_CAP: see `scores_triton.cap_scales`.
    always: see `_product`.
    UPCAST: see `stored_values_triton.even`.
    """
    scores = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    if PAIRS:
        scores = _product(q, tl.trans(even(k, q.dtype, UPCAST)), scores, always)
        scores = _product(q_odd, tl.trans(odd(k, q.dtype, UPCAST)), scores, always)
    else:
        scores = _product(q, tl.trans(k.to(q.dtype)), scores, always)
    if SOFT_CAP is not None:
        scores = soft_capped(scores, factor)
    return tl.where(seen[None, :], scores, float("-inf"))


@triton.jit
def _add_tile(
    scores,
    v,
    scale_log2,
    top,
    total,
    acc,
    acc_odd,
    always,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add a tile to the softmax state, as `online_softmax_triton.accumulate` does, and return it.

    scores, v: [M, N]; [N, D], or [N, D / 2] pairs.
    top, total, acc, acc_odd: the state: maximum [M], sums of weights [M, _SUM_COLUMNS], and outputs; with PAIRS, those
        of even and of odd dimensions.
    always: see `_product`.
    UNIT: factor on weights, so that small ones are not lost in DTYPE.
    """
    top, total, weights, shrink = softmax_step(scores, scale_log2, top, total, True)
    weights = (weights * UNIT if UNIT != 1.0 else weights).to(DTYPE)
    if PAIRS:
        acc = _product(weights, even(v, DTYPE, UPCAST), acc * shrink[:, None], always)
        acc_odd = _product(weights, odd(v, DTYPE, UPCAST), acc_odd * shrink[:, None], always)
    else:
        acc = _product(weights, v.to(DTYPE), acc * shrink[:, None], always)
    ones = tl.full([weights.shape[1], _SUM_COLUMNS], 1.0 / UNIT, DTYPE)
    total = _product(weights, ones, total * shrink[:, None], always)
    return top, total, acc, acc_odd


@triton.jit(do_not_specialize=["mask_request_stride", "mask_row_stride", "span"])
def _finish_paths(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    mask_ptr,
    prefix_ptr,
    tokens_ptr,
    requests_ptr,
    part_ptr,
    lse_ptr,
    sums_ptr,
    scale_log2,
    v_scale,
    q_row_stride,
    q_head_stride,
    mask_request_stride,
    mask_row_stride,
    sinks_ptr,
    span,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PATH_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITEM_M: tl.constexpr,
    PART_M: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Continue one row of a tree along its path, for one KV head, after the tiles that `_attend_decode` has computed;
    and write the result of the row.

    q_ptr, out_ptr: [requests * ROWS, KV_HEADS * GROUP, D]; out is written.
    k_ptr, v_ptr: the layer's pages, as tokens [.., KV_HEADS, D]. v_scale: factor on V.
    mask_ptr, prefix_ptr: [requests, ROWS] tree masks, and [requests] tokens before the tree.
    tokens_ptr: for each row's path PATH_COLUMNS indices of tokens in the pool, -1 after the last.
    requests_ptr: each request's first partial result and its number.
    part_ptr, lse_ptr, sums_ptr: partial results of `_attend_decode`, their maxima, and the sums of weights.
    scale_log2: factor on scores, including log2(e). sinks_ptr: [q heads] sinks, or None.
    span: tokens of a span of the fixed plan.
    GROUP: query heads per KV head, padded to BLOCK_M. BLOCK_N: columns of a tile.
    COLUMNS, ITEM_M, PART_M: sizes of `_attend_decode`: tiles per item, rows of a tile, rows stored per partial result.
    AT_ONCE: spans whose results are loaded at once.
    LEADS: the request's leading item has added the results of its own spans.
    WINDOW, SOFT_CAP, UPCAST, UNIT, PAIRS: as in `_attend_decode`.
    """
    WIDTH: tl.constexpr = D // 2 if PAIRS else D
    tree_row, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n, d, every = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, WIDTH), tl.arange(0, D)
    live, query_head, packed = m < GROUP, head * GROUP + m, tree_row * GROUP + m
    first, count = tl.load(requests_ptr + 2 * request), tl.load(requests_ptr + 2 * request + 1)
    prefix = tl.load(prefix_ptr + request)
    path = tl.load(mask_ptr + request * mask_request_stride + tree_row * mask_row_stride)
    if PDL:
        # The plan, masks, prefix lengths, pages, q, K and V were written before the preceding kernel's own wait: see
        # `aerie.kernels.pdl`.
        tl.extra.cuda.gdc_launch_dependents()
    row = request * ROWS + tree_row
    q_row = q_ptr + row * q_row_stride + query_head[:, None] * q_head_stride
    q, q_odd = load_queries(q_row, d, live, UNIT, UPCAST, PAIRS)
    factor = 0.0
    if SOFT_CAP is not None:
        factor, scale_log2 = cap_scales(scale_log2, SOFT_CAP)
    start = prefix // BLOCK_N * BLOCK_N
    own = prefix + num_seen(path) - 1
    always = start >= 0
    tokens = tokens_ptr + row * PATH_COLUMNS + n
    token = tl.load(tokens)
    cells = ((tl.maximum(token, 0).to(tl.int64) * KV_HEADS + head) * WIDTH)[:, None] + d[None, :]
    k = tl.load(k_ptr + cells, mask=token[:, None] >= 0, other=0)
    v = tl.load(v_ptr + cells, mask=token[:, None] >= 0, other=0)
    scores = _path_scores(q, q_odd, k, token >= 0, factor, always, SOFT_CAP, UPCAST, PAIRS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    stride = COLUMNS * PART_M
    base = (first * COLUMNS + packed // ITEM_M * KV_HEADS + head) * PART_M + packed % ITEM_M
    there = live & (count > 0) & (LEADS > 0)
    mean = _load_rows(part_ptr, base, every, there, D)
    weight = _load_number(sums_ptr, base, there, 0.0)
    largest = _load_number(lse_ptr, base, there, float("-inf"))
    for low in range(LEADS, count, AT_ONCE):
        parts = ()
        lses = ()
        for i in tl.static_range(AT_ONCE):
            rows, there = base + (low + i) * stride, live & (low + i < count)
            lses = lses + (_load_number(lse_ptr, rows, there, float("-inf")),)
            parts = parts + (_load_rows(part_ptr, rows, every, there, D),)
        for i in tl.static_range(AT_ONCE):
            mean, weight, largest = fold(mean, weight, largest, parts[i], lses[i])
    # The span of the first tile: its sums so far, if it began before.
    span_low = span_start(span_of(start, span), span)
    span_end = span_start(span_of(start, span) + 1, span)
    if WINDOW:
        span_low = tl.maximum(span_low, tl.maximum(prefix + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N)
    rows, there = base + count * stride, live & (span_low < start)
    top = _load_number(lse_ptr, rows, there, float("-inf"))
    total = tl.zeros([BLOCK_M, _SUM_COLUMNS], tl.float32) + _load_number(sums_ptr, rows, there, 0.0)[:, None]
    if PAIRS:
        acc = _load_rows(part_ptr, rows, 2 * d, there, D)
        acc_odd = _load_rows(part_ptr, rows, 2 * d + 1, there, D)
    else:
        acc = _load_rows(part_ptr, rows, d, there, D)
        acc_odd = 0.0
    if sinks_ptr is not None:
        sinks = sink_scores(sinks_ptr, query_head, live)
        has_own = (span_low >= start) & (own >= start) & (own < span_end)
        top = tl.where(has_own, sinks, top)
        total = tl.where(has_own, 1.0, total)
    top, total, acc, acc_odd = _add_tile(
        scores, v, scale_log2, top, total, acc, acc_odd, always, UPCAST, UNIT, PAIRS, q.dtype
    )
    for at in range(start + BLOCK_N, own + 1, BLOCK_N):
        if at == span_end:
            sums = both(acc, acc_odd, BLOCK_M, D) if PAIRS else acc
            part, lse = finished(sums, tl.max(total, 1), top, v_scale)
            mean, weight, largest = fold(mean, weight, largest, part, lse)
            span_end = span_start(span_of(at, span) + 1, span)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M, _SUM_COLUMNS], tl.float32)
            if sinks_ptr is not None:
                top = tl.where(own < span_end, sinks, top)
                total = tl.where(own < span_end, 1.0, total)
            acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
            if PAIRS:
                acc_odd = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        token = tl.load(tokens + at - start)
        cells = ((tl.maximum(token, 0).to(tl.int64) * KV_HEADS + head) * WIDTH)[:, None] + d[None, :]
        k = tl.load(k_ptr + cells, mask=token[:, None] >= 0, other=0)
        v = tl.load(v_ptr + cells, mask=token[:, None] >= 0, other=0)
        scores = _path_scores(q, q_odd, k, token >= 0, factor, always, SOFT_CAP, UPCAST, PAIRS)
        top, total, acc, acc_odd = _add_tile(
            scores, v, scale_log2, top, total, acc, acc_odd, always, UPCAST, UNIT, PAIRS, q.dtype
        )
    sums = both(acc, acc_odd, BLOCK_M, D) if PAIRS else acc
    part, lse = finished(sums, tl.max(total, 1), top, v_scale)
    mean, weight, largest = fold(mean, weight, largest, part, lse)
    out = out_ptr + (row * KV_HEADS * GROUP + query_head)[:, None] * D + every[None, :]
    tl.store(out, folded(mean, weight).to(out_ptr.dtype.element_ty), mask=live[:, None])


def finish_paths(
    q: Tensor,
    kv: LayerKV,
    batch: DecodeBatch,
    plan: DecodePlan,
    factors: tuple[Any, ...],
    out: Tensor,
    constants: dict[str, Any],
) -> None:
    """Write attention of the rows of trees to `out`, after `decode_triton` has computed the tiles that all rows share.

    q, kv, batch, plan: those of `attend_decode`.
    factors: scales, strides of q and of the mask, and sinks.
    constants: those that the kernel has in common with `_attend_decode`.
    """
    workspace, head_dim = plan.workspace, constants["D"]
    _finish_paths[batch.rows, constants["KV_HEADS"], batch.num_requests](
        q,
        *kv.pages,
        out,
        batch.mask,
        batch.prefix_len,
        plan.paths,
        plan.items.requests,
        workspace.part,
        workspace.lse,
        workspace.sums,
        *factors,
        plan.span,
        **constants,
        PATH_COLUMNS=PATH_COLUMNS,
        BLOCK_M=max(16, triton.next_power_of_2(constants["GROUP"])),
        ITEM_M=plan.tiles.block_m,
        AT_ONCE=AT_ONCE,
        LEADS=int(plan.leads),
        num_warps=num_warps(head_dim),
        num_stages=1,
        **pdl_wait(out.device),
    )
