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

MAGNITUDES, SIGNS = 0x7FFF7FFF, 0x00080008  # of two bf16; of two codes, each in the low bits of its half
SIGN_MOVES = 15 - 3  # from bf16's to a code's
FLAT = 153 / 512  # 5 * FLAT <= 1.5 < (5 + 2^-5) * FLAT, and 8 * FLAT < 2.5; 2^-5: bf16's step there
BASE = 128  # from here on bf16 steps by 1
EVEN = 0x000F000F  # where two rows are put together: the first one's codes
# Bytes that prmt takes of eight, first register lowest: those of both registers' first, then second halves; first
# halves of both, second halves of both.
CODES, FIRSTS, SECONDS = 0x6240, 0x5410, 0x7632


def along(x: Value, factor: Value) -> Value:
    """x (bf16 vector, a multiple of 8) times factor (below 8) -> i32 words of 8 codes, the first lowest."""
    codes = [_codes(pair, factor) for pair in _pairs(x)]
    return vector_of([_word_along(codes[i : i + 4]) for i in range(0, len(codes), 4)])


def down(rows: list[Value], factors: Value) -> Iterator[Value]:
    """8 rows (bf16 vectors of an even width) times factors -> for each column a word of codes, first row lowest."""
    for pair, *numbers in zip(_pairs(factors), *map(_pairs, rows), strict=True):  # so few registers wait for others
        codes = [_codes(x, pair) for x in numbers]
        both = [even & EVEN | (odd << 4) & ~EVEN for even, odd in zip(codes[::2], codes[1::2], strict=True)]
        low, high = _bytes(both[0], both[1], CODES), _bytes(both[2], both[3], CODES)
        yield from (_bytes(low, high, FIRSTS), _bytes(low, high, SECONDS))


def _pairs(x: Value) -> list[Value]:
    return [x.shuffle([i, i + 1]) for i in range(0, x.width, 2)]


def _codes(x: Value, factor: Value) -> Value:
    """Two numbers -> a register of their codes, each in the low 4 bits of its half; above is no matter."""
    x = x * factor
    size = (x.bitcast(i32) & MAGNITUDES).bitcast(bf16, 2)
    lines = [
        fma(size, slope, constant(BASE + start, bf16)).bitcast(i16, 2)
        for slope, start in ((2.0, 0), (1.0, 2), (FLAT, 5))
    ]
    least = minimum(minimum(lines[0], lines[1]), lines[2]).bitcast(i32)
    return least | ((x.bitcast(i32) >> SIGN_MOVES) & SIGNS)


def _word_along(codes: list[Value]) -> Value:
    """Four registers of two neighbours' codes -> one of eight."""
    low, high = _bytes(codes[0], codes[1], CODES), _bytes(codes[2], codes[3], CODES)
    return (_bytes(low, high, SECONDS) << 4) + _bytes(low, high, FIRSTS)


def _bytes(a: Value, b: Value, which: int) -> Value:
    return Value(intrinsic("llvm.nvvm.prmt", mlir_type(i32), a, b, constant(which, i32)), i32)
