# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The online softmax over tiles of KV (arXiv 2205.14135, section 3.1) that the attention kernels share."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def score_tile(q, k_ptr, v_ptr, token, head, d, KV_HEADS: tl.constexpr, D: tl.constexpr, UPCAST: tl.constexpr):
    """Scores [M, N] float32 of q [M, D] against the keys of the pool's tokens `token` [N] int64, and their values
    [N, D]. K is loaded like V and transposed by the product, so that both share addresses."""
    offset = ((token * KV_HEADS + head) * D)[:, None] + d[None, :]
    k = tl.load(k_ptr + offset)
    v = tl.load(v_ptr + offset)
    if UPCAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    return tl.dot(q, tl.trans(k), input_precision="ieee"), v


@triton.jit
def sum_weights(weights, axis: tl.constexpr, FIXED: tl.constexpr):
    """Sums along an axis of weights that are 1 at most. FIXED: the same in every kernel. Which float is added to which
    first follows from the layout that the compiler chooses, in each loop of a kernel anew; integers have one sum."""
    if FIXED:
        unit: tl.constexpr = (1 << 30) // weights.shape[axis]
        return tl.sum((weights * unit + 0.5).to(tl.int32), axis).to(tl.float32) / unit
    return tl.sum(weights, axis)


@triton.jit
def accumulate(scores, v, scale_log2, top, total, acc, FIXED: tl.constexpr = False):
    """One tile: scores [M, N] float32 (minus infinity where a row must not look), v [N, D], scale_log2 > 0.

    Returns the new running maximum `top` [M] of scores * scale_log2, the sum `total` [M] of powers of two relative to
    it, and the weighted sum `acc` [M, D]. A row that has seen nothing yet has top = -inf, total = 0. FIXED: see
    `sum_weights`.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale_log2 - origin[:, None])
    shrink = tl.exp2(top - origin)
    total = total * shrink + sum_weights(weights, 1, FIXED)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total, acc
