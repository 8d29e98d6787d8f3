"""MX quantisation of normal numbers is as accurate as integration predicts: of numbers, and of their products."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from flykernels.dtypes import dtype
from flykernels.microscaling import dequantised
from templates.quantize.expected import moments, product_error
from templates.quantize.problem import MODES, QuantizeProblem
from templates.quantize.reference import reference
from templates.scaled_gemm.problem import ScaledGemmProblem
from tests.scaled_gemm.x86_case import exact_of, launch

FORMATS = ("f8E4M3FN", "f8E5M2", "f4E2M1FN")
M, N, K = 96, 64, 2048


def quantised(rows: int, format: str, mode: str, seed: int):
    p = QuantizeProblem(n=K, dtype="f32", format=format, mode=mode)
    x = np.random.default_rng(seed).standard_normal((rows, K)).astype(np.float32).astype(np.float64)
    made = reference(p, x)
    return x, made["codes"], made["scales"]


@pytest.mark.parametrize(("format", "mode"), list(product(FORMATS, MODES)))
def test_signal_to_noise(format, mode):
    x, codes, scales = quantised(M, format, mode, 1)
    error = dequantised(codes, scales, dtype(format)) - x
    got = -10 * np.log10((error**2).mean() / (x**2).mean())
    assert abs(got - moments(dtype(format), mode == "round_up").qsnr) < 0.1  # dB


@pytest.mark.parametrize(("a", "b"), [("f8E4M3FN",) * 2, ("f8E5M2",) * 2, ("f4E2M1FN",) * 2, ("f8E4M3FN", "f4E2M1FN")])
def test_products(a, b):
    """Against the unquantised product as predicted; against that of the quantised operands within 2e-3 for bf16."""
    x, codes, scales = quantised(M, a, "floor", 2)
    y, codes_b, scales_b = quantised(N, b, "floor", 3)
    p = ScaledGemmProblem(n=N, k=K, a_dtype=a, b_dtype=b)
    found = {"a": codes, "b": codes_b, "scale_a": scales, "scale_b": scales_b}
    got, (exact, _) = launch(p, M, found), exact_of(p, found)
    assert np.linalg.norm(got - exact) <= 2e-3 * np.linalg.norm(exact)
    error = np.linalg.norm(got - x @ y.T) / np.linalg.norm(x @ y.T)
    want = product_error(moments(dtype(a)), moments(dtype(b)))
    assert abs(error / want - 1) < 0.03, f"{error:.4f} where {want:.4f} is expected"


def test_what_the_formats_cost():
    """The order of the formats, and the figures that docs/microscaling.md gives."""
    qsnr = {f: moments(dtype(f)).qsnr for f in FORMATS}
    assert qsnr["f8E4M3FN"] > qsnr["f8E5M2"] + 5 > qsnr["f4E2M1FN"] + 10
    assert moments(dtype("f4E2M1FN")).error < 0.02
