"""Element functions of f32 Values and Fragments that every target computes alike, from `exp2` and arithmetic.

No library is called. `exp2` is one instruction on the GPUs and a polynomial on x86; its own error is about 1e-7
relatively. The coefficients below are ours: `tests/lang/fit_functions.py` derives them. Errors stated are against
float64, measured over all of the named range (`tests/lang/test_functions.py`); NaN gives NaN everywhere.
"""

from __future__ import annotations

from math import e, log2

from .values import absolute, exp2, minimum, reciprocal, select, vector_of

LOG2_E = log2(e)

# 1 - Phi(x) = t 2^(P(t) - x^2 log2(e) / 2) with t = 1 / (1 + SLOPE x), 0 <= x; error of P at most 1.9e-07
NORMAL_SLOPE = 0.25
NORMAL = (
    -3.327197433035672,
    1.4694691051064512,
    0.42053640840887246,
    1.2222271355022898,
    -2.3454276618063354,
    4.013770155551213,
    -4.016776783394747,
    1.909142010207769,
    -0.3457427513023673,
)
# tanh(x) = x + x^3 P(x^2), |x| <= TANH_END; error of P at most 1.5e-9
TANH_END = 0.625
TANH = (
    -0.33333333183352887,
    0.1333330498216645,
    -0.053959550148731474,
    0.021770994825907324,
    -0.008350005401630963,
    0.00229893875627455,
)
# gelu's tanh form: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), Hendrycks and Gimpel 2016 (arXiv 1606.08415)
GELU_TANH_SCALE = 2 * (2 / 3.141592653589793) ** 0.5
GELU_TANH_CUBE = 0.044715
PAIRED_MOST = 60.0  # exponent of 2


def polynomial(x, coefficients):
    """The polynomial at x, by Horner's rule; coefficients lowest power first."""
    *rest, out = coefficients
    for c in reversed(rest):
        out = x * out + c
    return out


def exp(x):
    """e^x. Relative error at most 1e-7 (1 + |x|); subnormal results may be 0."""
    return exp2(x * LOG2_E)


def sigmoid(x):
    """1 / (1 + e^-x). Relative error at most 2e-7 (1 + |x|)."""
    return x.map(lambda v: reciprocal(exp2(v * -LOG2_E) + 1.0))


def tanh(x):
    """Relative error at most 5e-7."""

    def one(v):
        size = absolute(v)
        small = v + v * (v * v) * polynomial(v * v, TANH)
        folded = exp2(minimum(size, 16.0) * (-2 * LOG2_E))  # beyond 16 it is 1 in f32
        large = (1.0 - folded) * reciprocal(folded + 1.0)
        return select(size < TANH_END, small, select(v < 0.0, 0.0 - large, select(size >= TANH_END, large, v)))

    return x.map(one)


def normal_cdf(x):
    """Phi(x), the standard normal distribution function. Relative error at most 3e-6 from -6 on, 1e-5 from -12 on."""

    def one(v):
        size = absolute(v)
        t = reciprocal(size * NORMAL_SLOPE + 1.0)
        tail = t * exp2(polynomial(t, NORMAL) - v * v * (LOG2_E / 2))
        return select(v < 0.0, tail, 1.0 - tail)

    return x.map(one)


def relu(x):
    """max(x, 0), but NaN stays NaN."""
    return x.map(lambda v: select(v < 0.0, 0.0, v))


def gelu(x):
    """x Phi(x), the exact form. Relative error as normal_cdf's."""
    return x.map(lambda v: v * normal_cdf(v))


def gelu_tanh(x):
    """The tanh form, x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)). Relative error at most 2e-6 where |x| < 5."""
    return x.map(lambda v: v * sigmoid((v + v * (v * v) * GELU_TANH_CUBE) * GELU_TANH_SCALE))


def gelu_tanh_by_pairs(x):
    """gelu_tanh of vectors of an even width, with one reciprocal for two elements: for processors where that is what
    takes longest. Below about -7.6 it is x 2^-60 (1e-17 from the exact value and less), also at minus infinity."""
    square, line = (-LOG2_E * GELU_TANH_SCALE * c for c in (GELU_TANH_CUBE, 1.0))

    def one(v):
        # beyond PAIRED_MOST the product of two might not be finite; a NaN's neighbour gets a number
        grown = exp2(minimum(v * (v * v * square + line), PAIRED_MOST)) + 1.0
        shares = []
        for i in range(0, v.width, 2):
            both = reciprocal(grown[i] * grown[i + 1])
            shares += [both * grown[i + 1], both * grown[i]]
        return v * vector_of(shares)

    return x.map(one)


def silu(x):
    """x sigmoid(x). Relative error at most 2e-7 (1 + |x|)."""
    return x.map(lambda v: v * sigmoid(v))
