"""What a scaled GEMM should give: numpy in f64 over the dequantised operands, and how far a kernel may be from it."""

from __future__ import annotations

from math import sqrt

import numpy as np

from flykernels.microscaling import decode, dequantised

from .problem import ScaledGemmProblem


def operand(p: ScaledGemmProblem, which: str, stored: np.ndarray, scale) -> np.ndarray:
    """A as (M, K) or B as (N, K), float64, from its bytes (rows, row bytes) and scales."""
    kind = p.a_type if which == "a" else p.b_type
    if p.scaling == "block":
        return dequantised(stored, scale, kind)
    each = np.asarray(scale, np.float64).reshape(-1, 1)  # one of all rows, or one a row
    return decode(stored, kind) * each


def reference(p: ScaledGemmProblem, a, b, scale_a, scale_b, bias=None) -> np.ndarray:
    """C, not rounded. a (M, bytes), b (N, bytes): uint8. Scales: uint8 (rows, K / 32), or f32 (1 or rows)."""
    with np.errstate(all="ignore"):
        c = operand(p, "a", a, scale_a) @ operand(p, "b", b, scale_b).T
        return c if bias is None else c + np.asarray(bias, np.float64)


def bound(p: ScaledGemmProblem, a, b, scale_a, scale_b, bias=None) -> np.ndarray:
    """Absolute error (M, N) that f32 sums of K exact products may show before C is rounded.

    K eps sum|a||b| bounds any order of additions (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
    section 3.1); errors not all of one sign grow with sqrt(K), of which 8 times is taken. Scales and bias add a few."""
    with np.errstate(all="ignore"):
        size = np.abs(operand(p, "a", a, scale_a)) @ np.abs(operand(p, "b", b, scale_b)).T
        if bias is not None:
            size = size + np.abs(np.asarray(bias, np.float64))
        return (8 * sqrt(p.k) + 8) * 2.0**-24 * size


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 rounded once to f32, f16 or bf16 (nearest, ties to even), as float64."""
    with np.errstate(over="ignore"):
        if dtype == "f32":
            return x.astype(np.float32).astype(np.float64)
        if dtype == "f16":
            return x.astype(np.float16).astype(np.float64)
    mantissa, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))  # 8 bits of a bf16: |mantissa| in [0.5, 1)
    exponent = np.maximum(exponent, -125)  # subnormals share the least exponent's step
    step = 2.0 ** (exponent - 8)
    return np.where(np.isfinite(x), np.rint(np.ldexp(mantissa, np.frexp(x)[1]) / step) * step, x)


def wrong(p: ScaledGemmProblem, got: np.ndarray, exact: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Where `got` is not the exact result rounded once, nor one that the accumulation bound can explain.

    Where rounding exact - allowed and exact + allowed gives one number, `got` must be that, bit for bit."""
    with np.errstate(all="ignore"):
        low, high = (rounded(exact + side * allowed, p.out_dtype) for side in (-1, 1))
        fine = ((low <= got) & (got <= high)) | (np.isnan(exact) & np.isnan(got)) | (exact == got)
    return ~fine
