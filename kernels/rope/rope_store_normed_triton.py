# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of `rope_store` and `rope` with norms: one launch between the QKV GEMM and attention. Per row and KV head,
one warp computes key and value, and one or more compute the queries. A program has four such warps, for four rows,
because starting programs takes long (256 rows of Qwen3-8B: 2.6 us; 5.3 us with one row per program). Tiles, and so a
row's bits, do not depend on the number of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import LayerKV
from aerie.kernels.kv.stored_values_triton import as_stored, nan_where, without_nan
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.norm.norm_triton import inverse_rms, scaled_by
from aerie.kernels.pdl import pdl_wait
from aerie.kernels.rope.rope_store import Angles

_MAX_QUERY_ELEMENTS = 512  # query elements per program, 16 per thread; more only if one head has more
_ROWS = 4  # per program, each with a warp


@triton.jit
def _load_parts(x_ptr, inside, D: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Load the heads at x_ptr [n, 1] where inside [n, 1]. Return both halves of the rotated dimensions [n, HALF], and
    the other dimensions [n, BLOCK], zeros before dimension ROTATED."""
    half, d = tl.arange(0, HALF)[None, :], tl.arange(0, BLOCK)[None, :]
    in_half = inside & (half < ROTATED // 2)
    x = tl.load(x_ptr + half, mask=in_half, other=0.0)
    y = tl.load(x_ptr + ROTATED // 2 + half, mask=in_half, other=0.0)
    rest = x
    if ROTATED < D:
        rest = tl.load(x_ptr + d, mask=inside & (d >= ROTATED) & (d < D), other=0.0)
    return x, y, rest


@triton.jit
def _rotated(parts, weights, cos_ptr, sin_ptr, eps, D: tl.constexpr, ROTATED: tl.constexpr):
    """Normalise heads, round them to their dtype, rotate them, and round again.

    parts, weights: heads and a norm's weights, from `_load_parts`.
    cos_ptr, sin_ptr: [1, HALF] addresses of the heads' angles.
    eps: epsilon of the norm. D, ROTATED: dimensions of a head, and how many of them are rotated.
    """
    x, y, rest = parts
    in_half = tl.arange(0, x.shape[1])[None, :] < ROTATED // 2
    cos, sin = tl.load(cos_ptr, mask=in_half, other=0.0), tl.load(sin_ptr, mask=in_half, other=0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    weight_x, weight_y, weight_rest = weights
    squares = tl.sum(x * x + y * y, 1)
    if ROTATED < D:
        full = rest.to(tl.float32)
        squares += tl.sum(full * full, 1)
    inverse = inverse_rms(squares, D, eps)[:, None]
    x = scaled_by(x, inverse, weight_x, dtype).to(dtype).to(tl.float32)
    y = scaled_by(y, inverse, weight_y, dtype).to(dtype).to(tl.float32)
    if ROTATED < D:
        rest = scaled_by(full, inverse, weight_rest, dtype).to(dtype)
    return (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype), rest


@triton.jit(do_not_specialize=["rows"])
def _normed_rope_store(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slot_ptr,
    k_inverse_scale,
    v_inverse_scale,
    eps,
    rows,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    out_row_stride,
    out_head_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    STORES: tl.constexpr,
    V_NORMED: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Normalise and rotate q and k, and store k and v in the pools.

    Grid: ROWS rows x KV heads x parts. A part has HEADS of the GROUP query heads; the last one key and value.
    q_ptr, out_ptr: [rows, q heads, D], out is written. k_ptr, v_ptr: [rows, KV_HEADS, D]. Each has its row and head
        stride.
    q_weight_ptr, k_weight_ptr: [D] weights of the norms, eps their epsilon.
    cos_ptr, sin_ptr: [positions, ROTATED / 2] float32. position_ptr: [rows].
    k_pool_ptr, v_pool_ptr: the pools, written at the rows' token indices slot_ptr [rows].
    k_inverse_scale, v_inverse_scale: factors before K and V are stored in 8 bits.
    BLOCK, HALF: D and ROTATED / 2, padded.
    STORES: there are keys and values; else only q is rotated.
    V_NORMED: v is normalised too, without weights.
    PDL: launch before the previous kernel ends, see `aerie.kernels.pdl`.
    """
    first_row, head, part = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1), tl.program_id(2)
    half, d = tl.arange(0, HALF)[None, :], tl.arange(0, BLOCK)[None, :]
    in_half, inside, in_rest = half < ROTATED // 2, d < D, (d >= ROTATED) & (d < D)
    one = tl.arange(0, 1)[:, None]
    stores = part * HEADS >= GROUP
    weight_ptr = q_weight_ptr
    if STORES:
        weight_ptr = tl.where(stores, k_weight_ptr, q_weight_ptr)
    weights = _load_parts(weight_ptr + one, one == 0, D, ROTATED, HALF, BLOCK)
    if PDL:
        # Waits before it triggers, which makes it a fence: see `aerie.kernels.pdl`.

        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if not stores:
        tile = tl.arange(0, ROWS * HEADS)[:, None]
        row, g = first_row + tile // HEADS, part * HEADS + tile % HEADS
        there = (g < GROUP) & (row < rows)
        # Heads are loaded before the angles, whose addresses depend on a load of the position.
        angle = tl.load(position_ptr + row, mask=row < rows, other=0) * (ROTATED // 2) + half
        q = q_ptr + row * q_row_stride + (head * GROUP + g) * q_head_stride
        out = out_ptr + row * out_row_stride + (head * GROUP + g) * out_head_stride
        parts = _load_parts(q, there, D, ROTATED, HALF, BLOCK)
        first, second, rest = _rotated(parts, weights, cos_ptr + angle, sin_ptr + angle, eps, D, ROTATED)
        tl.store(out + half, first, mask=there & in_half)
        tl.store(out + ROTATED // 2 + half, second, mask=there & in_half)
        if ROTATED < D:
            tl.store(out + d, rest, mask=there & in_rest)
    elif STORES:
        kv_row = first_row + tl.arange(0, ROWS)[:, None]
        stored = kv_row < rows
        kv_angle = tl.load(position_ptr + kv_row, mask=stored, other=0) * (ROTATED // 2) + half
        target = (tl.load(slot_ptr + kv_row, mask=stored, other=0) * KV_HEADS + head) * D
        k = k_ptr + kv_row * k_row_stride + head * k_head_stride
        k_parts = _load_parts(k, stored, D, ROTATED, HALF, BLOCK)
        v = tl.load(v_ptr + kv_row * v_row_stride + head * v_head_stride + d, mask=stored & inside, other=0.0)
        if V_NORMED:
            full = v.to(tl.float32)
            v = (full * inverse_rms(tl.sum(full * full, 1), D, eps)[:, None]).to(v.dtype)
        k_first, k_second, k_rest = _rotated(k_parts, weights, cos_ptr + kv_angle, sin_ptr + kv_angle, eps, D, ROTATED)
        v, spoilt = without_nan(v, 1)
        spoilt = spoilt[:, None]
        k_first = as_stored(nan_where(spoilt, k_first), k_pool_ptr, k_inverse_scale, INTERPRETED)
        k_second = as_stored(nan_where(spoilt, k_second), k_pool_ptr, k_inverse_scale, INTERPRETED)
        tl.store(k_pool_ptr + target + half, k_first, mask=stored & in_half)
        tl.store(k_pool_ptr + target + ROTATED // 2 + half, k_second, mask=stored & in_half)
        if ROTATED < D:
            k_rest = as_stored(nan_where(spoilt, k_rest), k_pool_ptr, k_inverse_scale, INTERPRETED)
            tl.store(k_pool_ptr + target + d, k_rest, mask=stored & in_rest)
        v = as_stored(v, v_pool_ptr, v_inverse_scale, INTERPRETED)
        tl.store(v_pool_ptr + target + d, v, mask=stored & inside)


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles,
    kv: LayerKV,
    slot_mapping: Tensor,
    norms: HeadNorms,
) -> Tensor:
    """Implement `aerie.kernels.rope.rope_store.rope_store` with norms: return normed and rotated q; write normed and
    rotated k, and v, to the layer's pages."""
    return _launch(q, k, v, angles, kv, slot_mapping, norms)


def rope(q: Tensor, angles: Angles, norms: HeadNorms) -> Tensor:
    """Implement `aerie.kernels.rope.rope_store.rope` with norms: return normed and rotated q."""
    return _launch(q, None, None, angles, None, None, norms)


def _launch(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    angles: Angles,
    kv: LayerKV | None,
    slot_mapping: Tensor | None,
    norms: HeadNorms,
) -> Tensor:
    """Launch `_normed_rope_store` on q [rows, heads, D]. Return the normed and rotated q, contiguous.

    k, v: [rows, kv_heads, D]; None: q only.
    kv, slot_mapping: the pool's layer, and the rows' tokens in it; None without k and v.
    norms: norms of the heads of q and k.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads, half = 1 if k is None else k.shape[1], angles.cos.shape[-1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = num_heads // num_kv_heads
    heads = query_heads(group, head_dim)
    _normed_rope_store[(triton.cdiv(rows, _ROWS), num_kv_heads, triton.cdiv(group, heads) + (k is not None))](
        q,
        k,
        v,
        out,
        norms.q,
        norms.k,
        angles.cos,
        angles.sin,
        angles.index,
        None if kv is None else kv.k,
        None if kv is None else kv.v,
        slot_mapping,
        1.0 if kv is None else 1.0 / kv.k_scale,
        1.0 if kv is None else 1.0 / kv.v_scale,
        norms.eps,
        rows,
        *(0 if x is None else x.stride(i) for x in (q, k, v, out) for i in range(2)),
        ROWS=_ROWS,
        GROUP=group,
        HEADS=heads,
        KV_HEADS=num_kv_heads,
        D=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        ROTATED=2 * half,
        HALF=triton.next_power_of_2(half),
        STORES=k is not None,
        V_NORMED=norms.norms_values,
        INTERPRETED=INTERPRETED,
        num_warps=_ROWS,
        **pdl_wait(q.device),
    )
    return out


def query_heads(group: int, head_dim: int) -> int:
    """Return the query heads per program, a power of two. group: query heads per KV head."""
    padded: int = triton.next_power_of_2(group)
    fitting: int = _MAX_QUERY_ELEMENTS // triton.next_power_of_2(head_dim)
    return max(1, min(padded, fitting))
