"""Floats to FP8 on sm_90a, which makes two codes an instruction: of two f32, or of two f16 in one register.

bf16 is scaled two at a time and then widened, which is all exact. f16 stays f16: scaling rounds only what ends below
2^-14, the least normal number. For e4m3fn that is far below the least number that has a code; for e5m2, whose numbers
are f16's first bytes, nothing is scaled down with the scales of mode "floor" (with "round_up" blocks may be halved, so
there f32 is scaled). f16 has powers of two up to 2^15, and a block of its subnormals may ask for 2^39: three factors.
"""

from __future__ import annotations

from ..dtypes import DType, f8e4m3fn, f8e5m2, f16, f32, i16, i32
from ..lang.microscaling import F16_BIAS, F16_MANTISSA, F32_BIAS
from ..lang.values import Value, maximum, minimum, mlir_type, vector_of
from ..mlir import intrinsic

FORMATS = {f8e4m3fn: "e4m3x2", f8e5m2: "e5m2x2"}  # PTX's names
LEAST = F32_BIAS + 1 - F16_BIAS  # biased by 127: f16's powers of two that are normal
MOST = F32_BIAS + F16_BIAS


def takes_f16(dtype: DType, round_up: bool) -> bool:
    """Whether f16 may be scaled as f16, see above."""
    return dtype == f8e4m3fn or (dtype == f8e5m2 and not round_up)


def factors_of_f16(exponent: Value) -> tuple[Value, ...]:
    """Powers of two (exponents biased by 127, an even number of i16) as three of f16 to multiply by in turn. Larger
    ones than all hold are for blocks of zeros only, smaller ones than 2^-14 for none that is finite."""
    found, left = [], maximum(exponent, LEAST)
    both, pairs = lambda x: x << 16 | x, exponent.width // 2
    words = lambda v: v.bitcast(i32, pairs)  # no half of a word carries into the other
    for _ in range(3):
        part = minimum(left, MOST)
        found.append(((words(part) - both(LEAST - 1)) << F16_MANTISSA).bitcast(f16, exponent.width))
        left = (words(left) - words(part) + both(F32_BIAS)).bitcast(i16, exponent.width)
    return tuple(found)


def first_alone(exponent: Value) -> Value:
    """i1: of all these exponents f16 has the power of two, as only blocks of finite numbers ask for."""
    low, high = exponent, exponent
    while low.width > 1:
        halves = lambda v: (v.shuffle(range(v.width // 2)), v.shuffle(range(v.width // 2, v.width)))
        low, high = minimum(*halves(low)), maximum(*halves(high))
    return (low[0] >= LEAST) & (high[0] <= MOST)


def along(x: Value, factors: tuple[Value, ...], dtype: DType) -> Value:
    """x (a vector) times factors -> i32 words of 4 codes, the first lowest. Numbers that are too large saturate."""
    return _words(_scaled(x, factors), dtype)


def down(rows: list[Value], factors: tuple[Value, ...], dtype: DType) -> list[Value]:
    """Rows (vectors) times factors -> each column's words, first row lowest. 16 bits are scaled before columns are
    taken out of the rows' registers."""
    rows = [_scaled(r, factors) for r in rows]
    return [_words(vector_of([r[c] for r in rows]), dtype) for c in range(factors[0].width)]


def _scaled(x: Value, factors: tuple[Value, ...]) -> Value:
    for factor in factors:
        x = x * factor if x.dtype == factor.dtype else x.to(f32) * factor.to(f32)
    return x


def _words(x: Value, dtype: DType) -> Value:
    x = x if x.dtype == f16 else x.to(f32)
    pairs = vector_of([_pair(x.shuffle([i, i + 1]), dtype) for i in range(0, x.width, 2)])
    return pairs.bitcast(i32, x.width // 4)


def _pair(x: Value, dtype: DType) -> Value:
    """Two f16 or f32 -> their codes, as i16, the first one low."""
    if x.dtype == f16:
        return Value(intrinsic(f"llvm.nvvm.f16x2.to.{FORMATS[dtype]}.rn", mlir_type(i16), x), i16)
    return Value(intrinsic(f"llvm.nvvm.ff.to.{FORMATS[dtype]}.rn", mlir_type(i16), x[1], x[0]), i16)
