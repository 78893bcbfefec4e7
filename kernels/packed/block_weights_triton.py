# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
"""Weights of `blocks_triton` as wgmma's first operand."""

import triton
import triton.language as tl

from aerie.kernels.packed.fragments_triton import decode


@triton.jit
def _joined(operands):
    """Join the first half of a tuple with the second: half as many tensors, with one more dimension."""
    half: tl.constexpr = len(operands) // 2
    joined = ()
    for each in tl.static_range(half):
        joined = joined + (tl.join(operands[each], operands[half + each]),)
    return joined


@triton.jit
def block_weights(
    codes_base,
    scales_base,
    zeros_base,
    first_chunk,
    t,
    K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    COUNT: tl.constexpr,
    ROUNDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the weights of 64 outputs by COUNT chunks (1 or 2) of inputs, in the order of operands.

    SCALE_TYPE: dtype of scales; None: weights are not scaled.
    ROUNDED: steps may reach beyond the last chunk.
    """
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    CHUNKS: tl.constexpr = (K + 63) // 64
    operands = ()
    for c in tl.static_range(COUNT):
        # rows are zero beyond the last chunk
        chunk = tl.minimum(first_chunk + c, CHUNKS - 1) if ROUNDED else first_chunk + c
        words = ()
        for s in tl.static_range(PIECES):
            words = words + (tl.load(codes_base + chunk * (512 * PIECES) + s * 128),)
        for s in tl.static_range(2):
            start = chunk * 64 + (0 if GROUP % 64 == 0 or GROUP == K else 32 * s)
            if GROUP == 16:
                start += t // 2 * 16
            start = tl.minimum(start, K - 1)
            scale = words[s * (PIECES - 1)]
            if SCALE_TYPE is not None:
                scale = tl.load(scales_base + start // GROUP * 32)
            zero = scale
            if HAS_ZEROS:
                zero = tl.load(zeros_base + start // GROUP * 32)
            word = words[s * (PIECES - 1)]
            operands = operands + decode(word, zero, scale, 0, s, CODE, HAS_ZEROS, SCALE_TYPE, TYPE, INTERPRETED)
    operands = _joined(_joined(operands))
    if COUNT == 2:
        operands = _joined(operands)
    low = (operands[0] & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
    high = (operands[0] >> 16).to(tl.int16).to(TYPE, bitcast=True)
    # i g t u h c s r p to i h g, c s r u t p
    numbers = tl.reshape(tl.join(low, high), [4, 8, 4, 2, 2, COUNT, 2, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 4, 1, 5, 6, 7, 3, 2, 8]), [64, 64 * COUNT])
