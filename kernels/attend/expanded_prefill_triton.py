# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Causal attention of prompt chunks over keys and values expanded from latent rows in this pass
(`aerie.attention.expansion`). A key consists of a part per head and a RoPE part that all heads share.

A program computes one head of a tile of adjacent rows from `prefill_plan_triton`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.latent_tile_triton import no_state, rotate_pairs
from aerie.kernels.attend.online_softmax_triton import accumulate
from aerie.kernels.attend.prefill_plan_triton import TILE_FIELDS
from aerie.kernels.attend.prefill_triton import PrefillTiles
from aerie.kernels.attend.references import masked_positions
from aerie.kernels.attend.scores import LOG2_E
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import ExpandedKV, PrefillBatch
from aerie.kernels.rope.rope_store import Angles


@triton.jit
def _attend_tiles(
    low,
    high,
    q,
    q_pe,
    kv_ptr,
    k_pe_ptr,
    kv_stride,
    k_pe_stride,
    position,
    last,
    scale_log2,
    top,
    total,
    acc,
    KEY: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add KV positions low .. high - 1 to the softmax state of rows at `position` [M], and return the state.

    q, q_pe: [M, KEY], [M, ROTATED] queries of one head.
    kv_ptr: the head's keys and values [tokens, KEY + VALUE], kv_stride between tokens.
    k_pe_ptr: [tokens, ROTATED] rotated parts of keys, k_pe_stride between tokens.
    last: position of the tile's last row, which is the last token that is read.
    scale_log2: factor on scores, including log2(e).
    top, total, acc: see `online_softmax_triton.accumulate`.
    MASKED: hide positions after a row's own; without it every row sees all of low .. high - 1.
    UPCAST: multiply in float32, for the interpreter.
    """
    n = tl.arange(0, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        column = start + n
        token = tl.minimum(column, last).to(tl.int64)[:, None]
        kv = kv_ptr + token * kv_stride
        k = tl.load(kv + tl.arange(0, KEY)[None, :])
        v = tl.load(kv + KEY + tl.arange(0, VALUE)[None, :])
        k_pe = tl.load(k_pe_ptr + token * k_pe_stride + tl.arange(0, ROTATED)[None, :])
        if UPCAST:
            k, v, k_pe = k.to(tl.float32), v.to(tl.float32), k_pe.to(tl.float32)
        scores = tl.dot(q_pe, tl.trans(k_pe), input_precision="ieee")
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(column[None, :] <= position[:, None], scores, float("-inf"))
        top, total, acc, _ = accumulate(scores, v, v, scale_log2, top, total, acc, acc)
    return top, total, acc


@triton.jit
def _attend_expanded(
    q_ptr,
    kv_ptr,
    k_pe_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    angle_ptr,
    first_ptr,
    tiles_ptr,
    scale_log2,
    q_row_stride,
    q_head_stride,
    kv_row_stride,
    k_pe_row_stride,
    out_row_stride,
    KEY: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend for one head and one tile of BLOCK_M adjacent rows of a chunk.

    q_ptr: [rows, heads, KEY + ROTATED], the RoPE part not rotated yet.
    kv_ptr: [tokens, heads, KEY + VALUE], each token's keys and values.
    k_pe_ptr: [tokens, ROTATED], the part of the keys with RoPE.
    out_ptr: [rows, heads, VALUE], written.
    cos_ptr, sin_ptr: [positions, ROTATED / 2] float32.
    angle_ptr: [rows] position of each row, which selects its angles.
    first_ptr: [chunks] first token of each in kv_ptr.
    scale_log2: factor on scores, including log2(e).
    tiles_ptr: fields of `prefill_plan_triton`: chunk, first row, the chunk's end, position of the first row.
    UPCAST: multiply in float32, for the interpreter.
    """
    head = tl.program_id(0)
    tile = tiles_ptr + tl.program_id(1) * TILE_FIELDS
    chunk = tl.load(tile)
    if chunk < 0:
        return
    first, end, start = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    m = tl.arange(0, BLOCK_M)
    live = first + m < end
    row = (first + m).to(tl.int64)
    q_row = q_ptr + row[:, None] * q_row_stride + head * q_head_stride
    q = tl.load(q_row + tl.arange(0, KEY)[None, :], mask=live[:, None], other=0.0)
    both = tl.load(q_row + KEY + tl.arange(0, ROTATED)[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    angle = tl.load(angle_ptr + row, mask=live, other=0)[:, None] * (ROTATED // 2) + tl.arange(0, ROTATED // 2)[None, :]
    cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
    q_pe = rotate_pairs(both, cos, sin, BLOCK_M, ROTATED).to(q.dtype)
    if UPCAST:
        q, q_pe = q.to(tl.float32), q_pe.to(tl.float32)
    position, last = start + m, start + tl.minimum(BLOCK_M, end - first) - 1
    kv_first = tl.load(first_ptr + chunk).to(tl.int64)
    kv = kv_ptr + kv_first * kv_row_stride + head * (KEY + VALUE)
    k_pe = k_pe_ptr + kv_first * k_pe_row_stride
    top, total, acc = no_state(BLOCK_M, BLOCK_N, VALUE, 1)
    seen_by_all = (start + 1) // BLOCK_N * BLOCK_N
    top, total, acc = _attend_tiles(
        0, seen_by_all, q, q_pe, kv, k_pe, kv_row_stride, k_pe_row_stride, position, last, scale_log2,
        top, total, acc, KEY, ROTATED, VALUE, BLOCK_N, False, UPCAST,
    )  # fmt: skip
    top, total, acc = _attend_tiles(
        seen_by_all, last + 1, q, q_pe, kv, k_pe, kv_row_stride, k_pe_row_stride, position, last, scale_log2,
        top, total, acc, KEY, ROTATED, VALUE, BLOCK_N, True, UPCAST,
    )  # fmt: skip
    out = out_ptr + row[:, None] * out_row_stride + head * VALUE + tl.arange(0, VALUE)[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])


def expanded_tiles(itemsize: int) -> PrefillTiles:
    """Return the tiles, the fastest of nine on an H200 (`df3f33c`): 113 us for 16 prompts of 512 tokens, 2,022 us for
    8,192 tokens after 8,192 cached ones. block_m: rows of one head."""
    # block_m, block_n, warps, stages
    if INTERPRETED:
        return PrefillTiles(16, 16, 1, 1)
    if itemsize == 4:
        return PrefillTiles(32, 16, 4, 1)
    return PrefillTiles(128, 64, 8, 3)


def attend_expanded(
    q: Tensor,
    made: ExpandedKV,
    angles: Angles,
    tile_list: Tensor,
    tiles: PrefillTiles,
    scale: float,
    out: Tensor,
) -> Tensor:
    """Write attention of q to out. Each row sees the tokens up to its own; padding rows are not written.

    q: [rows, heads, key_dim + rotated], before RoPE.
    tile_list: [num_tiles, TILE_FIELDS] int32, from `plan_tiles` with tiles.block_m rows each.
    scale: positive.
    out: [rows, heads, value_dim].
    The parts of q and out must be powers of two.
    """
    (_, heads, value_dim), rotated = out.shape, made.k_pe.shape[1]
    assert q.stride(2) == out.stride(2) == made.k_pe.stride(1) == 1 and out.stride(1) == value_dim and scale > 0
    assert q.shape[1:] == (heads, made.key_dim + rotated) and made.kv.shape[1:] == (heads, made.key_dim + value_dim)
    assert made.kv.is_contiguous() and tile_list.is_contiguous() and angles.cos.shape[1] == rotated // 2
    _attend_expanded[(heads, tile_list.shape[0])](
        q,
        made.kv,
        made.k_pe,
        out,
        angles.cos,
        angles.sin,
        angles.index,
        made.first,
        tile_list,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        made.kv.stride(0),
        made.k_pe.stride(0),
        out.stride(0),
        KEY=made.key_dim,
        ROTATED=rotated,
        VALUE=value_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        UPCAST=INTERPRETED,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def reference(q: Tensor, made: ExpandedKV, batch: PrefillBatch, scale: float) -> Tensor:
    """Return attention of rotated q in float64, chunk by chunk."""
    key_dim, value_dim = made.key_dim, made.kv.shape[2] - made.key_dim
    out = torch.zeros((*q.shape[:2], value_dim), dtype=torch.float64, device=q.device)
    starts, indptr, first = batch.starts.tolist(), batch.qo_indptr.tolist(), made.first.tolist()
    for c, start in enumerate(starts):
        mine = slice(indptr[c], indptr[c + 1])
        rows = mine.stop - mine.start
        tokens = slice(first[c], first[c] + start + rows)
        kv, k_pe = made.kv[tokens].double(), made.k_pe[tokens].double()
        scores = torch.einsum("rhd,nhd->hrn", q[mine, :, :key_dim].double(), kv[..., :key_dim])
        scores += torch.einsum("rhd,nd->hrn", q[mine, :, key_dim:].double(), k_pe)
        weights = (scores * scale).masked_fill(masked_positions(start, rows, None).to(q.device), float("-inf"))
        out[mine] = torch.einsum("hrn,nhd->rhd", weights.softmax(-1), kv[..., key_dim:])
    return out
