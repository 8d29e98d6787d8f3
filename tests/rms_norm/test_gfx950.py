"""RMSNorm on the gfx950 simulator: right against float64, the checker silent, nothing spilled, accesses coalesced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.sim.load import load
from flykernels.sim.run import Simulation
from flykernels.sim.trace import LINE, Recorder
from flykernels.targets import gfx950
from templates.rms_norm.config import GpuConfig
from templates.rms_norm.problem import DTYPES, RMSNormProblem
from templates.rms_norm.space import configurations

from .case import EPS, TORCH, arguments_of, call, codes, operands, run

P = RMSNormProblem
BACK = {"direction": "backward", "weight_gradient": True}

FORWARD = {
    "four waves a row": (P(4096, "bf16", "bf16"), GpuConfig(256, 1, 8), 3, {}),
    "f32, rstd": (P(4096, "f32", "f32", rstd=True), GpuConfig(256, 1, 4), 3, {}),
    "four rows a wave": (P(136, "bf16", "f32", residual=True, rstd=True), GpuConfig(16, 16, 8), 37, {}),
    "odd starts and strides": (P(4097, "bf16", "f16", align=2), GpuConfig(512, 1, 1), 2, {"offset": 1, "pad": 3}),
    "one element": (P(1, "f16", align=2, rstd=True), GpuConfig(1, 64, 1), 70, {}),
    "three elements": (P(3, "f32", "bf16", align=4), GpuConfig(4, 16, 1), 70, {"offset": 1}),
    "tiles in turn": (P(2048, "bf16", "bf16", residual=True, rstd=True), GpuConfig(64, 2, 8, parts=3), 17, {"pad": 8}),
    "not fetched ahead": (P(512, "f16", "f16"), GpuConfig(64, 2, 8, parts=2, ahead=False), 11, {}),
    "read twice": (P(10000, "f16", "f16", residual=True), GpuConfig(256, 1, 8, held=False), 2, {"pad": 8}),
    "the widest row, read twice": (P(262144, "bf16", "bf16"), GpuConfig(1024, 1, 8, held=False), 1, {}),
    "slices": (
        P(20001, "bf16", "f32", residual=True, rstd=True, align=2),
        GpuConfig(512, 1, 1, slices=8),
        2,
        {"pad": 2},
    ),
    "the widest row in slices": (P(262144, "f32", "f32", rstd=True), GpuConfig(1024, 1, 4, slices=16), 1, {}),
}
BACKWARD = {
    "sums in registers": (P(4096, "bf16", "bf16", **BACK), GpuConfig(256, 1, 8, parts=4, sums=True), 7, {}),
    "no weight gradient": (P(4096, "bf16", "bf16", direction="backward"), GpuConfig(256, 1, 8, parts=4), 7, {}),
    "dsum": (P(136, "f32", "f32", residual=True, **BACK), GpuConfig(16, 16, 4, parts=3, sums=True), 100, {}),
    "odd": (P(137, "bf16", "f32", align=2, **BACK), GpuConfig(16, 16, 1, parts=3), 100, {"offset": 1, "pad": 2}),
    "read twice": (P(5000, "f16", "f16", residual=True, **BACK), GpuConfig(256, 1, 8, held=False, parts=3), 11, {}),
    "one element": (P(1, "f16", align=2, direction="backward"), GpuConfig(1, 64, 1, parts=2), 170, {}),
    "alone": (P(4096, "bf16", "bf16", **BACK), GpuConfig(256, 1, 8, parts=1, ahead=False, sums=True), 1, {}),
    "alone, odd": (
        P(137, "bf16", "f32", residual=True, align=2, **BACK),
        GpuConfig(64, 1, 1, parts=1, ahead=False, sums=True), 5, {"offset": 1, "pad": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name):
    problem, config, rows, how = FORWARD[name]
    run(problem, config, gfx950, rows, **how)
    assert all(c.spills == 0 and c.scratch_bytes == 0 for c in codes(problem, config, gfx950))


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name):
    problem, config, rows, how = BACKWARD[name]
    run(problem, config, gfx950, rows, **how)
    assert all(c.spills == 0 and c.scratch_bytes == 0 for c in codes(problem, config, gfx950))


@given(
    st.integers(1, 9), st.integers(1, 700), st.sampled_from(DTYPES), st.sampled_from((*DTYPES, "none")),
    st.booleans(), st.booleans(), st.integers(0, 3), st.data(),
)  # fmt: skip
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_shape(rows, width, dtype, weight, residual, back, offset, data):
    more = {"direction": "backward", "weight_gradient": weight != "none"} if back else {"rstd": True}
    size = TORCH[dtype].itemsize
    align = 16 if not offset and width * size % 16 == 0 else size
    p = P(width, dtype, weight, residual=residual, align=align, rows_hint=rows, **more)
    config = data.draw(st.sampled_from([c.config for c in configurations(p, gfx950).kept]))
    run(p, config, gfx950, rows, offset=offset)


def test_special_rows():
    """NaN and infinity stay in their rows; rows of zeros give zeros."""
    p = P(512, "bf16", "bf16")
    made = operands(p, 8, 512)
    x = made["x"].view
    x[0, 3], x[1, 500], x[2], x[3, 7] = float("nan"), float("inf"), 0, torch.finfo(x.dtype).max
    want = torch.nn.functional.rms_norm(x, (512,), made["weight"].view, EPS)
    call(p, GpuConfig(64, 4, 8), gfx950, made)
    assert torch.equal(made["y"].view.isnan(), want.isnan())
    torch.testing.assert_close(made["y"].view, want, rtol=0.01, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype, width, rows", [
    ("bf16", 4096, 8192), ("f32", 4096, 8192), ("f16", 7168, 1024), ("bf16", 16384, 64), ("bf16", 512, 32768),
    ("f32", 16384, 1),
])  # fmt: skip
def test_accesses_are_coalesced_16_byte_vectors(dtype, width, rows):
    """Of the best guesses: all bytes of all lines that are moved are used, and LDS has no bank conflicts."""
    problem = P(width, dtype, dtype, rows_hint=rows)
    for candidate in configurations(problem, gfx950).kept[:2]:
        config = candidate.config
        made = operands(problem, max(1, config.rows_per_workgroup), width)
        for code in codes(problem, config, gfx950):
            given, grid = arguments_of(problem, config, code, made)
            loaded = load(code, None)
            recorder = Recorder(instructions=loaded.code.instructions)
            Simulation(loaded, given, grid, trace=recorder).run([(0, 0, 0)])
            memory = [s for s in recorder.sites.values() if not s.ideal]
            assert sum(s.bytes for s in memory) >= LINE * sum(s.lines for s in memory)
            assert all(s.cycles == s.ideal for s in recorder.sites.values() if s.ideal)
            moves = [i.name for i in loaded.code.instructions if i.name.startswith(("global_load", "global_store"))]
            assert moves and all(name.endswith("dwordx4") for name in moves)
        assert candidate.config.vector * TORCH[dtype].itemsize == gfx950.vector_bytes


@pytest.mark.parametrize("dtype, width, rows", [("bf16", 4096, 8192), ("f32", 4096, 1024), ("f16", 1024, 64)])
@pytest.mark.parametrize("sums", [True, False])
def test_backwards_accesses_are_coalesced(dtype, width, rows, sums):
    """Of dx and of both ways to the weight's gradient: rows move in 16-byte vectors, all bytes of all lines are used,
    and LDS has no bank conflicts. A row's rstd is one number, which all its lanes read; the f32 sums of rows of 16 bits
    leave a thread as two stores, which fill lines together."""
    problem = P(width, dtype, dtype, rows_hint=rows, **BACK)
    config = next(c.config for c in configurations(problem, gfx950).kept if c.config.sums == sums)
    made = operands(problem, 2 * config.rows_per_workgroup, width)
    for code in codes(problem, config, gfx950):
        given, grid = arguments_of(problem, config, code, made)
        loaded = load(code, None)
        recorder = Recorder(instructions=loaded.code.instructions)
        Simulation(loaded, given, grid, trace=recorder).run([(0, 0, 0)])
        assert all(s.cycles == s.ideal for s in recorder.sites.values() if s.ideal)
        for pc, site in recorder.sites.items():
            name = loaded.code.instructions[pc].name
            if not site.ideal and name.endswith("dwordx4"):
                together = 2 if name == "global_store_dwordx4" and problem.type.bytes == 2 else 1
                assert together * site.bytes >= LINE * site.lines > 0, name
            elif not site.ideal and name.startswith("global_load"):
                assert name == "global_load_dword" and site.lines <= site.accesses, "of rstd, one line a wave"


def test_the_weight_gradient_is_the_same_every_time():
    p, config = P(136, "f32", "f32", **BACK), GpuConfig(16, 16, 4, parts=3, sums=True)
    results = []
    for rows_hint in (100, 7):
        made = operands(replace(p, rows_hint=rows_hint), 100, 136)
        call(replace(p, rows_hint=rows_hint), config, gfx950, made)
        results.append(made["dweight"].view.clone())
    assert torch.equal(*(r.view(torch.int32) for r in results))


def test_no_rows():
    """Nothing is launched that has rows to work on; the weight's gradient is an empty sum."""
    alone = GpuConfig(64, 1, 4, parts=1, ahead=False, sums=True)
    for config in (GpuConfig(64, 2, 4, parts=8, sums=True), GpuConfig(64, 2, 4, held=False, parts=8), alone):
        p = P(256, "f32", "f32", **BACK)
        made = operands(p, 0, 256)
        call(p, config, gfx950, made)
        assert bool((made["dweight"].view == 0).all())
    p = P(256, "f32", "f32", rstd=True)
    for config in (GpuConfig(64, 2, 4), GpuConfig(64, 2, 4, parts=8), GpuConfig(64, 1, 4, slices=2)):
        assert call(p, config, gfx950, operands(p, 0, 256)) == [None] * (1 + (config.slices > 1))
