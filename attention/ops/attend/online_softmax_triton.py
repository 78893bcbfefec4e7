# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Online softmax over tiles of KV (arXiv 2205.14135, section 3.1), shared by the attention kernels."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def score_tile(q, k_ptr, v_ptr, token, head, d, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """Return scores [M, N] float32 of q [M, D] and the keys of the pool's tokens `token` [N] int64, and their values
    [N, D] in q's dtype; both without the pool's scales. K is loaded like V and
    transposed in the product, so that both share addresses."""
    offset = ((token * KV_HEADS + head) * D)[:, None] + d[None, :]
    k = tl.load(k_ptr + offset).to(q.dtype)
    v = tl.load(v_ptr + offset).to(q.dtype)
    return tl.dot(q, tl.trans(k), input_precision="ieee"), v


@triton.jit
def sum_weights(weights, axis: tl.constexpr, FIXED: tl.constexpr):
    """Sum weights of at most 1 along an axis. FIXED: as integers, which give the same sum in every kernel. The order of
    float additions depends on the layout that the compiler chooses per loop."""
    if FIXED:
        unit: tl.constexpr = (1 << 30) // weights.shape[axis]
        return tl.sum((weights * unit + 0.5).to(tl.int32), axis).to(tl.float32) / unit
    return tl.sum(weights, axis)


@triton.jit
def accumulate(scores, v, scale_log2, top, total, acc, FIXED: tl.constexpr = False, UNIT: tl.constexpr = 1.0):
    """Add one tile to the softmax state and return it: top [M], total [M], acc [M, D].

    scores: [M, N] float32, minus infinity where masked.
    v: [N, D].
    scale_log2: positive.
    top: running maximum of scores * scale_log2; -inf for a row that has seen nothing.
    total: sum of powers of two relative to top; 0 for such a row.
    acc: weighted sum.
    FIXED: see `sum_weights`.
    UNIT: see `attention.fp8.weight_unit`.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale_log2 - origin[:, None])
    shrink = tl.exp2(top - origin)
    total = total * shrink + sum_weights(weights, 1, FIXED)
    acc = acc * shrink[:, None]
    if UNIT != 1.0:
        weights = weights * UNIT
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total, acc
