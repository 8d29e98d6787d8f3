"""f64 vector instructions: name -> (result type, source types, numpy function).

Semantics: AMD CDNA3 ISA reference, VOP1 and VOP3 chapters. Reciprocals and roots are correctly rounded here, where the
hardware leaves 2^29 ulp for the refinement that follows them in every kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from .arithmetic import I32, U32

F64, U64 = np.float64, np.uint64


def _fma(a: float, b: float, c: float, exponent: int = 0) -> float:
    """(a b + c) 2^exponent with one rounding."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return float(F64(a) * F64(b) + F64(c))
    exact = (Fraction(a) * Fraction(b) + Fraction(c)) * Fraction(2) ** exponent
    if exact == 0:
        return float(F64(a) * F64(b) + F64(c)) if a * b == 0 or exponent == 0 else 0.0
    try:
        return exact.numerator / exact.denominator  # Python divides integers with one rounding
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray, exponent: np.ndarray | int = 0) -> np.ndarray:
    """f64 fused multiply-add, exact and rounded once; `exponent` scales before the rounding."""
    a, b, c, exponent = np.broadcast_arrays(a, b, c, exponent)
    each = zip(*(x.ravel().tolist() for x in (a, b, c, exponent)), strict=True)
    return np.array([_fma(*v) for v in each], F64).reshape(a.shape)


def class_f64(x, mask):
    """v_cmp_class of f64: bits as for f32, see arithmetic.class_f32."""
    bits = np.ascontiguousarray(x).view(U64)
    magnitude, negative = bits & U64((1 << 63) - 1), bits >> U64(63) != 0
    infinite = U64(0x7FF << 52)
    nan, quiet = magnitude > infinite, (bits >> U64(51)) & U64(1) != 0
    side = lambda minus, plus: np.where(negative, minus, plus)
    index = np.select(
        [nan & ~quiet, nan, magnitude == infinite, magnitude >= U64(1 << 52), magnitude > U64(0)],
        [0, 1, side(2, 9), side(3, 8), side(4, 7)],
        side(5, 6),
    )
    return (mask >> index.astype(U32)) & U32(1) != 0


D = ("f64",)
TABLE: dict[str, tuple[str, tuple[str, ...], Callable]] = {
    "v_fma_f64": ("f64", ("f64",) * 3, fma64),
    "v_rcp_f64": ("f64", D, lambda x: 1 / x),
    "v_rsq_f64": ("f64", D, lambda x: 1 / np.sqrt(x)),
    "v_sqrt_f64": ("f64", D, np.sqrt),
    "v_floor_f64": ("f64", D, np.floor),
    "v_ceil_f64": ("f64", D, np.ceil),
    "v_trunc_f64": ("f64", D, np.trunc),
    "v_fract_f64": ("f64", D, lambda x: np.minimum(x - np.floor(x), np.nextafter(1.0, 0.0))),
    "v_frexp_mant_f64": ("f64", D, lambda x: np.where(np.isfinite(x), np.frexp(x)[0], x)),
    "v_frexp_exp_i32_f64": ("i32", D, lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32)),
}
ACCUMULATE: dict[str, tuple[str, tuple[str, ...], Callable]] = {"v_fmac_f64": ("f64", ("f64",) * 3, fma64)}
