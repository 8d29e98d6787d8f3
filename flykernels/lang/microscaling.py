"""Small floats in kernels: codes to f32 and back, by integer arithmetic that every target has.

Targets with an instruction for a conversion may use that; what comes out is the same (`flykernels.microscaling` is the
definition in numpy)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..dtypes import DType, bf16, f8e4m3fn, f8e4m3fnuz, f16, f32, i16, i32
from ..microscaling import FORMATS, SCALE_BIAS, SCALE_NAN
from .values import TARGET, Value, absolute, constant, maximum, minimum, select, vector_of

F32_MANTISSA, F32_BIAS = 23, 127
F16_MANTISSA, F16_BIAS = 10, 15
INFINITE = 0x7F800000  # bits of f32 infinity; above are NaNs


def decoded(codes: Value, dtype: DType) -> Value:
    """Codes (i16, not packed) of a format -> f32. NaN and infinity as the format has them.

    A code's exponent and mantissa put where f16 has its own read as the number times 2^(bias - 15), subnormals too."""
    sign = 1 << (dtype.bits - 1)
    half = ((codes & sign) << (16 - dtype.bits)) | ((codes & (sign - 1)) << (F16_MANTISSA - dtype.mantissa))
    if dtype == f8e4m3fn:  # its only NaN is what f16 takes for a number
        half = select((codes & (sign - 1)).equals(sign - 1), constant(0x7E00, i16, codes.width), half)
    return half.bitcast(f16, codes.width).to(f32) * 2.0 ** (F16_BIAS - FORMATS[dtype].bias)


def encoded(x: Value, dtype: DType) -> Value:
    """f32 (not NaN) -> codes (i32, not packed): nearest, ties to even, beyond the largest the largest.

    Adding 2^(e + 23 - mantissa) to a number of exponent e rounds it to the format's step; below the format's smallest
    normal number the step stays. What has been added is then taken off bit by bit, which leaves the code."""
    f, shift = FORMATS[dtype], F32_MANTISSA - dtype.mantissa
    bits = lambda v: v.bitcast(i32, v.width)
    size = minimum(absolute(x), dtype.largest)
    least = (f.least_exponent + F32_BIAS) << F32_MANTISSA
    base = maximum(bits(size) & INFINITE, least)
    magic = base + (shift << F32_MANTISSA)
    steps = bits(size + magic.bitcast(f32, x.width)) - magic
    code = steps + (base >> shift) - ((f.least_exponent + F32_BIAS) << dtype.mantissa)
    sign = 1 << (dtype.bits - 1)
    code = code | ((bits(x) >> (32 - dtype.bits)) & sign)
    return select(code.equals(sign), constant(0, i32, code.width), code) if dtype == f8e4m3fnuz else code


def rounded_to_odd(x: Value) -> Value:
    """f32 -> bf16: its last 16 bits are cut off, and if any of them was set, so is the last one left.

    Rounded to nearest after that, to a type of at least two bits less, a number is what it would have become at once
    (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008); comparisons with numbers of fewer bits
    and NaN stay as they are."""
    bits, low = x.bitcast(i32, x.width), (1 << F32_MANTISSA - bf16.mantissa) - 1
    bits = bits | (bits + low ^ bits) & low + 1  # the sum's carry
    return bits.bitcast(i16, 2 * x.width).shuffle(range(1, 2 * x.width, 2)).bitcast(bf16, x.width)


def narrowed(x: Value, dtype: DType) -> Value:
    """x, or what the target makes the same codes of in less time."""
    kind = getattr(TARGET.get(None), "narrower_for_small_floats", {}).get((x.dtype, dtype))
    return rounded_to_odd(x) if kind == bf16 else x


def power_of_two(exponent: Value) -> Value:
    """2^(exponent - 127): f32 of i32, bf16 of an even number of i16."""
    if exponent.dtype == i32:
        return (exponent << F32_MANTISSA).bitcast(f32, exponent.width)
    return (exponent.bitcast(i32, exponent.width // 2) << bf16.mantissa).bitcast(bf16, exponent.width)


def factors_for(kind: DType, exponent: Value, dtype: DType, round_up: bool) -> tuple[Value, ...]:
    """Powers of two (one a block, as exponents from `scale_of`) as `words` and `words_down` take them for numbers of
    type `kind`: what the target multiplies by one after the other."""
    own = getattr(TARGET.get(None), "small_float_factors", None)
    return own(kind, exponent, dtype, round_up) if own else (power_of_two(exponent),)


def first_factor_alone(kind: DType, exponent: Value, dtype: DType, round_up: bool) -> Value | None:
    """i1: of all these blocks the first of what `factors_for` gives is the whole power, and all their numbers are
    finite. None where the target gains nothing by knowing."""
    own = getattr(TARGET.get(None), "first_factor_alone", None)
    return own(kind, exponent, dtype, round_up) if own else None


def words(x: Value, factors: tuple[Value, ...], dtype: DType) -> Value:
    """A vector of floats times a power of two (see `factors_for`) -> codes in i32 words, first element lowest.

    NaN gives no code in particular. By the target's own instructions where it has better ones."""
    own = getattr(TARGET.get(None), "small_floats", None)
    found = own(x, factors, dtype) if own else None
    if found is not None:
        return found
    (factor,) = factors
    x = x.to(f32) * factor.to(f32)
    code, each = encoded(x, dtype), 32 // dtype.bits
    parts = [code.shuffle(list(range(i, x.width, each))) << (dtype.bits * i) for i in range(each)]
    while len(parts) > 1:
        parts = [a | b for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


def words_down(rows: list[Value], factors: tuple[Value, ...], dtype: DType) -> Iterable[Value]:
    """Rows of floats times powers of two, one a column (vectors, as in `words`) -> each column's codes, as `words`."""
    own = getattr(TARGET.get(None), "small_floats_down", None)
    found = own(rows, factors, dtype) if own else None
    if found is not None:
        return found
    column = lambda c: (vector_of([r[c] for r in rows]), tuple(f[c] for f in factors))
    return [words(*column(c), dtype) for c in range(factors[0].width)]


def scale_of(largest: Value, dtype: DType, round_up: bool) -> tuple[Value, Value]:
    """(E8M0 byte, exponent of the power of two to multiply by: 254 - byte), i32, of a block whose largest magnitude's
    f32 bits are `largest`. Where it is NaN or infinite neither means anything: see `is_finite`.

    round_up False: 2^(floor(log2 largest) - the format's largest exponent); True: the least power of two that leaves
    nothing beyond the format's largest number. Below 2^-127 it is 2^-127."""
    f, top = FORMATS[dtype], largest
    if round_up:
        top = top + _to_carry(dtype, F32_MANTISSA)
    byte = maximum((top >> F32_MANTISSA) - f.largest_exponent, 0)
    return byte, 2 * SCALE_BIAS - byte


def scales_of_bf16(largest: Value, dtype: DType, round_up: bool) -> tuple[Value, Value]:
    """As `scale_of`, for an even number of bf16 bits, all i16: two at a time in 32-bit arithmetic. No half of a word
    ever carries into the other."""
    f, pairs, width = FORMATS[dtype], largest.width // 2, largest.width
    top, both = largest.bitcast(i32, pairs), lambda x: x << 16 | x
    halves = lambda v: v.bitcast(i16, width)
    if round_up:
        top = top + both(_to_carry(dtype, bf16.mantissa))
    exponent = (top >> bf16.mantissa) & both(0x1FF)
    byte = maximum(halves(exponent), f.largest_exponent).bitcast(i32, pairs) - both(f.largest_exponent)
    return halves(byte), halves(both(2 * SCALE_BIAS) - byte)


def _to_carry(dtype: DType, mantissa: int) -> int:
    """What, added to a number's bits, carries into the exponent if its fraction is above the largest number's."""
    fraction = int((dtype.largest / 2.0 ** FORMATS[dtype].largest_exponent - 1) * (1 << mantissa))
    return (1 << mantissa) - 1 - fraction


def is_finite(largest: Value) -> Value:
    """Of bits as `scale_of` (i32) or `scales_of_bf16` (i16) takes them. The scale of a block in which something is not
    finite is SCALE_NAN, its codes are 0."""
    if largest.dtype == i16 and bf16 in getattr(TARGET.get(None), "packed_nan_maximum", ()):
        return largest.bitcast(bf16, largest.width) < math.inf  # two at a time
    return largest < (INFINITE if largest.dtype == i32 else INFINITE >> 16)


def scale_factor(byte: Value) -> Value:
    """E8M0 byte (i32) -> f32: 2^(byte - 127), subnormal for 0; NaN for 255."""
    bits = select(byte.equals(0), constant(1 << (F32_MANTISSA - 1), i32, byte.width), byte << F32_MANTISSA)
    quiet = constant(INFINITE | 1 << (F32_MANTISSA - 1), i32, byte.width)
    return select(byte.equals(SCALE_NAN), quiet, bits).bitcast(f32, byte.width)
