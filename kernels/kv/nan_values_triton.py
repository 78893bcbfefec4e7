# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`aerie.kernels.kv.nan_values` in kernels that write KV."""

import triton
import triton.language as tl


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
