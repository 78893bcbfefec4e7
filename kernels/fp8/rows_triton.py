# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
"""Kernels with FP8 rows as output: of `aerie.kernels.fp8.rows.quantize_rows`, and of
`aerie.kernels.fp8.product.fp8_rms_norm`, with one program per row as in `aerie.kernels.norm.norm_triton`. Other kernels
with FP8 output use the device functions."""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.fp8 import rows as reference
from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.stored_values_triton import FP8_MAX, to_fp8
from aerie.kernels.norm.norm_triton import normed_row, num_warps
from aerie.kernels.pdl import pdl_wait

_COLUMNS = 1024  # per program
SMALLEST = tl.constexpr(reference.SMALLEST)


@triton.jit
def scale_of(x, AXIS: tl.constexpr):
    """Return the scale of x along an axis; above 0 even for zeros."""
    return tl.maximum(tl.max(tl.abs(x), AXIS), SMALLEST) / FP8_MAX


@triton.jit
def store_fp8(
    x,
    values_ptr,
    scales_ptr,
    first,
    group_step,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantise and store BLOCK float32 numbers x of a row of SIZE, from column `first`.

    x: zeros beyond the row's end; the whole row without BY_GROUP.
    values_ptr, scales_ptr: addresses of this row.
    """
    column = first + tl.arange(0, BLOCK)
    if BY_GROUP:
        groups: tl.constexpr = BLOCK // 128
        tiles = tl.reshape(x, [groups, 128])
        scale = scale_of(tiles, 1)
        x = tl.reshape(tiles / scale[:, None], [BLOCK])
        group = first // 128 + tl.arange(0, groups)
        tl.store(scales_ptr + group * group_step, scale, mask=group * 128 < SIZE)
    else:
        scale = scale_of(x, 0)
        x = x / scale
        tl.store(scales_ptr, scale)
    tl.store(values_ptr + column, to_fp8(x, INTERPRETED), mask=column < SIZE)


@triton.jit
def round_columns(
    x_ptr,
    values_ptr,
    scales_ptr,
    rows,
    x_stride,
    first,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    FENCE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantise SPAN groups of columns of one row x, from group `first`; this program may then read them. Other programs
    may write the same values.

    x_ptr: [rows, ..] in 16 or 32 bits, x_stride between rows; with rows = 0 nothing is written.
    values_ptr, scales_ptr: [GROUPS * 128] FP8 and [GROUPS] float32, written.
    COLUMNS: columns at a time.
    FENCE: let tensor maps read the values.
    """
    m = tl.arange(0, 1)
    row = m.to(tl.int64)[:, None]
    for start in tl.static_range(0, SPAN * 128, COLUMNS):
        column, group = start + tl.arange(0, COLUMNS), start // 128 + tl.arange(0, COLUMNS // 128)
        inside = (m < rows)[:, None] & (column < SPAN * 128)[None, :]
        x = tl.load(x_ptr + row * x_stride + first * 128 + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tiles = tl.reshape(x, [1, COLUMNS // 128, 128])
        scale = scale_of(tiles, 2)
        x = to_fp8(tl.reshape(tiles / scale[:, :, None], [1, COLUMNS]), INTERPRETED)
        tl.store(values_ptr + row * (GROUPS * 128) + first * 128 + column[None, :], x, mask=inside)
        live = (m < rows)[:, None] & (group < SPAN)[None, :]
        tl.store(scales_ptr + row * GROUPS + first + group[None, :], scale, mask=live)
    if FENCE:
        # Stores and tensor maps use different memory proxies (PTX ISA, fence.proxy).
        zeros = tl.zeros([128], tl.int32)  # one per thread
        tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, $1;", "=r,r", [zeros], tl.int32, False, 1)
    tl.debug_barrier()


@triton.jit
def _quantize(
    x_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    row_step,
    group_step,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_GROUP: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write BLOCK columns of a row in FP8, with scales by group of columns (BY_GROUP) or by row.

    x_ptr: [rows, SIZE], x_stride between rows; with GATED gate and up columns [rows, 2 SIZE], of which silu(gate) * up
        is
        written.
    out_ptr, scales_ptr: [rows, SIZE] FP8 and its scales, written.
    row_step, group_step: strides of the scales.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
        x = (x / (1.0 + tl.exp(-x))).to(x_ptr.dtype.element_ty).to(tl.float32)
        x = (x * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    values, scales = out_ptr + row * SIZE, scales_ptr + row * row_step
    store_fp8(x, values, scales, first, group_step, SIZE, BLOCK, BY_GROUP, INTERPRETED)


def quantize_rows(x: Tensor, by_group: bool, rows_together: bool = False, gated: bool = False) -> Fp8Rows:
    """Implement `aerie.kernels.fp8.rows.quantize_rows`: return x [rows, size] in FP8 with scales per row or per group;
    of gated x [rows, 2 * size], silu(gate) * up.

    by_group: scales per group of 128 columns; else per row.
    rows_together: the scales of a group are contiguous, for large-batch GEMMs; else those of a row.
    """
    rows, size = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = Fp8Rows.empty(rows, size, by_group, rows_together, x.device)
    if rows == 0:
        return out
    block = _COLUMNS if by_group else triton.next_power_of_2(size)
    _quantize[(rows, triton.cdiv(size, block))](
        x,
        out.values,
        out.scales,
        x.stride(0),
        out.scales.stride(0),
        out.scales.stride(1),
        SIZE=size,
        BLOCK=block,
        BY_GROUP=by_group,
        GATED=gated,
        INTERPRETED=INTERPRETED,
        num_warps=4 if by_group else num_warps(block),
        **pdl_wait(x.device),
    )
    return out


@triton.jit
def _fp8_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    plain_ptr,
    out_ptr,
    scales_ptr,
    eps,
    row_step,
    group_step,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PLAIN: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Norm one row and write it in FP8, with PLAIN also in x's dtype. With HAS_RESIDUAL x is added to the residual
    first, in place.

    x_ptr, residual_ptr: [rows, SIZE]. weight_ptr, eps: [SIZE] weights and epsilon of the norm.
    plain_ptr, out_ptr, scales_ptr: [rows, SIZE] in x's dtype, FP8 and its scales, written.
    row_step, group_step: strides of the scales.
    BY_GROUP: scales by group of columns; else by row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rounded = normed_row(x_ptr, residual_ptr, weight, row, column, SIZE, eps, HAS_RESIDUAL).to(x_ptr.dtype.element_ty)
    if PLAIN:
        tl.store(plain_ptr + row * SIZE + column, rounded, mask=inside)
    values, scales = out_ptr + row * SIZE, scales_ptr + row * row_step
    store_fp8(rounded.to(tl.float32), values, scales, 0, group_step, SIZE, BLOCK, BY_GROUP, INTERPRETED)


def fp8_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Fp8Rows) -> Fp8Rows:
    """Implement `aerie.kernels.fp8.product.fp8_rms_norm`: write x / rms(x) * weight in FP8 to `out`. With a residual,
    add x to it first, and write the norm of the sum."""
    rows, size = out.values.shape
    if rows == 0:
        return out
    block = triton.next_power_of_2(size)
    _fp8_norm[(rows,)](
        x,
        residual,
        weight,
        out.plain,
        out.values,
        out.scales,
        eps,
        out.scales.stride(0),
        out.scales.stride(1),
        SIZE=size,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        PLAIN=out.plain is not None,
        BY_GROUP=out.scales.shape[1] > 1 or size == 128,
        INTERPRETED=INTERPRETED,
        num_warps=num_warps(block),
        **pdl_wait(x.device),
    )
    return out
