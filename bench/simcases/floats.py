"""Small float formats, decoded from the OCP specifications (8-bit FP, and Microscaling v1.0): a second opinion to the
simulator's own tables, written apart from them."""

from __future__ import annotations

import numpy as np

# exponent bits, mantissa bits, bias, whether the top exponent codes Inf/NaN (e5m2), or one NaN only (e4m3)
FORMATS = {
    "e4m3": (4, 3, 7, "nan"),
    "e5m2": (5, 2, 15, "ieee"),
    "e2m1": (2, 1, 1, ""),
    "e2m3": (2, 3, 1, ""),
    "e3m2": (3, 2, 3, ""),
}


def values(fmt: str) -> np.ndarray:
    """The value of every code of a format, in code order (float64)."""
    e_bits, m_bits, bias, special = FORMATS[fmt]
    out = []
    for code in range(1 << (1 + e_bits + m_bits)):
        sign = -1.0 if code >> (e_bits + m_bits) else 1.0
        e, m = (code >> m_bits) & ((1 << e_bits) - 1), code & ((1 << m_bits) - 1)
        if special == "ieee" and e == (1 << e_bits) - 1:
            v = np.inf if m == 0 else np.nan
        elif special == "nan" and e == 15 and m == 7:
            v = np.nan
        elif e == 0:
            v = m / (1 << m_bits) * 2.0 ** (1 - bias)
        else:
            v = (1 + m / (1 << m_bits)) * 2.0 ** (e - bias)
        out.append(sign * v)
    return np.array(out)


def decode(x: np.ndarray, fmt: str) -> np.ndarray:
    """Bytes -> float64. e2m1 has two values a byte, the low nibble first, so the last axis doubles."""
    if fmt == "e2m1":
        return values(fmt)[np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1)]
    return values(fmt)[x]


def e8m0(x: np.ndarray) -> np.ndarray:
    """Scale bytes -> 2^(x - 127); 255 is NaN."""
    return np.where(x == 255, np.nan, 2.0 ** (x.astype(np.float64) - 127))
