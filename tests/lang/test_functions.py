"""The element functions against float64, over their whole range, on the CPU; and where their coefficients come from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flykernels.lang import Global, Mode, ThreadValues, f32, functions

from .fit_functions import normal, tanh
from .host import run

erfc = np.vectorize(math.erfc, otypes=[np.float64])
phi = lambda x: erfc(-x / math.sqrt(2)) / 2
sigmoid = lambda x: 1 / (1 + np.exp(-x))
tanh_gelu = lambda x: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))

# name, exact, from, to, largest relative error as the function of x that the docstring states
CASES = [
    ("exp", np.exp, -87, 88, lambda x: 1.2e-7 * (1 + np.abs(x))),
    ("sigmoid", sigmoid, -80, 80, lambda x: 2.5e-7 * (1 + np.abs(x))),
    ("tanh", np.tanh, -20, 20, lambda x: 5e-7 + 0 * x),
    ("normal_cdf", phi, -6, 6, lambda x: 3e-6 + 0 * x),
    ("normal_cdf", phi, -12, -6, lambda x: 1e-5 + 0 * x),
    ("gelu", lambda x: x * phi(x), -6, 30, lambda x: 3e-6 + 0 * x),
    ("gelu_tanh", tanh_gelu, -5, 30, lambda x: 4e-6 + 0 * x),
    ("gelu_tanh_by_pairs", tanh_gelu, -5, 30, lambda x: 4e-6 + 0 * x),
    ("silu", lambda x: x * sigmoid(x), -80, 80, lambda x: 2.5e-7 * (1 + np.abs(x))),
    ("relu", lambda x: np.maximum(x, 0), -9, 9, lambda x: 0 * x),
]


def apply(name: str, x: np.ndarray) -> np.ndarray:
    count = len(x)
    assert count % 8 == 0
    y = np.zeros_like(x)

    def kernel(k, p, c):
        a, b = k.args(a=Global(f32, (count,)), b=Global(f32, (count,)))
        held = k.fragment(ThreadValues((8,), (Mode(1, 0, 1),), Mode(8, 0, 1)))

        @k.loop(0, count // 8)
        def _(i):
            held.store(b.tile((8,), i), getattr(functions, name)(held.load(a.tile((8,), i))))

    run(kernel, x, y)
    return y


@pytest.mark.parametrize("name, exact, low, high, bound", CASES, ids=[f"{c[0]} {c[2]} to {c[3]}" for c in CASES])
def test_errors_are_as_stated(name, exact, low, high, bound):
    near_zero = np.geomspace(1e-30, 1, 2000)
    x = np.concatenate([np.linspace(low, high, 100_000), near_zero, -near_zero]).astype(np.float32)
    x = x[(x >= low) & (x <= high)]
    x = x[: len(x) // 8 * 8].copy()
    want, got = exact(x.astype(np.float64)), apply(name, x).astype(np.float64)
    normal_numbers = np.abs(want) > 2.0**-126
    error = np.abs(got - want)[normal_numbers] / np.abs(want)[normal_numbers]
    over = error - bound(x[normal_numbers].astype(np.float64))
    worst = int(np.argmax(over))
    assert over[worst] <= 0, f"{name}({x[normal_numbers][worst]}) errs by {error[worst]}"


@pytest.mark.parametrize("name, at_minus_infinity, at_infinity", [
    ("exp", 0, np.inf), ("sigmoid", 0, 1), ("tanh", -1, 1), ("normal_cdf", 0, 1), ("relu", 0, np.inf),
    ("gelu", np.nan, np.inf), ("silu", np.nan, np.inf), ("gelu_tanh", np.nan, np.inf),
    ("gelu_tanh_by_pairs", -np.inf, np.inf),
])  # fmt: skip
def test_infinities_and_nan(name, at_minus_infinity, at_infinity):
    got = apply(name, np.array([-np.inf, np.inf, np.nan, 0, 0, 0, 0, 0], np.float32))
    assert np.array_equal(got[:3], np.array([at_minus_infinity, at_infinity, np.nan], np.float32), equal_nan=True)
    assert got[3] == apply(name, np.zeros(8, np.float32))[0]  # whatever its neighbours are


@pytest.mark.parametrize("fit, held", [(normal, functions.NORMAL), (tanh, functions.TANH)])
def test_coefficients_are_what_the_fit_gives(fit, held):
    """Compared where it counts: the two polynomials agree far below an f32 step."""
    found, error = fit()
    x = np.linspace(0, 1, 1000)
    assert np.abs(np.polynomial.polynomial.polyval(x, found) - np.polynomial.polynomial.polyval(x, held)).max() < 1e-9
    assert error < 3e-7
