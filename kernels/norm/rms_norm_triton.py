# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The formula of `aerie.kernels.norm.head_norms.rms_norm`, for kernels that norm rows or heads."""

import triton
import triton.language as tl


@triton.jit
def inverse_rms(squares, size, eps):
    """Return 1 / rms of rows of `size` numbers, from the sums of their squares."""
    return tl.rsqrt(squares / size + eps)


@triton.jit
def scaled_by(x, inverse, weight, DTYPE: tl.constexpr):
    """Return x * inverse * weight in float32. Rounded to DTYPE before a weight of DTYPE."""
    scaled = x * inverse
    if weight.dtype != tl.float32:
        scaled = scaled.to(DTYPE).to(tl.float32)
    return scaled * weight.to(tl.float32)
