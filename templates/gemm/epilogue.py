"""What happens to a sum before it is written: bias, activation, residual. Shared by all targets.

Every function takes f32 Values (scalars or vectors) or Fragments, and gives the same back."""

from __future__ import annotations

from math import e, log2, pi, sqrt

from flykernels.lang import exp2, select
from flykernels.lang.values import maximum

# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: erfc(x) = t(a1 + t(a2 + ...)) exp(-x^2) for x >= 0,
# t = 1 / (1 + p x); absolute error at most 1.5e-7.
ERFC_P = 0.3275911
ERFC_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
TANH_GELU = 0.044715  # the cubic term of GELU's tanh form (Hendrycks and Gimpel, 2016)


def activate(kind: str, x):
    """One of problem.ACTIVATIONS of x. NaN stays NaN, and infinities give what ATen gives."""
    return {"none": lambda v: v, "relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}[kind](x)


def relu(x):
    return x.map(lambda v: select(v < 0.0, 0.0, v))  # a NaN is not less than 0


def sigmoid(x):
    return x.map(lambda v: 1.0 / (exp2(v * -log2(e)) + 1.0))


def silu(x):
    return x.map(lambda v: v / (exp2(v * -log2(e)) + 1.0))


def gelu_tanh(x):
    """x (1 + tanh(u)) / 2 = x sigmoid(2u), with u = sqrt(2/pi) (x + 0.044715 x^3)."""
    scale = 2 * sqrt(2 / pi)
    return x.map(lambda v: v * sigmoid(v * (v * v * (TANH_GELU * scale) + scale)))


def gelu(x):
    """x (1 + erf(x / sqrt 2)) / 2 by way of q = erfc(|x| / sqrt 2) / 2, which loses nothing to cancellation."""

    def one(v):
        t = 1.0 / (maximum(v, 0.0 - v) * (ERFC_P / sqrt(2)) + 1.0)
        *rest, series = ERFC_A
        for a in reversed(rest):
            series = t * series + a
        q = t * series * exp2(v * v * (-log2(e) / 2)) * 0.5
        return v * select(v < 0.0, q, 1.0 - q)

    return x.map(one)
