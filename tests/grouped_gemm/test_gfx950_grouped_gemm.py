"""The gfx950 grouped GEMM on the simulator, checker silent: forms, layouts, groups, what offs may say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flykernels.targets import gfx950
from templates.gemm.gfx950_config import Gfx950Config
from templates.grouped_gemm.config import GroupedConfig
from templates.grouped_gemm.problem import FORMS, RUN_TIME, GroupedGemmProblem
from templates.grouped_gemm.space import candidates

from .case import SIZES, Case, case, offsets
from .gfx950_case import compiled, run

RING = GroupedConfig(Gfx950Config(64, 64, 64, 3, (2, 2)), 3)
COPIED = NARROW = GroupedConfig(Gfx950Config(32, 64, 64, 2, (2, 2)), 2)  # rows that start anywhere go through registers
DEEP = GroupedConfig(Gfx950Config(16, 64, 128, 4, (1, 2), k_waves=2), 2)


def problem(form: str, groups: int, **more) -> GroupedGemmProblem:
    """Sizes with tails along every axis."""
    sizes = {"m": 72, "n": 104, "k": 136, RUN_TIME[form]: 0}
    return GroupedGemmProblem(form, groups, **{**sizes, **more})


def drawn(p: GroupedGemmProblem, sizes=SIZES["uneven"], **how) -> Case:
    """A case with three more of T than groups have."""
    offs = offsets(sizes)
    return case(p, offs if p.ragged else None, int(offs[-1]) + 3, **how)


@pytest.mark.parametrize(
    ("form", "a", "b"),
    [
        ("m", "row", "col"), ("m", "row", "row"), ("m", "col", "row"), ("n", "row", "col"), ("n", "col", "row"),
        ("k", "col", "row"), ("k", "row", "col"), ("k", "col", "col"), ("batch", "row", "col"), ("batch", "col", "row"),
    ],
)  # fmt: skip
def test_forms_and_layouts(form, a, b):
    """Layouts whose rows start anywhere (T's elements are neighbours) go through registers, in two stages."""
    p = problem(form, 5, a=a, b=b)
    direct = min(p.dense.align_a, p.dense.align_b) >= 4
    run(drawn(p), RING if direct else COPIED)


@pytest.mark.parametrize("sizes", [SIZES["none"], SIZES["single"], SIZES["last"]], ids=["none", "single", "last"])
@pytest.mark.parametrize(("form", "a", "b"), [("m", "row", "col"), ("k", "col", "row")])
def test_groups(form, a, b, sizes):
    run(drawn(problem(form, len(sizes), a=a, b=b), sizes), RING)


@pytest.mark.parametrize("schedule", ["four", "eight"])
def test_interleaved_tiles(schedule):
    """Several tiles a workgroup: waves that run a barrier apart meet again before each next tile."""
    forward = GroupedConfig(Gfx950Config(128, 128, 64, 2, (2, 2), schedule=schedule), 2)
    run(drawn(problem("m", 3, n=264, k=512), (130, 0, 5)), forward)
    run(drawn(problem("m", 2, n=136, k=392, b="row"), (5, 130)), forward)  # K ends within a tile
    gradient = GroupedConfig(Gfx950Config(128, 256, 64, 2, (2, 4), schedule=schedule), 2)
    run(drawn(problem("k", 4, m=136, n=264, a="col", b="row"), (1, 0, 200, 330)), gradient)


@pytest.mark.parametrize("groups", [1, 64, 65, 512])
def test_many_groups(groups):
    """One lane a group, several rounds of lanes, and as many groups as there may be; most of them are empty."""
    sizes = [3 if g in (0, groups // 2, groups - 1) else 0 for g in range(groups)]
    run(drawn(problem("m", groups, n=32, k=64), sizes), GroupedConfig(Gfx950Config(32, 32, 64, 2, (1, 2)), 2))
    gradient = problem("k", groups, m=16, n=32, a="col", b="row") if groups <= 65 else None
    if gradient:
        run(drawn(gradient, sizes), GroupedConfig(Gfx950Config(16, 32, 64, 2, (1, 1)), 2))


@pytest.mark.parametrize(
    "offs", [(8, 4, 20, 28), (-5, 4, 3, 9), (8, 90, 2, 100)], ids=["decreasing", "negative", "past the end"]
)
@pytest.mark.parametrize(("form", "a", "b"), [("m", "row", "col"), ("k", "col", "row")])
def test_offs_that_make_no_sense(form, a, b, offs):
    run(case(problem(form, 4, a=a, b=b), torch.tensor(offs, dtype=torch.int32), tokens=30), RING)


@pytest.mark.parametrize("config", [RING, GroupedConfig(Gfx950Config(128, 128, 64, 2, (2, 2), schedule="four"), 2)])
def test_a_product_of_nothing_is_zeros(config):
    """K = 0 (pytorch#192497)."""
    found = drawn(problem("m", 3, k=0), (5, 0, 90))
    run(found, config)
    assert (found.operands["c"].view[:95] == 0).all() and found.operands["c"].view[95:].isnan().all()


def test_waves_along_k_and_f16():
    run(drawn(problem("m", 5, dtype="f16", out_dtype="f32", align_c=4)), DEEP)
    run(drawn(problem("m", 5, align_a=4, align_b=4, align_c=2)), NARROW)
    run(drawn(problem("m", 5, n=37, k=61, align_a=2, align_b=2, align_c=2)), COPIED)


@settings(max_examples=5, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(st.just(0), st.integers(1, 150)), min_size=6, max_size=6), st.sampled_from(["m", "k"]))
def test_any_sizes(sizes, form):
    layouts = {"a": "col", "b": "row"} if form == "k" else {}
    run(drawn(problem(form, 6, **layouts), sizes), RING)


@pytest.mark.parametrize("form", FORMS)
def test_candidates_do_not_spill(form):
    """The first ones for a layer with tails; `bench gfx950-grouped` compiles all of the suite's."""
    layouts = {"a": "col", "b": "row"} if form == "k" else {}
    p = problem(form, 16, **({"m": 1024, "n": 520, "k": 512} | {RUN_TIME[form]: 0}), tokens_hint=4096, **layouts)
    space = candidates(p, gfx950)
    assert space.kept and all(d.reason for d in space.dropped)
    for c in space.kept[:2]:
        code = compiled(p, c.config)
        assert code.spills == 0 and code.scratch_bytes == 0, c.config
