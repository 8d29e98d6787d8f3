"""Number conversions of the vector ALU: bf16, f16, fp8, fp6 and fp4, with the rounding and saturation of gfx950.

Formats: OCP 8-bit floating point (e4m3 without infinities, largest 448; e5m2) and OCP Microscaling (e2m1, e2m3, e3m2,
E8M0 scales). gfx950 uses these, unlike gfx942's "fnuz" variants (published ROCm notes).
"""

from __future__ import annotations

import numpy as np

U32, F32, F64 = np.uint32, np.float32, np.float64


def to_integer(x: np.ndarray, low: int, high: int) -> np.ndarray:
    """Float -> integer: toward zero, saturating, NaN to 0 (int64)."""
    wide = np.nan_to_num(x.astype(F64), nan=0.0, posinf=float(high), neginf=float(low))
    return np.clip(np.trunc(wide), low, high).astype(np.int64)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """f32 -> bf16 bits in uint32, nearest even; NaN stays NaN (quieted)."""
    u = np.ascontiguousarray(x, F32).view(U32)
    rounded = (u + U32(0x7FFF) + ((u >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (u >> U32(16)) | U32(0x40), rounded)


def pack_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return bf16_bits(a) | bf16_bits(b) << U32(16)


def half_bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, F32).astype(np.float16).view(np.uint16).astype(U32)


def pack_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return half_bits(a) | half_bits(b) << U32(16)


def _toward_zero(x: np.ndarray) -> np.ndarray:
    h = np.asarray(x, F32).astype(np.float16)
    over = np.isfinite(x) & (np.abs(h.astype(F64)) > np.abs(x.astype(F64)))
    return (h.view(np.uint16) - over.astype(np.uint16)).astype(U32)


def pack_half_toward_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _toward_zero(a) | _toward_zero(b) << U32(16)


def pack_i16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    low, high = (np.clip(v, -32768, 32767).astype(np.int16).view(np.uint16).astype(U32) for v in (a, b))
    return low | high << U32(16)


def halves_bf16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed bf16 pair -> (low, high) as f32."""
    x = np.ascontiguousarray(x)
    return (x << U32(16)).view(F32), (x & U32(0xFFFF0000)).view(F32)


def halves_f16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed f16 pair -> (low, high) as f32."""
    low = (x & U32(0xFFFF)).astype(np.uint16).view(np.float16).astype(F32)
    return low, (x >> U32(16)).astype(np.uint16).view(np.float16).astype(F32)


def dot2_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    (a0, a1), (b0, b1) = halves_bf16(a), halves_bf16(b)
    return (a0.astype(F64) * b0 + a1.astype(F64) * b1 + c).astype(F32)


def dot2_f16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    (a0, a1), (b0, b1) = halves_f16(a), halves_f16(b)
    return (a0.astype(F64) * b0 + a1.astype(F64) * b1 + c).astype(F32)


# -- small floats
class Small:
    """A float format of at most 8 bits: all its values, and rounding to it."""

    def __init__(self, name: str, exponent: int, mantissa: int, bias: int, special: str):
        self.name, self.bits, self.special = name, 1 + exponent + mantissa, special
        codes = np.arange(1 << self.bits)
        sign = np.where(codes >> (exponent + mantissa), -1.0, 1.0)
        e, m = (codes >> mantissa) & ((1 << exponent) - 1), codes & ((1 << mantissa) - 1)
        value = np.where(e == 0, m * 2.0 ** (1 - bias - mantissa), (1 + m / 2**mantissa) * 2.0 ** (e - bias * 1.0))
        if special == "ieee":
            value = np.where(e == (1 << exponent) - 1, np.where(m == 0, np.inf, np.nan), value)
        elif special == "nan":
            value = np.where((codes & (2 ** (self.bits - 1) - 1)) == 2 ** (self.bits - 1) - 1, np.nan, value)
        self.table = (sign * value).astype(F32)
        positive = self.table[: 1 << (self.bits - 1)]
        self.finite = positive[np.isfinite(positive)].astype(F64)
        self.largest = float(self.finite[-1])

    def encode(self, x: np.ndarray, saturate: bool = True) -> np.ndarray:
        """Nearest even code (uint32). Beyond the largest: saturates, or gives NaN / infinity where the format has
        one."""
        x = np.asarray(x, F64)
        magnitude = np.abs(x)
        steps = self.finite
        upper = np.clip(np.searchsorted(steps, np.nan_to_num(magnitude, nan=0.0)), 1, len(steps) - 1)
        low, high = steps[upper - 1], steps[upper]
        middle = (low + high) / 2
        code = np.where((magnitude > middle) | ((magnitude == middle) & (upper % 2 == 0)), upper, upper - 1)
        if not saturate and self.special:
            step = steps[-1] - steps[-2]
            over = magnitude >= steps[-1] + step / 2
            code = np.where(over, 0x7C if self.special == "ieee" else 0x7F, code)
        code = np.where(np.isnan(x), (1 << (self.bits - 1)) - 1 if self.special else len(steps) - 1, code)
        return (code | np.where(np.signbit(x), 1 << (self.bits - 1), 0)).astype(U32)


E4M3 = Small("e4m3", 4, 3, 7, "nan")
E5M2 = Small("e5m2", 5, 2, 15, "ieee")
E2M1 = Small("e2m1", 2, 1, 1, "")
E2M3 = Small("e2m3", 2, 3, 1, "")
E3M2 = Small("e3m2", 3, 2, 3, "")
BY_CODE = {0: E4M3, 1: E5M2, 2: E2M3, 3: E3M2, 4: E2M1}  # cbsz and blgp of the scaled matrix instructions


def e8m0(x: np.ndarray) -> np.ndarray:
    """E8M0 byte -> 2^(x - 127) as f32 (2^-127 is denormal); 255 is NaN."""
    return E8M0[x]


with np.errstate(all="ignore"):
    E8M0 = np.where(np.arange(256) == 255, np.nan, 2.0 ** (np.arange(256) - 127.0)).astype(F32)
