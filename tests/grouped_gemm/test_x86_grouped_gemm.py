"""Grouped products on the CPU against float64: all forms and layouts, uneven groups, what offs may say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flykernels.launch import host
from flykernels.targets import x86
from templates.gemm.config import X86Config
from templates.grouped_gemm.arguments import problem_of, scalar_values
from templates.grouped_gemm.build import build
from templates.grouped_gemm.problem import FORMS, RUN_TIME, GroupedGemmProblem
from templates.grouped_gemm.space import candidates

from .case import SIZES, Case, case, offsets
from .x86_case import check, launch

PANEL = X86Config("panel", 4, 16, 32, 8, 16, 32, pack_a=True, threads=3)
DOT = X86Config("dot", 3, 4, 32, 6, 12, 8, threads=2)
LAYOUTS = [(a, b) for a in ("row", "col") for b in ("row", "col")]


def problem(form: str, groups: int, **more) -> GroupedGemmProblem:
    """Sizes that leave tails along every axis, operands aligned to elements only."""
    sizes = {"m": 21, "n": 37, "k": 40, RUN_TIME[form]: 0}
    return GroupedGemmProblem(form, groups, **{**sizes, "align_a": 2, "align_b": 2, "align_c": 2, **more})


def drawn(p: GroupedGemmProblem, sizes=SIZES["uneven"], **how) -> Case:
    """A case with three more of T than groups have."""
    offs = offsets(sizes)
    return case(p, offs if p.ragged else None, int(offs[-1]) + 3, **how)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_forms_and_layouts(form, layouts):
    """Every set of groups, in each form and layout; rows apart, starting anywhere."""
    for sizes in SIZES.values():
        p = problem(form, len(sizes), a=layouts[0], b=layouts[1])
        check(drawn(p, sizes, pad=1), PANEL, threads=3)
    turned = p.flipped if form == "n" else p
    if form != "k" and (turned.a, turned.b) == ("row", "col"):
        p = problem(form, len(SIZES["uneven"]), a=layouts[0], b=layouts[1])
        check(drawn(p, pad=1), DOT, threads=2)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("form", FORMS)
def test_types_and_scales(form, dtype):
    p = problem(form, 5, dtype=dtype, out_dtype="f32", align_a=4, align_b=4, align_c=4)
    for scale in (1e-3, 1.0, 1e2):
        check(drawn(p, scale=scale), PANEL)


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.one_of(st.just(0), st.integers(1, 60)), min_size=6, max_size=6),
    st.sampled_from(FORMS),
    st.integers(1, 4),
)
def test_any_sizes(sizes, form, threads):
    check(drawn(problem(form, 6), sizes), PANEL, threads)


@pytest.mark.parametrize(
    "offs",
    [(8, 4, 20, 28), (-5, 4, 3, 9), (8, 90, 2, 100), (-1, -1, -1, -1), (2**31 - 1, 0, 0, 0)],
    ids=["decreasing", "negative", "past the end", "all negative", "far past"],
)
@pytest.mark.parametrize("form", ["m", "n", "k"])
def test_offs_that_make_no_sense(form, offs):
    """Nothing outside is read or written, and what a group gets is what `reference.bounds` says."""
    check(case(problem(form, 4), torch.tensor(offs, dtype=torch.int32), tokens=30), PANEL, threads=2)


@pytest.mark.parametrize("form", ["m", "n", "batch"])
def test_a_product_of_nothing_is_zeros(form):
    """K = 0 (pytorch#192497): rows of groups are zeros, others are left alone."""
    p = problem(form, 3, k=0)
    found = drawn(p, (5, 0, 9))
    launch(found, PANEL)
    got = found.operands["c"].view
    inside = got if form == "batch" else got[:14] if form == "m" else got[:, :14]
    assert (inside == 0).all() and found.operands["c"].intact()
    found.check()


@pytest.mark.parametrize(
    ("a", "b", "sizes"),
    [
        ((512, 16512), (16512, 256), [2064] * 8),  # pytorch#158042, sizes as they are there
        ((192, 3268), (3268, 160), [162, 0, 2577, 446, 0, 83]),  # #172439's groups, of a narrower layer
    ],
    ids=["158042", "172439"],
)
def test_weight_gradients_of_public_reports(a, b, sizes):
    """2-D x 2-D as autograd poses it: A is the transpose of a row-major matrix. Empty groups are exactly zero."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(a[1], a[0], generator=make).bfloat16().t()
    y = torch.randn(b, generator=make).bfloat16()
    offs = offsets(sizes)
    p = problem_of(x, y, offs)
    assert (p.form, p.a, p.b) == ("k", "col", "row")
    (first, *_) = candidates(p, x86, threads=2).kept
    out = torch.full((len(sizes), a[0], b[1]), float("nan"), dtype=torch.bfloat16)
    kernel = host.load(build(p, first.config, x86))
    kernel(x.data_ptr(), y.data_ptr(), offs.data_ptr(), out.data_ptr(), *scalar_values(p, x, y, out), threads=2)
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start + size)
        exact = x[:, part].double() @ y[part].double()
        size_of = (x[:, part].double().abs() @ y[part].double().abs()).max() if size else 0
        assert (out[g].double() - exact).abs().max() <= 2**-8 * size_of, f"group {g}"
        start += size


def test_rows_past_the_last_group_are_left_alone():
    """torchtitan#1237: ATen leaves rows past offs[-1] as they were, and so do kernels; what is there is not read."""
    p = problem("m", 2)
    found = drawn(p, (4, 6))
    launch(found, PANEL)
    assert found.operands["c"].view[10:].isnan().all() and found.operands["c"].view[:10].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_every_candidate(form, dtype):
    """What space.py proposes for a small MoE layer, on two threads."""
    size = {"bf16": 2, "f32": 4}[dtype]
    sizes = {"m": 200, "n": 264, "k": 136, RUN_TIME[form]: 0}
    layouts = {"a": "col", "b": "row"} if form == "k" else {}
    p = GroupedGemmProblem(
        form,
        5,
        **sizes,
        dtype=dtype,
        out_dtype=dtype,
        tokens_hint=50,
        align_a=size,
        align_b=size,
        align_c=size,
        **layouts,
    )
    space = candidates(p, x86, threads=2)
    assert space.kept and all(d.reason for d in space.dropped)
    for c in space.kept[:2]:
        check(drawn(p), c.config, threads=2)


def test_results_do_not_depend_on_the_number_of_threads():
    """Tiles are the same whoever does them: the same bits with one thread, two and three."""
    p = problem("m", 3, n=512)
    config = replace(PANEL, tile_n=32)
    results = []
    for threads in (1, 2, 3):
        found = drawn(p, (1, 200, 2))
        check(found, config, threads)
        results.append(found.operands["c"].view.view(torch.int16).clone())
    assert all(torch.equal(results[0], other) for other in results[1:])
