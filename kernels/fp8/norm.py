"""RMSNorm that returns FP8 rows for the next GEMM, in one launch."""

import torch
from torch import Tensor

from aerie.kernels.fp8.rows import Fp8Rows, quantize_rows
from aerie.kernels.norm.norm import add_rms_norm, rms_norm
from aerie.kernels.operation import Implementation, on_gpu, operation


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Fp8Rows) -> None:
    assert x.dim() == 2 and x.is_contiguous() and x.shape == out.values.shape and out.values.is_contiguous()
    assert weight.shape == x.shape[1:] and weight.is_contiguous() and weight.dtype in (x.dtype, torch.float32)
    for each in (residual, out.plain):
        assert each is None or (each.is_contiguous() and each.shape == x.shape and each.dtype == x.dtype)


@operation(Implementation("triton", "aerie.kernels.fp8.norm_triton:fp8_rms_norm", on_gpu), contract=_check)
def fp8_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Fp8Rows) -> Fp8Rows:
    """Return x / rms(x) * weight in FP8. With a residual, add x to it first, and return the norm of the sum.

    x         [rows, size], contiguous, 16 or 32 bits
    residual  as x, written; or None
    weight    [size], x's dtype or float32
    out       written: from `Fp8Inputs.empty`; `plain`, if not None, receives the norm before rounding to FP8
    ->        out

    The kernel's results are bitwise those of `aerie.kernels.norm.norm` and `quantize_rows`.
    """
    normed = (
        rms_norm.reference(x, weight, eps) if residual is None else add_rms_norm.reference(x, residual, weight, eps)
    )
    rounded = quantize_rows.reference(normed, out.scales.shape[1] > 1 or normed.shape[1] == 128)
    out.values.copy_(rounded.values)
    out.scales.copy_(rounded.scales)
    if out.plain is not None:
        out.plain.copy_(normed)
    return out
