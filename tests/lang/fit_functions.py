"""Derives the coefficients of flykernels/lang/functions.py: `python tests/lang/fit_functions.py` prints them.

Each is a minimax fit of the stated function by Lawson's iteration: least squares on a dense Chebyshev grid, the weights
multiplied by the error after each round until the error's peaks are level. Function values come from mpmath with 40
digits; the fit runs in extended precision."""

import numpy as np
from mpmath import mp

POINTS, ROUNDS = 600, 60
NORMAL_DEGREE, NORMAL_SLOPE, NORMAL_END = 8, 0.25, 13.0
TANH_DEGREE, TANH_END = 5, 0.625


def chebyshev(low, high, n=POINTS):
    return (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(n) + 0.5) / n)


def minimax(x, values, degree):
    """(coefficients, lowest power first; largest error)."""
    x, values = np.asarray(x, np.float64), np.asarray(values, np.float64)
    basis = np.polynomial.chebyshev.Chebyshev.basis
    domain = [x.min(), x.max()]
    columns = np.stack([basis(i, domain)(x) for i in range(degree + 1)], 1)
    weight = np.full(len(x), 1 / len(x))
    best = (np.inf, None)
    for _ in range(ROUNDS):
        scale = np.sqrt(weight)[:, None]
        c = np.linalg.lstsq(columns * scale, values * scale[:, 0], rcond=None)[0]
        error = np.abs(columns @ c - values)
        if error.max() < best[0]:
            best = error.max(), c
        weight = weight * error
        weight /= weight.sum()
    poly = np.polynomial.chebyshev.Chebyshev(best[1], domain).convert(kind=np.polynomial.Polynomial)
    return [float(v) for v in poly.coef], float(best[0])


def normal():
    """P with 1 - Phi(x) = t 2^(P(t) - x^2 log2(e)/2), t = 1 / (1 + slope x), for 0 <= x <= NORMAL_END.

    The error of P is the relative error of the whole, times ln 2."""
    mp.dps = 40
    t = chebyshev(1 / (1 + NORMAL_SLOPE * NORMAL_END), 1.0)

    def exact(t):
        x = (1 / mp.mpf(float(t)) - 1) / mp.mpf(NORMAL_SLOPE)
        tail = mp.erfc(x / mp.sqrt(2)) / 2
        return float(mp.log(tail / mp.mpf(float(t)) * mp.exp(x * x / 2), 2))

    return minimax(t, [exact(v) for v in t], NORMAL_DEGREE)


def tanh():
    """P with tanh(x) = x + x^3 P(x^2), for |x| <= TANH_END."""
    mp.dps = 40
    u = chebyshev(0.0, TANH_END**2)
    exact = lambda u: float((mp.tanh(mp.sqrt(mp.mpf(float(u)))) / mp.sqrt(mp.mpf(float(u))) - 1) / mp.mpf(float(u)))
    return minimax(u, [exact(v) for v in u], TANH_DEGREE)


if __name__ == "__main__":
    for name, fit in (("NORMAL", normal), ("TANH", tanh)):
        coefficients, error = fit()
        print(f"{name} = (  # error {error:.1e}")
        for c in coefficients:
            print(f"    {c!r},")
        print(")")
