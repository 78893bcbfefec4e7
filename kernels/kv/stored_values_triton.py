# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Device functions of `aerie.kernels.kv.stored_values`, for kernels that write KV (NaN moved to the key, rounding to
FP8) or read FP8 pages (conversion to the dtype of the products)."""

import triton
import triton.language as tl

from aerie.kernels.kv import stored_values


@triton.jit
def without_nan(v, axis: tl.constexpr):
    """Return values v with 0 instead of NaN, and whether there was one along an axis: then the key must be NaN."""
    x = v.to(tl.float32)  # Triton's interpreter (3.6) does not compare bfloat16
    spoilt = x != x
    return tl.where(spoilt, 0.0, x).to(v.dtype), tl.max(spoilt.to(tl.int32), axis) > 0


@triton.jit
def nan_where(spoilt, x):
    """Return x, NaN where `spoilt`, which broadcasts to it."""
    return tl.where(spoilt, float("nan"), x.to(tl.float32)).to(x.dtype)


FP8_MAX = tl.constexpr(stored_values.FP8_MAX)


@triton.jit
def to_fp8(x, INTERPRETED: tl.constexpr):
    """Round float32 x to the nearest FP8 numbers. Beyond 448 they saturate; NaN stays NaN.

    Triton's interpreter (3.6) loses the carry of a rounding and all subnormals. So x is rounded by float32 additions
    first: to four significant bits, or to multiples of 2^-9.
    """
    x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        split = x * 1048577.0
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, split - (split - x))
    return x.to(tl.float8e4nv)


@triton.jit
def as_stored(x, pool_ptr, inverse_scale, INTERPRETED: tl.constexpr):
    """Return x, rounded to the model's dtype, as the pool stores it (`aerie.kernels.kv.stored_values.stored`)."""
    if pool_ptr.dtype.element_ty == tl.float8e4nv:
        stored = to_fp8(x.to(tl.float32) * inverse_scale, INTERPRETED)
    else:
        stored = x.to(pool_ptr.dtype.element_ty)
    return stored


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Return x in `dtype`. FP8 is converted to bfloat16 through float16 and float32, because the compiler's direct
    conversion uses an instruction of an eighth of the usual rate (compute capability 9.0)."""
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        x = x.to(tl.float16).to(tl.float32)
    return x.to(dtype)


@triton.jit
def even(pairs, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the first of each pair of FP8 numbers in `dtype`. pairs: int16, two FP8 numbers each.

    Instructions that load operands transpose units of 16 bits. So pairs are used as operands of two products, one of
    even and one of odd dimensions, and no bytes move between threads.
    """
    if INTERPRETED:
        number = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        number = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, $1, 0x3120; mov.b32 {lo, hi}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, lo; }",
            "=r,r",
            [pairs],
            tl.float16,
            True,
            2,
        )
    return number.to(dtype)


@triton.jit
def odd(pairs, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the second of each pair; see `even`."""
    if INTERPRETED:
        number = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        number = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, $1, 0x3120; mov.b32 {lo, hi}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, hi; }",
            "=r,r",
            [pairs],
            tl.float16,
            True,
            2,
        )
    return number.to(dtype)


@triton.jit
def as_multiplied(q, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """Return q in the dtype of its product with the pages. Over FP8 pages, bfloat16 becomes float16, because one
    instruction converts two FP8 numbers to float16 exactly, but four are needed for bfloat16. Queries beyond float16's
    range saturate; those below 2^-14 round to multiples of 2^-24."""
    if FP8 and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    if UPCAST:
        q = q.to(tl.float32)
    return q
