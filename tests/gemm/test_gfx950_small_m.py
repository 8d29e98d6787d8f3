"""gfx950 GEMMs for few rows: K split over workgroups and over waves, deep rings, all grids of waves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flykernels.sim import run_on_sim
from templates.gemm.gfx950_config import Gfx950Config, direct_bytes
from templates.gemm.gfx950_hti import SCHEDULES
from templates.gemm.gfx950_output import slot_bytes
from templates.gemm.problem import GemmProblem

from .gfx950_case import compiled, encode, run

SKINNY = Gfx950Config(16, 64, 128, 3, (1, 4))


def problem(**kw) -> GemmProblem:
    return GemmProblem(**{"n": 128, "k": 1024, "dtype": "bf16", "out_dtype": "bf16", "b": "col", **kw})


@pytest.mark.parametrize("split", [2, 4, 8])
@pytest.mark.parametrize("kw", [
    {}, {"a": "col", "b": "row"}, {"bias": "row", "activation": "gelu", "residual": True}, {"out_dtype": "f32"},
], ids=str)  # fmt: skip
def test_k_split_over_workgroups(split, kw):
    p = problem(n=72, **kw)
    run(p, replace(SKINNY, split_k=split), 24, pads=(0, 0, 0))


@pytest.mark.parametrize("k", [1024 - 8, 1024 + 8, 1024 + 3, 1024 - 3, 9 * 128, 11 * 128, 10 * 128 + 56])
@pytest.mark.parametrize("split, kw", [
    (2, {}), (4, {}), (8, {"a": "col", "b": "row"}), (4, {"align_a": 4, "align_b": 4}),
    (4, {"align_a": 2, "align_b": 2}),
], ids=str)  # fmt: skip
def test_k_that_does_not_split_evenly(k, split, kw):
    """Slices that differ by a K tile, and a last one that ends within a tile, within 16 bytes or within 4."""
    p = problem(n=72, k=k, **kw)
    cfg = replace(SKINNY, split_k=split, stages=SKINNY.stages if direct_bytes(p) else 2)
    step = min(p.align_a, p.align_b) // 2
    m = 24
    run(p, cfg, m, pads=(-(k if p.a == "row" else m) % step, -(k if p.b == "col" else p.n) % step, 0))


@pytest.mark.parametrize("k", [768, 1000, 1003])
@pytest.mark.parametrize("kw", [{}, {"bias": "full", "residual": True}, {"b": "row"}], ids=str)
def test_batches_split_too(k, kw):
    p = problem(n=72, k=k, batched=True, **kw)
    run(p, replace(SKINNY, split_k=4), 24, batch=3, pads=(-k % 8, -(k if p.b == "col" else p.n) % 8, 0))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("k", [512, 512 + 64 - 24, 512 + 128 + 3])
def test_interleaved_tiles_split_too(schedule, k):
    cfg = Gfx950Config(128, 128, 64, 2, (2, 4), schedule=schedule, split_k=2)
    run(problem(n=136, k=k), cfg, 130, pads=(-k % 8, -k % 8, 0))


def test_the_sum_does_not_depend_on_who_comes_last():
    """The same bits whatever the order of workgroups, launch after launch on a workspace that is cleared only once."""
    p, cfg, m = problem(), replace(SKINNY, split_k=4), 16
    code, rng = compiled(p, cfg), np.random.default_rng(0)
    a, b = (encode(rng.standard_normal(s), "bf16") for s in ((m, p.k), (p.n, p.k)))
    workspace = np.zeros(code.workspace_for({"m": m}) // 4, np.int32)
    results = []
    for seed in range(4):
        c = np.zeros((m, p.n), np.uint16)
        order = [(int(i), 0, 0) for i in np.random.default_rng(seed).permutation(8)]
        args = [a, b, c, *(np.int64(x) for x in (m, p.k, p.k, p.n)), workspace]
        ran = run_on_sim(code, args, (8, 1, 1), workgroups=order)
        ran.raise_for_findings()
        assert not workspace[:: slot_bytes(cfg) // 4].any(), "counters are left at 0"
        results.append(c)
    assert results[0].any() and all((r == results[0]).all() for r in results)


def test_partial_sums_are_written_back_before_they_are_counted():
    """Dies have L2 caches of their own: written back (wbl2) before the counter, dropped (inv) before sums are read."""
    text = compiled(problem(), replace(SKINNY, split_k=4)).text
    order = [text.index(x) for x in ("buffer_wbl2 sc1", "s_barrier", "global_atomic_add", "buffer_inv sc1")]
    counted = text.index("global_atomic_add")
    assert order[0] < counted < order[3] and "s_barrier" in text[order[0] : counted]
    assert "vmcnt(0)" in text[text.rindex("global_store", 0, counted) : counted]


@pytest.mark.parametrize("k_waves, waves", [(2, (1, 2)), (4, (1, 1)), (2, (1, 1))])
@pytest.mark.parametrize("kw", [
    {}, {"k": 1000 + 8, "n": 120}, {"bias": "full", "activation": "silu"}, {"a": "col", "b": "row", "residual": True},
    {"out_dtype": "f32", "bias": "row"},
], ids=str)  # fmt: skip
def test_waves_share_k(k_waves, waves, kw):
    p = problem(**{"n": 64, **kw})
    cfg = Gfx950Config(16, 64, 128, 3, waves, k_waves=k_waves)
    m = 13
    run(p, cfg, m, pads=(-(p.k if p.a == "row" else m) % 8, 0, 0))


def test_waves_and_workgroups_share_k():
    run(problem(k=2048), Gfx950Config(16, 64, 128, 3, (1, 2), k_waves=2, split_k=2), 16)


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6, 7, 8])
def test_rings_of_every_depth(stages):
    for k in (64 * stages * 2, 64 * (stages - 1) + 24):
        run(problem(n=64, k=k), Gfx950Config(64, 64, 64, stages, (2, 2)), 64)


@pytest.mark.parametrize("waves", [(m, n) for m in (1, 2, 4) for n in (1, 2, 4)])
def test_grids_of_waves(waves):
    run(problem(n=72, k=264), Gfx950Config(64, 64, 128, 2, waves), 70)
