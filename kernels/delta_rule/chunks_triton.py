# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of `delta_rule_chunks`, in four launches over blocks of 64 rows (the stages of flash-linear-attention):

convolve   q, k and v
solve      gates, and each block's triangular system: its rows w and u
advance    block by block: the state before the block, and the additions of the block's rows
finish     outputs and their gated norm

Operands of products are of `scratch_dtype`; sums and states are float32. The device divides the chunks into blocks
(`locate`), because the host does not know their lengths: a block has up to BLOCK rows, fewer before a snapshot or the
end of its chunk. So grids have the maximum number of blocks for this many rows and chunks."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.delta_rule.chunks import BLOCK, max_blocks, scratch_dtype
from aerie.kernels.delta_rule.formulas_triton import (
    PRECISION,
    dot,
    gate,
    inverse_of_unit_triangle,
    log_decay,
    norm_factors,
    sigmoid,
    silu,
)
from aerie.kernels.delta_rule.tables import ChunkTables, DeltaRows, DeltaWeights, LayerState


@triton.jit
def borders(chunk, inside, qo_ptr, starts_ptr, snapshot_at_ptr):
    """Return each chunk's first row, its number of rows, and its number of rows before the snapshot: 0 if the snapshot
    is at an end of the chunk or outside.

    chunk, inside: indices of chunks, and whether each exists.
    qo_ptr: [chunks + 1] first row of each chunk, and the last one's end.
    starts_ptr, snapshot_at_ptr: [chunks] position of the first row, and of the snapshot.
    """
    first = tl.load(qo_ptr + chunk, mask=inside, other=0)
    rows = tl.load(qo_ptr + chunk + 1, mask=inside, other=0) - first
    border = tl.load(snapshot_at_ptr + chunk, mask=inside, other=-1) - tl.load(starts_ptr + chunk, mask=inside, other=0)
    return first, rows, tl.where((border > 0) & (border < rows), border, 0)


@triton.jit
def num_blocks(rows, BLOCK: tl.constexpr):
    return (rows + BLOCK - 1) // BLOCK


@triton.jit
def block_rows(j, rows, border, BLOCK: tl.constexpr):
    """Return the first row of a chunk's block j, counted in the chunk, and its number of rows."""
    before = num_blocks(border, BLOCK)
    first = tl.where(j < before, j * BLOCK, border + (j - before) * BLOCK)
    end = tl.where(j < before, border, rows)
    return first, tl.minimum(end - first, BLOCK)


@triton.jit
def first_blocks(qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Return [CHUNKS_PADDED] each: the number of blocks before each chunk, and each chunk's number of blocks.

    qo_ptr, starts_ptr, snapshot_at_ptr: see `borders`, of num_chunks chunks. BLOCK: maximum rows of a block.
    """
    chunks = tl.arange(0, CHUNKS_PADDED)
    _, rows, border = borders(chunks, chunks < num_chunks, qo_ptr, starts_ptr, snapshot_at_ptr)
    own = num_blocks(border, BLOCK) + num_blocks(rows - border, BLOCK)
    return tl.cumsum(own, 0) - own, own


@triton.jit
def locate(
    index, qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return block `index`: its chunk, the row where the chunk starts, its first row in the chunk, its rows (or 0).

    qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED, BLOCK: see `first_blocks`.
    """
    before, own = first_blocks(qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED, BLOCK)
    mine = (before <= index) & (index < before + own)
    chunk = tl.sum(tl.where(mine, tl.arange(0, CHUNKS_PADDED), 0), 0)
    j = index - tl.sum(tl.where(mine, before, 0), 0)
    chunk_row, rows, border = borders(chunk, True, qo_ptr, starts_ptr, snapshot_at_ptr)
    first, count = block_rows(j, rows, border, BLOCK)
    return chunk, chunk_row, first, tl.where(tl.sum(mine.to(tl.int32), 0) > 0, count, 0)


CHANNELS = 128  # channels per program of `_convolve`


@triton.jit(do_not_specialize=["num_chunks"])
def _convolve(
    qkv_ptr, weight_ptr, conv_ptr, x_ptr,
    slots_ptr, qo_ptr, starts_ptr, snapshot_at_ptr,
    num_chunks, qkv_stride,
    C: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write x_ptr, the convolved q, k and v. A program computes CHANNELS channels of a block. The slot's history
    precedes a chunk, unless the chunk starts its prompt.

    qkv_ptr: [rows, C] before the convolution, qkv_stride between rows.
    weight_ptr: [4, C] taps, the oldest first. conv_ptr: [slots, 3, C], the slots' last three tokens.
    x_ptr: [rows, C], written.
    slots_ptr: [chunks] slot. qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED, BLOCK: see `first_blocks`.
    """
    chunk, chunk_row, first, count = locate(
        tl.program_id(1), qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED, BLOCK
    )
    if count > 0:
        has_history = tl.load(starts_ptr + chunk) > 0
        history_ptr = conv_ptr + tl.load(slots_ptr + chunk) * (3 * C)
        i, column = tl.arange(0, BLOCK), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        live, inside = i < count, column < C
        x = tl.zeros((BLOCK, CHANNELS), tl.float32)
        for tap in tl.static_range(4):
            at = first + i + (tap - 3)
            exists = live & ((at >= 0) | has_history)
            source = tl.where(at >= 0, qkv_ptr + (chunk_row + at).to(tl.int64) * qkv_stride, history_ptr + (at + 3) * C)
            raw = tl.load(source[:, None] + column[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_ptr + tap * C + column, mask=inside, other=0.0).to(tl.float32)
            x += raw.to(tl.float32) * weight[None, :]
        place = x_ptr + (chunk_row + first + i).to(tl.int64)[:, None] * C + column[None, :]
        y = silu(x).to(qkv_ptr.dtype.element_ty).to(x_ptr.dtype.element_ty)
        tl.store(place, y, mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_chunks"])
def _solve(
    x_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, w_ptr, u_ptr, decay_ptr,
    qo_ptr, starts_ptr, snapshot_at_ptr,
    num_chunks, b_stride, a_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write w_ptr, u_ptr and decay_ptr. A program computes one value head of a block.

    x_ptr: [rows, C] q, k and v after the convolution, from `_convolve`.
    b_ptr, a_ptr: [rows, HV] inputs of beta and of the decay, b_stride and a_stride between rows.
    a_log_ptr, dt_bias_ptr: [HV] weights of the decay.
    w_ptr, u_ptr: [rows, HV, DK], [rows, HV, DV] of the UT transform: solutions for keys and for values.
    decay_ptr: [rows, HV] float32, log decay since the block's start.
    qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED, BLOCK: see `first_blocks`.
    HK, HV, DK, DV: heads and dimensions of keys and values.
    """
    KEYS: tl.constexpr = HK * DK
    C: tl.constexpr = 2 * KEYS + HV * DV
    SOLVE: tl.constexpr = PRECISION if x_ptr.dtype.element_ty == tl.float32 else "tf32"
    h = tl.program_id(0)
    chunk, chunk_row, first, count = locate(
        tl.program_id(1), qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED, BLOCK
    )
    if count > 0:
        i, d, e = tl.arange(0, BLOCK), tl.arange(0, DK), tl.arange(0, DV)
        live, row = i < count, (chunk_row + first + i).to(tl.int64)
        b = tl.load(b_ptr + row * b_stride + h, mask=live, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + row * a_stride + h, mask=live, other=0.0).to(tl.float32)
        beta = tl.where(live, sigmoid(b), 0.0)
        g = log_decay(a, tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_bias_ptr + h).to(tl.float32))
        decay = tl.cumsum(tl.where(live, g, 0.0), 0)
        tl.store(decay_ptr + row * HV + h, decay, mask=live)
        at = x_ptr + row[:, None] * C + (KEYS + h // (HV // HK) * DK + d)[None, :]
        k = tl.load(at, mask=live[:, None], other=0.0)
        scale = norm_factors(k)
        above = i[None, :] < i[:, None]
        between = tl.exp(tl.where(above, decay[:, None] - decay[None, :], -float("inf")))
        between *= (beta * scale)[:, None] * scale[None, :]
        inverse = inverse_of_unit_triangle(dot(k, tl.trans(k)) * between, BLOCK, BLOCK, SOLVE)
        inverse *= beta[None, :]
        v = tl.load(x_ptr + row[:, None] * C + (2 * KEYS + h * DV + e)[None, :], mask=live[:, None], other=0.0)
        u = dot(inverse.to(v.dtype), v).to(v.dtype)
        tl.store(u_ptr + (row * HV + h)[:, None] * DV + e[None, :], u, mask=live[:, None])
        w = dot((inverse * (tl.exp(decay) * scale)[None, :]).to(k.dtype), k).to(k.dtype)
        tl.store(w_ptr + (row * HV + h)[:, None] * DK + d[None, :], w, mask=live[:, None])


@triton.jit
def _history(qkv_ptr, history_ptr, chunk_row, token, column, stride, has_history, C: tl.constexpr):
    """Return channels of one token, counted in the chunk; negative tokens precede the chunk."""
    inside = (token >= 0) | has_history
    source = tl.where(token >= 0, qkv_ptr + (chunk_row + token).to(tl.int64) * stride, history_ptr + (token + 3) * C)
    return tl.load(source + column, mask=inside & (column >= 0), other=0.0)


@triton.jit
def move_history(
    qkv_ptr, conv_ptr, saved_ptr, slot, entry, chunk_row, rows, snapshot, column, stride, has_history, C: tl.constexpr,
):  # fmt: skip
    """Store the last three tokens of a chunk as the slot's history, and the three before a snapshot as its history.

    qkv_ptr: [rows, C] before the convolution, stride between rows.
    conv_ptr, saved_ptr: [slots, 3, C], [.., 3, C] histories of slots and of snapshots, written at `slot` and `entry`.
    chunk_row, rows, snapshot: the chunk's first row, number of rows, and rows before the snapshot; 0 for none.
    column, has_history: channels to move, and whether tokens precede the chunk; else zeros do.
    """
    history_ptr = conv_ptr + slot * (3 * C)
    first = _history(qkv_ptr, history_ptr, chunk_row, rows - 3, column, stride, has_history, C)
    second = _history(qkv_ptr, history_ptr, chunk_row, rows - 2, column, stride, has_history, C)
    third = _history(qkv_ptr, history_ptr, chunk_row, rows - 1, column, stride, has_history, C)
    if snapshot > 0:
        target_ptr = saved_ptr + entry * (3 * C) + column
        for i in tl.static_range(3):
            channels = _history(qkv_ptr, history_ptr, chunk_row, snapshot - 3 + i, column, stride, has_history, C)
            tl.store(target_ptr + i * C, channels)
    # read all before writing: the new history of a short chunk contains tokens of the old one
    tl.debug_barrier()
    tl.store(history_ptr + column, first)
    tl.store(history_ptr + C + column, second)
    tl.store(history_ptr + 2 * C + column, third)


@triton.jit(do_not_specialize=["num_chunks"])
def _advance(
    qkv_ptr, x_ptr, w_ptr, u_ptr, decay_ptr, begin_ptr, state_ptr, conv_ptr, saved_state_ptr, saved_conv_ptr,
    slots_ptr, qo_ptr, starts_ptr, snapshot_at_ptr, snapshot_entry_ptr,
    num_chunks, qkv_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Advance PART columns of a value head's state over a chunk, block by block; write the states before the blocks.

    qkv_ptr: [rows, C] before the convolution, qkv_stride between rows: its last tokens become the slot's history.
    x_ptr: [rows, C] q, k and v after the convolution, from `_convolve`.
    w_ptr, u_ptr, decay_ptr: w, u and [rows, HV] decays of the blocks' rows, from `_solve`; u is replaced.
    begin_ptr: [blocks, HV, DK, DV] states before the blocks, written.
    state_ptr, conv_ptr: [slots, HV, DK, DV] float32 and [slots, 3, C], written: state and history after the chunk.
    slots_ptr, qo_ptr, starts_ptr: slot, first row and position of the first row of each of num_chunks chunks.
    snapshot_at_ptr, snapshot_entry_ptr: [chunks] position at which the state is saved, and its index in saved_state_ptr
        [.., HV, DK, DV] and saved_conv_ptr [.., 3, C].
    HK, HV, DK, DV: heads and dimensions of keys and values. CHUNKS_PADDED, BLOCK: see `first_blocks`.
    """
    KEYS: tl.constexpr = HK * DK
    C: tl.constexpr = 2 * KEYS + HV * DV
    h, part, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk_row, rows, border = borders(chunk, True, qo_ptr, starts_ptr, snapshot_at_ptr)
    if rows > 0:
        key_head = h // (HV // HK)
        before, own = first_blocks(qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED, BLOCK)
        mine = tl.arange(0, CHUNKS_PADDED) == chunk
        block, blocks = tl.sum(tl.where(mine, before, 0), 0), tl.sum(tl.where(mine, own, 0), 0)
        slot, entry = tl.load(slots_ptr + chunk), tl.load(snapshot_entry_ptr + chunk)
        start = tl.load(starts_ptr + chunk)
        snapshot = tl.load(snapshot_at_ptr + chunk) - start
        i, d, e = tl.arange(0, BLOCK), tl.arange(0, DK), part * PART + tl.arange(0, PART)
        of_head = h * (DK * DV) + d[:, None] * DV + e[None, :]
        state = tl.load(state_ptr + slot * (HV * DK * DV) + of_head, mask=(start + d[:, None] * 0) > 0, other=0.0)
        for j in range(blocks):
            first, count = block_rows(j, rows, border, BLOCK)
            live, row = i < count, (chunk_row + first + i).to(tl.int64)
            kept = state.to(x_ptr.dtype.element_ty)
            tl.store(begin_ptr + (block + j).to(tl.int64) * (HV * DK * DV) + of_head, kept)
            w = tl.load(w_ptr + (row * HV + h)[:, None] * DK + d[None, :], mask=live[:, None], other=0.0)
            u_at = u_ptr + (row * HV + h)[:, None] * DV + e[None, :]
            added = tl.load(u_at, mask=live[:, None], other=0.0).to(tl.float32) - dot(w, kept)
            tl.store(u_at, added.to(u_ptr.dtype.element_ty), mask=live[:, None])
            at = x_ptr + row[:, None] * C + (KEYS + key_head * DK + d)[None, :]
            k = tl.load(at, mask=live[:, None], other=0.0)
            decay = tl.load(decay_ptr + row * HV + h, mask=live, other=0.0)
            last = tl.sum(tl.where(i == count - 1, decay, 0.0), 0)
            added *= tl.where(live, tl.exp(last - decay) * norm_factors(k), 0.0)[:, None]
            state = tl.exp(last) * state + dot(tl.trans(k), added.to(k.dtype))
            if first + count == snapshot:
                tl.store(saved_state_ptr + entry * (HV * DK * DV) + of_head, state)
        tl.store(state_ptr + slot * (HV * DK * DV) + of_head, state)
        snapshot = tl.where(snapshot <= rows, snapshot, 0)
        move_history(
            qkv_ptr, conv_ptr, saved_conv_ptr, slot, entry, chunk_row, rows, snapshot, 2 * KEYS + h * DV + e,
            qkv_stride, start > 0, C,
        )  # fmt: skip
        if (part == 0) & (h == key_head * (HV // HK)):
            for keys in tl.static_range(2):
                column = keys * KEYS + key_head * DK + d
                move_history(
                    qkv_ptr, conv_ptr, saved_conv_ptr, slot, entry, chunk_row, rows, snapshot, column,
                    qkv_stride, start > 0, C,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_chunks", "num_rows"])
def _finish(
    z_ptr, out_ptr, norm_ptr, x_ptr, u_ptr, decay_ptr, begin_ptr,
    qo_ptr, starts_ptr, snapshot_at_ptr,
    num_chunks, num_rows, z_stride, out_stride, scale_eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIGMOID: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the outputs and their gated norm, and zeros to padding rows. A program computes one value head of a block.

    z_ptr: [rows, HV * DV] inputs of the gate, z_stride between rows.
    out_ptr: [num_rows, HV * DV], written, out_stride between rows.
    norm_ptr: [DV] weights of the norm, scale_eps its epsilon.
    x_ptr, u_ptr, decay_ptr, begin_ptr: q and k, additions to the state, decays, and states before the blocks, after
        `_advance`.
    qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED, BLOCK: see `first_blocks`.
    HK, HV, DK, DV: heads and dimensions of keys and values. SIGMOID: the gate is a sigmoid; else SiLU.
    """
    h, index = tl.program_id(0), tl.program_id(1)
    key_head = h // (HV // HK)
    i, d, e = tl.arange(0, BLOCK), tl.arange(0, DK), tl.arange(0, DV)
    padding = index * BLOCK + i
    is_padding = (padding >= tl.load(qo_ptr + num_chunks)) & (padding < num_rows)
    zeros = tl.zeros((BLOCK, DV), out_ptr.dtype.element_ty)
    column = h * DV + e[None, :]
    tl.store(out_ptr + padding.to(tl.int64)[:, None] * out_stride + column, zeros, mask=is_padding[:, None])
    chunk, chunk_row, first, count = locate(
        index, qo_ptr, starts_ptr, snapshot_at_ptr, num_chunks, CHUNKS_PADDED, BLOCK
    )
    if count > 0:
        live, row = i < count, (chunk_row + first + i).to(tl.int64)
        at = x_ptr + row[:, None] * (2 * HK * DK + HV * DV) + (key_head * DK + d)[None, :]
        q = tl.load(at, mask=live[:, None], other=0.0)
        k = tl.load(at + HK * DK, mask=live[:, None], other=0.0)
        added = tl.load(u_ptr + (row * HV + h)[:, None] * DV + e[None, :], mask=live[:, None], other=0.0)
        begin = tl.load(begin_ptr + (index.to(tl.int64) * HV + h) * (DK * DV) + d[:, None] * DV + e[None, :])
        decay = tl.load(decay_ptr + row * HV + h, mask=live, other=0.0)
        sees = (i[None, :] <= i[:, None]) & live[None, :]
        scores = dot(q, tl.trans(k)) * norm_factors(k)[None, :]
        scores *= tl.exp(tl.where(sees, decay[:, None] - decay[None, :], -float("inf")))
        o = tl.exp(decay)[:, None] * dot(q, begin) + dot(scores.to(q.dtype), added)
        o *= norm_factors(q)[:, None] * DK**-0.5
        z = tl.load(z_ptr + row[:, None] * z_stride + column, mask=live[:, None], other=0.0).to(tl.float32)
        o *= tl.rsqrt(tl.sum(o * o, 1) / DV + scale_eps)[:, None] * tl.load(norm_ptr + e).to(tl.float32)[None, :]
        out = (o * gate(z, SIGMOID)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * out_stride + column, out, mask=live[:, None])


@dataclass(frozen=True)
class ChunkTiles:
    """Tiles of the four kernels.

    part: columns of the state per program of `_advance`.
    solve, advance, finish: warps of these kernels.
    stages: Triton's num_stages of `_advance`: blocks that are in shared memory or being loaded.
    """

    part: int
    solve: int
    advance: int
    finish: int
    stages: int = 2


def chunk_tiles(value_dim: int) -> ChunkTiles:
    """Return the tiles. For 8,192 tokens of a layer of Qwen3.6-27B on an H200, four warps in `_solve` and `_finish`
    took 1,096 us, eight 1,551 (`python -m tests.bench delta_chunks`)."""
    return ChunkTiles(min(value_dim, 32), solve=4, advance=4, finish=4)


def padded_chunks(num_chunks: int) -> int:
    """Return `num_chunks` padded to a power of two. Few values are used, because each compiles the kernels: an engine
    start compiles the smallest, and the one for as many chunks as slots."""
    return 8 if num_chunks <= 8 else max(64, int(triton.next_power_of_2(num_chunks)))


def delta_rule_chunks(
    rows: DeltaRows,
    weights: DeltaWeights,
    layer: LayerState,
    tables: ChunkTables,
    out: Tensor,
    tiles: ChunkTiles | None = None,
) -> None:
    """Implement `aerie.kernels.delta_rule.chunks.delta_rule_chunks`: write the gated outputs of prompt chunks to out
    [N, Hv * dv], and advance the states of their slots by all rows. Allocates `scratch_bytes`."""
    heads, num_rows, num_chunks = layer.heads, out.shape[0], tables.slots.shape[0]
    dtype, device = scratch_dtype(heads, rows.qkv.dtype), out.device
    x = torch.empty((num_rows, heads.channels), dtype=dtype, device=device)
    w = torch.empty((num_rows, heads.value_heads, heads.key_dim), dtype=dtype, device=device)
    u = torch.empty((num_rows, heads.value_heads, heads.value_dim), dtype=dtype, device=device)
    decay = torch.empty((num_rows, heads.value_heads), dtype=torch.float32, device=device)
    blocks = max_blocks(num_rows, num_chunks)
    begin = torch.empty((blocks, *layer.state.shape[1:]), dtype=dtype, device=device)
    tiles = tiles or chunk_tiles(heads.value_dim)
    sizes = {"HK": heads.key_heads, "HV": heads.value_heads, "DK": heads.key_dim, "DV": heads.value_dim}
    sizes |= {"CHUNKS_PADDED": padded_chunks(num_chunks), "BLOCK": BLOCK}
    of_chunks = (tables.qo_indptr, tables.starts, tables.snapshot_at)
    of_blocks = {name: sizes[name] for name in ("CHUNKS_PADDED", "BLOCK")}
    _convolve[(triton.cdiv(heads.channels, CHANNELS), blocks)](
        rows.qkv, weights.conv, layer.conv, x, tables.slots, *of_chunks, num_chunks, rows.qkv.stride(0),
        C=heads.channels, CHANNELS=CHANNELS, **of_blocks, num_warps=4, num_stages=1,
    )  # fmt: skip
    _solve[(heads.value_heads, blocks)](
        x, rows.b, rows.a, weights.a_log, weights.dt_bias, w, u, decay, *of_chunks,
        num_chunks, rows.b.stride(0), rows.a.stride(0),
        **sizes, num_warps=tiles.solve, num_stages=1,
    )  # fmt: skip
    _advance[(heads.value_heads, heads.value_dim // tiles.part, num_chunks)](
        rows.qkv, x, w, u, decay, begin, layer.state, layer.conv, layer.saved_state, layer.saved_conv,
        tables.slots, *of_chunks, tables.snapshot_entry, num_chunks, rows.qkv.stride(0),
        **sizes, PART=tiles.part, num_warps=tiles.advance, num_stages=tiles.stages,
    )  # fmt: skip
    _finish[(heads.value_heads, blocks)](
        rows.z, out, weights.norm, x, u, decay, begin, *of_chunks,
        num_chunks, num_rows, rows.z.stride(0), out.stride(0), weights.eps,
        **sizes, SIGMOID=weights.sigmoid, num_warps=tiles.finish, num_stages=1,
    )  # fmt: skip
