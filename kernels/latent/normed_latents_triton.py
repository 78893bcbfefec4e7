# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of `aerie.kernels.latent.normed_latents`: one launch, one program per row and latent."""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.fp8.rows_triton import store_fp8
from aerie.kernels.gemm.splits_triton import sum_of_splits
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.fp8_triton import as_stored
from aerie.kernels.kv.nan_values_triton import nan_where, without_nan
from aerie.kernels.kv.views import LatentKV
from aerie.kernels.norm.norm_triton import normed, num_warps
from aerie.kernels.pdl import pdl_wait
from aerie.kernels.rope.rotation import Angles


@triton.jit
def _load(pointers, there, part_step, PARTS: tl.constexpr, KEPT: tl.constexpr):
    """Return the sum of all parts in float32, rounded to KEPT like a GEMM's result."""
    return sum_of_splits(pointers, there, part_step, PARTS).to(KEPT).to(tl.float32)


@triton.jit
def _normed_latents(
    both_ptr,
    q_weight_ptr,
    row_weight_ptr,
    q_ptr,
    pool_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    q_scales_ptr,
    inverse_scale,
    both_row_stride,
    part_step,
    q_row_step,
    q_group_step,
    eps,
    PARTS: tl.constexpr,
    Q: tl.constexpr,
    Q_NORMED: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BY_GROUP: tl.constexpr,
    FENCE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row, is_latent = tl.program_id(0).to(tl.int64), tl.program_id(1) == 0
    column, q_column = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_Q)
    inside, q_inside = column < LATENT, q_column < Q
    weight = tl.load(row_weight_ptr + column, mask=inside & is_latent, other=0.0)
    if Q_NORMED:
        q_weight = tl.load(q_weight_ptr + q_column, mask=q_inside & (not is_latent), other=0.0)
    if PDL:
        if not FENCE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if FENCE:  # a fence waits before it triggers: see `aerie.kernels.pdl`
            tl.extra.cuda.gdc_launch_dependents()
    both = both_ptr + row * both_row_stride
    kept = row_weight_ptr.dtype.element_ty
    if is_latent:
        latent = _load(both + Q + column, inside, part_step, PARTS, kept)
        pair = tl.arange(0, ROTATED // 2)
        angle = tl.load(position_ptr + row) * (ROTATED // 2) + pair
        cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
        x = _load(both + Q + LATENT + 2 * pair, None, part_step, PARTS, kept)
        y = _load(both + Q + LATENT + 2 * pair + 1, None, part_step, PARTS, kept)
        target = pool_ptr + tl.load(slot_ptr + row) * (LATENT + ROTATED)
        latent, spoilt = without_nan(normed(latent, weight, LATENT, eps, kept).to(kept), 0)
        first = nan_where(spoilt, x * cos - y * sin).to(kept)
        second = nan_where(spoilt, y * cos + x * sin).to(kept)
        tl.store(target + column, as_stored(latent, pool_ptr, inverse_scale, INTERPRETED), mask=inside)
        tl.store(target + LATENT + 2 * pair, as_stored(first, pool_ptr, inverse_scale, INTERPRETED))
        tl.store(target + LATENT + 2 * pair + 1, as_stored(second, pool_ptr, inverse_scale, INTERPRETED))
    elif Q_NORMED:
        q = _load(both + q_column, q_inside, part_step, PARTS, kept)
        q = normed(q, q_weight, Q, eps, kept).to(kept)
        if q_scales_ptr is None:
            tl.store(q_ptr + row * Q + q_column, q, mask=q_inside)
        else:
            scales = q_scales_ptr + row * q_row_step
            store_fp8(q.to(tl.float32), q_ptr + row * Q, scales, 0, q_group_step, Q, BLOCK_Q, BY_GROUP, INTERPRETED)


def normed_latents(
    both: Tensor,
    q_weight: Tensor | None,
    row_weight: Tensor,
    eps: float,
    angles: Angles,
    kv: LatentKV,
    slot_mapping: Tensor,
    wanted: Fp8Inputs | None = None,
    fence: bool = True,
) -> Tensor | Fp8Rows:
    """`aerie.kernels.latent.normed_latents.normed_latents`."""
    latent, width = kv.latent, kv.rows.shape[2]
    parts = both if both.dim() == 3 else both.unsqueeze(0)
    rows, q_size, rotated = parts.shape[1], parts.shape[2] - width, width - latent
    plain = parts[0, :, :q_size]
    q: Tensor | Fp8Rows = plain
    if q_weight is not None:
        q = plain.new_empty(plain.shape, dtype=row_weight.dtype) if wanted is None else wanted.empty(plain)
    scales = None if isinstance(q, Tensor) else q.scales
    block_q = 1 if q_weight is None else triton.next_power_of_2(q_size)
    block_latent = triton.next_power_of_2(latent)
    _normed_latents[(rows, 1 if q_weight is None else 2)](
        both,
        q_weight,
        row_weight,
        q if isinstance(q, Tensor) else q.values,
        kv.rows,
        angles.cos,
        angles.sin,
        angles.index,
        slot_mapping,
        scales,
        1.0 / kv.scale,
        parts.stride(1),
        parts.stride(0) if parts.shape[0] > 1 else 0,
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        eps,
        PARTS=parts.shape[0],
        Q=q_size,
        Q_NORMED=q_weight is not None,
        LATENT=latent,
        ROTATED=rotated,
        BLOCK_Q=block_q,
        BLOCK_LATENT=block_latent,
        BY_GROUP=wanted is not None and wanted.by_group,
        FENCE=fence,
        INTERPRETED=INTERPRETED,
        # with partial sums each thread reads several numbers in sequence, so more warps share them
        num_warps=16 if parts.shape[0] > 1 else num_warps(max(block_q, block_latent)),
        **pdl_wait(both.device),
    )
    return q
