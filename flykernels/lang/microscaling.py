"""Small floats in kernels: codes to f32 and back, by integer arithmetic that every target has.

Targets with an instruction for a conversion may use that; what comes out is the same (`flykernels.microscaling` is the
definition in numpy)."""

from __future__ import annotations

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


def factors_for(kind: DType, factor: Value, dtype: DType) -> tuple[Value, ...]:
    """Powers of two (f32 or bf16; one a block) as `words` and `words_down` take them for numbers of type `kind`: what
    the target multiplies by one after the other."""
    own = getattr(TARGET.get(None), "small_float_factors", None)
    return own(kind, factor, dtype) if own else (factor,)


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


def scale_of(largest: Value, dtype: DType, round_up: bool) -> tuple[Value, Value, Value]:
    """(E8M0 byte as i32, f32 to multiply by, mask for the codes) of a block; largest: its largest magnitude's f32 bits.

    round_up False: 2^(floor(log2 largest) - the format's largest exponent); True: the least power of two that leaves
    nothing beyond the format's largest number. Below 2^-127 it is 2^-127. With a NaN or an infinity in the block the
    byte is 255 and the mask 0 (else all ones): the codes of such a block are 0."""
    f = FORMATS[dtype]
    top = largest
    if round_up:  # a fraction above the largest number's carries into the exponent
        fraction = int((dtype.largest / 2.0**f.largest_exponent - 1) * (1 << F32_MANTISSA))
        top = top + ((1 << F32_MANTISSA) - 1 - fraction)
    byte = maximum((top >> F32_MANTISSA) - f.largest_exponent, 0)
    finite = largest < INFINITE
    inverse = ((2 * SCALE_BIAS - byte) << F32_MANTISSA).bitcast(f32, largest.width)
    number = lambda x: constant(x, i32, largest.width)
    return select(finite, byte, number(SCALE_NAN)), inverse, select(finite, number(-1), number(0))


def scales_of_bf16(largest: Value, dtype: DType, round_up: bool) -> tuple[Value, Value, Value]:
    """As `scale_of`, for an even number of bf16 bits (i16), two at a time in 32-bit arithmetic: (bytes as i16, factors
    as bf16, masks as i16). No half of a word ever carries into the other."""
    f, pairs, width = FORMATS[dtype], largest.width // 2, largest.width
    words, both = largest.bitcast(i32, pairs), lambda x: x << 16 | x
    halves = lambda v: v.bitcast(i16, width)
    least = lambda v, x: minimum(halves(v), x).bitcast(i32, pairs)
    most = lambda v, x: maximum(halves(v), x).bitcast(i32, pairs)
    top = words
    if round_up:
        fraction = int((dtype.largest / 2.0**f.largest_exponent - 1) * (1 << bf16.mantissa))
        top = top + both((1 << bf16.mantissa) - 1 - fraction)
    exponent = (top >> bf16.mantissa) & both(0x1FF)
    byte = most(exponent, f.largest_exponent) - both(f.largest_exponent)
    factor = (both(2 * SCALE_BIAS) - byte) << bf16.mantissa
    last = (INFINITE >> 16) - 1  # finite up to here
    infinite = least(most(words, last) - both(last), 1)
    mask = (both(1) - infinite) * 0xFFFF
    byte = byte | ((mask ^ -1) & both(SCALE_NAN))
    return halves(byte), factor.bitcast(bf16, width), halves(mask)


def scale_factor(byte: Value) -> Value:
    """E8M0 byte (i32) -> f32: 2^(byte - 127), subnormal for 0; NaN for 255."""
    bits = select(byte.equals(0), constant(1 << (F32_MANTISSA - 1), i32, byte.width), byte << F32_MANTISSA)
    quiet = constant(INFINITE | 1 << (F32_MANTISSA - 1), i32, byte.width)
    return select(byte.equals(SCALE_NAN), quiet, bits).bitcast(f32, byte.width)
