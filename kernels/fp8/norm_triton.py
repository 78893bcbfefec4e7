# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of `aerie.kernels.fp8.norm`: one program per row, as in `aerie.kernels.norm.norm_triton`; stores FP8
values and scales."""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.fp8.rows_triton import store_fp8
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.norm.norm_triton import normed_row, num_warps
from aerie.kernels.pdl import pdl_wait


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
    """`aerie.kernels.fp8.norm.fp8_rms_norm`."""
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
