"""Grouped kernels for sm_90a without a GPU: all forms and layouts assemble without spills; what is offered, and why."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.targets import sm90a
from templates.grouped_gemm.build import build, build_from_json
from templates.grouped_gemm.problem import FORMS, GroupedGemmProblem
from templates.grouped_gemm.sm90a_config import GroupedSm90aConfig as Config
from templates.grouped_gemm.sm90a_tiles import unit
from templates.grouped_gemm.space import candidates
from templates.grouped_gemm.space_sm90a import KEPT, limit

PROBLEMS = {
    "m": GroupedGemmProblem("m", 8, n=512, k=1024),
    "n": GroupedGemmProblem("n", 8, m=512, k=1024),
    "k": GroupedGemmProblem("k", 8, m=512, n=512, a="col", b="row"),
    "batch": GroupedGemmProblem("batch", 8, n=512, k=1024),
}
SMALL = Config(tile_m=64, tile_n=64, stages=4, groups=(1, 1), persistent=True)
LARGE = Config(tile_n=256, stages=3, persistent=True)


@pytest.mark.parametrize("form", FORMS)
def test_forms_and_layouts_assemble_without_spills(form):
    for a, b in product(("row", "col"), repeat=2):
        p = replace(PROBLEMS[form], a=a, b=b)
        for config in (SMALL, LARGE) if (a, b) == (PROBLEMS[form].a, PROBLEMS[form].b) else (SMALL,):
            code = build(p, config, sm90a)
            assert code.spills == 0 and code.grid_for({"tokens": 5000}) == (132,)
            assert code.shared_bytes + code.dynamic_bytes <= sm90a.limits.shared_bytes
            assert [t.name for t in code.tensor_maps] == ["a_map", "b_map"]
            assert [len(t.axes) for t in code.tensor_maps] == [2 + p.has_groups(x) for x in "ab"]


def test_a_counter_where_tiles_are_asked_for():
    """128 bytes of workspace, which the launcher makes and zeroes; none where tiles are dealt out."""
    for config, size in ((SMALL, 128), (replace(SMALL, queued=False), 0)):
        code = build(PROBLEMS["m"], config, sm90a)
        assert code.workspace_for({"tokens": 5000}) == size
        assert [a.name for a in code.arguments].count("workspace") == bool(size)
    assert build(PROBLEMS["k"], replace(SMALL, overlap="early"), sm90a).overlaps


def test_no_launch_without_tokens_and_the_same_from_json():
    code = build(PROBLEMS["m"], SMALL, sm90a)
    assert code.grid_for({"tokens": 0}) == (0,)
    assert build_from_json(PROBLEMS["m"], SMALL.key(), "sm90a").to_bytes() == code.to_bytes()


def test_tiles_begin_where_tma_may():
    """Boxes' rows begin at multiples of 16 bytes: it matters where tokens are neighbours in memory."""
    wanted = {("m", "row", "col"): 1, ("m", "col", "col"): 8, ("n", "row", "col"): 1, ("n", "row", "row"): 8}
    wanted |= {("k", "col", "row"): 1, ("k", "row", "row"): 8, ("k", "col", "col"): 8, ("batch", "col", "row"): 1}
    for (form, a, b), elements in wanted.items():
        assert unit(replace(PROBLEMS[form], a=a, b=b)) == elements


@pytest.mark.parametrize("tokens", [16, 128, 1024])
@pytest.mark.parametrize("groups", [8, 128])
@pytest.mark.parametrize("form", FORMS)
def test_a_few_candidates_with_reasons(form, groups, tokens):
    p = replace(PROBLEMS[form], groups=groups, tokens_hint=tokens if form == "batch" else groups * tokens)
    space = candidates(p, sm90a)
    configs = [c.config for c in space.kept]
    assert 2 <= len(configs) <= KEPT and len(set(configs)) == len(configs)
    assert all(c.reason for c in space.kept) and all(d.reason for d in space.dropped)
    assert build(p, configs[0], sm90a).spills == 0


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_every_problem_that_is_served_has_candidates(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    form, size = draw(*FORMS), st.integers(1, 20000)
    p = GroupedGemmProblem(
        form, data.draw(st.integers(1, 512)), dtype=draw("bf16", "f16"), out_dtype=draw("bf16", "f32"),
        a=draw("row", "col"), b=draw("row", "col"), tokens_hint=data.draw(size), align_c=draw(2, 4, 8, 16),
        **{x: data.draw(size) for x in "mnk" if x != ("m" if form == "batch" else form)},
    )  # fmt: skip
    p = replace(p, align_c=max(p.align_c, p.output_type.bytes))
    space = candidates(p, sm90a)
    assert 1 <= len(space.kept) <= KEPT
    assert all(limit(p, c.config, sm90a.limits) is None for c in space.kept)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"dtype": "f32"}, "f32"),
        ({"k": 0}, "K = 0"),
        ({"a": "any"}, "no contiguous axis"),
        ({"align_b": 8}, "TMA needs 16"),
        ({"c": "col"}, "writes rows"),
        ({"groups": 513}, "at most 512"),
    ],
)
def test_what_is_not_served(change, why):
    p = replace(PROBLEMS["m"], **change)
    space = candidates(p, sm90a)
    assert not space.kept and why in space.dropped[0].reason
    with pytest.raises(ValueError, match=why):
        build(p, SMALL, sm90a)


def test_limits_of_a_configuration():
    refused = lambda **change: limit(PROBLEMS["m"], replace(LARGE, **change), sm90a.limits)
    assert refused() is None
    assert "shared memory" in refused(stages=5)
    assert "stay" in refused(persistent=False) and "stay" in refused(cluster=(2, 1))
