# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Rounding to FP8 (e4m3) in kernels."""

import triton
import triton.language as tl


@triton.jit
def to_fp8(x, INTERPRETED: tl.constexpr):
    """Round float32 x to the nearest FP8 numbers. Beyond 448 they saturate; NaN stays NaN.

    Triton's interpreter (3.6) loses a rounding's carry and all subnormals. There, float32 sums round first: to four
    bits of mantissa, and to multiples of 2^-9.
    """
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        split = x * 1048577.0
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, split - (split - x))
    return x.to(tl.float8e4nv)


@triton.jit
def as_stored(x, pool_ptr, inverse_scale, INTERPRETED: tl.constexpr):
    """Return x, rounded to the model's dtype, as the pool stores it (`attention.fp8.stored`)."""
    if pool_ptr.dtype.element_ty == tl.float8e4nv:
        stored = to_fp8(x.to(tl.float32) * inverse_scale, INTERPRETED)
    else:
        stored = x.to(pool_ptr.dtype.element_ty)
    return stored
