# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""FP8 (e4m3) in kernels: rounding to it, and the dtypes in which FP8 pages are multiplied."""

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


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Return x in `dtype`. FP8 becomes bfloat16 by way of float16 and float32: the compiler's direct way ends with an
    instruction that runs at an eighth of the others' rate (compute capability 9.0)."""
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        x = x.to(tl.float16).to(tl.float32)
    return x.to(dtype)


@triton.jit
def as_multiplied(q, pages_ptr, UPCAST: tl.constexpr):
    """Return q in the dtype in which attention multiplies it with the pages. Over FP8 that is float16 in bfloat16's
    place, to which one instruction converts two numbers of the pages, exactly; bfloat16 takes four. Queries beyond
    float16 saturate; those below 2^-14 round to multiples of 2^-24."""
    if pages_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    if UPCAST:
        q = q.to(tl.float32)
    return q
