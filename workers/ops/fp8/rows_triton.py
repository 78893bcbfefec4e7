# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `workers.ops.fp8.rows`, and the parts that other kernels which write FP8 share."""

import triton
import triton.language as tl
from torch import Tensor

from attention.ops.interpreter_triton import INTERPRETED
from attention.ops.pdl import pdl_wait
from workers.ops.fp8.rows import Fp8Rows
from workers.ops.norm_triton import num_warps

_COLUMNS = 1024  # of a program


@triton.jit
def to_fp8(x, INTERPRETED: tl.constexpr):
    """The nearest numbers of eight bits to x float32. Triton's interpreter (3.6) loses the carry of a rounding and all
    subnormals; there float32's own sums round first, to four bits of mantissa and to multiples of 2^-9."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if INTERPRETED:
        split = x * 1048577.0
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, split - (split - x))
    return x.to(tl.float8e4nv)


@triton.jit
def scale_of(x, AXIS: tl.constexpr):
    """The scale that the numbers of x along an axis share; of zeros too it is one to divide by."""
    return tl.maximum(tl.max(tl.abs(x), AXIS), 1e-12) / 448.0


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
    """Rounds BLOCK numbers x float32 of a row of SIZE from its column `first` on, zeros beyond its end, and writes them
    and their scales; pointers are to the row's own. Without BY_GROUP x is the whole row."""
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
    """`workers.ops.fp8.rows.quantize_rows`."""
    rows, size = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    assert x.stride(1) == 1
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
