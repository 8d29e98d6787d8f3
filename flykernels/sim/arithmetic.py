"""Arithmetic of the vector ALU that numpy has no name for: fused multiply-add, minima and maxima of ISA and IEEE, bit
fields, byte permutations.

Semantics: AMD CDNA3 ISA reference, chapter "VOP1/VOP2/VOP3 instructions". Transcendentals are correctly rounded here
where the hardware is allowed 1 ulp, and flush denormals as the hardware does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

U32, U64, I32, F32, F64 = np.uint32, np.uint64, np.int32, np.float32, np.float64
M31 = U32(31)
TINY = F32(2.0**-126)


def flush(x: np.ndarray) -> np.ndarray:
    """Denormal f32 -> zero of the same sign."""
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x).astype(F32)


def special(f: Callable) -> Callable:
    """A transcendental unit's function: computed in f64, rounded, denormals flushed on both sides."""
    return lambda x: flush(f(flush(x).astype(F64)).astype(F32))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f32 fused multiply-add with one rounding: the product is exact in f64, the sum is rounded to odd, then to f32."""
    p = a.astype(F64) * b
    c = c.astype(F64)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    inexact = np.isfinite(s) & (error != 0)
    if inexact.any():
        bits = np.broadcast_to(s, inexact.shape).copy().view(np.int64)
        even = (bits & 1) == 0
        away = (error > 0) == (s > 0)  # the true sum is larger in magnitude than s
        bits += np.where(inexact & even, np.where(away, 1, -1), 0)
        s = bits.view(F64)
    return s.astype(F32)


def fma16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f16 fused multiply-add: exact in f64 up to one rounding of the sum, which cannot round twice for f16 operands
    (11 + 11 product bits and a 40-binade spread fit 53 bits)."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(np.float16)


def _bits(x: np.ndarray) -> tuple[np.ndarray, Any]:
    """(codes of floats, the bit that makes a NaN a quiet one)."""
    kinds: dict[int, tuple[Any, int]] = {2: (np.uint16, 9), 4: (U32, 22), 8: (U64, 51)}
    raw, bit = kinds[x.dtype.itemsize]
    return np.ascontiguousarray(x).view(raw), raw(1 << bit)


def quiet(x: np.ndarray) -> np.ndarray:
    """Every NaN made a quiet one, its payload kept."""
    codes, bit = _bits(x)
    return np.where(np.isnan(x), (codes | bit).view(x.dtype), x)


def _signals(x: np.ndarray) -> np.ndarray:
    codes, bit = _bits(x)
    return np.isnan(x) & (codes & bit == 0)


def _number(a: np.ndarray, b: np.ndarray, first: np.ndarray) -> np.ndarray:
    """a where it is to be chosen, else b; a quiet NaN loses to a number, a signalling one wins and becomes quiet, as
    they do with MODE's IEEE bit set (mode.py)."""
    lost_a, lost_b = np.isnan(a), np.isnan(b)
    chosen = np.where(first, a, b)
    if not (lost_a.any() or lost_b.any()):
        return chosen
    chosen = np.where(lost_a, b, np.where(lost_b, a, chosen))
    return quiet(np.where(_signals(a), a, np.where(_signals(b), b, chosen)))


def minimum_number(a, b):
    """IEEE-754:2008 minNum; -0 < +0."""
    return _number(a, b, (a < b) | ((a == b) & np.signbit(a)))


def maximum_number(a, b):
    return _number(a, b, (a > b) | ((a == b) & ~np.signbit(a)))


def minimum_ieee(a, b):
    """IEEE-754:2019 minimum: a NaN wins."""
    return quiet(np.where(np.isnan(a), a, np.where(np.isnan(b), b, minimum_number(a, b))))


def maximum_ieee(a, b):
    return quiet(np.where(np.isnan(a), a, np.where(np.isnan(b), b, maximum_number(a, b))))


def median(a, b, c, low=np.minimum, high=np.maximum):
    return high(low(a, b), low(high(a, b), c))


def median_float(a, b, c):
    """v_med3: with a NaN, min3 of the three; else the middle one."""
    middle = median(a, b, c, minimum_number, maximum_number)
    some = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(some, minimum_number(minimum_number(a, b), c), middle)


def multiply_legacy(a, b):
    """0 times anything is 0."""
    return np.where((a == 0) | (b == 0), F32(0), a * b)


def high_u(a, b):
    return ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32)


def high_i(a, b):
    return ((a.astype(np.int64) * b.astype(np.int64)) >> 32).astype(I32)


def u24(x):
    return x & U32(0xFFFFFF)


def i24(x):
    return ((x.view(I32) << 8) >> 8).astype(np.int64)


def extract_u(x, at, width):
    width = width & M31
    return (x >> (at & M31)) & ((U32(1) << width) - U32(1))


def extract_i(x, at, width):
    width = (width & M31).astype(np.int64)
    value = (x.view(I32).astype(np.int64) >> (at & M31).astype(np.int64)) & ((np.int64(1) << width) - 1)
    sign = np.where(width > 0, np.int64(1) << np.maximum(width - 1, 0), 0)
    return ((value ^ sign) - sign).astype(I32)


def reverse_bits(x):
    x = np.asarray(x, U32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        x = ((x >> U32(shift)) & U32(mask)) | ((x & U32(mask)) << U32(shift))
    return (x >> U32(16)) | (x << U32(16))


def find_high_u(x):
    """Position of the highest set bit from the top; -1 if none."""
    n = np.frexp(x.astype(F64))[1]
    return np.where(x == 0, -1, 32 - n).astype(I32)


def find_high_i(x):
    y = np.where(x < 0, ~x, x)
    return np.where(y == 0, -1, find_high_u(y.astype(U32))).astype(I32)


def find_low(x):
    x = np.asarray(x, U32)
    lowest = x & (~x + U32(1))
    return np.where(x == 0, -1, np.frexp(lowest.astype(F64))[1] - 1).astype(I32)


def permute_bytes(a, b, select):
    """v_perm_b32: bytes of {a, b} (b is bytes 0..3) by the selector's bytes; 8..11 sign fills, 12 zero, above 0xff."""
    pair = a.astype(U64) << U64(32) | b.astype(U64)
    out = np.zeros(np.broadcast(a, b, select).shape, U32)
    for k in range(4):
        s = ((select >> U32(8 * k)) & U32(255)).astype(U64)
        byte = (pair >> (U64(8) * np.minimum(s, U64(7)))) & U64(255)
        sign = ((pair >> (U64(15) + U64(16) * np.clip(s, 8, 11).astype(U64) - U64(128))) & U64(1)) * U64(255)
        byte = np.where(s < 8, byte, np.where(s < 12, sign, np.where(s == 12, U64(0), U64(255))))
        out |= byte.astype(U32) << U32(8 * k)
    return out


def align_bits(a, b, shift):
    return ((a.astype(U64) << U64(32) | b.astype(U64)) >> (shift & M31).astype(U64)).astype(U32)


def sad_u8(a, b, c):
    total = np.asarray(c, U32)
    for k in range(4):
        x, y = ((v >> U32(8 * k)) & U32(255) for v in (a, b))
        total = total + np.where(x > y, x - y, y - x)
    return total


def ldexp32(x, e):
    return np.ldexp(x.astype(F64), np.clip(e, -1200, 1200)).astype(F32)


def fract(x):
    return np.minimum(x - np.floor(x), np.nextafter(F32(1), F32(0)))


def frexp_exponent(x):
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32)


def frexp_mantissa(x):
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def bit_count(x, plus):
    return np.bitwise_count(x).astype(U32) + plus


def class_of(bits: np.ndarray, mask, exponent_bits: int, mantissa_bits: int):
    """v_cmp_class: bit per class of float: sNaN, qNaN, -Inf, -normal, -denormal, -0, +0, +denormal, +normal, +Inf.

    bits: the floats' codes, of an unsigned type as wide as they are."""
    number = bits.dtype.type
    infinity, normal = number(((1 << exponent_bits) - 1) << mantissa_bits), number(1 << mantissa_bits)
    magnitude = bits & number((1 << (exponent_bits + mantissa_bits)) - 1)
    negative = bits >> number(exponent_bits + mantissa_bits) != 0
    nan, quiet = magnitude > infinity, (bits >> number(mantissa_bits - 1)) & number(1) != 0
    side = lambda minus, plus: np.where(negative, minus, plus)
    index = np.select(
        [nan & ~quiet, nan, magnitude == infinity, magnitude >= normal, magnitude > 0],
        [0, 1, side(2, 9), side(3, 8), side(4, 7)],
        side(5, 6),
    )
    return (mask >> index.astype(U32)) & U32(1) != 0


def class_f32(x, mask):
    return class_of(x.view(U32), mask, 8, 23)
