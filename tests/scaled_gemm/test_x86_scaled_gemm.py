"""Scaled GEMM on x86 against float64 over the dequantised operands."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.targets import gfx950, x86
from templates.scaled_gemm.problem import OPERANDS, ScaledGemmProblem
from templates.scaled_gemm.reference import wrong
from templates.scaled_gemm.space import candidates

from .x86_case import check, exact_of, kernel, launch, operands

NAMES = [d.name for d in OPERANDS]


@pytest.mark.parametrize(("a", "b"), list(product(NAMES, NAMES)))
def test_formats(a, b):
    check(ScaledGemmProblem(n=61, k=96, a_dtype=a, b_dtype=b), 19)


@pytest.mark.parametrize("out", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("scaling", ["block", "tensor", "row"])
def test_scalings_and_outputs(scaling, out):
    kind = "f8E4M3FN"
    centre = 121 if out == "f16" else 127  # f16 ends at 65504
    p = ScaledGemmProblem(n=50, k=160, a_dtype=kind, b_dtype=kind, scaling=scaling, out_dtype=out, bias="row")
    found = operands(p, 33, spread=3, centre=centre)
    if out == "f16" and scaling != "block":
        found["scale_a"] /= 1024
    got = launch(p, 33, found, pad=5)
    exact, allowed = exact_of(p, found)
    assert not wrong(p, got, exact, allowed).any()


@pytest.mark.parametrize("k", [8, 16, 41, 100])
def test_k_tails_of_fp8_with_one_scale(k):
    check(ScaledGemmProblem(n=21, k=k, scaling="row"), 7, pad=3)


def test_several_blocks_of_k_and_threads():
    p = ScaledGemmProblem(n=130, k=2592, a_dtype="f8E5M2", b_dtype="f4E2M1FN", bias="row")
    for c in candidates(p, x86, threads=2).kept:
        check(p, 70, threads=2, config=c.config, pad=1)


def test_empty_m():
    p = ScaledGemmProblem(n=37, k=96)
    assert launch(p, 0, operands(p, 0)).size == 0


@pytest.mark.parametrize("centre", [20, 64, 190])
def test_far_scales(centre):
    """Exponents far from 0 on both sides: products stay within f32 because the other side leans the other way."""
    p = ScaledGemmProblem(n=24, k=64, out_dtype="f32")
    found = operands(p, 9, centre=centre)
    found["scale_b"] = operands(p, 9, centre=254 - centre, seed=1)["scale_b"]
    exact, allowed = exact_of(p, found)
    assert not wrong(p, launch(p, 9, found), exact, allowed).any()


def test_nan_scale_poisons_its_block_only():
    p = ScaledGemmProblem(n=24, k=64)
    found = operands(p, 9)
    found["scale_a"][3, 1] = 255
    found["scale_b"][17, 0] = 255
    got = launch(p, 9, found)
    nan = np.zeros((9, 24), bool)
    nan[3], nan[:, 17] = True, True
    assert (np.isnan(got) == nan).all()


def test_nan_and_infinity_in_operands():
    p = ScaledGemmProblem(n=24, k=64, b_dtype="f8E5M2")
    found = operands(p, 9)
    found["a"][2, 5] = 0x7F  # NaN
    found["b"][4, 7] = 0xFC  # -infinity
    found["a"][:, 7] = 0x38  # 1.0
    got = launch(p, 9, found)
    assert np.isnan(got[2]).all()
    assert (np.delete(got[:, 4], 2) == -np.inf).all()
    assert np.isfinite(np.delete(np.delete(got, 2, 0), 4, 1)).all()


def test_scale_zero_is_two_to_the_minus_127():
    p = ScaledGemmProblem(n=8, k=32, out_dtype="f32")
    found = operands(p, 4)
    found["scale_a"][:] = 0
    found["scale_b"][:] = 254
    exact, _ = exact_of(p, found)
    got = launch(p, 4, found)
    assert np.isfinite(exact).all() and (got != 0).any()
    found["scale_b"][:] = 254 - 20  # no number overflows f32 any more
    exact, allowed = exact_of(p, found)
    assert np.abs(launch(p, 4, found) - exact).max() <= allowed.max()


def test_scale_overflow_is_infinite():
    """e4m3 times 2^127 is beyond f32: the MX specification leaves the value to the implementation; here: infinity."""
    p = ScaledGemmProblem(n=8, k=32, out_dtype="f32")
    found = operands(p, 4)
    found["a"][:], found["b"][:] = 0x7E, 0x38  # 448, 1
    found["scale_a"][:], found["scale_b"][:] = 254, 100
    assert (launch(p, 4, found) == np.inf).all()


def test_zero_operands():
    p = ScaledGemmProblem(n=24, k=64, a_dtype="f4E2M1FN", bias="row")
    found = operands(p, 9)
    found["a"][:] = 0
    exact, _ = exact_of(p, found)
    assert (launch(p, 9, found) == exact).all()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 80),
    n=st.integers(1, 70),
    blocks=st.integers(1, 6),
    a=st.sampled_from(NAMES),
    b=st.sampled_from(NAMES),
    pad=st.integers(0, 9),
)
def test_shapes(m, n, blocks, a, b, pad):
    check(ScaledGemmProblem(n=n, k=32 * blocks, a_dtype=a, b_dtype=b, bias="row", m_hint=m), m, pad=pad, seed=m * n)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 100}, "not a multiple of 32"),
        ({"a_dtype": "f8E4M3FNUZ"}, "240.*448"),
        ({"b_dtype": "bf16"}, "b_dtype"),
        ({"b_dtype": "f4E2M1FN", "scaling": "row"}, "for FP8"),
        ({"out_dtype": "i8"}, "out_dtype"),
        ({"n": 0}, "empty"),
        ({"align_a": 3}, "power of two"),
    ],
)
@pytest.mark.parametrize("target", [x86, gfx950], ids=lambda t: t.name)
def test_not_eligible(change, words, target):
    reason = ScaledGemmProblem(**({"n": 32, "k": 64} | change)).why_not(target)
    assert reason and re.search(words, reason)
    assert not candidates(ScaledGemmProblem(**({"n": 32, "k": 64} | change)), target).kept


def test_kernel_keeps_its_source():
    assert kernel(ScaledGemmProblem(n=37, k=96)).code.source["template"] == "scaled_gemm"
