"""Small floats and their block scales, in numpy: what the bytes mean, and which byte is nearest to a number.

A block is 32 numbers that share one E8M0 scale, 2^(byte - 127); byte 255 is NaN and makes the whole block NaN. Formats,
block size and scale: OCP Microscaling Formats (MX) specification v1.0, sections 5 and 6. e2m1 lies two a byte, the
first in the low half, as torch.float4_e2m1fn_x2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .dtypes import DType, f4e2m1, f8e4m3fn, f8e4m3fnuz, f8e5m2

BLOCK = 32  # numbers that share a scale
SCALE_BIAS = 127
SCALE_NAN = 255


@dataclass(frozen=True)
class SmallFloat:
    """What DType does not say of a format: its exponent's bias, and the exponent of its largest number."""

    dtype: DType
    bias: int
    largest_exponent: int

    @property
    def least_exponent(self) -> int:
        """Of the smallest normal number."""
        return 1 - self.bias

    @property
    def per_byte(self) -> int:
        """Numbers in a byte."""
        return 8 // self.dtype.bits

    @property
    def nan(self) -> int | None:
        """The code that conversions write for NaN; None: the format has none."""
        return {f8e4m3fn: 0x7F, f8e5m2: 0x7F, f8e4m3fnuz: 0x80}.get(self.dtype)


FORMATS = {
    f8e4m3fn: SmallFloat(f8e4m3fn, 7, 8),
    f8e4m3fnuz: SmallFloat(f8e4m3fnuz, 8, 7),
    f8e5m2: SmallFloat(f8e5m2, 15, 15),
    f4e2m1: SmallFloat(f4e2m1, 1, 2),
}


@cache
def values(dtype: DType) -> np.ndarray:
    """The number that each code of a format stands for, float64; codes in order."""
    f, mantissa = FORMATS[dtype], dtype.mantissa
    codes = np.arange(1 << dtype.bits)
    exponent = (codes & ((1 << dtype.bits - 1) - 1)) >> mantissa
    fraction = codes & ((1 << mantissa) - 1)
    size = np.where(exponent > 0, 1 + fraction / 2**mantissa, fraction / 2 ** (mantissa - 0.0))
    out = size * 2.0 ** (np.maximum(exponent, 1) - f.bias)
    if dtype == f8e4m3fn:
        out[(codes & 0x7F) == 0x7F] = np.nan
    elif dtype == f8e5m2:
        out[(codes & 0x7F) == 0x7C] = np.inf
        out[(codes & 0x7F) > 0x7C] = np.nan
    out = np.where(codes >> (dtype.bits - 1), -out, out)
    if dtype == f8e4m3fnuz:
        out[0x80] = np.nan
    return out


def unpacked(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Bytes (uint8) -> one code an element along the last axis."""
    if FORMATS[dtype].per_byte == 1:
        return stored
    return np.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:-1], -1)


def packed(codes: np.ndarray, dtype: DType) -> np.ndarray:
    """The inverse of `unpacked`."""
    codes = codes.astype(np.uint8)
    return codes if FORMATS[dtype].per_byte == 1 else codes[..., 0::2] | codes[..., 1::2] << 4


def decode(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Bytes -> numbers, float64."""
    return values(dtype)[unpacked(stored, dtype)]


def scale_values(scales: np.ndarray) -> np.ndarray:
    """E8M0 bytes -> 2^(byte - 127), float64; 255 is NaN."""
    return np.where(scales == SCALE_NAN, np.nan, 2.0 ** (scales.astype(np.float64) - SCALE_BIAS))


def dequantised(stored: np.ndarray, scales: np.ndarray, dtype: DType) -> np.ndarray:
    """(rows, bytes) and (rows, blocks) -> numbers (rows, blocks * 32), float64."""
    return decode(stored, dtype) * np.repeat(scale_values(scales), BLOCK, axis=-1)


def encode(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Codes (uint8, not packed) of the nearest finite numbers; halfway: the even code. Beyond the largest: the largest.

    NaN gives the format's NaN, and 0 where it has none. The sign of zero is kept, but e4m3fnuz has none."""
    table = values(dtype)[: 1 << (dtype.bits - 1)]
    steps = table[np.isfinite(table)]
    size = np.minimum(np.abs(np.nan_to_num(np.asarray(x, np.float64), nan=0.0)), steps[-1])
    up = np.clip(np.searchsorted(steps, size), 1, len(steps) - 1)
    middle = (steps[up - 1] + steps[up]) / 2
    code = np.where((size > middle) | ((size == middle) & (up % 2 == 0)), up, up - 1).astype(np.uint8)
    code |= np.where(np.signbit(x), 1 << (dtype.bits - 1), 0).astype(np.uint8)
    if dtype == f8e4m3fnuz:
        code[code == 0x80] = 0
    nan = FORMATS[dtype].nan
    return np.where(np.isnan(x), nan or 0, code).astype(np.uint8)
