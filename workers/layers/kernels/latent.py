# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What multi-head latent attention does between its projections, in two launches and one after attention: the norms of
both latents with the rotary embedding of keys and the write of latent rows; the product that absorbs the up-projection
of keys into q, with the rotary embedding of q; and that of values. Called by `workers.layers.latent_attention` on GPUs.

Rotary embedding turns neighbours, as DeepSeek's checkpoints have them (`attention.rotation.rotate_pairs`).
"""

from typing import NamedTuple

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

FEW_ROWS = 16  # of a product, which are then multiplied by more and narrower tiles
FIXED_ROWS = 64  # whose tiles are taken for any number of rows where tiles must not depend on it


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
    both_row_stride,
    q_row_step,
    q_group_step,
    eps,
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
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        # Waits first: for the kernels that the trigger starts this one is a fence, see `attention.kernels.pdl`.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    both = both_ptr + row * both_row_stride
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_LATENT)
        inside = column < LATENT
        weight = tl.load(row_weight_ptr + column, mask=inside, other=0.0)
        latent = tl.load(both + Q + column, mask=inside, other=0.0).to(tl.float32)
        pair = tl.arange(0, ROTATED // 2)
        angle = tl.load(position_ptr + row) * (ROTATED // 2) + pair
        cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
        x = tl.load(both + Q + LATENT + 2 * pair).to(tl.float32)
        y = tl.load(both + Q + LATENT + 2 * pair + 1).to(tl.float32)
        target = pool_ptr + tl.load(slot_ptr + row) * (LATENT + ROTATED)
        kept = pool_ptr.dtype.element_ty
        tl.store(target + column, normed(latent, weight, LATENT, eps, kept).to(kept), mask=inside)
        tl.store(target + LATENT + 2 * pair, (x * cos - y * sin).to(kept))
        tl.store(target + LATENT + 2 * pair + 1, (y * cos + x * sin).to(kept))
    elif Q_NORMED:
        q_column = tl.arange(0, BLOCK_Q)
        q_inside = q_column < Q
        q_weight = tl.load(q_weight_ptr + q_column, mask=q_inside, other=0.0)
        q = tl.load(both + q_column, mask=q_inside, other=0.0).to(tl.float32)
        result = both_ptr.dtype.element_ty
        q = normed(q, q_weight, Q, eps, result).to(result)
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
        both.stride(0),
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        eps,
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


@triton.jit(do_not_specialize=["num_rows"])
def _head_products(
    x_ptr,
    weight_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    num_rows,
    x_row_stride,
    x_head_stride,
    weight_head_stride,
    weight_in_stride,
    weight_out_stride,
    out_row_stride,
    out_head_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    weight = weight_ptr + head * weight_head_stride
    weight += k[:, None] * weight_in_stride + n[None, :] * weight_out_stride
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    live = (m < num_rows)[:, None]
    x_row = x_ptr + m.to(tl.int64)[:, None] * x_row_stride + head * x_head_stride
    out_row = out_ptr + m.to(tl.int64)[:, None] * out_row_stride + head * out_head_stride
    if BLOCK_K >= IN:
        w = tl.load(weight, mask=(k < IN)[:, None] & (n < OUT)[None, :], other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_row + k[None, :], mask=live & (k < IN)[None, :], other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w, input_precision="ieee")
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, IN, BLOCK_K):
            x = tl.load(x_row + (start + k)[None, :], mask=live & (start + k < IN)[None, :], other=0.0)
            w_inside = (start + k < IN)[:, None] & (n < OUT)[None, :]
            w = tl.load(weight + start * weight_in_stride, mask=w_inside, other=0.0)
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            y = tl.dot(x, w, y, input_precision="ieee")
    kept = out_ptr.dtype.element_ty
    tl.store(out_row + n[None, :], y.to(kept), mask=live & (n < OUT)[None, :])
    if ROTATED > 0 and tl.program_id(0) == 0:
        pair = tl.arange(0, ROTATED // 2)[None, :]
        angle = tl.load(position_ptr + m, mask=m < num_rows, other=0)[:, None] * (ROTATED // 2) + pair
        cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
        first = tl.load(x_row + IN + 2 * pair, mask=live, other=0.0).to(tl.float32)
        second = tl.load(x_row + IN + 2 * pair + 1, mask=live, other=0.0).to(tl.float32)
        tl.store(out_row + OUT + 2 * pair, (first * cos - second * sin).to(kept), mask=live)
        tl.store(out_row + OUT + 2 * pair + 1, (second * cos + first * sin).to(kept), mask=live)


class ProductBlocks(NamedTuple):
    """Of a program: rows, columns, and as many inner dimensions at a time; the smallest power of two that holds all of
    them where they are multiplied at once."""

    m: int
    n: int
    k: int
    warps: int
    stages: int = 3


def product_blocks(rows: int, in_features: int, itemsize: int) -> ProductBlocks:
    """Few rows: 16 kB of a weight a program, so that the heads of one of eight ranks, 16 of 128, fill an H200. Many:
    tiles that read neither side more often than the matrix unit has time for."""
    whole = triton.next_power_of_2(in_features)
    if itemsize == 4:
        return ProductBlocks(16, 16, min(64, whole), 4)
    if rows <= 4 * FEW_ROWS:
        return ProductBlocks(16 if rows <= FEW_ROWS else 64, max(16, min(128, 8192 // whole)), whole, 4)
    return ProductBlocks(128, 128, min(64, whole), 8)


def head_products(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    angles: Angles | None = None,
    pdl: bool | None = None,
    fixed: bool = False,
) -> Tensor:
    """Each head's rows by its own matrix: out[r, h, :n] = x[r, h, :k] @ weight[h], in place.

    x: [rows, heads, k + rotated]; weight: [heads, k, n]; out: [rows, heads, n + rotated]; any strides but for the last
    ones of x and out, which are 1. angles: of the rows, if there is a rotated part, which is turned and copied. pdl: as
    for `normed_latents`. fixed: in tiles that do not depend on the number of rows, so that a row's result is a function
    of that row. Reference: `head_products_reference`.
    """
    (rows, heads, width), (_, in_features, out_features) = x.shape, weight.shape
    rotated = width - in_features
    assert x.stride(2) == out.stride(2) == 1 and out.shape == (rows, heads, out_features + rotated)
    assert (rotated > 0) == (angles is not None)
    blocks = product_blocks(FIXED_ROWS if fixed else rows, in_features, x.itemsize)
    _head_products[(triton.cdiv(out_features, blocks.n), heads, triton.cdiv(rows, blocks.m))](
        x,
        weight,
        out,
        None if angles is None else angles.cos,
        None if angles is None else angles.sin,
        None if angles is None else angles.index,
        rows,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        out.stride(0),
        out.stride(1),
        IN=in_features,
        OUT=out_features,
        ROTATED=rotated,
        BLOCK_M=blocks.m,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        UPCAST=INTERPRETED,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **pdl_wait(supports_pdl(x.device) if pdl is None else pdl),
    )
    return out


def head_products_reference(x: Tensor, weight: Tensor, out: Tensor, angles: Angles | None = None) -> Tensor:
    k, n = weight.shape[1:]
    out[..., :n] = torch.bmm(x[..., :k].transpose(0, 1), weight).transpose(0, 1)
    if angles is not None:
        out[..., n:] = rotate_pairs(x[..., k:], angles.cos[angles.index], angles.sin[angles.index])
    return out
