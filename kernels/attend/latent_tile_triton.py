# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""One tile of attention over latent rows, for rounds and prompt chunks.

A latent row is key and value: its first D numbers are both, and the ROTATED numbers after them belong to the key. A
tile is loaded once and multiplied twice.

TOKENS is the token axis of the scores. wgmma's first operand has 64 rows, so it chooses what must come in multiples of
64:
- TOKENS = 1: scores [rows of q, tokens]. q is the first operand of both products, so a tile has 64 rows of q or more.
- TOKENS = 0: transposed, scores [tokens, rows of q]. The first operand has tokens as rows in the first product, and
  dimensions of the value in the second. Rows of q are columns, so a tile may have only 16 or 32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.kv.batches import LatentKV
from aerie.kernels.kv.stored_values_triton import as_multiplied, even, odd


@triton.jit
def load_queries(
    q_ptr,
    row,
    head,
    live,
    q_row_stride,
    q_head_stride,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr = 1.0,
    STEP: tl.constexpr = 1,
):
    """Load [M, D] and [M, ROTATED] of q for rows `row` and heads `head` [M], in the dtype of the products with the
    pool's rows; zeros where not `live`. STEP = 2: load every second of 2 D and 2 ROTATED numbers."""
    q = q_ptr + (row * q_row_stride + head * q_head_stride)[:, None]
    latent = tl.load(q + STEP * tl.arange(0, D)[None, :], mask=live[:, None], other=0.0)
    rotated = tl.load(q + STEP * (D + tl.arange(0, ROTATED))[None, :], mask=live[:, None], other=0.0)
    return as_multiplied(latent, UNIT != 1.0, UPCAST), as_multiplied(rotated, UNIT != 1.0, UPCAST)


@triton.jit
def rotate_pairs(x, cos, sin, M: tl.constexpr, ROTATED: tl.constexpr):
    """Rotate adjacent pairs (`aerie.kernels.rope.rope_store.rotate_pairs`): x [M, ROTATED] float32; cos, sin [M,
    ROTATED / 2]."""
    first, second = tl.split(tl.reshape(x, (M, ROTATED // 2, 2)))
    return tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), (M, ROTATED))


@triton.jit
def load_latent_rows(rows_ptr, token, D: tl.constexpr, ROTATED: tl.constexpr):
    """Load [N, D] and [N, ROTATED] of the pool's tokens `token` [N] int64."""
    rows = rows_ptr + (token * (D + ROTATED))[:, None]
    return tl.load(rows + tl.arange(0, D)[None, :]), tl.load(rows + D + tl.arange(0, ROTATED)[None, :])


@triton.jit
def load_latent_tile(
    rows_ptr,
    latent_desc,
    rotated_desc,
    page,
    start,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Load a tile of BLOCK_N KV positions from `start`, on pages `page` [BLOCK_N]. If a tile is on one page, `page` is
    a scalar; then the tensor maps of `latent_maps` load the tile, without address computation."""
    if latent_desc is None:
        token = page.to(tl.int64) * PAGE + (start + tl.arange(0, BLOCK_N)) % PAGE
        latent, rotated = load_latent_rows(rows_ptr, token, D, ROTATED)
    else:
        first = page * PAGE + start % PAGE
        latent, rotated = latent_desc.load([first, 0]), rotated_desc.load([first, D])
    return latent, rotated


def pages_of_rows(kv: LatentKV, pairs: bool) -> Tensor:
    """Return rows as kernels read them. pairs: as pairs of FP8 numbers, int16."""
    return kv.rows.view(torch.int16) if pairs else kv.rows


def latent_maps(
    kv: LatentKV, block_n: int, pairs: bool = False
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return tensor maps of the latent and the RoPE part for tiles of block_n tokens; None if a tile spans pages or
    tensor maps do not support the rows."""
    page_size, width = kv.rows.shape[1:]
    if page_size % block_n or width * kv.rows.itemsize % 16:
        return None, None
    step = 2 if pairs else 1
    tokens = pages_of_rows(kv, pairs).view(-1, width // step)
    latent, rotated = ([block_n, size // step] for size in (kv.latent, width - kv.latent))
    return TensorDescriptor.from_tensor(tokens, latent), TensorDescriptor.from_tensor(tokens, rotated)


@triton.jit
def score_latent_tile(q, q_rotated, latent, rotated, scale_log2, TOKENS: tl.constexpr):
    """Return scaled float32 scores of q [M, D], q_rotated [M, ROTATED] and a tile: [M, N], or [N, M] with TOKENS = 0;
    and the values [N, D] in q's dtype, without the pool's scale.

    latent, rotated: [N, D], [N, ROTATED], from `load_latent_tile`.
    scale_log2: factor on scores, including log2(e) and the pool's scale.
    TOKENS: dimension of the tokens in the scores.
    """
    latent, rotated = latent.to(q.dtype), rotated.to(q.dtype)
    if TOKENS == 0:
        scores = tl.dot(rotated, tl.trans(q_rotated), input_precision="ieee")
        scores = tl.dot(latent, tl.trans(q), scores, input_precision="ieee") * scale_log2
    else:
        # If the second product accumulated onto the first, Triton would distribute it over other warps, and move the
        # sums through shared memory.
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee") * scale_log2
        scores += tl.dot(q_rotated, tl.trans(rotated), input_precision="ieee") * scale_log2
    return scores, latent


@triton.jit
def score_latent_pairs(
    q, q_odd, q_rotated, q_rotated_odd, pairs, rotated, scale_log2, TOKENS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Return the scores of `score_latent_tile` over FP8 rows read as pairs of numbers
    (`aerie.kernels.kv.stored_values_triton.even`).

    q, q_odd, q_rotated, q_rotated_odd: even and odd dimensions of the queries.
    pairs, rotated: [N, D / 2], [N, ROTATED / 2] pairs of FP8 numbers.
    """
    dtype: tl.constexpr = q.dtype
    first, second = even(pairs, dtype, INTERPRETED), odd(pairs, dtype, INTERPRETED)
    k_pe, k_pe_odd = even(rotated, dtype, INTERPRETED), odd(rotated, dtype, INTERPRETED)
    if TOKENS == 0:
        scores = tl.dot(k_pe, tl.trans(q_rotated), input_precision="ieee")
        scores = tl.dot(k_pe_odd, tl.trans(q_rotated_odd), scores, input_precision="ieee")
        scores = tl.dot(first, tl.trans(q), scores, input_precision="ieee")
        scores = tl.dot(second, tl.trans(q_odd), scores, input_precision="ieee")
    else:
        scores = tl.dot(q_rotated, tl.trans(k_pe), input_precision="ieee")
        scores = tl.dot(q_rotated_odd, tl.trans(k_pe_odd), scores, input_precision="ieee")
        scores = tl.dot(q, tl.trans(first), scores, input_precision="ieee")
        scores = tl.dot(q_odd, tl.trans(second), scores, input_precision="ieee")
    return scores * scale_log2


@triton.jit
def sum_weights(weights, FIXED: tl.constexpr):
    """Sum each row of weights of at most 1. FIXED: add them as integers, which gives the same sum in every kernel. A
    float sum depends on the order of additions, and thus on the compiler's layout of a loop."""
    if FIXED:
        unit: tl.constexpr = (1 << 30) // weights.shape[1]
        return tl.sum((weights * unit + 0.5).to(tl.int32), 1).to(tl.float32) / unit
    return tl.sum(weights, 1)


@triton.jit
def accumulate_latent_pairs(
    scores,
    pairs,
    dtype: tl.constexpr,
    top,
    total,
    acc,
    acc_odd,
    TOKENS: tl.constexpr,
    FIXED: tl.constexpr,
    UNIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add a tile to the softmax state as `accumulate_latent` does, with even and odd dimensions of the values as
    separate sums.

    scores: from `score_latent_pairs`.
    pairs: [N, D / 2] int16, pairs of FP8 numbers.
    dtype: dtype of the products' operands.
    top, total, acc, acc_odd: the state: maxima, sums of weights, and sums of even and of odd dimensions.
    TOKENS, FIXED, UNIT: as in `accumulate_latent`.
    """
    new_top = tl.maximum(top, tl.max(scores, TOKENS))
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - tl.expand_dims(origin, TOKENS))
    shrink = tl.exp2(top - origin)
    if TOKENS == 0:
        total = total * shrink[None, :] + weights
        weights = (weights * UNIT).to(dtype)
        columns = tl.trans(pairs)
        acc = tl.dot(even(columns, dtype, INTERPRETED), weights, acc * shrink[None, :], input_precision="ieee")
        acc_odd = tl.dot(odd(columns, dtype, INTERPRETED), weights, acc_odd * shrink[None, :], input_precision="ieee")
    else:
        total = total * shrink + sum_weights(weights, FIXED)
        weights = (weights * UNIT).to(dtype)
        acc = tl.dot(weights, even(pairs, dtype, INTERPRETED), acc * shrink[:, None], input_precision="ieee")
        acc_odd = tl.dot(weights, odd(pairs, dtype, INTERPRETED), acc_odd * shrink[:, None], input_precision="ieee")
    return new_top, total, acc, acc_odd


@triton.jit
def both_latent(acc, acc_odd, M: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    """Return acc of all D dimensions: [M, D], or [D, M] with TOKENS = 0."""
    if TOKENS == 0:
        joined = tl.trans(tl.reshape(tl.join(tl.trans(acc), tl.trans(acc_odd)), (M, D)))
    else:
        joined = tl.reshape(tl.join(acc, acc_odd), (M, D))
    return joined


@triton.jit
def accumulate_latent(
    scores,
    latent,
    top,
    total,
    acc,
    TOKENS: tl.constexpr,
    FIXED: tl.constexpr = False,
    UNIT: tl.constexpr = 1.0,
):
    """`online_softmax_triton.accumulate` for both orientations: acc [M, D], or [D, M] with TOKENS = 0. With TOKENS = 0,
    a sum over tokens would cross warps, so `total` is [N, M], one sum per token index in a tile; `finish_latent` adds
    them.

    scores, latent: as `score_latent_tile` returns them.
    FIXED: add weights as `sum_weights` does. Only with TOKENS = 1.
    UNIT: factor on weights before their product (`weight_unit`), undone by the factor on the output.
    """
    new_top = tl.maximum(top, tl.max(scores, TOKENS))
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - tl.expand_dims(origin, TOKENS))
    shrink = tl.exp2(top - origin)
    acc = acc * tl.expand_dims(shrink, TOKENS)
    if TOKENS == 0:
        total = total * shrink[None, :] + weights
        if UNIT != 1.0:
            weights = weights * UNIT
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc, input_precision="ieee")
    else:
        total = total * shrink + sum_weights(weights, FIXED)
        if UNIT != 1.0:
            weights = weights * UNIT
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def no_state(M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    """Return the initial top, total and acc of `accumulate_latent`."""
    top = tl.full([M], float("-inf"), tl.float32)
    if TOKENS == 0:
        total, acc = tl.zeros([N, M], tl.float32), tl.zeros([D, M], tl.float32)
    else:
        total, acc = tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    return top, total, acc


@triton.jit
def finish_latent(total, acc, TOKENS: tl.constexpr):
    """Return the sums of weights [M], and the weighted means of the values; zeros for fully masked rows."""
    if TOKENS == 0:
        total = tl.sum(total, 0)
    return total, acc / tl.expand_dims(tl.where(total == 0.0, 1.0, total), TOKENS)


@triton.jit
def log_sum(total, top):
    """Return log2 of a softmax state's sum of weights [M]; -inf for fully masked rows. total: of `finish_latent`."""
    return tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
