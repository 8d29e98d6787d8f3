"""What a GEMM should give: numpy in f64, plain, and how far a kernel may be from it."""

from __future__ import annotations

from math import erf, pi, sqrt

import numpy as np

from .problem import GemmProblem


def reference(p: GemmProblem, a, b, bias=None, residual=None) -> np.ndarray:
    """C of a problem, not rounded. Arrays are ([batch,] rows, columns) of any float type; bias is (N,) or C's shape."""
    wide = lambda x: np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        x = wide(a) @ wide(b)
        if bias is not None:
            x = x + wide(bias)
        x = activation(p.activation, x)
        return x if residual is None else x + wide(residual)


def activation(kind: str, x: np.ndarray) -> np.ndarray:
    """torch.nn.functional's relu, gelu (both) and silu in f64."""
    if kind == "relu":
        return np.where(x < 0, 0.0, x)
    if kind == "gelu":
        return x * 0.5 * (1 + np.vectorize(erf, otypes=[np.float64])(x / sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
    if kind == "silu":
        return x / (1 + np.exp(-x))
    return x


def tolerance(p: GemmProblem, a, b) -> float:
    """Absolute error that f32 sums of K products and one rounding of C may show, for these A and B.

    Sums: K eps sum|a||b| bounds any order (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1);
    errors that are not all of one sign grow with sqrt(K), of which 8 times is taken here. The activations have slopes
    up to 1.13 and add 4 steps of f32 of their own."""
    f32_eps = 2.0**-24
    size = float(np.max(np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64)), initial=0.0))
    return (8 * sqrt(p.k) + 8) * f32_eps * size + p.output_type.epsilon * size
