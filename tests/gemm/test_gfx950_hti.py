"""The half-tile-interleaved gfx950 GEMM on the simulator: right and in order, from its first K tile to its last."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flykernels.sim import run_on_sim
from flykernels.sim.errors import SimulatorError
from flykernels.targets import gfx950
from templates.gemm.gfx950_config import Gfx950Config
from templates.gemm.gfx950_hti import SCHEDULES
from templates.gemm.problem import GemmProblem
from templates.gemm.space_gfx950 import limit

from .gfx950_case import compiled, encode, run

BOTH = tuple(SCHEDULES)
LAYOUTS = [(a, b) for a in ("row", "col") for b in ("row", "col")]


def problem(**kw) -> GemmProblem:
    return GemmProblem(**{"n": 128, "k": 192, "dtype": "bf16", "out_dtype": "bf16", "b": "col", **kw})


def large(schedule: str) -> Gfx950Config:
    return Gfx950Config(256, 256, 64, 2, (2, 4), schedule=schedule)


def small(schedule: str) -> Gfx950Config:
    return Gfx950Config(128, 128, 64, 2, (2, 4), schedule=schedule)


def pads(p: GemmProblem, m: int, step: int = 8) -> tuple[int, int]:
    return (-(p.k if p.a == "row" else m) % step, -(p.k if p.b == "col" else p.n) % step)


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5])
def test_any_number_of_k_tiles(schedule, tiles):
    """256x256x64: whole K tiles, and the last one cut; some halves of the second workgroup lie outside C altogether."""
    p = problem(n=256, k=64 * tiles)
    run(p, large(schedule), 256)
    p = problem(n=256 + 40, k=64 * tiles - 13)
    run(p, large(schedule), 256 + 9, pads=(*pads(p, 265), 0), workgroups=[(3, 0, 0)])


@pytest.mark.parametrize("schedule", BOTH)
def test_sixty_four_k_tiles(schedule):
    run(problem(k=64 * 64), small(schedule), 128)
    p = problem(n=100, k=64 * 64 - 1)
    run(p, small(schedule), 70, pads=(1, 1, 0))


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("a, b", LAYOUTS)
@pytest.mark.parametrize("k", [256, 299])
def test_layouts_and_ragged_edges(schedule, a, b, k):
    """Four workgroups; M, N and K end inside a tile, and for k = 299 within 16 bytes."""
    p = problem(a=a, b=b, n=128 + 24, k=k, align_c=2)
    run(p, small(schedule), 128 + 75, pads=(*pads(p, 203), 1))


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("shape", ["16x16x32", "32x32x16"])
@pytest.mark.parametrize("tile", [(256, 128), (128, 256)])
def test_smaller_siblings(schedule, shape, tile):
    waves = (4, 2) if shape == "32x32x16" and tile[0] == 256 else (2, 4)
    cfg = Gfx950Config(*tile, 64, 2, waves, shape, schedule=schedule)
    run(problem(n=tile[1], k=64 * 5, dtype="f16", out_dtype="f16"), cfg, tile[0])


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("kw", [
    {"bias": "row", "activation": "gelu", "residual": True}, {"bias": "full", "activation": "silu"},
    {"out_dtype": "f32", "activation": "relu"}, {"batched": True, "residual": True}, {"align_a": 4, "align_b": 4},
], ids=str)  # fmt: skip
def test_epilogues_batches_and_narrow_loads(schedule, kw):
    p = problem(n=136, k=202, **kw)
    run(p, small(schedule), 90, pads=(*pads(p, 90, p.align_a // 2), 0), batch=2)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 300), st.integers(1, 300), st.integers(1, 400), st.sampled_from(LAYOUTS), st.sampled_from([4, 16]),
    st.sampled_from(["bf16", "f16"]), st.sampled_from(BOTH), st.integers(0, 2**16),
)  # fmt: skip
def test_any_shape(m, n, k, layouts, align, dtype, schedule, seed):
    p = problem(
        a=layouts[0], b=layouts[1], n=n, k=k, dtype=dtype, out_dtype=dtype, align_a=align, align_b=align, align_c=2
    )
    run(p, small(schedule), m, pads=(*pads(p, m, align // 2), seed % 3), seed=seed)


@pytest.mark.parametrize("schedule", BOTH)
def test_it_fits_two_waves_a_simd(schedule):
    epilogue = {"bias": "row", "activation": "gelu", "residual": True}
    sizes = {"n": 4096, "k": 4096}, {"n": 14336, "k": 4104}, {"n": 4001, "k": 520, "align_c": 2}
    for size in sizes:
        for kw in ({}, {"dtype": "f16"}, epilogue, {"a": "col", "b": "row"}, {"a": "col"}, {"b": "row"}):
            code = compiled(problem(**size, **kw), large(schedule))
            assert code.registers <= 256 and code.spills == 0 and code.scratch_bytes == 0, (size, kw)
        assert code.shared_bytes == 128 * 1024


@pytest.mark.parametrize("schedule, k", [("four", 192), ("eight", 320), ("four", 456), ("four", 4168)])
def test_what_would_spill_is_not_offered(schedule, k):
    transposed = {"n": 4096, "a": "col", "b": "row", "m_hint": 4096}
    assert f"K = {k}" in limit(problem(**transposed, k=k), large(schedule), gfx950.limits)
    assert limit(problem(**transposed, k=4096), large(schedule), gfx950.limits) is None


@pytest.mark.parametrize("schedule", BOTH)
def test_main_loop_is_the_schedule_and_nothing_else(schedule):
    """Per two K tiles: the table's barriers, loads and matrix instructions, and no wait of the compiler's for loads."""
    text = compiled(problem(n=4096, k=4096), large(schedule)).text
    body = main_loop(text)
    barriers = 2 * 2 * len(SCHEDULES[schedule])
    assert body.count("s_barrier") == barriers and body.count("v_mfma") == 2 * 64
    assert body.count("s_setprio 1") == barriers // 2 and body.count("offen lds") == 2 * 8
    waits = [int(n) for n in re.findall(r"vmcnt\((\d+)\)", body)]
    assert len(waits) == 2 * sum(bool(phase.reads) for phase in SCHEDULES[schedule]) and min(waits) >= 6


def main_loop(text: str) -> str:
    label = re.search(r"^(\.LBB\d+_\d+):(?:(?!^\.LBB).)*?s_cbranch_\w+ \1$", text, re.M | re.S)
    assert label, "there is no main loop"
    return label[0]


@pytest.mark.parametrize("schedule", BOTH)
def test_the_checker_notices_each_missing_wait_and_barrier(schedule):
    """All waits for loads, one after the other; and all barriers of the main loop: none is slack."""
    p, cfg, m = problem(n=64, k=64 * 6), Gfx950Config(64, 64, 64, 2, (2, 1), schedule=schedule), 64
    text = compiled(p, cfg).text
    lines, rng = text.splitlines(), np.random.default_rng(0)
    a, b = (encode(rng.standard_normal((64, p.k)), "bf16") for _ in range(2))

    def noticed(changed: str) -> bool:
        args = [a, b, np.zeros((m, p.n), np.uint16), *(np.int64(x) for x in (m, p.k, p.k, p.n))]
        try:
            return bool(run_on_sim(changed, args, grid=(1, 1, 1), block=(cfg.workgroup_size, 1, 1)).findings)
        except SimulatorError:
            return True

    without = lambda i: "\n".join([*lines[:i], "\ts_nop 0", *lines[i + 1 :]])
    assert not noticed(text)
    loop = main_loop(text)
    first = text[: text.index(loop)].count("\n")
    inside = range(first, first + loop.count("\n"))
    waits = [i for i, line in enumerate(lines) if "vmcnt(" in line]
    barriers = [i for i in inside if "s_barrier" in lines[i]]
    assert len(waits) >= 2 * len(SCHEDULES[schedule]) and len(barriers) == 4 * len(SCHEDULES[schedule])
    missed = [lines[i] for i in waits if not noticed(without(i))]
    assert not missed
    slack = sum(not noticed(without(i)) for i in barriers)
    assert slack == 0, slack
