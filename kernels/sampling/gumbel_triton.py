# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Gumbel noise in Triton, for the kernels of this folder.

The hash is that of `aerie.kernels.sampling.choose.gumbel_noise`. Logarithms are float32 here and float64 in the
reference, so results differ in the last bits. Every kernel adds this noise with the same fused multiply-add, so
non-speculative decoding, verification and any batch sample the same tokens.
"""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """Apply the 64-bit finaliser of MurmurHash3."""
    x = (x ^ (x >> 33 & 0x7FFFFFFF)) * -49064778989728563
    x = (x ^ (x >> 33 & 0x7FFFFFFF)) * -4265267296055464877
    return x ^ (x >> 33 & 0x7FFFFFFF)


@triton.jit
def _log(numerator, denominator, exponent):
    """Return log((denominator + numerator) / (denominator - numerator)) + exponent log 2, for ratios between sqrt(1/2)
    and sqrt(2), by the series of artanh; the first omitted term is below 3e-9 of the sum."""
    s = numerator / denominator
    square = s * s
    series = tl.fma(square, 0.1111111111, 0.1428571429)
    series = tl.fma(square, series, 0.2)
    series = tl.fma(square, series, 0.3333333333)
    twice = s + s
    return tl.fma(exponent, 0.6931471806, tl.fma(twice * square, series, twice))


@triton.jit
def split(x):
    """Return the mantissa, from sqrt(1/2) to sqrt(2), and the exponent of positive normal x, float32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True), exponent.to(tl.float32)


@triton.jit
def log(x):
    """Return the natural logarithm of positive normal float32 x, precise near zero."""
    mantissa, exponent = split(x)
    return _log(mantissa - 1.0, mantissa + 1.0, exponent)


@triton.jit
def draw_of_row(
    row,
    slot_ptr,
    position_ptr,
    position_row,
    position_column,
    width,
    temperature_ptr,
    temperature_stride,
    seed_ptr,
    seed_stride,
):
    """Return a row's temperature and the hash of its seed and position.

    slot_ptr: [requests] slots; a request has `width` rows.
    position_ptr: positions, position_row apart between requests and position_column between a request's rows.
    temperature_ptr, seed_ptr: by slot, temperature_stride and seed_stride apart.
    """
    slot = tl.load(slot_ptr + row // width)
    position = tl.load(position_ptr + row // width * position_row + row % width * position_column)
    temperature = tl.load(temperature_ptr + slot * temperature_stride)
    seed = tl.load(seed_ptr + slot * seed_stride)
    return temperature, mix(seed + position * -7046029254386353131)


@triton.jit
def gumbel(hashed, token):
    """Return standard Gumbel noise, float32, from a row's hash and token ids int64."""
    high = (mix(hashed + token * -7046029254386353131) >> 32).to(tl.uint32, bitcast=False)
    below = (high.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    above = ((high ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log(1 - below), by the more precise of two formulas
    near = below < 0.29
    mantissa, exponent = split(above)
    numerator = tl.where(near, -below, mantissa - 1.0)
    exponential = -_log(numerator, tl.where(near, 2.0 - below, mantissa + 1.0), tl.where(near, 0.0, exponent))
    return -log(exponential)


@triton.jit
def noisy(x, inverse_temperature, hashed, token):
    return tl.fma(x, inverse_temperature, gumbel(hashed, token))
