"""MXFP8 and MXFP4 grouped products for gfx950 on the simulator, with its checker, against float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from flykernels.microscaling import BLOCK
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.grouped_gemm.scaled.arguments import POINTERS
from templates.grouped_gemm.scaled.build import build
from templates.grouped_gemm.scaled.config import ScaledGroupedConfig
from templates.grouped_gemm.scaled.problem import ScaledGroupedProblem
from templates.grouped_gemm.scaled.space import candidates
from templates.scaled_gemm.gfx950_config import ScaledConfig

from .scaled_case import GUARD, Case, case

RING = ScaledConfig(tile_m=32, tile_n=64, stages=3, waves=(1, 2))
INTERLEAVED = ScaledConfig(tile_m=128, tile_n=128, stages=2, waves=(2, 2), schedule="four")
UNEVEN = np.cumsum((40, 0, 1, 7, 0))


@cache
def compiled(p: ScaledGroupedProblem, cfg: ScaledGroupedConfig):
    return build(p, cfg, gfx950)


def run(found: Case, cfg: ScaledGroupedConfig) -> None:
    """All workgroups, one after the other; fails on a finding and on a wrong result."""
    code = compiled(found.problem, cfg)
    assert code.spills == 0 and code.scratch_bytes == 0, f"{code.spills} registers spilled"
    c = found.empty_c()
    whole = lambda x: x if x.base is None else x.base
    memory = {name: whole(x) for name, x in found.held.items()} | {"offs": found.offs, "c": c[GUARD:]}
    arguments = [memory[name] for name in POINTERS] + [np.int64(x) for x in found.numbers()]
    workspace = np.zeros(code.workspace_for({}) // 4, np.int32)
    arguments += [workspace] if code.workspace else []
    written = None if code.workspace else [POINTERS.index("c")]  # workspace is read as well
    run_on_sim(code, arguments, (*code.grid_for({}), 1, 1)[:3], outputs=written).raise_for_findings()
    assert not workspace.any(), "the counter must be 0 after a launch, for the next one"
    found.check(c)


@pytest.mark.parametrize(
    ("a", "b", "k"),
    [("f8E4M3FN", "f8E4M3FN", 640), ("f4E2M1FN", "f4E2M1FN", 512), ("f8E5M2", "f4E2M1FN", 192)],
    ids=["mxfp8", "mxfp4", "a8w4, no whole words of scales"],
)
def test_rings(a, b, k):
    """Uneven and empty groups, more of T than they have, N's tail; rows of operands and scales apart."""
    p = ScaledGroupedProblem("m", 5, n=72, k=k, a_dtype=a, b_dtype=b, tokens_hint=50)
    run(case(p, UNEVEN, 60, pad=16), ScaledGroupedConfig(RING, 3))


@pytest.mark.parametrize(
    ("a", "b", "k"), [("f8E4M3FN", "f8E4M3FN", 32), ("f4E2M1FN", "f4E2M1FN", 96), ("f8E4M3FN", "f4E2M1FN", 4096 + 32)]
)
def test_k_in_blocks_of_32(a, b, k):
    """K of less than a tile, or that ends within one: the last group's last rows end where memory does."""
    p = ScaledGroupedProblem("m", 3, n=40, k=k, a_dtype=a, b_dtype=b, tokens_hint=50)
    run(case(p, (5, 5, 38)), ScaledGroupedConfig(RING, 2))


@pytest.mark.parametrize("kind", ["f8E4M3FN", "f4E2M1FN"])
def test_interleaved(kind):
    p = ScaledGroupedProblem("m", 3, n=136, k=1024, a_dtype=kind, b_dtype=kind, tokens_hint=200)
    tile = ScaledConfig(**{**INTERLEAVED.key(), "tile_k": 256 if kind == "f4E2M1FN" else 128})
    run(case(p, (130, 130, 133)), ScaledGroupedConfig(tile, 2))


@pytest.mark.parametrize("scaling", ["block", "row"])
def test_offs_that_make_no_sense(scaling):
    p = ScaledGroupedProblem("m", 5, n=64, k=128, tokens_hint=50, scaling=scaling)
    run(case(p, (-3, 20, 10, 90, 33), 40), ScaledGroupedConfig(RING, 2))


@pytest.mark.parametrize("k", [640, 16, 1040])
def test_a_scale_for_each_row_and_column(k):
    """f32 scales; K of less than a tile, of whole tiles, and one that ends within a tile."""
    p = ScaledGroupedProblem("m", 5, n=72, k=k, tokens_hint=50, scaling="row")
    run(case(p, UNEVEN, 60, pad=16), ScaledGroupedConfig(RING, 3))
    wide = ScaledGroupedProblem("m", 2, n=136, k=1024, a_dtype="f8E5M2", tokens_hint=200, scaling="row")
    if k == 640:
        run(case(wide, (130, 133)), ScaledGroupedConfig(INTERLEAVED, 2))


@pytest.mark.parametrize(
    ("a", "b", "sizes"),
    [
        ("f8E4M3FN", "f8E4M3FN", (5, 0, 1, 13, 0)), ("f8E4M3FN", "f8E4M3FN", (0, 0, 0, 0, 0)),
        ("f4E2M1FN", "f4E2M1FN", (5, 0, 1, 9, 0)), ("f8E5M2", "f4E2M1FN", (1, 1, 1, 1, 1)),
    ],
    ids=["mxfp8", "mxfp8, all empty", "mxfp4", "a8w4, a block each"],
)  # fmt: skip
def test_weight_gradients(a, b, sizes):
    """Groups of any number of blocks, which begin at any; empty ones' gradients are zeros."""
    p = ScaledGroupedProblem("k", 5, m=40, n=72, a_dtype=a, b_dtype=b, tokens_hint=1000, align_scales=1)
    tile = ScaledConfig(**RING.key() | {"tile_k": 256 if a == "f4E2M1FN" else 128})
    run(case(p, np.cumsum(sizes) * BLOCK, (sum(sizes) + 2) * BLOCK, pad=16), ScaledGroupedConfig(tile, 3))


def test_weight_gradients_of_offs_that_make_no_sense():
    p = ScaledGroupedProblem("k", 5, m=40, n=72, tokens_hint=200, align_scales=1)
    run(case(p, (-3, 90, 40, 900, 33), 128), ScaledGroupedConfig(RING, 2))


def test_space():
    """Tiles of both kinds; scales that begin anywhere and weights' gradients are refused in words."""
    p = ScaledGroupedProblem("m", 8, n=4096, k=2048, tokens_hint=8192)
    kept = [c.config.tile for c in candidates(p, gfx950).kept]
    assert {t.interleaved for t in kept} == {True, False}
    narrow = ScaledGroupedProblem("m", 8, n=4096, k=2048 + 32, tokens_hint=8192)
    assert not any(c.config.tile.interleaved for c in candidates(narrow, gfx950).kept)
    for refused, words in (
        (ScaledGroupedProblem("m", 8, n=64, k=128, align_scales=1), "scales begin at multiples of 1"),
        (ScaledGroupedProblem("k", 8, m=64, n=64, scaling="row"), "only of form 'm'"),
        (ScaledGroupedProblem("m", 8, n=64, k=128, align_a=8), "multiples of 8"),
    ):
        (dropped,) = candidates(refused, gfx950).dropped
        assert words in dropped.reason
        with pytest.raises(ValueError, match=words):
            build(refused, ScaledGroupedConfig(RING, 2), gfx950)
    few = ScaledGroupedProblem("m", 16, n=4096, k=1536, tokens_hint=256)
    # 16x256x128 of 4 stages has most places in LDS that its loads go to: more than scalar registers hold
    most = max((c.config for c in candidates(few, gfx950).kept), key=lambda c: c.tile.stages * c.tile.tile_n)
    assert compiled(few, most).spills == 0, str(most)
    many = ScaledGroupedProblem("m", 64, n=4096, k=2048, tokens_hint=64 * 1024)
    # 16 waves of 256x256 have half the registers that 8 have, and spilled 184 in FP8
    assert all(c.config.tile.workgroup_size <= 8 * gfx950.limits.lanes for c in candidates(many, gfx950).kept)
    gradient = ScaledGroupedProblem("k", 8, m=2048, n=4096, tokens_hint=8192)
    for c in candidates(gradient, gfx950).kept[:2]:
        assert not c.config.tile.interleaved and compiled(gradient, c.config).spills == 0
    cfg = ScaledGroupedConfig(RING, 2)
    assert ScaledGroupedConfig(**cfg.key()) == cfg
