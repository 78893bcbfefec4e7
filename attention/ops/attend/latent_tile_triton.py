# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""One tile of attention over latent rows, for the kernels of rounds and of prompt chunks.

A latent row is key and value at once: its first D numbers are both, the ROTATED after them belong to the key alone. So
a tile is loaded once and multiplied twice. TOKENS says along which axis of the scores its tokens lie, which is to say
which way round the products are: wgmma takes 64 rows at a time. With TOKENS = 1 these are rows of q, tiles of 64 of
them. With TOKENS = 0 they are tokens, then dimensions of the sums, and tiles of 16 or 32 rows of q leave none empty.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.ops.attend.online_softmax_triton import sum_weights
from attention.views import LatentKV


@triton.jit
def load_queries(
    q_ptr, row, head, live, q_row_stride, q_head_stride, D: tl.constexpr, ROTATED: tl.constexpr, UPCAST: tl.constexpr
):
    """[M, D] and [M, ROTATED], in the type of q: of rows and heads row, head [M], zeros where not `live`."""
    q = q_ptr + (row * q_row_stride + head * q_head_stride)[:, None]
    latent = tl.load(q + tl.arange(0, D)[None, :], mask=live[:, None], other=0.0)
    rotated = tl.load(q + D + tl.arange(0, ROTATED)[None, :], mask=live[:, None], other=0.0)
    if UPCAST:
        latent, rotated = latent.to(tl.float32), rotated.to(tl.float32)
    return latent, rotated


@triton.jit
def turn_pairs(x, cos, sin, M: tl.constexpr, ROTATED: tl.constexpr):
    """Rotary embedding of neighbours (`attention.rotation.rotate_pairs`): x [M, ROTATED] float32 turned by cos, sin [M,
    ROTATED / 2]."""
    first, second = tl.split(tl.reshape(x, (M, ROTATED // 2, 2)))
    return tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), (M, ROTATED))


@triton.jit
def load_latent_rows(rows_ptr, token, D: tl.constexpr, ROTATED: tl.constexpr):
    """[N, D] and [N, ROTATED] of the pool's tokens `token` [N] int64."""
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
    """The same of the BLOCK_N KV positions from `start` on, whose pages are `page` [BLOCK_N]; or a number where all are
    of one page, which tensor maps bring, of `latent_maps`: threads need not compute where rows are."""
    if latent_desc is None:
        token = page.to(tl.int64) * PAGE + (start + tl.arange(0, BLOCK_N)) % PAGE
        latent, rotated = load_latent_rows(rows_ptr, token, D, ROTATED)
    else:
        first = page * PAGE + start % PAGE
        latent, rotated = latent_desc.load([first, 0]), rotated_desc.load([first, D])
    return latent, rotated


def latent_maps(kv: LatentKV, block_n: int) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Of tiles of block_n tokens; None where these are not of one page, or no tensor map can have such rows."""
    page_size, width = kv.rows.shape[1:]
    if page_size % block_n or width * kv.rows.itemsize % 16:
        return None, None
    tokens = kv.rows.view(-1, width)
    latent, rotated = ([block_n, size] for size in (kv.latent, width - kv.latent))
    return TensorDescriptor.from_tensor(tokens, latent), TensorDescriptor.from_tensor(tokens, rotated)


@triton.jit
def score_latent_tile(q, q_rotated, latent, rotated, scale_log2, TOKENS: tl.constexpr, UPCAST: tl.constexpr):
    """Scores times scale_log2, float32, of q [M, D] and q_rotated [M, ROTATED] against a tile: [M, N], or [N, M] with
    TOKENS = 0; and the values [N, D]."""
    if UPCAST:
        latent, rotated = latent.to(tl.float32), rotated.to(tl.float32)
    if TOKENS == 0:
        scores = tl.dot(rotated, tl.trans(q_rotated), input_precision="ieee")
        scores = tl.dot(latent, tl.trans(q), scores, input_precision="ieee") * scale_log2
    else:
        # Were one the other's accumulator, Triton would give them to other warps, and move the sums from one to the
        # other through shared memory.
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee") * scale_log2
        scores += tl.dot(q_rotated, tl.trans(rotated), input_precision="ieee") * scale_log2
    return scores, latent


@triton.jit
def accumulate_latent(scores, latent, top, total, acc, TOKENS: tl.constexpr, FIXED: tl.constexpr = False):
    """`online_softmax.accumulate` of scaled scores both ways round: acc [M, D], or [D, M] with TOKENS = 0. There the
    sums `total` [N, M] are kept by places of a tile, and added up by `finish_latent`: sums over tokens cross warps."""
    new_top = tl.maximum(top, tl.max(scores, TOKENS))
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - tl.expand_dims(origin, TOKENS))
    shrink = tl.exp2(top - origin)
    acc = acc * tl.expand_dims(shrink, TOKENS)
    if TOKENS == 0:
        total = total * shrink[None, :] + weights
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc, input_precision="ieee")
    else:
        total = total * shrink + sum_weights(weights, 1, FIXED)
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def no_state(M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    """What `accumulate_latent` begins with: top, total, acc."""
    top = tl.full([M], float("-inf"), tl.float32)
    if TOKENS == 0:
        total, acc = tl.zeros([N, M], tl.float32), tl.zeros([D, M], tl.float32)
    else:
        total, acc = tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    return top, total, acc


@triton.jit
def finish_latent(total, acc, TOKENS: tl.constexpr):
    """The sums of weights [M], and the weighted means, zeros for a row that has seen nothing."""
    if TOKENS == 0:
        total = tl.sum(total, 0)
    return total, acc / tl.expand_dims(tl.where(total == 0.0, 1.0, total), TOKENS)
