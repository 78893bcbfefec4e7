# mypy: disable-error-code="assignment, no-untyped-call, no-untyped-def, untyped-decorator, var-annotated"
"""The kernels of `aerie.kernels.latent.head_products`: `_head_products` for any number of rows, in which some programs
rotate q and whose results may be FP8; `_latent_values` for few rows. `_latent_values` loads a head's matrix to
shared memory by a tensor map before the PDL wait. `_head_products` loads it to registers, from which it would have to
be moved to shared memory after the wait."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.attend.latent_tile_triton import rotate_pairs
from aerie.kernels.fp8.rows import GROUP, Fp8Rows
from aerie.kernels.fp8.rows_triton import scale_of
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.stored_values_triton import to_fp8
from aerie.kernels.latent.head_products import MAX_ROWS, fits_values
from aerie.kernels.pdl import pdl_wait
from aerie.kernels.rope.rope_store import Angles

FEW_ROWS = 16  # maximum rows for narrower tiles, which give more programs
BATCH_ROWS = 512  # maximum rows (of verified batches) for tiles of 64 rows, which give more programs
MAX_BYTES_AHEAD = 128 << 10  # bytes of a weight read before the wait, in registers, then in shared memory


@triton.jit(do_not_specialize=["num_rows"])
def _head_products(
    x_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
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
    row_step,
    head_step,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Multiply BLOCK_M rows of one head with BLOCK_N columns of its matrix [IN, OUT]; programs beyond OUT rotate the
    ROTATED numbers after a row's IN.

    scales_ptr: with FP8 results, scales per group, row_step and head_step apart; else None.
    AHEAD: load the matrix before the wait.
    UPCAST: multiply in float32, for the interpreter.
    """
    head = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    live = (m < num_rows)[:, None]
    x_row = x_ptr + m.to(tl.int64)[:, None] * x_row_stride + head * x_head_stride
    out_row = out_ptr + m.to(tl.int64)[:, None] * out_row_stride + head * out_head_stride
    kept = out_ptr.dtype.element_ty
    if tl.program_id(0) * BLOCK_N < OUT:
        n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        weight = weight_ptr + head * weight_head_stride
        weight += k[:, None] * weight_in_stride + n[None, :] * weight_out_stride
        if AHEAD:
            w_ahead = ()
            for start in tl.static_range(0, IN, BLOCK_K):
                w_inside = (start + k < IN)[:, None] & (n < OUT)[None, :]
                w_ahead = w_ahead + (tl.load(weight + start * weight_in_stride, mask=w_inside, other=0.0),)
        if PDL:
            tl.extra.cuda.gdc_wait()
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if AHEAD:
            x_steps = ()
            for start in tl.static_range(0, IN, BLOCK_K):
                x_inside = live & (start + k < IN)[None, :]
                x_steps = x_steps + (tl.load(x_row + (start + k)[None, :], mask=x_inside, other=0.0),)
            for step in tl.static_range((IN + BLOCK_K - 1) // BLOCK_K):
                x, w = x_steps[step], w_ahead[step]
                if UPCAST:
                    x, w = x.to(tl.float32), w.to(tl.float32)
                y = tl.dot(x, w, y, input_precision="ieee")
        else:
            for start in range(0, IN, BLOCK_K):
                x = tl.load(x_row + (start + k)[None, :], mask=live & (start + k < IN)[None, :], other=0.0)
                w_inside = (start + k < IN)[:, None] & (n < OUT)[None, :]
                w = tl.load(weight + start * weight_in_stride, mask=w_inside, other=0.0)
                if UPCAST:
                    x, w = x.to(tl.float32), w.to(tl.float32)
                y = tl.dot(x, w, y, input_precision="ieee")
        if scales_ptr is not None:
            # a program's columns share a scale
            tl.static_assert(BLOCK_N == OUT and OUT == 128)
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
            scale = scale_of(y, 1)
            scales = scales_ptr + m.to(tl.int64) * row_step + head * head_step
            tl.store(scales, scale, mask=m < num_rows)
            tl.store(out_row + n[None, :], to_fp8(y / scale[:, None], UPCAST), mask=live)
        else:
            tl.store(out_row + n[None, :], y.to(kept), mask=live & (n < OUT)[None, :])
    elif ROTATED > 0:  # separate programs, concurrent with the products
        if PDL:
            tl.extra.cuda.gdc_wait()
        column, pair = tl.arange(0, ROTATED)[None, :], tl.arange(0, ROTATED // 2)[None, :]
        angle = tl.load(position_ptr + m, mask=m < num_rows, other=0)[:, None] * (ROTATED // 2) + pair
        cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
        both = tl.load(x_row + IN + column, mask=live, other=0.0).to(tl.float32)
        tl.store(out_row + OUT + column, rotate_pairs(both, cos, sin, BLOCK_M, ROTATED).to(kept), mask=live)


class ProductBlocks(NamedTuple):
    """Tile sizes.

    m, n, k: rows, columns, and inner dimensions per step (powers of two).
    ahead: the whole weight is read before the wait.
    warps, stages: Triton's num_warps and num_stages.
    """

    m: int
    n: int
    k: int
    ahead: bool
    warps: int
    stages: int = 3


def product_blocks(rows: int, in_features: int, itemsize: int) -> ProductBlocks:
    """Return tile sizes. Few rows: 16 kB of a weight per program, so that 16 heads fill an H200. Batches: all inner
    dimensions of a head, read before the wait. Many rows: tiles large enough to be limited by the tensor core."""
    whole = triton.next_power_of_2(in_features)
    # m, n, k, ahead, warps
    if itemsize == 4:
        return ProductBlocks(16, 16, min(64, whole), whole <= 64, 4)
    if rows <= 4 * FEW_ROWS:
        return ProductBlocks(16 if rows <= FEW_ROWS else 64, max(16, min(128, 8192 // whole)), whole, True, 4)
    if rows <= BATCH_ROWS and whole <= 128:
        return ProductBlocks(64, 128, whole, True, 8)
    return ProductBlocks(128, 128, min(64, whole), False, 8)


def rounded_blocks(rows: int, in_features: int, itemsize: int) -> ProductBlocks:
    """Return tile sizes with GROUP columns per program, one scale group. Few rows: a head's whole matrix (128 kB),
    read while attention still runs."""
    ahead = rows <= 4 * FEW_ROWS and in_features * GROUP * itemsize <= MAX_BYTES_AHEAD
    # m, n, k, ahead, warps
    if ahead or itemsize == 4:
        return ProductBlocks(FEW_ROWS, GROUP, min(128, triton.next_power_of_2(in_features)), ahead, 16)
    if rows <= BATCH_ROWS:
        return ProductBlocks(64, GROUP, 64, False, 4, stages=6)
    return ProductBlocks(128, GROUP, 64, False, 8)


def head_products(
    x: Tensor,
    weight: Tensor,
    out: Tensor | Fp8Rows,
    angles: Angles | None = None,
    fixed: bool = False,
) -> None:
    """Implement `aerie.kernels.latent.head_products.head_products`: write out[r, h, :n] = x[r, h, :k] @ weight[h], and
    x[r, h, k:] after RoPE to out[r, h, n:]."""
    (rows, heads, width), (_, in_features, out_features) = x.shape, weight.shape
    rotated = width - in_features
    scales = None if isinstance(out, Tensor) else out.scales
    values = out if isinstance(out, Tensor) else out.values.view(rows, heads, out_features)
    choose = product_blocks if scales is None else rounded_blocks
    # Tiles add the products of an element in the same order, whatever their size (H200).
    blocks = choose(rows, in_features, x.itemsize)
    _head_products[(triton.cdiv(out_features, blocks.n) + (rotated > 0), heads, triton.cdiv(rows, blocks.m))](
        x,
        weight,
        values,
        scales,
        None if angles is None else angles.cos,
        None if angles is None else angles.sin,
        None if angles is None else angles.index,
        rows,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        values.stride(0),
        values.stride(1),
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        IN=in_features,
        OUT=out_features,
        ROTATED=rotated,
        BLOCK_M=blocks.m,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        AHEAD=blocks.ahead,
        UPCAST=INTERPRETED,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        enable_fp_fusion=not fixed,
        **pdl_wait(x.device),
    )


def rounded_values(x: Tensor, weight: Tensor, key_dim: int, rows_together: bool, fixed: bool) -> Fp8Rows:
    """Return x [rows, heads, latent], the attention output, times each head's value matrix, in FP8 with scales per
    group: `aerie.kernels.latent.head_products.latent_values` for any number of rows."""
    rows, heads, latent = x.shape
    out = Fp8Rows.empty(rows, heads * GROUP, True, rows_together, x.device)
    head_products(x, weight.view(heads, -1, latent)[:, key_dim:].transpose(1, 2), out, fixed=fixed)
    return out


@triton.jit(do_not_specialize=["rows"])
def _latent_values(
    w_desc,
    x_ptr,
    out_ptr,
    scales_ptr,
    rows,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Multiply the few rows of a head by its matrix [128, LATENT], and write FP8 with a scale per row and head. The
    head's matrix has the rows from head * STEP + FIRST on."""
    head = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weights = w_desc.load([head * STEP + FIRST, 0])
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, 128), tl.arange(0, LATENT)
    live = m < rows
    row = m.to(tl.int64) * HEADS + head
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row[:, None] * LATENT + k[None, :], mask=live[:, None], other=0.0)
    kept = x_ptr.dtype.element_ty
    if INTERPRETED:
        weights, x = weights.to(tl.float32), x.to(tl.float32)
    y = tl.dot(weights, tl.trans(x), input_precision="ieee").to(kept).to(tl.float32)
    scale = scale_of(y, 0)
    tl.store(scales_ptr + row, scale, mask=live)
    out = out_ptr + row[None, :] * 128 + n[:, None]
    tl.store(out, to_fp8(y / scale[None, :], INTERPRETED), mask=live[None, :])


def latent_values(x: Tensor, weight: Tensor, key_dim: int, rows_together: bool = False, fixed: bool = False) -> Fp8Rows:
    """Implement `aerie.kernels.latent.head_products.latent_values`: return x [rows, heads, latent], the attention
    output, times each head's value matrix, in FP8 with scales per group.

    rows_together: the scales of a group are contiguous, for large-batch GEMMs; else those of a row.
    fixed: results have the bits of `rounded_values`.
    """
    rows, heads, latent = x.shape
    step = key_dim + GROUP
    assert not rows_together and fits_values(rows, weight)
    out = Fp8Rows.empty(rows, heads * GROUP, True, False, x.device)
    _latent_values[(heads,)](
        TensorDescriptor.from_tensor(weight, [GROUP, latent]),
        x,
        out.values,
        out.scales,
        rows,
        HEADS=heads,
        LATENT=latent,
        STEP=step,
        FIRST=key_dim,
        BLOCK_M=MAX_ROWS,
        INTERPRETED=INTERPRETED,
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=not fixed,
        **pdl_wait(x.device),
    )
    return out
