"""bf16 and f16 to FP4 (e2m1) on sm_90a, which has no instruction for it: arithmetic on two numbers a register.

A code's three bits below the sign, as a number, are a concave function of the magnitude y, three straight pieces of it:
2y up to 2, y + 2 up to 4, y / 2 + 4 beyond; so the least of the three lines, rounded. Added to 128 (f16: 1024), a line
is rounded to nearest, ties to even, by the very multiply-add that computes it, and the last bits of the sum are the
code: three multiply-adds and a least of three for two numbers. The third line is laid flatter, 5 + FLAT * y: at 5,
where the code changes, it meets the tie, and at 8 it is still below the next one, so that what lies between the largest
number, 6, and 8 needs no clamp.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dtypes import DType, bf16, f16, i16, i32
from ..lang.microscaling import F16_BIAS, F16_MANTISSA, F32_BIAS
from ..lang.values import Value, constant, fma, maximum, minimum, mlir_type, vector_of
from ..mlir import intrinsic

FLAT = {bf16: 153 / 512, f16: 307 / 1024}  # 5 * FLAT <= 1.5 < (5 + step) * FLAT, the step at 5; 8 * FLAT < 2.5
BASE = {bf16: 128, f16: 1024}  # from here on the type steps by 1
LINES = {kind: ((2.0, 0), (1.0, 2), (flat, 5)) for kind, flat in FLAT.items()}  # slopes and starts
SIGN, EVEN = 0x08080808, 0x0F0F0F0F  # in bytes with a code each: its sign; all of it
# What prmt makes of eight bytes, those of two registers: the lowest of each half of both, first halves first; all bits
# of such a byte the sign of a half; the first halves of both; the second halves.
CODES, SIGNS, FIRSTS, SECONDS = 0x6240, 0xFBD9, 0x5410, 0x7632


def factors_of_f16(exponent: Value) -> tuple[Value, ...]:
    """Powers of two (exponents biased by 127, an even number of i16) for f16: what magnitudes are multiplied by, and
    then what the lines' slopes are. f16 ends at 2^16, so both make up each power.

    Larger ones than both hold are for blocks of zeros only, smaller ones than 2^-14 for none that is finite. What a
    product below f16's normal numbers loses lies far below the least number that has a code. Two at a time in 32-bit
    arithmetic, as `microscaling.scales_of_bf16` does it; no half of a word ever carries into the other."""
    both, pairs = lambda x: x << 16 | x, exponent.width // 2
    words = lambda v: v.bitcast(i32, pairs)
    as_f16 = lambda biased: (biased << F16_MANTISSA).bitcast(f16, exponent.width)
    offset, top = F32_BIAS - F16_BIAS, F32_BIAS + F16_BIAS  # of f16's exponents 0 and 2^15
    within = maximum(minimum(exponent, top + F16_BIAS - 1), offset + 1)  # twice the second part is a slope
    low = minimum(within, top)
    first = as_f16(words(low) - both(offset))
    second = as_f16(words(within) - words(low) + both(F16_BIAS))
    return first, *(second * slope for slope, _ in LINES[f16])


def along(x: Value, factors: tuple[Value, ...]) -> Value:
    """x (a vector of bf16 or f16, a multiple of 8) times factors of its type (results below 8) -> i32 words of 8 codes,
    the first lowest."""
    found, pairs = [], [(pair, _codes(pair, *factors)) for pair in _pairs(x)]
    for i in range(0, len(pairs), 4):
        low, high = _four(pairs[i : i + 2]), _four(pairs[i + 2 : i + 4])
        found.append((_bytes(low, high, SECONDS) << 4) + _bytes(low, high, FIRSTS))
    return vector_of(found)


def down(rows: list[Value], factors: tuple[Value, ...]) -> Iterator[Value]:
    """8 rows (vectors of bf16 or f16 of an even width) times factors -> for each column a word of codes, first row
    lowest."""
    of_columns = list(zip(*map(_pairs, factors), strict=True))
    for factor, *numbers in zip(of_columns, *map(_pairs, rows), strict=True):
        x = [(pair, _codes(pair, *factor)) for pair in numbers]
        # (what a NaN leaves in a byte beside its code ends here)
        low, high = (_four(four[::2]) & EVEN | (_four(four[1::2]) << 4) & ~EVEN for four in (x[:4], x[4:]))
        yield from (_bytes(low, high, FIRSTS), _bytes(low, high, SECONDS))


def magnitude(x: Value) -> Value:
    """x (of bf16 or f16, an even number) without signs. ptxas makes that a modifier of what takes it, if it has one; of
    `math.absf` LLVM makes a mask of bits."""
    size = lambda pair: Value(intrinsic("llvm.nvvm.fabs", mlir_type(x.dtype, 2), pair), x.dtype, 2)
    return vector_of([pair[i] for pair in map(size, _pairs(x)) for i in range(2)])


def _pairs(x: Value) -> list[Value]:
    return [x.shuffle([i, i + 1]) for i in range(0, x.width, 2)]


def _four(x: list[tuple[Value, Value]]) -> Value:
    """Two pairs of numbers, each with its codes -> a register with a byte for each one's code and sign: first ones of
    both, second ones."""
    (a, codes_a), (b, codes_b) = x
    return _bytes(codes_a, codes_b, CODES) | _bytes(a.bitcast(i32), b.bitcast(i32), SIGNS) & SIGN


def _codes(x: Value, factor: Value, *slopes: Value) -> Value:
    """Two numbers -> the low bits of the halves are their codes without signs. What multiplies takes its operand's
    magnitude at no cost, what adds does not."""
    kind: DType = x.dtype
    size = _scaled(x, factor)
    lines = zip(slopes or [slope for slope, _ in LINES[kind]], [start for _, start in LINES[kind]], strict=True)
    least = [fma(size, slope, constant(BASE[kind] + start, kind)).bitcast(i16, 2) for slope, start in lines]
    return minimum(minimum(least[0], least[1]), least[2]).bitcast(i32)


def _scaled(x: Value, factor: Value) -> Value:
    return magnitude(x) * factor


def _bytes(a: Value, b: Value, which: int) -> Value:
    return Value(intrinsic("llvm.nvvm.prmt", mlir_type(i32), a, b, constant(which, i32)), i32)
