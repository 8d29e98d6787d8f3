"""bf16 to FP4 (e2m1) on sm_90a, which has no instruction for it: arithmetic on two numbers a register.

A code's three bits below the sign, as a number, are a concave function of the magnitude y, three straight pieces of it:
2y up to 2, y + 2 up to 4, y / 2 + 4 beyond; so the least of the three lines, rounded. Added to 128, a line is rounded
to nearest, ties to even, by the very multiply-add that computes it, and the last bits of the bf16 are the code: three
multiply-adds and a least of three for two numbers. The third line is laid flatter, 5 + FLAT * y: at 5, where the code
changes, it meets the tie, and at 8 it is still below the next one, so that what lies between the largest number, 6, and
8 needs no clamp.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dtypes import bf16, i16, i32
from ..lang.values import Value, constant, fma, minimum, mlir_type, vector_of
from ..mlir import intrinsic

MAGNITUDES = 0x7FFF7FFF  # of two bf16
FLAT = 153 / 512  # 5 * FLAT <= 1.5 < (5 + 2^-5) * FLAT, and 8 * FLAT < 2.5; 2^-5: bf16's step there
BASE = 128  # from here on bf16 steps by 1
SIGN, EVEN = 0x08080808, 0x0F0F0F0F  # in bytes with a code each: its sign; all of it
# What prmt makes of eight bytes, those of two registers: the lowest of each half of both, first halves first; all bits
# of such a byte the sign of a half; the first halves of both; the second halves.
CODES, SIGNS, FIRSTS, SECONDS = 0x6240, 0xFBD9, 0x5410, 0x7632


def along(x: Value, factor: Value) -> Value:
    """x (bf16 vector, a multiple of 8) times factor (results below 8) -> i32 words of 8 codes, the first lowest."""
    found = []
    y = [pair * factor for pair in _pairs(x)]
    for i in range(0, len(y), 4):
        low, high = _four(y[i : i + 2]), _four(y[i + 2 : i + 4])
        found.append((_bytes(low, high, SECONDS) << 4) + _bytes(low, high, FIRSTS))
    return vector_of(found)


def down(rows: list[Value], factors: Value) -> Iterator[Value]:
    """8 rows (bf16 vectors of an even width) times factors -> for each column a word of codes, first row lowest."""
    for factor, *numbers in zip(_pairs(factors), *map(_pairs, rows), strict=True):
        x = [pair * factor for pair in numbers]
        # (what a NaN leaves in a byte beside its code ends here)
        low, high = (_four(four[::2]) & EVEN | (_four(four[1::2]) << 4) & ~EVEN for four in (x[:4], x[4:]))
        yield from (_bytes(low, high, FIRSTS), _bytes(low, high, SECONDS))


def _pairs(x: Value) -> list[Value]:
    return [x.shuffle([i, i + 1]) for i in range(0, x.width, 2)]


def _four(x: list[Value]) -> Value:
    """Two pairs of numbers -> a register with a byte for each one's code: first ones of both, second ones."""
    a, b = x
    return _bytes(_magnitudes(a), _magnitudes(b), CODES) | _bytes(a.bitcast(i32), b.bitcast(i32), SIGNS) & SIGN


def _magnitudes(x: Value) -> Value:
    """Two numbers -> the low bits of the halves are their codes without signs."""
    size = (x.bitcast(i32) & MAGNITUDES).bitcast(bf16, 2)
    lines = [
        fma(size, slope, constant(BASE + start, bf16)).bitcast(i16, 2)
        for slope, start in ((2.0, 0), (1.0, 2), (FLAT, 5))
    ]
    return minimum(minimum(lines[0], lines[1]), lines[2]).bitcast(i32)


def _bytes(a: Value, b: Value, which: int) -> Value:
    return Value(intrinsic("llvm.nvvm.prmt", mlir_type(i32), a, b, constant(which, i32)), i32)
