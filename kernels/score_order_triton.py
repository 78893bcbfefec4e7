# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Integers that compare like float32 scores, so that kernels sort scores together with the place they come from."""

import triton
import triton.language as tl


@triton.jit
def ordered(score):
    """Return int32 numbers that compare like float32 scores, which are not NaN; 0.0 and -0.0 are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def sort_key(score, index, size: tl.constexpr):
    """Return int64 keys, larger for larger scores, among equal scores for smaller places in 0 .. size - 1."""
    return (ordered(score).to(tl.int64) << 32) | (size - 1 - index)


@triton.jit
def index_of(key, size: tl.constexpr):
    """Return the int32 places of `sort_key`s."""
    return size - 1 - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def score_of(key):
    """Return the float32 scores of `sort_key`s."""
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
