# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Online softmax over tiles of KV (arXiv 2205.14135, section 3.1), shared by the attention kernels."""

import triton
import triton.language as tl

from aerie.kernels.kv.stored_values_triton import even, odd

SUM_COLUMNS = tl.constexpr(8)  # fewest columns of a product


@triton.jit
def score_tile(q, k_ptr, v_ptr, token, head, d, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """Return scores [M, N] float32 of q [M, D] and the keys of the pool's tokens `token` [N] int64, and their values
    [N, D] in q's dtype; both without the pool's scales. K is loaded like V, with the same offsets, and transposed in
    the product."""
    offset = ((token * KV_HEADS + head) * D)[:, None] + d[None, :]
    k = tl.load(k_ptr + offset).to(q.dtype)
    v = tl.load(v_ptr + offset).to(q.dtype)
    return tl.dot(q, tl.trans(k), input_precision="ieee"), v


@triton.jit
def score_pairs(
    q, q_odd, k_ptr, v_ptr, token, head, d, KV_HEADS: tl.constexpr, D: tl.constexpr, INTERPRETED: tl.constexpr
):
    """`score_tile` over FP8 pages read as pairs of numbers (`aerie.kernels.kv.stored_values_triton.even`). Return the
    scores, and even and odd dimensions of the values [N, D / 2].

    q, q_odd: [M, D / 2], even and odd dimensions.
    """
    offset = ((token * KV_HEADS + head) * (D // 2))[:, None] + d[None, :]
    k = tl.load(k_ptr + offset)
    v = tl.load(v_ptr + offset)
    scores = tl.dot(q, tl.trans(even(k, q.dtype, INTERPRETED)), input_precision="ieee")
    scores = tl.dot(q_odd, tl.trans(odd(k, q.dtype, INTERPRETED)), scores, input_precision="ieee")
    return scores, even(v, q.dtype, INTERPRETED), odd(v, q.dtype, INTERPRETED)


@triton.jit
def accumulate(scores, v, scale_log2, top, total, acc, FIXED: tl.constexpr = False, UNIT: tl.constexpr = 1.0):
    """Add one tile to the softmax state and return it: top [M], total [M], acc [M, D].

    scores: [M, N] float32, minus infinity where masked.
    v: [N, D].
    scale_log2: positive.
    top: running maximum of scores * scale_log2; -inf for a row without columns so far.
    total: sum of powers of two relative to top; 0 for such a row. FIXED: [M, SUM_COLUMNS], equal columns.
    acc: weighted sum.
    FIXED: the tensor core adds weights, in the order of columns, as it adds values. Another sum would depend on the
        compiler's layout of a loop.
    UNIT: see `aerie.kernels.kv.stored_values.weight_unit`.
    """
    top, total, weights, shrink = softmax_step(scores, scale_log2, top, total, FIXED)
    if UNIT != 1.0:
        weights = weights * UNIT
    weights = weights.to(v.dtype)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    if FIXED:
        total = _add_weights(weights, total, shrink, UNIT)
    return top, total, acc


@triton.jit
def _add_weights(weights, total, shrink, UNIT: tl.constexpr):
    ones = tl.full([weights.shape[1], SUM_COLUMNS], 1.0 / UNIT, weights.dtype)
    return tl.dot(weights, ones, total * shrink[:, None], input_precision="ieee")


@triton.jit
def accumulate_pairs(scores, v, v_odd, scale_log2, top, total, acc, acc_odd, FIXED: tl.constexpr, UNIT: tl.constexpr):
    """`accumulate`, with even and odd dimensions of the values as separate sums."""
    top, total, weights, shrink = softmax_step(scores, scale_log2, top, total, FIXED)
    weights = (weights * UNIT).to(v.dtype)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    acc_odd = tl.dot(weights, v_odd, acc_odd * shrink[:, None], input_precision="ieee")
    if FIXED:
        total = _add_weights(weights, total, shrink, UNIT)
    return top, total, acc, acc_odd


@triton.jit
def softmax_step(scores, scale_log2, top, total, FIXED: tl.constexpr):
    """Return top and total after a tile, the tile's weights, and the factor on the earlier acc. FIXED: without the
    tile's part of total."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale_log2 - origin[:, None])
    shrink = tl.exp2(top - origin)
    if not FIXED:
        total = total * shrink + tl.sum(weights, 1)
    return new_top, total, weights, shrink


@triton.jit
def both(acc, acc_odd, M: tl.constexpr, D: tl.constexpr):
    """Interleave even and odd columns [M, D / 2] to [M, D]."""
    return tl.reshape(tl.join(acc, acc_odd), (M, D))
