# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Online softmax over tiles of KV (arXiv 2205.14135, section 3.1), shared by the attention kernels."""

import triton
import triton.language as tl

from aerie.kernels.kv.stored_values_triton import as_multiplied, even, odd

SUM_COLUMNS = tl.constexpr(8)  # fewest columns of a product


@triton.jit
def load_queries(q_row, d, live, UNIT: tl.constexpr, UPCAST: tl.constexpr, PAIRS: tl.constexpr):
    """Return queries [M, D] as they are multiplied, twice; PAIRS: even and odd dimensions [M, D / 2].

    q_row: [M, 1] addresses. d: numbers of the dimensions, or of their pairs. live: [M], others are zeros.
    UNIT: see `aerie.kernels.kv.stored_values.weight_unit`.
    """
    step: tl.constexpr = 2 if PAIRS else 1
    q = as_multiplied(tl.load(q_row + step * d[None, :], mask=live[:, None], other=0.0), UNIT != 1.0, UPCAST)
    q_odd = q
    if PAIRS:
        q_odd = as_multiplied(tl.load(q_row + 2 * d[None, :] + 1, mask=live[:, None], other=0.0), UNIT != 1.0, UPCAST)
    return q, q_odd


@triton.jit
def score_tile(
    q, q_odd, k_ptr, v_ptr, token, head, d, KV_HEADS: tl.constexpr, D: tl.constexpr, UPCAST: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Return scores [M, N] float32 of q [M, D] and the keys of the pool's tokens `token` [N] int64, their values [N, D]
    in q's dtype, twice; scores and values without the pool's scales. K is loaded like V, with the same offsets, and
    transposed in the product.

    PAIRS: pages are FP8, read as pairs of numbers (`aerie.kernels.kv.stored_values_triton.even`); q, q_odd and the
        returned values are even and odd dimensions, [M, D / 2] and [N, D / 2].
    """
    WIDTH: tl.constexpr = D // 2 if PAIRS else D
    offset = ((token * KV_HEADS + head) * WIDTH)[:, None] + d[None, :]
    k = tl.load(k_ptr + offset)
    v = tl.load(v_ptr + offset)
    if PAIRS:
        scores = tl.dot(q, tl.trans(even(k, q.dtype, UPCAST)), input_precision="ieee")
        scores = tl.dot(q_odd, tl.trans(odd(k, q.dtype, UPCAST)), scores, input_precision="ieee")
        return scores, even(v, q.dtype, UPCAST), odd(v, q.dtype, UPCAST)
    k, v = k.to(q.dtype), v.to(q.dtype)
    return tl.dot(q, tl.trans(k), input_precision="ieee"), v, v


@triton.jit
def accumulate(
    scores, v, v_odd, scale_log2, top, total, acc, acc_odd, FIXED: tl.constexpr = False, UNIT: tl.constexpr = 1.0,
    PAIRS: tl.constexpr = False,
):  # fmt: skip
    """Add one tile to the softmax state and return it: top [M], total [M], acc [M, D], acc_odd.

    scores: [M, N] float32, minus infinity where masked.
    v: [N, D]. PAIRS: v and v_odd are even and odd dimensions, and acc and acc_odd their sums; else the odd ones are
        unused.
    scale_log2: positive.
    top: running maximum of scores * scale_log2; -inf for a row without columns so far.
    total: sum of powers of two relative to top; 0 for such a row. FIXED: [M, SUM_COLUMNS], equal columns.
    acc, acc_odd: weighted sums.
    FIXED: the tensor core adds weights, in the order of columns, as it adds values. Another sum would depend on the
        compiler's layout of a loop.
    UNIT: see `aerie.kernels.kv.stored_values.weight_unit`.
    """
    top, total, weights, shrink = softmax_step(scores, scale_log2, top, total, FIXED)
    if UNIT != 1.0:
        weights = weights * UNIT
    weights = weights.to(v.dtype)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    if PAIRS:
        acc_odd = tl.dot(weights, v_odd, acc_odd * shrink[:, None], input_precision="ieee")
    if FIXED:
        ones = tl.full([weights.shape[1], SUM_COLUMNS], 1.0 / UNIT, weights.dtype)
        total = tl.dot(weights, ones, total * shrink[:, None], input_precision="ieee")
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
