# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Merges partial results of attention (partials), each weighted by 2 ** lse, either in a second kernel or in the
programs of `decode_triton` that finish last. Fixed plans add them in order, as kernels of prompts do."""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.decode_plan_triton import MAX_SPLITS, DecodePlan
from aerie.kernels.attend.fixed.spans_triton import fold, folded
from aerie.kernels.kv.batches import DecodeBatch
from aerie.kernels.pdl import pdl_wait


@triton.jit
def merge_rows(
    part_ptr,
    lse_ptr,
    out_ptr,
    requests_ptr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partial results of one query row and query head, AT_ONCE partials at a time.

    part_ptr: [partials, COLUMNS, BLOCK_M, D] results of items, each normalised by its own sum.
    lse_ptr: [partials, COLUMNS, BLOCK_M] float32, log2 of the sums of weights.
    out_ptr: [requests, ROWS, KV_HEADS * GROUP, D], written for requests with several partials.
    requests_ptr: [requests, 2] index of a request's first partial, and how many it has.
    ROWS, GROUP: query rows of a request, and query heads per KV head.
    COLUMNS: partial results of an item, one for each tile of query rows of each KV head.
    BLOCK_M: rows per partial.
    MAX_SPLITS: maximum partials of a request, padded.
    PDL: launch before the previous kernel ends, see `aerie.kernels.pdl`.
    """
    packed, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(requests_ptr + 2 * request), tl.load(requests_ptr + 2 * request + 1)
    if PDL:
        # The counts may be read before the wait: their writer ended before the predecessor passed its own wait
        # (`aerie.kernels.pdl`).
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if count > 1:
        d = tl.arange(0, D)
        stride = COLUMNS * BLOCK_M
        base = (first * COLUMNS + packed // BLOCK_M * KV_HEADS + head) * BLOCK_M + packed % BLOCK_M
        every = tl.arange(0, MAX_SPLITS)
        lses = tl.load(lse_ptr + base + every * stride, mask=every < count, other=float("-inf"), cache_modifier=".cg")
        top = tl.max(lses, 0)
        origin = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(lses - origin), 0)
        acc = tl.zeros([D], tl.float32)
        for start in range(0, count, AT_ONCE):
            i = start + tl.arange(0, AT_ONCE)
            partial = base + i * stride
            lse = tl.load(lse_ptr + partial, mask=i < count, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(
                part_ptr + partial.to(tl.int64)[:, None] * D + d[None, :],
                mask=(i < count)[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += tl.sum(part * tl.exp2(lse - origin)[:, None], 0)
        out = ((request * ROWS + packed // GROUP) * KV_HEADS + head) * GROUP + packed % GROUP
        acc = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(out_ptr + out * D + d, acc.to(out_ptr.dtype.element_ty))


@triton.jit
def merge_in_order(
    part_ptr,
    lse_ptr,
    sums_ptr,
    out_ptr,
    requests_ptr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge as `merge_rows` does, for fixed plans: fold one partial after another, loading AT_ONCE at a time.

    sums_ptr: the weight of the first partial, in which several spans are folded; None: each partial is one span.
    Other arguments: `merge_rows`.
    """
    packed, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(requests_ptr + 2 * request), tl.load(requests_ptr + 2 * request + 1)
    if PDL:  # the counts may be read before the wait, see `merge_rows`
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if count > 1:
        d, one = tl.arange(0, D)[None, :], tl.arange(0, 1)
        stride = COLUMNS * BLOCK_M
        base = (first * COLUMNS + packed // BLOCK_M * KV_HEADS + head) * BLOCK_M + packed % BLOCK_M
        mean = tl.zeros([1, D], tl.float32)
        weight = tl.zeros([1], tl.float32)
        top = tl.full([1], float("-inf"), tl.float32)
        if sums_ptr is not None:
            first_weight = tl.load(sums_ptr + base + one, cache_modifier=".cg")
        for start in range(0, count, AT_ONCE):
            parts = ()
            lses = ()
            for i in tl.static_range(AT_ONCE):
                row, there = base + (start + i) * stride + one, start + i + one < count
                lses = lses + (tl.load(lse_ptr + row, mask=there, other=float("-inf"), cache_modifier=".cg"),)
                cells = part_ptr + row.to(tl.int64)[:, None] * D + d
                parts = parts + (tl.load(cells, mask=there[:, None], other=0.0, cache_modifier=".cg"),)
            for i in tl.static_range(AT_ONCE):
                mean, weight, top = fold(mean, weight, top, parts[i], lses[i])
                if i == 0 and sums_ptr is not None:
                    weight = tl.where(start == 0, first_weight, weight)
        out = ((request * ROWS + packed // GROUP) * KV_HEADS + head) * GROUP + packed % GROUP
        tl.store(out_ptr + (out + one[:, None]) * D + d, folded(mean, weight).to(out_ptr.dtype.element_ty))


@triton.jit
def _merge(
    part_ptr,
    lse_ptr,
    first,
    step,
    count,
    target,
    m,
    live,
    in_place,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    SLICE: tl.constexpr,
    FAN: tl.constexpr,
):
    """Store the weighted mean of `count` <= FAN partials, `step` apart, to rows target [BLOCK_M] of D values. Return
    its lse [BLOCK_M].

    part_ptr, lse_ptr, COLUMNS, SLICE: as in `merge_by_the_last`. Works in slices of D to save registers.
    first: index of the first of the partials.
    m, live: rows of the tile, and whether they exist.
    in_place: target is one of the partials.
    """
    stride = step * COLUMNS * BLOCK_M
    base = (first * COLUMNS + tl.program_id(0)) * BLOCK_M
    # L1 is not coherent: read other programs' results from L2.
    i = tl.arange(0, FAN)
    there = (i < count)[:, None] & live[None, :]
    lses = tl.load(
        lse_ptr + base + i[:, None] * stride + m[None, :], mask=there, other=float("-inf"), cache_modifier=".cg"
    )
    top = tl.max(lses, 0)
    origin = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lses - origin[None, :]), 0)
    total = tl.where(total == 0.0, 1.0, total)
    for low in range(0, D, SLICE):
        d = low + tl.arange(0, SLICE)
        acc = tl.zeros([BLOCK_M, SLICE], tl.float32)
        for j in tl.static_range(FAN):
            row = base + j * stride + m
            used = live & (j < count)
            lse = tl.load(lse_ptr + row, mask=used, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(
                part_ptr + row.to(tl.int64)[:, None] * D + d[None, :],
                mask=used[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += part * (tl.exp2(lse - origin) / total)[:, None]
        if in_place:
            tl.debug_barrier()
        tl.store(target[:, None] + d[None, :], acc.to(target.dtype.element_ty), mask=live[:, None])
    return origin + tl.log2(total)


@triton.jit
def merge_by_the_last(
    part_ptr,
    lse_ptr,
    ticket_ptr,
    out,
    partial,
    first,
    count,
    m,
    live,
    num_tickets,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    SLICE: tl.constexpr,
    FAN: tl.constexpr,
):
    """Merge if this program is the last to store its partial result. Up to FAN items of a request are merged to `out`;
    more items in two levels: the last program of each FAN items merges these in place of their first, and the last of
    these programs merges the results to `out`.

    part_ptr: [partials, COLUMNS, BLOCK_M, D] results of items, each normalised by its own sum.
    lse_ptr: [partials, COLUMNS, BLOCK_M] float32, log2 of the sums of weights.
    ticket_ptr: int32 counters of programs that are done, zero before and after: num_tickets of the first level, then
        those of the second.
    out: [BLOCK_M] addresses of the rows of the result.
    partial, first, count: number of this program's partial, number of the request's first one, and how many it has.
    m, live: rows of the tile, and whether they exist.
    COLUMNS: programs per item, one for each tile of query rows of each KV head.
    SLICE: dimensions of D that are merged at a time.
    """
    # The barrier orders the stores of all threads before the release by one thread.
    tl.debug_barrier()
    leader = first + (partial - first) // FAN * FAN
    members = tl.minimum(FAN, first + count - leader)
    ticket = ticket_ptr + leader * COLUMNS + tl.program_id(0)
    if tl.atomic_add(ticket, 1, sem="acq_rel") == members - 1:
        tl.store(ticket, 0)
        if count <= FAN:
            _merge(part_ptr, lse_ptr, leader, 1, members, out, m, live, False, COLUMNS, BLOCK_M, D, SLICE, FAN)
        else:
            row = (leader * COLUMNS + tl.program_id(0)) * BLOCK_M + m
            lse = _merge(
                part_ptr,
                lse_ptr,
                leader,
                1,
                members,
                part_ptr + row.to(tl.int64) * D,
                m,
                live,
                True,
                COLUMNS,
                BLOCK_M,
                D,
                SLICE,
                FAN,
            )
            tl.store(lse_ptr + row, lse, mask=live)
            tl.debug_barrier()
            ticket = ticket_ptr + num_tickets + first * COLUMNS + tl.program_id(0)
            groups = tl.cdiv(count, FAN)
            if tl.atomic_add(ticket, 1, sem="acq_rel") == groups - 1:
                tl.store(ticket, 0)
                _merge(part_ptr, lse_ptr, first, FAN, groups, out, m, live, False, COLUMNS, BLOCK_M, D, SLICE, FAN)


@triton.jit
def store_item(
    acc,
    lse,
    out,
    part_ptr,
    lse_ptr,
    ticket_ptr,
    part_row,
    partial,
    first,
    count,
    m,
    live,
    num_tickets,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    SLICE: tl.constexpr,
    FAN: tl.constexpr,
    APART: tl.constexpr,
):
    """Store the result of an item: to `out` [BLOCK_M] if it is the request's only one; else as a partial result to rows
    part_row [BLOCK_M], which the programs that finish last merge unless they are merged APART.

    acc: [BLOCK_M, D], or [D, BLOCK_M] with TOKENS = 0.
    lse: [BLOCK_M], log2 of the sums of weights.
    """
    d, stored = tl.expand_dims(tl.arange(0, D), 1 - TOKENS), tl.expand_dims(live, TOKENS)
    if count == 1:
        tl.store(tl.expand_dims(out, TOKENS) + d, acc.to(out.dtype.element_ty), mask=stored)
    else:
        if part_ptr.dtype.element_ty == tl.float16:
            acc = tl.clamp(acc, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(tl.expand_dims(part_ptr + part_row.to(tl.int64) * D, TOKENS) + d, acc, mask=stored)
        tl.store(lse_ptr + part_row, lse, mask=live)
        if not APART:
            merge_by_the_last(
                part_ptr, lse_ptr, ticket_ptr, out, partial, first, count, m, live, num_tickets,
                COLUMNS, BLOCK_M, D, SLICE, FAN,
            )  # fmt: skip


def launch_merge(
    out: Tensor,
    batch: DecodeBatch,
    plan: DecodePlan,
    shape: dict[str, int],
    part_m: int,
    part: Tensor,
    sums: Tensor | None = None,
) -> None:
    """Launch the kernel that merges the partials `part` of split requests into `out`. sums: as of `merge_in_order`."""
    workspace, head_dim = plan.workspace, shape["D"]
    grid = (batch.rows * shape["GROUP"], shape["KV_HEADS"], batch.num_requests)
    if plan.fixed:
        merge_in_order[grid](
            part,
            workspace.lse,
            sums,
            out,
            plan.items.requests,
            **shape,
            BLOCK_M=part_m,
            AT_ONCE=plan.merged_at_once,
            num_warps=max(1, head_dim // 128),
            enable_fp_fusion=False,
            **pdl_wait(out.device),
        )
        return
    merge_rows[grid](
        part,
        workspace.lse,
        out,
        plan.items.requests,
        **shape,
        BLOCK_M=part_m,
        AT_ONCE=plan.merged_at_once,
        MAX_SPLITS=MAX_SPLITS,
        num_warps=min(4, max(1, plan.merged_at_once * head_dim // 2048)),
        **pdl_wait(out.device),
    )
