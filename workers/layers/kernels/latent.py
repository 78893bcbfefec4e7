# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What multi-head latent attention does between its first projections and its products by heads, in one launch: the
norms of both latents, the rotary embedding of keys and the write of latent rows. Called by
`workers.layers.latent_attention` on GPUs.

Rotary embedding turns neighbours, as DeepSeek's checkpoints have them (`attention.rotation.rotate_pairs`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.online_softmax import INTERPRETED
from attention.kernels.pdl import pdl_wait, supports_pdl
from attention.rotation import rotate_pairs
from attention.views import LatentKV
from workers.layers.kernels.fp8_rows import Fp8Rows, store_fp8
from workers.layers.kernels.norm_activation import normed, num_warps, rms_norm_reference
from workers.layers.linear_method import Fp8Inputs
from workers.layers.rotary import Angles

_MANY_ROWS = 2048  # from which on a program has several: the next one's loads are under way while one is normed
_ROWS = 4  # of such a program


@triton.jit
def _read_latent(
    row_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    row,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The latent and what of the row is turned, as they are; cosines and sines; and where the row goes."""
    column, pair = tl.arange(0, BLOCK), tl.arange(0, ROTATED // 2)
    latent = tl.load(row_ptr + column, mask=column < LATENT, other=0.0)
    angle = tl.load(position_ptr + row) * (ROTATED // 2) + pair
    cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
    x, y = tl.load(row_ptr + LATENT + 2 * pair), tl.load(row_ptr + LATENT + 2 * pair + 1)
    return latent, x, y, cos, sin, tl.load(slot_ptr + row)


@triton.jit
def _keep_latent(
    pool_ptr,
    weight,
    latent,
    x,
    y,
    cos,
    sin,
    slot,
    eps,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column, pair = tl.arange(0, BLOCK), tl.arange(0, ROTATED // 2)
    latent, x, y = latent.to(tl.float32), x.to(tl.float32), y.to(tl.float32)
    target = pool_ptr + slot * (LATENT + ROTATED)
    kept = pool_ptr.dtype.element_ty
    tl.store(target + column, normed(latent, weight, LATENT, eps, kept).to(kept), mask=column < LATENT)
    tl.store(target + LATENT + 2 * pair, (x * cos - y * sin).to(kept))
    tl.store(target + LATENT + 2 * pair + 1, (y * cos + x * sin).to(kept))


@triton.jit
def _store_q(
    q_ptr,
    q_scales_ptr,
    weight,
    q,
    row,
    row_step,
    group_step,
    eps,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    result: tl.constexpr = q.dtype
    column = tl.arange(0, BLOCK)
    q = normed(q.to(tl.float32), weight, Q, eps, result).to(result)
    if q_scales_ptr is None:
        tl.store(q_ptr + row * Q + column, q, mask=column < Q)
    else:
        scales = q_scales_ptr + row * row_step
        store_fp8(q.to(tl.float32), q_ptr + row * Q, scales, 0, group_step, Q, BLOCK, BY_GROUP, INTERPRETED)


@triton.jit(do_not_specialize=["num_rows"])
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
    both_row_stride,
    q_row_step,
    q_group_step,
    eps,
    num_rows,
    ROWS: tl.constexpr,
    Q: tl.constexpr,
    Q_NORMED: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs of the latent parts of ROWS rows each, and programs of q's. A row is computed as if it were alone."""
    column, q_column = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_Q)
    q_inside = q_column < Q
    is_latent = tl.program_id(1) == 0
    weight = tl.load(row_weight_ptr + column, mask=(column < LATENT) & is_latent, other=0.0)
    if Q_NORMED:
        q_weight = tl.load(q_weight_ptr + q_column, mask=q_inside & (not is_latent), other=0.0)
    if PDL:
        # Waits before it triggers: for the kernels that the trigger starts it is a fence, see `attention.kernels.pdl`.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS
    last = tl.minimum(row + ROWS, num_rows) - 1
    both = both_ptr + row * both_row_stride
    if is_latent:
        latent, x, y, cos, sin, slot = _read_latent(
            both + Q, cos_ptr, sin_ptr, position_ptr, slot_ptr, row, LATENT, ROTATED, BLOCK_LATENT
        )
        if ROWS > 1:
            for _ in range(row, last):
                row += 1
                both += both_row_stride
                latent1, x1, y1, cos1, sin1, slot1 = _read_latent(
                    both + Q, cos_ptr, sin_ptr, position_ptr, slot_ptr, row, LATENT, ROTATED, BLOCK_LATENT
                )
                _keep_latent(pool_ptr, weight, latent, x, y, cos, sin, slot, eps, LATENT, ROTATED, BLOCK_LATENT)
                latent, x, y, cos, sin, slot = latent1, x1, y1, cos1, sin1, slot1
        _keep_latent(pool_ptr, weight, latent, x, y, cos, sin, slot, eps, LATENT, ROTATED, BLOCK_LATENT)
    elif Q_NORMED:
        q = tl.load(both + q_column, mask=q_inside, other=0.0)
        if ROWS > 1:
            for _ in range(row, last):
                both += both_row_stride
                next_q = tl.load(both + q_column, mask=q_inside, other=0.0)
                _store_q(
                    q_ptr,
                    q_scales_ptr,
                    q_weight,
                    q,
                    row,
                    q_row_step,
                    q_group_step,
                    eps,
                    Q,
                    BLOCK_Q,
                    BY_GROUP,
                    INTERPRETED,
                )
                row += 1
                q = next_q
        _store_q(
            q_ptr, q_scales_ptr, q_weight, q, row, q_row_step, q_group_step, eps, Q, BLOCK_Q, BY_GROUP, INTERPRETED
        )


def normed_latents(
    both: Tensor,
    q_weight: Tensor | None,
    row_weight: Tensor,
    eps: float,
    angles: Angles,
    kv: LatentKV,
    slot_mapping: Tensor,
    pdl: bool | None = None,
    wanted: Fp8Inputs | None = None,
) -> Tensor | Fp8Rows:
    """Writes the latent rows of a pass to `kv`, their latent part normed and the rest turned; returns q's part of
    `both`, normed if it has a norm, and then in the form that is wanted if any is.

    both: [rows, q + latent + rotated], last stride 1; a projection's result. q_weight: [q], None if q is no latent;
    row_weight: [latent]. slot_mapping: [rows] int64 token indices; rows that share one (padding) leave any one of their
    values. pdl: launch early; None wherever there is such a thing. Returns [rows, q]. Reference:
    `normed_latents_reference`.
    """
    latent, width = kv.latent, kv.rows.shape[2]
    rows, q_size, rotated = both.shape[0], both.shape[1] - width, width - latent
    assert both.stride(1) == 1 and kv.rows.is_contiguous() and slot_mapping.is_contiguous()
    assert angles.cos.dtype == torch.float32 and angles.cos.is_contiguous() and angles.sin.is_contiguous()
    assert angles.cos.shape[-1] == rotated // 2 and angles.index.is_contiguous()
    plain = both[:, :q_size]
    q: Tensor | Fp8Rows = plain
    if q_weight is not None:
        q = torch.empty_like(plain, memory_format=torch.contiguous_format) if wanted is None else wanted.empty(plain)
    scales = None if isinstance(q, Tensor) else q.scales
    block_q = 1 if q_weight is None else triton.next_power_of_2(q_size)
    block_latent = triton.next_power_of_2(latent)
    of_program = _ROWS if rows >= _MANY_ROWS else 1
    _normed_latents[(triton.cdiv(rows, of_program), 1 if q_weight is None else 2)](
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
        both.stride(0),
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        eps,
        rows,
        ROWS=of_program,
        Q=q_size,
        Q_NORMED=q_weight is not None,
        LATENT=latent,
        ROTATED=rotated,
        BLOCK_Q=block_q,
        BLOCK_LATENT=block_latent,
        BY_GROUP=wanted is not None and wanted.by_group,
        INTERPRETED=INTERPRETED,
        num_warps=num_warps(max(block_q, block_latent)),
        **pdl_wait(supports_pdl(both.device) if pdl is None else pdl),
    )
    return q


def normed_latents_reference(
    both: Tensor,
    q_weight: Tensor | None,
    row_weight: Tensor,
    eps: float,
    angles: Angles,
    kv: LatentKV,
    slot_mapping: Tensor,
) -> Tensor:
    width = kv.rows.shape[2]
    q, row = both[:, :-width], both[:, -width:]
    turned = rotate_pairs(row[:, kv.latent :].unsqueeze(1), angles.cos[angles.index], angles.sin[angles.index])
    kept = torch.cat((rms_norm_reference(row[:, : kv.latent], row_weight, eps), turned.squeeze(1)), dim=-1)
    kv.rows.view(-1, width).index_copy_(0, slot_mapping, kept)
    return q if q_weight is None else rms_norm_reference(q, q_weight, eps)
