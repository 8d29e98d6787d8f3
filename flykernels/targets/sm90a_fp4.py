"""bf16 to FP4 (e2m1) on sm_90a, which has no instruction for it: arithmetic on two numbers a register.

All of it is exact but the one rounding: adding 2^(e + 6) to a bf16 of exponent e (at least 0, e2m1's smallest normal)
rounds it to steps of 2^(e - 1), those of e2m1, ties to even. The sum's bits, less those of what was added, count the
steps; with the exponent's they make the code, as in lang.microscaling.encoded.
"""

from __future__ import annotations

from ..dtypes import bf16, f4e2m1, i16, i32
from ..lang.values import Value, constant, maximum, minimum, mlir_type, vector_of
from ..microscaling import FORMATS
from ..mlir import intrinsic

MANTISSA, BIAS = 7, 127  # of bf16
BOTH = 0x00010001  # a 16-bit number in both halves of a register
EXPONENT = 0x7F80
SHIFT = MANTISSA - f4e2m1.mantissa
LEAST = (FORMATS[f4e2m1].least_exponent + BIAS) << MANTISSA
EVEN_BYTES = 0x6420  # of eight, first register lowest


def from_bf16(x: Value, factor: Value) -> Value:
    """x (bf16 vector, a multiple of 8) times factor (f32, a power of two that bf16 holds) -> i32 words of 8 codes."""
    scale = (factor.bitcast(i32) >> 16).to(i16).bitcast(bf16)
    scaled = x * scale.splat(x.width)
    words, signs = (v.bitcast(i32, x.width // 2) for v in (_clamped(scaled), scaled))
    codes = [_codes(words[i], signs[i]) for i in range(words.width)]
    return vector_of([_packed(codes[i : i + 4]) for i in range(0, len(codes), 4)])


def _clamped(x: Value) -> Value:
    size = (x.bitcast(i16, x.width) & 0x7FFF).bitcast(bf16, x.width)
    return minimum(size, f4e2m1.largest)


def _codes(size: Value, sign: Value) -> Value:
    """Two magnitudes, and two numbers with their signs -> two codes, each in the low bits of its half."""
    pair = lambda v, kind: v.bitcast(kind, 2)
    exponent = pair(size, i16) & EXPONENT
    base = maximum(exponent, LEAST).bitcast(i32)
    magic = base + (SHIFT << MANTISSA) * BOTH
    total = (pair(size, bf16) + pair(magic, bf16)).bitcast(i32)
    code = total - magic + (base >> SHIFT) - (LEAST >> SHIFT) * BOTH
    return code | ((sign >> 12) & 8 * BOTH)


def _packed(codes: list[Value]) -> Value:
    """Four registers of two codes -> one of eight: bytes with a code each, then two codes a byte, then those bytes."""
    pick = lambda a, b: Value(intrinsic("llvm.nvvm.prmt", mlir_type(i32), a, b, constant(EVEN_BYTES, i32)), i32)
    nibbles = [(lambda u: u | (u >> 4))(pick(codes[i], codes[i + 1])) for i in (0, 2)]
    return pick(*nibbles)
