"""RMSNorm whose rows come in FP8, as the product after it reads them: no launch between."""

from torch import Tensor

from attention.ops.operation import Implementation, on_gpu, operation
from workers.ops.fp8.rows import Fp8Rows, quantize_rows
from workers.ops.norm import add_rms_norm, rms_norm


@operation(Implementation("triton", "workers.ops.fp8.norm_triton:fp8_rms_norm", on_gpu))
def fp8_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Fp8Rows) -> Fp8Rows:
    """x / rms(x) * weight in FP8; with a residual, residual += x, and that is normed.

    x         [rows, size], contiguous, of 16 or 32 bits
    residual  as x, written; or None
    weight    [size], of x's type
    out       written: rows of `Fp8Rows.empty`; its `plain`, if there is one, gets the norm before it is rounded to FP8
    ->        out

    The kernel's numbers are those of `workers.ops.norm` followed by `quantize_rows`, to the bit.
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
