"""Which problems have kernels, what a cache is asked for, which configurations are proposed and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flykernels.targets import gfx950, sm90a, x86
from templates.rms_norm.arguments import eps_bits, pointers, scalars
from templates.rms_norm.build import build, build_from_json
from templates.rms_norm.config import GpuConfig, X86Config, config_from_key
from templates.rms_norm.gpu import steps
from templates.rms_norm.problem import RMSNormProblem, alignment_of
from templates.rms_norm.space import configurations, fitting

TARGETS = (x86, gfx950, sm90a)
WIDTHS = (1, 3, 64, 100, 512, 1001, 4096, 7168, 16384, 65536, 262144)


@pytest.mark.parametrize("change, reason", [
    ({"dtype": "f64"}, "f64"), ({"weight_dtype": "i8"}, "i8"), ({"direction": "up"}, "up"),
    ({"width": 0}, "1 to 262144"), ({"width": 262145}, "1 to 262144"), ({"width": None}, "not known"),
    ({"align": 3}, "power of two"), ({"align": 32}, "power of two"), ({"dtype": "f32", "align": 2}, "power of two"),
    ({"direction": "backward", "rstd": True}, "always reads it"), ({"weight_gradient": True}, "backward"),
    ({"direction": "backward", "weight_gradient": True, "weight_dtype": "none"}, "a weight"),
])  # fmt: skip
def test_what_is_not_eligible_says_why(change, reason):
    problem = replace(RMSNormProblem(64, "bf16", "bf16"), **change)
    assert reason in (problem.why_not(gfx950) or "")
    space = configurations(problem, gfx950)
    assert not space.kept and reason in space.dropped[0].reason
    with pytest.raises(ValueError, match="no RMSNorm kernel"):
        build(problem, GpuConfig(64, 2, 8), gfx950)


def test_canonical_problems():
    p = RMSNormProblem(4096, "bf16", "bf16", rows_hint=1000)
    assert p.canonical(x86).width is None and p.canonical(x86).why_not(x86) is None
    assert p.canonical(gfx950).rows_hint == 1024 == p.canonical(sm90a).rows_hint
    most = replace(p, rows_hint=1 << 20).canonical(sm90a)
    assert most == replace(p, rows_hint=1 << 24).canonical(sm90a)


def test_alignment():
    assert alignment_of(2, 1024, 8192) == 16
    assert alignment_of(2, 1024, 8200) == 8
    assert alignment_of(2, 1026) == 2
    assert alignment_of(4, 1028, 4) == 4
    assert eps_bits(1.0) == 0x3F800000


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_configurations_are_few_and_have_reasons(target):
    for width in WIDTHS:
        for dtype in ("f32", "bf16"):
            for back in (False, True):
                for rows in (1, 64, 8192):
                    more = {"direction": "backward", "weight_gradient": True} if back else {}
                    align = 16 if width % 8 == 0 else 4 if dtype == "f32" else 2
                    p = RMSNormProblem(width, dtype, dtype, rows_hint=rows, align=align, **more)
                    space = configurations(p, target)
                    assert 1 <= len(space.kept) <= 10
                    assert all(c.reason for c in (*space.kept, *space.dropped))
                    keys = [c.config for c in space.kept]
                    assert len(set(keys)) == len(keys)
                    for c in keys:
                        assert config_from_key(target.name, c.key()) == c
                        assert c.parts_for(rows, width, 2) >= 1
                        if target is not x86:
                            assert c.workgroup_size <= target.limits.max_workgroup
                            assert c.workgroup_size % target.limits.lanes == 0
                            assert c.sums <= c.held
                            assert fitting(p, c, target.limits) >= c.beside >= 1


def test_few_wide_rows_are_sliced():
    p = RMSNormProblem(262144, "bf16", "bf16", rows_hint=1)
    first = configurations(p, sm90a).kept[0].config
    assert first.slices > 1
    assert [s.__name__ for s in steps(p, first)] == ["slice_sums", "slice_scaled"]
    assert all(c.config.slices == 1 for c in configurations(replace(p, rows_hint=8192), sm90a).kept)
    assert first.workspace_bytes(3, 262144, 1) == 3 * first.slices * 4


def test_few_rows_have_their_gradients_in_one_launch():
    """Of the weight too: one workgroup adds all of them up."""
    p = RMSNormProblem(4096, "bf16", "bf16", "backward", weight_gradient=True, rows_hint=1)
    for target in (gfx950, sm90a):
        first = configurations(p, target).kept[0].config
        assert first.alone and first.parts_for(3, 4096) == 1 and len(steps(p, first)) == 1
        (code,) = build(p, first, target)
        assert code.spills == 0 and "workspace" not in [a.name for a in code.arguments]
        assert not any(c.config.alone for c in configurations(replace(p, rows_hint=64), target).kept)


def test_wide_rows_that_caches_do_not_hold_may_go_past_them():
    """On sm_90a, whose code says so; rows of a small problem, of one much larger than L2, and a gradient's, do not."""
    wide = RMSNormProblem(16384, "f32", "f32", rows_hint=1024)
    once = [c.config for c in configurations(wide, sm90a).kept if c.config.once]
    assert {c.parts // sm90a.limits.compute_units for c in once} == {0, 1, 2}
    for p, target in (
        (wide, gfx950),
        (replace(wide, rows_hint=64), sm90a),
        (replace(wide, rows_hint=2048), sm90a),
        (replace(wide, direction="backward"), sm90a),
    ):
        assert not any(c.config.once for c in configurations(p, target).kept)
    (code,) = build(wide, once[0], sm90a)
    assert code.spills == 0


def test_arguments_are_the_same_for_all_configurations():
    p = RMSNormProblem(512, "bf16", "bf16", residual=True, rstd=True)
    assert pointers(p) == ("x", "weight", "residual", "y", "sum", "rstd")
    assert scalars(p) == ("eps", "rows", "x_row", "residual_row", "parts")
    for config in (GpuConfig(64, 2, 8), GpuConfig(64, 2, 8, parts=7), GpuConfig(64, 2, 8, held=False)):
        (code,) = build(p, config, gfx950)
        assert tuple(a.name for a in code.arguments) == (*pointers(p), *scalars(p))
    back = RMSNormProblem(512, "bf16", "bf16", "backward", residual=True, weight_gradient=True)
    codes = build(back, GpuConfig(64, 2, 8, parts=7, sums=True), gfx950)
    assert {tuple(a.name for a in c.arguments) for c in codes} == {(*pointers(back), *scalars(back), "workspace")}


def test_configurations_refuse_nonsense():
    for wrong in ({"threads_per_row": 3}, {"vector": 6}, {"held": False, "sums": True}):
        with pytest.raises(ValueError, match=r"power of two|registers"):
            GpuConfig(**({"threads_per_row": 64, "rows_per_workgroup": 2, "vector": 8} | wrong))


def test_from_json():
    (code,) = build_from_json(RMSNormProblem(None, "f32"), X86Config().key(), "x86")
    assert code.entry == "_mlir_rms_norm" and code.source["template"] == "rms_norm"


@pytest.mark.parametrize("p", [
    RMSNormProblem(4096, "bf16", "bf16"), RMSNormProblem(4096, "f32", "f32", "backward", weight_gradient=True),
    RMSNormProblem(262144, "f16", "f16", rows_hint=1), RMSNormProblem(1001, "bf16", "f32", align=2, residual=True),
], ids=["forward", "backward", "slices", "odd"])  # fmt: skip
def test_sm90a_assembles_without_spills(p):
    for code in build(p, configurations(p, sm90a).kept[0].config, sm90a):
        assert code.spills == 0 and 0 < code.registers <= 255
        vector = "v4.b32" if p.align == 16 else None
        assert vector is None or f"ld.global.nc.{vector}" in code.text or f"ld.global.{vector}" in code.text
