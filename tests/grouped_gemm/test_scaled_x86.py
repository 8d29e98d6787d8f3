"""MXFP8 and MXFP4 grouped products on the CPU against float64 of the quantised operands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flykernels.targets import x86
from templates.gemm.config import X86Config
from templates.grouped_gemm.scaled.problem import FORMS, ScaledGroupedProblem
from templates.grouped_gemm.scaled.space import candidates

from .scaled_case import case, check_x86

SMALL = X86Config("panel", 4, 16, 32, 8, 16, 32, unroll=4, pack_a=True, threads=3)
E4M3, E5M2, E2M1 = "f8E4M3FN", "f8E5M2", "f4E2M1FN"
SIZES = {  # of as many groups, so that they share kernels
    "even": (8, 8, 8, 8, 8),
    "uneven": (1, 0, 37, 5, 0),
    "last": (0, 0, 0, 0, 9),
    "single": (1, 1, 1, 1, 1),
    "none": (0, 0, 0, 0, 0),
    "long": (70, 0, 0, 3, 1),
}


def problem(form: str, groups: int, **more) -> ScaledGroupedProblem:
    """Sizes that leave tails, operands aligned to bytes only."""
    sizes = {"m": {"n": 37, "k": 96}, "k": {"m": 21, "n": 37}}.get(form, {})
    return ScaledGroupedProblem(
        form, groups, **{**sizes, "align_a": 1, "align_b": 1, "align_c": 2, "align_scales": 1, **more}
    )


def ends(form: str, sizes) -> np.ndarray:
    """offs of groups of these sizes; where what is summed over is ragged, of as many blocks."""
    return np.cumsum(sizes) * (32 if form == "k" else 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups(form, sizes):
    """Uneven, empty and single groups, with more of T than they have; rows apart; three threads."""
    offs = ends(form, sizes)
    check_x86(case(problem(form, len(sizes)), offs, int(offs[-1]) + 64, pad=3), SMALL, threads=3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("a", "b"), [(E5M2, E4M3), (E4M3, E5M2), (E4M3, E2M1), (E2M1, E5M2), (E2M1, E2M1)])
def test_formats(form, a, b):
    p = problem(form, 5, a_dtype=a, b_dtype=b)
    for spread, centre in ((6, 127), (20, 100)):
        check_x86(case(p, ends(form, (5, 0, 3, 0, 1)), spread=spread, centre=centre), SMALL)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("out", ["bf16", "f16", "f32"])
def test_candidates(form, out):
    """What space.py proposes for a small MoE layer, on two threads."""
    sizes = {"m": {"n": 264, "k": 160}, "k": {"m": 200, "n": 264}}[form]
    p = problem(form, 5, **sizes, out_dtype=out, align_c=4, tokens_hint=50 if form == "m" else 320)
    space = candidates(p, x86, threads=2)
    assert space.kept
    found = case(p, ends(form, SIZES["uneven"]), spread=2)
    for c in space.kept[: 2 if out == "bf16" else 1]:
        check_x86(found, c.config, threads=2)
        assert out != "bf16" or found.error <= 2e-3, "more than roundings of C make on average"


@pytest.mark.parametrize(("a", "b", "k"), [(E4M3, E4M3, 96), (E5M2, E4M3, 37), (E4M3, E5M2, 1)])
@pytest.mark.parametrize("sizes", [SIZES["uneven"], SIZES["none"]], ids=["uneven", "none"])
def test_a_scale_for_each_row_and_column(a, b, k, sizes):
    """f32 scales, K of any length."""
    p = problem("m", 5, k=k, a_dtype=a, b_dtype=b, scaling="row")
    check_x86(case(p, ends("m", sizes), int(sum(sizes)) + 3, pad=3), SMALL, threads=2)
    for c in candidates(p, x86, threads=2).kept[:1]:
        check_x86(case(p, ends("m", sizes), int(sum(sizes)) + 3), c.config, threads=2)


@settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 40), min_size=5, max_size=5), st.sampled_from(FORMS), st.integers(1, 4))
def test_any_sizes(sizes, form, threads):
    offs = ends(form, sizes if form == "m" else [s // 8 for s in sizes])
    check_x86(case(problem(form, 5), offs, int(offs[-1]) + 32), SMALL, threads)


@pytest.mark.parametrize(
    "offs",
    [(8, 4, 20, 28), (-5, 4, 3, 9), (32, 90, 70, 100), (-1, -1, -1, -1), (2**31 - 1, 0, 0, 0)],
    ids=["decreasing", "negative", "no blocks", "all negative", "far past"],
)
@pytest.mark.parametrize("form", FORMS)
def test_offs_that_make_no_sense(form, offs):
    """Nothing outside is read or written; a block of 32 belongs to one group."""
    check_x86(case(problem(form, 5), (*offs, 3), tokens=96), SMALL, threads=2)


def test_results_do_not_depend_on_the_number_of_threads():
    found = case(problem("k", 5), ends("k", (1, 0, 6, 2, 0)))
    results = [check_x86(found, SMALL, threads) for threads in (1, 2, 3)]
    assert all((results[0] == other).all() for other in results[1:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 48}, "K = 48 is not a multiple of 32"),
        ({"k": 0}, "k = 0"),
        ({"groups": 0}, "0 groups"),
        ({"groups": 513}, "513 groups"),
        ({"a_dtype": "f8E4M3FNUZ"}, "240"),
        ({"form": "n"}, "form"),
        ({"scaling": "tensor"}, "scaling"),
        ({"form": "k", "k": 0, "m": 8, "scaling": "row"}, "only of form 'm'"),
        ({"a_dtype": "f4E2M1FN", "scaling": "row"}, "is for FP8"),
        ({"m": 4}, "only known at run time"),
    ],
)
def test_refuses_in_words(change, words):
    p = problem(**{"form": "m", "groups": 2, **change})
    assert words in str(p.why_not(x86))
    assert not candidates(p, x86).kept
