# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of `rope_store` and `rope` without norms: one launch between the QKV GEMM and attention."""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import LayerKV
from aerie.kernels.kv.stored_values_triton import as_stored, nan_where, without_nan
from aerie.kernels.pdl import pdl_wait
from aerie.kernels.rope.rope_store import Angles


@triton.jit
def _rope_store(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slot_ptr,
    k_inverse_scale,
    v_inverse_scale,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    STORES: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Rotate the queries of one KV head in one row, in place. Store the head's rotated key and its value to the pool.

    cos_ptr, sin_ptr: [.., ROTATED / 2], selected by position_ptr [rows].
    slot_ptr: [rows], token indices in the pool.
    k_inverse_scale, v_inverse_scale: factors on what FP8 pools store.
    GROUP: query heads per KV head.
    ROTATED: rotated numbers of a head, its first ones; the others of D stay.
    STORES: false rotates queries only.
    q_ptr: [rows, KV_HEADS * GROUP, D], written. k_ptr, v_ptr: [rows, KV_HEADS, D].
    k_pool_ptr, v_pool_ptr: [tokens, KV_HEADS, D], written with STORES.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        # Waits before it triggers, which makes it a fence: see `aerie.kernels.pdl`.

        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    half, d, g = tl.arange(0, ROTATED // 2), tl.arange(0, D), tl.arange(0, GROUP_PADDED)[:, None]
    angle = tl.load(position_ptr + row) * (ROTATED // 2) + half
    cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
    q = q_ptr + row * q_row_stride + (head * GROUP + g) * q_head_stride + half[None, :]
    x = tl.load(q, mask=g < GROUP, other=0.0).to(tl.float32)
    y = tl.load(q + ROTATED // 2, mask=g < GROUP, other=0.0).to(tl.float32)
    tl.store(q, (x * cos - y * sin).to(q_ptr.dtype.element_ty), mask=g < GROUP)
    tl.store(q + ROTATED // 2, (y * cos + x * sin).to(q_ptr.dtype.element_ty), mask=g < GROUP)
    if STORES:
        k = k_ptr + row * k_row_stride + head * k_head_stride + half
        x, y = tl.load(k).to(tl.float32), tl.load(k + ROTATED // 2).to(tl.float32)
        v = tl.load(v_ptr + row * v_row_stride + head * v_head_stride + d)
        v, spoilt = without_nan(v, 0)
        target = (tl.load(slot_ptr + row) * KV_HEADS + head) * D
        first = nan_where(spoilt, x * cos - y * sin).to(k_ptr.dtype.element_ty)
        second = nan_where(spoilt, y * cos + x * sin).to(k_ptr.dtype.element_ty)
        tl.store(k_pool_ptr + target + half, as_stored(first, k_pool_ptr, k_inverse_scale, INTERPRETED))
        tl.store(k_pool_ptr + target + ROTATED // 2 + half, as_stored(second, k_pool_ptr, k_inverse_scale, INTERPRETED))
        if ROTATED < D:
            as_is = tl.load(k_ptr + row * k_row_stride + head * k_head_stride + d, mask=d >= ROTATED, other=0.0)
            as_is = as_stored(nan_where(spoilt, as_is), k_pool_ptr, k_inverse_scale, INTERPRETED)
            tl.store(k_pool_ptr + target + d, as_is, mask=d >= ROTATED)
        tl.store(v_pool_ptr + target + d, as_stored(v, v_pool_ptr, v_inverse_scale, INTERPRETED))


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles,
    kv: LayerKV,
    slot_mapping: Tensor,
    norms: None = None,
) -> Tensor:
    """Implement `aerie.kernels.rope.rope_store.rope_store`: rotate q in place and return it; write rotated k, and v, to
    the layer's pages."""
    return _launch(q, k, v, angles, kv, slot_mapping)


def rope(q: Tensor, angles: Angles, norms: None = None) -> Tensor:
    """Implement `aerie.kernels.rope.rope_store.rope`: rotate q in place and return it."""
    return _launch(q, None, None, angles, None, None)


def _launch(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    angles: Angles,
    kv: LayerKV | None,
    slot_mapping: Tensor | None,
) -> Tensor:
    """Launch `_rope_store` on q [rows, heads, D], in place. Return q.

    k, v: [rows, kv_heads, D]; None: rotate q only.
    kv, slot_mapping: the pool's layer, and the rows' tokens in it; None without k and v.
    """
    rows, num_heads, head_dim = q.shape
    heads = num_heads if k is None else k.shape[1]  # each with a program per row
    group = num_heads // heads
    _rope_store[(rows, heads)](
        q,
        k,
        v,
        angles.cos,
        angles.sin,
        angles.index,
        None if kv is None else kv.k,
        None if kv is None else kv.v,
        slot_mapping,
        1.0 if kv is None else 1.0 / kv.k_scale,
        1.0 if kv is None else 1.0 / kv.v_scale,
        *(0 if x is None else x.stride(i) for x in (q, k, v) for i in range(2)),
        GROUP=group,
        GROUP_PADDED=max(1, triton.next_power_of_2(group)),
        KV_HEADS=heads,
        D=head_dim,
        ROTATED=2 * angles.cos.shape[-1],
        STORES=k is not None,
        INTERPRETED=INTERPRETED,
        num_warps=1,
        **pdl_wait(q.device),
    )
    return q
