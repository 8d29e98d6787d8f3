"""Scaled grouped kernels compiled for the suite's sizes, and run on the simulator with fewer columns and K tiles, as
bench/_gfx950_grouped_right.py does with the dense ones."""

from __future__ import annotations

from collections.abc import Iterable
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

from ._gfx950_grouped_right import NAN, RUN_WORKGROUPS, SPARE, Task, outcomes
from ._gfx950_grouped_right import tasks as tasks_of
from .simcases.case import from_bf16

MXFP8, MXFP4 = "f8E4M3FN", "f4E2M1FN"
KINDS = (
    ("m", MXFP8, "block"),
    ("m", MXFP4, "block"),
    ("k", MXFP8, "block"),
    ("k", MXFP4, "block"),
    ("m", MXFP8, "row"),
)
FINITE = 0xBF  # of any byte: a mask after which no code of the formats is NaN
SCALES = 121, 134  # bytes, from and below


def problem(kind: tuple[str, str, str], groups: int, tokens: int, n: int, k: int) -> ScaledGroupedProblem:
    """Of the suite. kind: (form, operands' type, scaling); form "k" is the weight's gradient."""
    form, code, scaling = kind
    sizes = {"n": n, "k": k} if form == "m" else {"m": n, "n": k}
    return ScaledGroupedProblem(
        form, groups, **sizes, a_dtype=code, b_dtype=code, tokens_hint=groups * tokens, scaling=scaling
    )


def tasks(problems: Iterable[ScaledGroupedProblem], sample: int) -> list[Task]:
    kept = lambda p: [c.config for c in candidates(p, gfx950).kept]
    return tasks_of(problems, sample, kept, lambda p, config: replace(small(p, config)[0], tokens_hint=1))


def tried(task: Task) -> list[dict]:
    """One configuration, built in each problem's full size and run small."""
    name = lambda p: f"{p.form} {p.a_dtype} {p.groups} groups, T {p.tokens_hint}, {p.m or p.k} x {p.n}, {p.scaling}"
    return outcomes(task, name, build, run)


def small(p: ScaledGroupedProblem, config: ScaledGroupedConfig) -> tuple[ScaledGroupedProblem, np.ndarray]:
    """The problem with at most a tile and a half of columns and (form "k") rows, as many K tiles as the loop needs;
    groups' sizes: none, one row or block, a tile (form "k": all those K tiles) and one more, a few."""
    tile = config.tile
    depth, columns = tile.tile_k * max(7, tile.stages + 2), tile.tile_n + min(tile.tile_n // 2, 32)
    if p.form == "m":
        return replace(p, groups=5, n=columns, k=depth), np.array([0, 1, tile.tile_m + 1, 0, 5])
    rows = tile.tile_m + min(tile.tile_m // 2, 16)
    return replace(p, groups=5, m=rows, n=columns), np.array([0, BLOCK, depth + BLOCK, 0, 5 * BLOCK])


def run(problem: ScaledGroupedProblem, config: ScaledGroupedConfig) -> str:
    """What is wrong with a launch of a few groups, or ""."""
    p, sizes = small(problem, config)
    offs = np.cumsum(sizes).astype(np.int32)
    tokens, rng = int(offs[-1]) + SPARE * p.unit, np.random.default_rng(0)
    rows, depth, lead = (tokens, p.k, (p.groups,)) if p.form == "m" else (p.m, tokens, ())
    byte = lambda shape: rng.integers(0, 256, shape, dtype=np.uint8) & FINITE
    scale = lambda shape: rng.integers(*SCALES, shape).astype(np.uint8)
    held = {"a": byte((rows, depth // p.per_byte("a"))), "b": byte((*lead, p.n, depth // p.per_byte("b")))}
    if p.scaling == "row":
        held |= {
            x: rng.uniform(0.5, 2, s).astype(np.float32) for x, s in (("scale_a", rows), ("scale_b", (*lead, p.n)))
        }
    else:
        held |= {"scale_a": scale((rows, depth // BLOCK)), "scale_b": scale((*lead, p.n, depth // BLOCK))}
    c = np.full((rows, p.n) if p.form == "m" else (p.groups, p.m, p.n), NAN, np.uint16)
    number = {"tokens": tokens, "c_row": p.n, "c_group": c[0].size} | {
        f"{x}_{axis}": held[x].shape[-1]
        for x, axis in (("a", "row"), ("b", "col"), ("scale_a", "row"), ("scale_b", "col"))
    }
    number |= {f"{x}_group": held[x][0].size for x in ("b", "scale_b")}
    memory = held | {"offs": offs, "c": c}
    args = [memory[x].reshape(-1) for x in POINTERS] + [np.int64(number[x]) for x in scalars(p)]
    code = build(p, replace(config, workgroups=RUN_WORKGROUPS), gfx950)
    args += [np.zeros(code.workspace_for({}) // 4, np.int32)] if code.workspace else []
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
