# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""PTX that decodes four words of codes to two operands of a tensor core (`fragments_triton.decode`): eight words of two
numbers each. Every step is exact, except a product with a scale, which is rounded once.

int4: the four bits become the lowest of a mantissa whose exponent gives 128 + code (bfloat16) or 1024 + code (float16).
    The zero is subtracted with the same exponent.
int8: float16 likewise. A bfloat16 mantissa has seven bits, so two numbers are added: 128 + the lower seven bits, and
    128 or 256 for the highest.
e2m1: sign, exponent and mantissa move to their positions, and a power of two corrects the exponent, also of subnormal
    numbers.
e2m1 / 2^126: without that power, for scales that include it (bfloat16).
e2m1 moved: the same for codes with the bit order of `aerie.kernels.packed.experts.with_moved_bits`: 11 instructions
instead of 15.

Operands: $0 to $7 are results, $8 to $11 codes, $12 to $15 zeros, $16 to $19 scales. Word r = 2 u + h of a result
belongs to output g + 8 h. Sums are `fma`s with a factor of one: bfloat16 has no `add` before compute capability 9.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def decode_asm(i, half, code, has_zeros, scale_type, dtype):
    """Return the PTX. scale_type: dtype of scales to multiply by; None: do not multiply. Other arguments: see
    `fragments_triton.decode`."""
    is_bf16 = dtype == tl.bfloat16
    zero = f"${12 + i}" if has_zeros else None
    if code == "int4":
        lines = _int4(half, zero, is_bf16)
    elif code == "int8":
        lines = _int8(zero, is_bf16)
    elif code == "e2m1 moved":
        lines = _e2m1_moved(half)
    else:
        lines = _e2m1(half, is_bf16, code == "e2m1")
    if scale_type is not None:
        lines += _scale(f"${16 + i}", scale_type, dtype)
    registers = [".reg .b32 q, v, z0, z1, s0, s1, one, none;", ".reg .b16 lo, hi;", ".reg .f32 f0, f1, f2, f3;"]
    constants = [f"mov.b32 one, {0x3F803F80 if is_bf16 else 0x3C003C00:#x};", "mov.b32 none, 0x80008000;"]
    return "{\n" + "\n".join(registers + constants + lines) + "\n}"


@triton.constexpr_function
def _broadcast(pair, name):
    """Broadcast each half of a word to both halves of a register."""
    return [f"prmt.b32 {name}0, {pair}, 0, 0x1010;", f"prmt.b32 {name}1, {pair}, 0, 0x3232;"]


@triton.constexpr_function
def _floats(pair, names, dtype):
    """Return PTX that converts a pair of 16-bit numbers to two float32 registers."""
    if dtype == tl.bfloat16:
        return [
            f"shl.b32 v, {pair}, 16;",
            f"mov.b32 {names[0]}, v;",
            f"and.b32 v, {pair}, 0xffff0000;",
            f"mov.b32 {names[1]}, v;",
        ]
    return [f"mov.b32 {{lo, hi}}, {pair};", f"cvt.f32.f16 {names[0]}, lo;", f"cvt.f32.f16 {names[1]}, hi;"]


@triton.constexpr_function
def _scale(pair, scale_type, dtype):
    """Return PTX that multiplies eight words of two numbers by the scales of their outputs."""
    name = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
    if scale_type == dtype:
        return [*_broadcast(pair, "s"), *(f"fma.rn.{name} ${w}, ${w}, s{w % 2}, none;" for w in range(8))]
    lines = _floats(pair, ("f0", "f1"), scale_type)
    for word in range(8):
        lines += _floats(f"${word}", ("f2", "f3"), dtype)
        lines += [f"mul.f32 f2, f2, f{word % 2};", f"mul.f32 f3, f3, f{word % 2};"]
        lines.append(f"cvt.rn.{name}.f32 ${word}, f3, f2;")
    return lines


@triton.constexpr_function
def _int4(half, zero, is_bf16):
    """Return PTX that converts 4-bit integers to eight words of two numbers: bits are put into the mantissa of a power
    of two, from which that power and the zero point are subtracted.

    half: which 32 of 64 inputs.
    zero: register with the zero points of two outputs; None: 8.
    """
    name = "bf16x2" if is_bf16 else "f16x2"
    magic, symmetric, minus = (0x43004300, 0xC308C308, 0xC300C300) if is_bf16 else (0x64006400, 0xE408E408, 0xE400E400)
    if zero is None:
        lines = [f"mov.b32 z0, {symmetric:#x};", f"mov.b32 z1, {symmetric:#x};"]
    else:
        lines = [*_broadcast(zero, "z"), f"or.b32 z0, z0, {minus:#x};", f"or.b32 z1, z1, {minus:#x};"]
    for word in range(8):
        r, codes, moved = word % 4, f"${8 + 2 * half + word // 4}", "q"
        if r > 0:
            lines.append(f"shr.u32 q, {codes}, {4 * r};")
        else:
            moved = codes
        lines.append(f"lop3.b32 ${word}, {moved}, 0x000f000f, {magic:#x}, 0xea;")  # (a & b) | c
        lines.append(f"fma.rn.{name} ${word}, ${word}, one, z{r % 2};")
    return lines


@triton.constexpr_function
def _int8(zero, is_bf16):
    """Return PTX that converts 8-bit integers to eight words of two numbers, as `_int4`. The upper bit is added
    separately, because a bfloat16 mantissa has seven bits."""
    if not is_bf16:
        return _int8_half(zero)
    if zero is None:
        lines = ["mov.b32 z0, 0xc3c0c3c0;", "mov.b32 z1, 0xc3c0c3c0;"]  # -384: 128 for the exponent, 128, the zero
    else:
        lines = [f"mov.b32 {{lo, hi}}, {zero};", "cvt.rn.f32.u16 f0, lo;", "cvt.rn.f32.u16 f1, hi;"]
        lines += ["neg.f32 f0, f0;", "neg.f32 f1, f1;"]
        lines += ["cvt.rn.bf16x2.f32 z0, f0, f0;", "cvt.rn.bf16x2.f32 z1, f1, f1;"]
    lines += ["mov.b32 s0, 0xc300c300;"]  # -128
    for word in range(8):
        h, codes, moved, out = word % 2, f"${8 + word // 2}", "q", f"${word}"
        if h > 0:
            lines.append(f"shr.u32 q, {codes}, 8;")
        else:
            moved = codes
        lines.append(f"lop3.b32 {out}, {moved}, 0x007f007f, 0x43004300, 0xea;")
        lines.append(f"lop3.b32 v, {moved}, 0x00800080, 0x43004300, 0xea;")
        if zero is not None:
            lines += [f"fma.rn.bf16x2 {out}, {out}, one, s0;", "fma.rn.bf16x2 v, v, one, s0;"]
        lines += [f"fma.rn.bf16x2 {out}, {out}, one, z{h};", f"fma.rn.bf16x2 {out}, {out}, one, v;"]
    return lines


@triton.constexpr_function
def _int8_half(zero):
    """Return PTX of `_int8` for float16, whose mantissa has room for eight bits."""
    if zero is None:
        lines = ["mov.b32 z0, 0xe480e480;", "mov.b32 z1, 0xe480e480;"]
    else:
        lines = [*_broadcast(zero, "z"), "or.b32 z0, z0, 0xe400e400;", "or.b32 z1, z1, 0xe400e400;"]
    for word in range(8):
        h, codes, moved = word % 2, f"${8 + word // 2}", "q"
        if h > 0:
            lines.append(f"shr.u32 q, {codes}, 8;")
        else:
            moved = codes
        lines.append(f"lop3.b32 ${word}, {moved}, 0x00ff00ff, 0x64006400, 0xea;")
        lines.append(f"fma.rn.f16x2 ${word}, ${word}, one, z{h};")
    return lines


@triton.constexpr_function
def _e2m1(half, is_bf16, is_whole):
    """Return PTX that converts FP4 (e2m1) to eight words of two numbers: sign, exponent and mantissa are moved to their
    places. is_whole: also multiply by the power of two that the shorter exponent lacks."""
    # shift of exponent and mantissa for word 0, their mask, and 2^126 or 2^14
    name = "bf16x2" if is_bf16 else "f16x2"
    up, mask, power = (6, 0x01C001C0, 0x7E807E80) if is_bf16 else (9, 0x0E000E00, 0x74007400)
    lines = [f"mov.b32 z0, {power:#x};"]
    for word in range(8):
        r, codes, out = word % 4, f"${8 + 2 * half + word // 4}", f"${word}"
        sign, shift = codes, up - 4 * r
        if r < 3:
            lines.append(f"shl.b32 v, {codes}, {12 - 4 * r};")
            sign = "v"
        lines.append(f"shl.b32 q, {codes}, {shift};" if shift > 0 else f"shr.u32 q, {codes}, {-shift};")
        lines.append(f"and.b32 {out}, q, {mask:#x};")
        lines.append(f"lop3.b32 {out}, {sign}, 0x80008000, {out}, 0xea;")
        if is_whole:
            lines.append(f"fma.rn.{name} {out}, {out}, z0, none;")
    return lines


@triton.constexpr_function
def _e2m1_moved(half):
    """Return PTX that converts FP4 whose bits were moved when packed, in fewer instructions."""
    # by operand of a word: shift of exponent and mantissa, and shift of the sign
    lines = []
    for word in range(8):
        codes, out = f"${8 + 2 * half + word // 4}", f"${word}"
        shift, sign = ((0, 0), (3, 3), (6, 1), (-3, 2))[word % 4]
        moved = codes
        if shift:
            lines.append(f"shl.b32 v, {codes}, {shift};" if shift > 0 else f"shr.u32 v, {codes}, {-shift};")
            moved = "v"
        if sign == shift:
            lines.append(f"and.b32 {out}, {moved}, 0x81c081c0;")
        else:
            lines += [f"and.b32 {out}, {moved}, 0x01c001c0;", f"shl.b32 q, {codes}, {sign};"]
            lines.append(f"lop3.b32 {out}, q, 0x80008000, {out}, 0xea;")
    return lines
