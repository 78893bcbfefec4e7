# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
"""One step of `aerie.kernels.packed.stream_triton`: a lane's loads of codes, scales and rows, and its products."""

import triton
import triton.language as tl

from aerie.kernels.packed.fragments_triton import add_scaled, decode, multiply


@triton.jit
def load_codes(base, index, chunk, has, CHUNKS: tl.constexpr, COUNT: tl.constexpr, PIECES: tl.constexpr):
    """Load the codes of COUNT chunks from `chunk` on: per chunk and 16 outputs one tensor (int8: one per half)."""
    codes = ()
    for each in tl.static_range(COUNT):
        for piece in tl.static_range(4 * PIECES):
            cells = base + (chunk + each) * (512 * PIECES) + piece * 128 + index
            codes = codes + (tl.load(cells, mask=has & (chunk + each < CHUNKS), other=0, cache_modifier=".cg"),)
    return codes


@triton.jit
def load_scales(base, t, chunk, has, K: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr):
    """Load scales or zeros of COUNT chunks: one tensor per EACH half chunks."""
    scales = ()
    for half in tl.static_range(0, 2 * COUNT, EACH):
        start = chunk * 64 + 32 * half
        if GROUP == 16:
            start += t // 2 * 16
        scales = scales + (tl.load(base + start // GROUP * 32, mask=has & (start < K), other=0),)
    return scales


@triton.jit
def load_inputs(base, g, t, row_stride, rows, chunk, K: tl.constexpr, ROW_TILES: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT chunks of rows from `chunk` on: both halves of a chunk for each 8 rows."""
    inputs = ()
    for each in tl.static_range(COUNT):
        for j in tl.static_range(ROW_TILES):
            for half in tl.static_range(2):
                column = (chunk + each) * 64 + 32 * half
                there = (g + 8 * j < rows) & (column + 8 * t < K)
                inputs = inputs + (tl.load(base + 8 * j * row_stride + column // 2, mask=there, other=0),)
    return inputs


@triton.jit
def add_products(
    acc,
    codes,
    scales,
    zeros,
    inputs,
    each: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    EACH: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the accumulators plus the products of loaded chunk number `each`."""
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    # scales of groups of 16 differ between lanes of an operand, so weights are scaled; exact for e2m1
    OPERAND_SCALE: tl.constexpr = SCALE_TYPE if GROUP == 16 else None
    FIRST: tl.constexpr = 2 * each // EACH
    SECOND: tl.constexpr = (2 * each + 1) // EACH
    sums = ()
    for i in tl.static_range(4):
        words = codes[(4 * each + i) * PIECES], codes[(4 * each + i) * PIECES + PIECES - 1]
        scale, scale2 = scales[FIRST], scales[SECOND]
        zero, zero2 = scale, scale2
        if HAS_ZEROS:
            zero, zero2 = zeros[FIRST], zeros[SECOND]
        low, high = decode(words[0], zero, scale, i, 0, CODE, HAS_ZEROS, OPERAND_SCALE, TYPE, INTERPRETED)
        low2, high2 = decode(words[1], zero2, scale2, i, 1, CODE, HAS_ZEROS, OPERAND_SCALE, TYPE, INTERPRETED)
        for j in tl.static_range(ROW_TILES):
            part = acc[i * ROW_TILES + j]
            if GROUP == 16:
                part = multiply(low, high, inputs[2 * (each * ROW_TILES + j)], part, TYPE, INTERPRETED)
                part = multiply(low2, high2, inputs[2 * (each * ROW_TILES + j) + 1], part, TYPE, INTERPRETED)
            elif EACH > 1:
                first = multiply(low, high, inputs[2 * (each * ROW_TILES + j)], None, TYPE, INTERPRETED)
                first = multiply(low2, high2, inputs[2 * (each * ROW_TILES + j) + 1], first, TYPE, INTERPRETED)
                part = add_scaled(part, first, scale, i, SCALE_TYPE, INTERPRETED)
            else:
                first = multiply(low, high, inputs[2 * (each * ROW_TILES + j)], None, TYPE, INTERPRETED)
                part = add_scaled(part, first, scale, i, SCALE_TYPE, INTERPRETED)
                second = multiply(low2, high2, inputs[2 * (each * ROW_TILES + j) + 1], None, TYPE, INTERPRETED)
                part = add_scaled(part, second, scale2, i, SCALE_TYPE, INTERPRETED)
            sums = sums + (part,)
    return sums
