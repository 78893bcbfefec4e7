# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Operands of tensor cores in the layout of `aerie.kernels.packed.weight`: codes to numbers, products of 16 outputs
with 8 rows, and scaled sums.

Tensors are one-dimensional. Element 128 w + 4 l + r is register r of lane l of warp w, and lane l = 4 g + t. So the
inline PTX gets four registers of each tensor at once, and all lanes of a warp run it together. Triton's interpreter
does not run PTX, so the same is computed there from the registers of all lanes.
"""

import triton
import triton.language as tl

from aerie.kernels.packed.decode_ptx import decode_asm


@triton.jit
def decode(
    codes,
    zeros,
    scales,
    i: tl.constexpr,
    half: tl.constexpr,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    TYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return two operands, of 16 inputs each, as words of two numbers of TYPE.

    codes: 4-bit: words of 8 codes, of which words 2 half and 2 half + 1 are used. int8: words of 4 codes of this half.
    zeros, scales: words of two, of outputs g and g + 8; word i is used.
    SCALE_TYPE: dtype of scales to multiply by before rounding to TYPE; None: do not multiply.
    """
    if INTERPRETED:
        return _decode_interpreted(codes, zeros, scales, i, half, CODE, HAS_ZEROS, SCALE_TYPE, TYPE)
    else:
        return tl.inline_asm_elementwise(
            decode_asm(i, half, CODE, HAS_ZEROS, SCALE_TYPE, TYPE),
            _constraints(8, 12, "r"),
            [codes, zeros, scales],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=4,
        )


@triton.jit
def multiply(a_low, a_high, inputs, part, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return `part` (None: zeros) plus the products of 32 inputs, float32.

    a_low, a_high: operands from `decode`.
    inputs: 8 numbers of a row, from input 8 t on.
    """
    if INTERPRETED:
        return _multiply_interpreted(a_low, a_high, inputs, part, TYPE)
    elif part is None:
        return tl.inline_asm_elementwise(
            _multiply_asm(False, TYPE), _constraints(4, 12, "f"), [a_low, a_high, inputs], tl.float32, True, 4
        )
    else:
        return tl.inline_asm_elementwise(
            _multiply_asm(True, TYPE), _constraints(4, 12, "f", 4), [a_low, a_high, inputs, part], tl.float32, True, 4
        )


@triton.jit
def times_power(inputs, INTERPRETED: tl.constexpr):
    """Return words of two bfloat16 times 2^64: exact for numbers below 2^63."""
    if INTERPRETED:
        low, high = _number(inputs, tl.bfloat16)
        return _pair(low * 2.0**64, tl.bfloat16) | _pair(high * 2.0**64, tl.bfloat16) << 16
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 by, none; mov.b32 by, 0x5f805f80; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, by, none; }",
            "=r,r",
            [inputs],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def add_scaled(acc, part, scales, i: tl.constexpr, SCALE_TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return acc + part * scale. scales: words of two, of outputs g and g + 8; word i is used."""
    if INTERPRETED:
        return acc + part * _of_outputs(_number(_word(scales, i), SCALE_TYPE), acc)
    else:
        return tl.inline_asm_elementwise(
            _add_scaled_asm(i, SCALE_TYPE), _constraints(4, 4, "f", 8), [scales, acc, part], tl.float32, True, 4
        )


@triton.constexpr_function
def _constraints(outputs, words, output, floats=0):
    return ",".join([f"={output}"] * outputs + ["r"] * words + ["f"] * floats)


@triton.constexpr_function
def _multiply_asm(has_part, dtype):
    name = "bf16" if dtype == tl.bfloat16 else "f16"
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{$0, $1, $2, $3}}, "
    low, high, x = ("{$4, $5, $6, $7}, ", "{$8, $9, $10, $11}, ", ("{$12, $13}, ", "{$14, $15}, "))
    lines = [".reg .f32 zero;", "mov.f32 zero, 0f00000000;"]
    part = "{$16, $17, $18, $19};" if has_part else "{zero, zero, zero, zero};"
    lines += [mma + low + x[0] + part, mma + high + x[1] + "{$0, $1, $2, $3};"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _add_scaled_asm(i, dtype):
    lines = [".reg .f32 s0, s1;"]
    if dtype == tl.bfloat16:
        lines += [
            ".reg .b32 w;",
            f"shl.b32 w, ${4 + i}, 16;",
            "mov.b32 s0, w;",
            f"and.b32 w, ${4 + i}, 0xffff0000;",
            "mov.b32 s1, w;",
        ]
    else:
        lines += [".reg .b16 l, h;", f"mov.b32 {{l, h}}, ${4 + i};", "cvt.f32.f16 s0, l;", "cvt.f32.f16 s1, h;"]
    lines += [f"fma.rn.f32 ${r}, ${12 + r}, s{r // 2}, ${8 + r};" for r in range(4)]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def _word(words, i: tl.constexpr):
    """Return word i of each lane in all registers of the lane."""
    lanes = tl.reshape(words, [words.shape[0] // 4, 4])
    mine = tl.sum(tl.where(tl.arange(0, 4)[None, :] == i, lanes, 0), 1)
    return tl.reshape(tl.broadcast_to(mine[:, None], lanes.shape), words.shape)


@triton.jit
def _bits(half, TYPE: tl.constexpr):
    """Return the low 16 bits, a number of TYPE, as float32."""
    if tl.bfloat16 == TYPE:
        return (half << 16).to(tl.float32, bitcast=True)
    return (half & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _number(words, TYPE: tl.constexpr):
    """Return both numbers of each word."""
    return _bits(words, TYPE), _bits(words >> 16, TYPE)


@triton.jit
def _of_outputs(pair, like):
    """Return the first of a pair in registers 0 and 1 (output g), the second in 2 and 3 (output g + 8)."""
    return tl.where(tl.arange(0, like.shape[0]) % 4 < 2, pair[0], pair[1])


@triton.jit
def _decode_interpreted(
    codes,
    zeros,
    scales,
    i: tl.constexpr,
    half: tl.constexpr,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Compute `decode`, whose arguments these are, without PTX."""
    operands = ()
    r = tl.arange(0, codes.shape[0]) % 4  # 2 u + h
    for step in tl.static_range(2):
        if CODE == "int8":
            word = tl.where(r < 2, _word(codes, 2 * step), _word(codes, 2 * step + 1)) >> (8 * (r % 2))
            low, high = word & 255, (word >> 16) & 255
        else:
            word = _word(codes, 2 * half + step)
            word = _moved_back(word, r) if CODE == "e2m1 moved" else word >> (4 * r)
            low, high = word & 15, (word >> 16) & 15
        if CODE == "e2m1":
            low, high = _e2m1(low), _e2m1(high)
        elif CODE == "e2m1 / 2^126" or CODE == "e2m1 moved":
            low, high = _e2m1(low) * 2.0**-126, _e2m1(high) * 2.0**-126
        else:
            zero = tl.full([codes.shape[0]], 128 if CODE == "int8" else 8, tl.int32)
            if HAS_ZEROS:
                pair = _word(zeros, i)
                zero = tl.where(r % 2 == 0, pair & 0xFFFF, (pair >> 16) & 0xFFFF)
            low, high = (low - zero).to(tl.float32), (high - zero).to(tl.float32)
        if SCALE_TYPE is not None:
            first, second = _number(_word(scales, i), SCALE_TYPE)
            scale = tl.where(r % 2 == 0, first, second)
            low, high = low * scale, high * scale
        operands = operands + (_pair(low, TYPE) | _pair(high, TYPE) << 16,)
    return operands


@triton.jit
def _moved_back(word, r):
    """Return the codes of operand r, in the low bits of each half, from words of
    `aerie.kernels.packed.experts.with_moved_bits`."""
    first = tl.where(r == 0, 6, tl.where(r == 1, 3, tl.where(r == 2, 0, 9)))
    sign = tl.where(r == 0, 15, tl.where(r == 1, 12, tl.where(r == 2, 14, 13)))
    return ((word >> first) & 0x00070007) | ((word >> sign) & 0x00010001) << 3


@triton.jit
def _e2m1(code):
    exponent, mantissa = code >> 1 & 3, (code & 1).to(tl.float32)
    size = tl.where(exponent == 0, mantissa * 0.5, (1.0 + 0.5 * mantissa) * (1 << exponent).to(tl.float32) * 0.5)
    return tl.where(code >= 8, -size, size)


@triton.jit
def _pair(value, TYPE: tl.constexpr):
    """Return the 16 bits of a number rounded to TYPE."""
    if tl.bfloat16 == TYPE:
        bits = value.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _multiply_interpreted(a_low, a_high, inputs, part, TYPE: tl.constexpr):
    """Compute `multiply` without PTX: gather the operands of a warp's lanes to matrices."""
    WARPS: tl.constexpr = a_low.shape[0] // 128
    if part is None:
        part = tl.zeros([WARPS * 128], tl.float32)
    low, high = _number(inputs, TYPE)
    x = tl.reshape(tl.join(low, high), [WARPS, 8, 4, 2, 2, 2])  # row, t, step, u, p
    x = tl.permute(x, [0, 3, 4, 2, 5, 1])  # step, u, t, p, row
    x = tl.reshape(x, [WARPS, 2, 16, 8])
    x_low, x_high = tl.split(tl.permute(x, [0, 2, 3, 1]))
    sums = _product(a_low, x_low, TYPE, WARPS) + _product(a_high, x_high, TYPE, WARPS)
    # output h, g and row t, q to lane g, t and register h, q
    sums = tl.permute(tl.reshape(sums, [WARPS, 2, 8, 4, 2]), [0, 2, 3, 1, 4])
    return part + tl.reshape(sums, [WARPS * 128])


@triton.jit
def _product(a, x, TYPE: tl.constexpr, WARPS: tl.constexpr):
    low, high = _number(a, TYPE)
    a = tl.reshape(tl.join(low, high), [WARPS, 8, 4, 2, 2, 2])  # g, t, u, h, p
    a = tl.reshape(tl.permute(a, [0, 4, 1, 3, 2, 5]), [WARPS, 16, 16])  # h g, u t p
    return tl.sum(a[:, :, :, None] * x[:, None, :, :], 2)
