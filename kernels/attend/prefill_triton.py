# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention of prompt chunks over paged KV (see `PrefillBatch`), causal except within images. A program computes all
query heads of one KV head for a tile of adjacent rows from `prefill_plan_triton`."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.online_softmax_triton import accumulate, load_queries, score_tile
from aerie.kernels.attend.prefill_plan_triton import TILE_FIELDS
from aerie.kernels.attend.scores import LOG2_E, ScoreRule
from aerie.kernels.attend.scores_triton import cap_scales, sink_scores, soft_capped
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import LayerKV, PrefillBatch
from aerie.kernels.kv.stored_values import weight_unit


@triton.jit
def add_span(
    low, high, q, q_odd, k_ptr, v_ptr, table, position, reach, last, head, scale_log2, factor, top, total, acc, acc_odd,
    n, d, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, UPCAST: tl.constexpr, UNIT: tl.constexpr, PAIRS: tl.constexpr,
    FIXED: tl.constexpr,
):  # fmt: skip
    """Add KV positions low .. high - 1 to the softmax state of rows at `position` [M] that see positions up to `reach`
    [M], and return the state.

    q, q_odd: from `load_queries`. top, total, acc, acc_odd: see `accumulate`.
    k_ptr, v_ptr: the layer's pages of PAGE tokens; `head` is one of KV_HEADS, with D dimensions.
    table, last: the chunk's page table, and the last position that any row of the tile sees.
    scale_log2, factor: as `cap_scales` returns them; factor is unused without SOFT_CAP.
    n, d: [BLOCK_N], [D] indices of columns and dimensions; PAIRS: of pairs of dimensions.
    MASKED: apply `reach` and WINDOW; without it every row sees all positions of the span.
    """
    # Page numbers are loaded one tile ahead: see `decode_triton`.
    page = tl.load(table + tl.minimum(low if PAGE % BLOCK_N == 0 else low + n, last) // PAGE)
    for start in range(low, high, BLOCK_N):
        column = start + n
        token = page.to(tl.int64) * PAGE + column % PAGE
        page = tl.load(table + tl.minimum((start if PAGE % BLOCK_N == 0 else column) + BLOCK_N, last) // PAGE)
        scores, v, v_odd = score_tile(q, q_odd, k_ptr, v_ptr, token, head, d, KV_HEADS, D, UPCAST, PAIRS)
        if SOFT_CAP is not None:
            scores = soft_capped(scores, factor)
        if MASKED:
            scores = tl.where(column[None, :] <= reach[:, None], scores, float("-inf"))
            if WINDOW:
                scores = tl.where(column[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
        top, total, acc, acc_odd = accumulate(
            scores, v, v_odd, scale_log2, top, total, acc, acc_odd, FIXED, UNIT, PAIRS
        )
    return top, total, acc, acc_odd


@triton.jit(do_not_specialize=["table_stride"])
def _attend_prefill(
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
    reach_ptr,
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
):
    """Attend for one KV head and one tile of adjacent rows of a chunk x GROUP query heads, packed into BLOCK_M.

    tiles_ptr: fields of `prefill_plan_triton`: chunk, first row, the chunk's end, position of the first row.
    reach_ptr: [rows] int32, the last position that each row sees: later than its own within an image. None: its own.
    WINDOW: 0 without one.
    SOFT_CAP: None without one.
    UNIT: factor on softmax weights (`weight_unit`), undone by v_scale.
    UPCAST: multiply in float32, for the interpreter.
    q_ptr, out_ptr: [rows, KV_HEADS * GROUP, D].
    k_ptr, v_ptr: [pages, PAGE, KV_HEADS, D], the pool.
    table_ptr: [chunks, table_stride] int32 page table.
    sinks_ptr: score of each query head's sink, or None.
    scale_log2: factor on scores, including log2(e). v_scale: factor on the output.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    tile = tiles_ptr + tl.program_id(1) * TILE_FIELDS
    chunk = tl.load(tile)
    if chunk < 0:
        return
    first, end, start = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    row, query_head = first + m // GROUP, head * GROUP + m % GROUP
    live = (m < ROWS * GROUP) & (row < end)
    position = start + m // GROUP
    last_row = start + tl.minimum(ROWS, end - first) - 1
    reach, last = position, last_row
    if reach_ptr is not None:
        seen = tl.load(reach_ptr + row, mask=live, other=0)
        reach, last = tl.where(live, seen, position), tl.max(seen, 0)
    q_row = q_ptr + row.to(tl.int64)[:, None] * q_row_stride + query_head[:, None] * q_head_stride
    q, q_odd = load_queries(q_row, d, live, UNIT, UPCAST, False)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        top = sink_scores(sinks_ptr, query_head, live)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    factor = 0.0
    if SOFT_CAP is not None:
        factor, scale_log2 = cap_scales(scale_log2, SOFT_CAP)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    table = table_ptr + chunk * table_stride
    # Three spans of KV tiles; only those of which rows see different parts are masked:
    # 0 (with a window): the windows of some rows begin here; 1: all rows see all of it; 2: the rows' own positions.
    begin, shared, own = 0, 0, (start + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        begin = tl.maximum(start + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        shared = tl.minimum(tl.cdiv(tl.maximum(last_row + 1 - WINDOW, 0), BLOCK_N) * BLOCK_N, own)
    for span in tl.static_range(0 if WINDOW else 1, 3):
        top, total, acc, _ = add_span(
            begin if span == 0 else shared if span == 1 else own,
            shared if span == 0 else own if span == 1 else last + 1,
            q, q_odd, k_ptr, v_ptr, table, position, reach, last, head, scale_log2, factor, top, total, acc, acc,
            n, d, KV_HEADS, D, PAGE, BLOCK_N, span != 1, WINDOW, SOFT_CAP, UPCAST, UNIT, False, False,
        )  # fmt: skip
    if WINDOW:  # rows after the chunk's end may be fully masked
        total = tl.where(total == 0.0, 1.0, total)
    out = out_ptr + ((row.to(tl.int64) * KV_HEADS * GROUP + query_head) * D)[:, None] + d[None, :]
    tl.store(out, (acc / total[:, None] * v_scale).to(out_ptr.dtype.element_ty), mask=live[:, None])


@dataclass(frozen=True)
class PrefillTiles:
    """Tiles for prompt chunks.

    block_m: rows x group per program.
    block_n: KV positions per tile.
    warps, stages: Triton's num_warps and num_stages.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


def prefill_tiles(group: int, head_dim: int, itemsize: int, kv_itemsize: int | None = None) -> PrefillTiles:
    """Return the tiles that were fastest on an H200 (`bf86f5a`): 64 chunks of 512 tokens take 555 us with block_n 32,
    709 with 64."""
    # block_m, block_n, warps, stages
    if INTERPRETED:
        return PrefillTiles(max(16, triton.next_power_of_2(group)), 16, 1, 1)
    if itemsize == 4:
        return PrefillTiles(max(32, triton.next_power_of_2(group)), 16, 8, 2)
    if kv_itemsize == 1 and head_dim <= 128:
        return PrefillTiles(max(128, triton.next_power_of_2(group)), 64, 4, 3)
    if head_dim > 256:  # not measured: sums of 128 rows of 512 would not fit in registers
        return PrefillTiles(max(64, triton.next_power_of_2(group)), 32, 8, 2)
    return PrefillTiles(max(128, triton.next_power_of_2(group)), 32, 8, 3)


def launch_arguments(
    q: Tensor,
    kv: LayerKV,
    pages: tuple[Tensor, Tensor],
    batch: PrefillBatch,
    tile_list: Tensor,
    tiles: PrefillTiles,
    rule: ScoreRule,
    sinks: Tensor | None,
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Check the arguments of `attend_prefill`. Return the output, to be written, and the arguments and constants that
    the kernels of chunks have in common.

    pages: K and V as the kernel reads them.
    """
    page_table, (page_size, num_kv_heads, head_dim) = batch.page_table, kv.k.shape[1:]
    assert q.stride(2) == 1 and kv.k.is_contiguous() and kv.v.is_contiguous() and rule.scale > 0
    assert rule.has_sinks == (sinks is not None) and (sinks is None or sinks.is_contiguous())
    assert page_table.stride(1) == 1 and tile_list.is_contiguous()
    # Padding rows pass through the model and write KV to page 0. Masked reads of page 0 must give finite values.
    make = torch.zeros if batch.is_padded else torch.empty
    out, unit = make(q.shape, dtype=q.dtype, device=q.device), weight_unit(kv.k.dtype)
    scales = (rule.scale * kv.k_scale * LOG2_E, kv.v_scale / unit)
    strides = (q.stride(0), q.stride(1), page_table.stride(0))
    constants = {
        "GROUP": q.shape[1] // num_kv_heads,
        "KV_HEADS": num_kv_heads,
        "D": head_dim,
        "PAGE": page_size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "WINDOW": batch.window or 0,
        "SOFT_CAP": rule.soft_cap,
        "UPCAST": INTERPRETED,
        "UNIT": unit,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    return out, (q, *pages, out, page_table, tile_list, *scales, *strides, sinks), constants


def attend_prefill(
    q: Tensor,
    kv: LayerKV,
    batch: PrefillBatch,
    tile_list: Tensor,
    tiles: PrefillTiles,
    rule: ScoreRule,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of q, [rows, q_heads, head_dim] in q's dtype; zeros for padding rows. Rows see positions up to
    their own, or `batch.reach`.

    q: [rows, q_heads, head_dim], any row and head strides.
    tile_list: [num_tiles, TILE_FIELDS] int32, from `plan_tiles` with block_m // group rows each.
    rule: with the batch's window.
    sinks: [q_heads] float32, contiguous, if the rule has them.
    """
    reach = batch.reach(rule.within_images)
    assert reach is None or (reach.is_contiguous() and reach.shape[0] == batch.num_rows)
    out, arguments, constants = launch_arguments(q, kv, (kv.k, kv.v), batch, tile_list, tiles, rule, sinks)
    _attend_prefill[(kv.k.shape[2], tile_list.shape[0])](*arguments, reach, **constants)
    return out
