"""MXFP8 and MXFP4 grouped kernels compiled for the suite's sizes, and run on the simulator with fewer columns and K
tiles, as bench/_gfx950_grouped_right.py does with the dense ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flykernels.microscaling import BLOCK
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.grouped_gemm.scaled.arguments import POINTERS, scalars
from templates.grouped_gemm.scaled.build import build
from templates.grouped_gemm.scaled.config import ScaledGroupedConfig
from templates.grouped_gemm.scaled.problem import ScaledGroupedProblem
from templates.grouped_gemm.scaled.reference import reference
from templates.grouped_gemm.scaled.space import candidates
from templates.scaled_gemm.reference import wrong

from ._gfx950_grouped_right import NAN, RUN_WORKGROUPS, SPARE, Outcome, outcome, sampled
from .simcases.case import from_bf16

FORMATS = {"mxfp8": "f8E4M3FN", "mxfp4": "f4E2M1FN"}
FINITE = 0xBF  # of any byte: a mask after which no code of the formats is NaN
SCALES = 121, 134  # bytes, from and below


def problem(kind: str, groups: int, tokens: int, n: int, k: int) -> ScaledGroupedProblem:
    """Of the suite, with operands of "mxfp8" or "mxfp4"."""
    code = FORMATS[kind]
    return ScaledGroupedProblem("m", groups, n=n, k=k, a_dtype=code, b_dtype=code, tokens_hint=groups * tokens)


def tasks(p: ScaledGroupedProblem, sample: int) -> list[tuple[ScaledGroupedProblem, ScaledGroupedConfig]]:
    """Each candidate of a problem, or one in `sample`."""
    return [(p, config) for config in sampled(str(p), [c.config for c in candidates(p, gfx950).kept], sample)]


def tried(task: tuple[ScaledGroupedProblem, ScaledGroupedConfig]) -> Outcome:
    """One configuration, built in full size and run small."""
    p, config = task
    name = f"{p.a_dtype} {p.groups} groups, T {p.tokens_hint}, {p.n} x {p.k}"
    return outcome(name, config, lambda: build(p, config, gfx950), lambda: run(p, config))


def run(problem: ScaledGroupedProblem, config: ScaledGroupedConfig) -> str:
    """What is wrong with a launch of a few groups (none, one row, a tile and a row, a few rows), or ""."""
    tile = config.tile
    sizes = np.array([0, 1, tile.tile_m + 1, 0, 5])
    depth, columns = tile.tile_k * max(7, tile.stages + 2), tile.tile_n + min(tile.tile_n // 2, 32)
    p = replace(problem, groups=len(sizes), n=columns, k=depth)
    offs = np.cumsum(sizes).astype(np.int32)
    tokens, rng = int(offs[-1]) + SPARE, np.random.default_rng(0)
    byte = lambda shape: rng.integers(0, 256, shape, dtype=np.uint8) & FINITE
    scale = lambda shape: rng.integers(*SCALES, shape).astype(np.uint8)
    held = {
        "a": byte((tokens, depth // p.per_byte("a"))),
        "b": byte((p.groups, columns, depth // p.per_byte("b"))),
        "scale_a": scale((tokens, depth // BLOCK)),
        "scale_b": scale((p.groups, columns, depth // BLOCK)),
    }
    c = np.full((tokens, columns), NAN, np.uint16)
    number = {"tokens": tokens, "c_row": columns} | {
        f"{x}_{axis}": held[x].shape[-1]
        for x, axis in (("a", "row"), ("b", "col"), ("scale_a", "row"), ("scale_b", "col"))
    }
    number |= {f"{x}_group": held[x][0].size for x in ("b", "scale_b")}
    memory = held | {"offs": offs, "c": c}
    args = [memory[x].reshape(-1) for x in POINTERS] + [np.int64(number[x]) for x in scalars(p)]
    code = build(p, replace(config, workgroups=RUN_WORKGROUPS), gfx950)
    try:
        run_on_sim(code, args, (RUN_WORKGROUPS, 1, 1)).raise_for_findings()
    except Exception as e:  # a fault of the kernel is an outcome, not the bench's end
        return f"{type(e).__name__}: {e}"
    got = from_bf16(c)
    exact, allowed = reference(p, **held, offs=offs)
    mine = ~np.isnan(exact)
    if not np.isnan(got[~mine]).all():
        return "rows of no group were written"
    bad = wrong(p.dense, got, exact, allowed) & mine
    return f"{bad.sum()} of {bad.size} wrong, the first at {np.argwhere(bad)[0]}" if bad.any() else ""
