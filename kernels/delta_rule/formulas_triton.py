# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`aerie.kernels.delta_rule.formulas` in Triton, in float32, and other functions that the kernels share."""

import triton
import triton.language as tl

from aerie.kernels import interpreter_triton
from aerie.kernels.delta_rule import formulas

PRECISION = tl.constexpr("tf32x3")  # about the precision of float32
INTERPRETED = tl.constexpr(interpreter_triton.INTERPRETED)
NORM_EPS = tl.constexpr(formulas.NORM_EPS)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gate(z, SIGMOID: tl.constexpr):
    return sigmoid(z) if SIGMOID else silu(z)


@triton.jit
def log_decay(a, a_log, dt_bias):
    """Return g = -exp(a_log) * softplus(a + dt_bias). For small y, log(1 + y) is a series: 1 + y would lose y, and the
    errors of slow decays add up over thousands of tokens."""
    x = a + dt_bias
    y = tl.exp(tl.minimum(x, 20.0))
    s = y / (2.0 + y)
    t = s * s
    series = 2.0 * s * (1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9)))))
    softplus = tl.where(x > 20.0, x, tl.where(y < 0.25, series, tl.log(1.0 + y)))
    return -tl.exp(a_log) * softplus


@triton.jit
def before(i, conv_ptr, committed_ptr, C: tl.constexpr, R: tl.constexpr):
    """Return the address of token i's channels. Tokens 0 to 2 are the convolution's history, others committed rows."""
    return tl.where(i < 3, conv_ptr + i * C, committed_ptr + (i - 3) * R)


@triton.jit
def three_before(above, column):
    """Return each row's three nearest ancestors, newest first, by token number (`place`): the convolution's inputs. If
    fewer than three are in the tile, tokens before the tile follow.

    above: [rows, rows], whether a column is an ancestor of a row.
    column: [1, rows], column numbers.
    """
    newest = tl.max(tl.where(above, column, -1), 1)
    older = tl.max(tl.where(above & (column < newest[:, None]), column, -1), 1)
    oldest = tl.max(tl.where(above & (column < older[:, None]), column, -1), 1)
    missing = (newest < 0).to(tl.int32) + (older < 0).to(tl.int32) + (oldest < 0).to(tl.int32)
    newest = tl.where(newest < 0, 2, 3 + newest)
    older = tl.where(older < 0, 4 - missing, 3 + older)
    oldest = tl.where(oldest < 0, 3 - missing, 3 + oldest)
    return newest, older, oldest


@triton.jit
def place(
    token, conv_ptr, committed_ptr, rows_ptr, stride, C: tl.constexpr, R: tl.constexpr, PATH: tl.constexpr, skipped=0
):
    """Return the addresses of the channels of tokens by number: three before the tile, PATH committed ones, then the
    new rows. skipped: committed tokens before the tile."""
    new = rows_ptr + (token - 3 - PATH) * stride
    return tl.where(token < 3 + PATH, before(token + skipped, conv_ptr, committed_ptr, C, R), new)


@triton.jit
def keep_history(target_ptr, first, column, conv_ptr, committed_ptr, C: tl.constexpr, R: tl.constexpr):
    """Copy channels of the three tokens from `first` on to a snapshot's history."""
    for i in tl.static_range(3):
        source = before(first + i, conv_ptr, committed_ptr, C, R)
        tl.store(target_ptr + i * C + column, tl.load(source + column))


@triton.jit
def norm_factors(x):
    """Return 1 / l2 norm of rows [n, d]: [n] float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + NORM_EPS)


@triton.jit
def settled(x):
    """Return x, and force the compiler to compute it once, here. Otherwise Triton 3.6 recomputes an operand in the
    layout of each product, in which every warp holds all rows, so registers spill."""
    if not INTERPRETED:
        if x.dtype == tl.bfloat16:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
        else:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def prefetch(pointers):
    """Prefetch the 128 bytes at each of `pointers` to the L2 cache. Uses no registers."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def dot(x, y):
    """Return x @ y in float32. Converts x and y for the interpreter (3.6), which multiplies bfloat16 as raw bits."""
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def product_with_rows(k, q, y):
    """Return k @ y and q @ y of float32 y. If k and q are bfloat16, y is split into a sum of three bfloat16 numbers,
    whose products are exact in float32; q @ y omits the smallest term."""
    if k.dtype == tl.bfloat16:
        high = y.to(tl.bfloat16)
        y -= high.to(tl.float32)
        middle = y.to(tl.bfloat16)
        low = (y - middle.to(tl.float32)).to(tl.bfloat16)
        k = settled(k)
        of_k = dot(k, high) + dot(k, middle) + dot(k, low)
        q = settled(q)
        of_q = dot(q, high) + dot(q, middle)
    else:
        of_k, of_q = dot(k, y), dot(q, y)
    return of_k, of_q


@triton.jit
def exact_product(x, y):
    """Return x @ y of float32 y, with all three terms of `product_with_rows`."""
    if x.dtype == tl.bfloat16:
        part = y.to(tl.bfloat16)
        y -= part.to(tl.float32)
        product = dot(x, part)
        part = y.to(tl.bfloat16)
        y -= part.to(tl.float32)
        product += dot(x, part)
        product += dot(x, y.to(tl.bfloat16))
    else:
        product = dot(x, y)
    return product


@triton.jit
def inverse_of_unit_triangle(system, ROWS: tl.constexpr, USED: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + system)^-1 of a strictly lower triangle [ROWS, ROWS] whose rows from USED on are zeros. Inverts
    blocks of two rows, then joins pairs of blocks: as stable as substitution, in fewer steps."""
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    inverse = tl.where(r == c, 1.0, tl.where(r // 2 == c // 2, -system, 0.0))
    for level in tl.static_range(1, 7):
        if (1 << level) < USED:
            beside = ((r >> (level + 1)) == (c >> (level + 1))) & ((r >> level) != (c >> level))
            below = tl.dot(inverse, tl.where(beside, system, 0.0), input_precision=PRECISION)
            inverse -= tl.dot(below, inverse, input_precision=PRECISION)
    return inverse
