"""Grouped kernels in the suite's own sizes on the simulator: some workgroups of a launch do all that is theirs.

Forward and input gradient (form "m") go by turns that each workgroup works out for itself, so any of them can be run
alone: all of a small launch, the first, the last and some drawn ones of a large one. The weight's gradient (form "k")
hands out tiles by a counter; it is set to begin near the end, and one workgroup does the rest. Memory is filled where
those tiles are; the rest of C must be left alone."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

import numpy as np

from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.gemm.order import grouped
from templates.grouped_gemm.arguments import pointers, scalars
from templates.grouped_gemm.build import build
from templates.grouped_gemm.config import GroupedConfig
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.schedule import turns, walk
from templates.grouped_gemm.space import candidates

from ._gfx950_grouped_right import NAN
from ._grouped_suite import Case
from .simcases.case import bf16, from_bf16

PARTS = ("forward", "input gradient", "weight gradient")
WORK_MOST = 4e8  # multiplications that a launch's chosen workgroups do
EPSILON, SUM_STEP = 2.0**-8, 2.0**-24  # of bf16 and f32
ROW_STEP = 8  # elements between weights of neighbouring groups: they overlap, and no two are the same


@dataclass(frozen=True)
class Task:
    """One launch: a case, which of PARTS, which candidate (0: the likeliest)."""

    case: Case
    part: str
    number: int


@dataclass(frozen=True)
class Ran:
    """workgroups, tiles: of so many of the launch's; wrong: a finding, a fault, a wrong value, or ""."""

    config: str
    workgroups: int
    of_workgroups: int
    tiles: int
    of_tiles: int
    wrong: str


def problem(case: Case, part: str) -> GroupedGemmProblem:
    """y = x w^T, dx = dy w, or dw = dy^T x, as autograd poses them."""
    common = {"tokens_hint": case.total}
    if part == "forward":
        return GroupedGemmProblem("m", case.groups, n=case.n, k=case.k, **common)
    if part == "input gradient":
        return GroupedGemmProblem("m", case.groups, n=case.k, k=case.n, b="row", **common)
    return GroupedGemmProblem("k", case.groups, m=case.n, n=case.k, a="col", b="row", **common)


@dataclass(frozen=True)
class Tile:
    """Rows (from, to) and columns of group g's product, and which of T it reads or is."""

    group: int
    rows: slice
    columns: slice


def tiles(p: GroupedGemmProblem, config: GroupedConfig, sizes: list[int]) -> list[Tile]:
    """All of a launch in the order of their numbers."""
    t = config.tile
    columns = -(-p.n // t.tile_n)
    order = range(p.groups) if p.form == "m" else np.argsort(-np.array(sizes), kind="stable")
    found = []
    for g in map(int, order):
        height = sizes[g] if p.form == "m" else p.m
        rows = -(-height // t.tile_m)
        for i in range(rows * columns):
            row, column = grouped(i, rows, columns, t.group_m)
            across = slice(column * t.tile_n, min((column + 1) * t.tile_n, p.n))
            found.append(Tile(g, slice(row * t.tile_m, min((row + 1) * t.tile_m, height)), across))
    return found


def work(p: GroupedGemmProblem, config: GroupedConfig, sizes: list[int], tile: Tile) -> float:
    """Of a tile, in multiplications; storing it is counted too."""
    depth = p.k if p.form == "m" else sizes[tile.group]
    return config.tile.tile_m * config.tile.tile_n * (depth + 64.0)


def chosen(p: GroupedGemmProblem, config: GroupedConfig, sizes: list[int], every: list[Tile]):
    """(workgroups to run, the tiles that they do, the counter's value before), of form "m" by turns."""
    if p.form == "k":
        at, left = len(every), WORK_MOST
        while at and (left := left - work(p, config, sizes, every[at - 1])) > 0:
            at -= 1
        at = min(at, len(every) - 1)
        return [0], list(range(at, len(every))), at
    count = turns(len(every), config.workgroups)
    mine = lambda w: [
        n for t in range(count) if (n := walk(t, w, config.workgroups, len(every), gfx950.limits.dies)) < len(every)
    ]
    drawn = random.Random(f"{p}{config}").sample(range(config.workgroups), config.workgroups)
    found, left, run = [], WORK_MOST, []
    for w in dict.fromkeys((0, config.workgroups - 1, *drawn)):
        its = mine(w)
        left -= sum(work(p, config, sizes, every[n]) for n in its)
        if left < 0 and len(run) > 1:
            break
        run.append(w)
        found += its
    return run, found, 0


def tried(task: Task) -> dict:
    """Builds a candidate, runs what is chosen, compares with f64. A Ran as a dictionary."""
    p, sizes = problem(task.case, task.part), task.case.sizes
    kept = [c.config for c in candidates(p, gfx950).kept]
    config = kept[task.number % len(kept)]
    every = tiles(p, config, sizes)
    run, numbers, begin = chosen(p, config, sizes, every)
    code = build(p, config, gfx950)
    wrong = f"{code.spills} spills" if code.spills or code.scratch_bytes else ""
    wrong = wrong or launched(p, config, code, task.case, [every[n] for n in numbers], run, begin)
    return asdict(Ran(str(config), len(run), config.workgroups, len(numbers), len(every), wrong))


def launched(p, config: GroupedConfig, code, case: Case, mine: list[Tile], run: list[int], begin: int) -> str:
    """What is wrong with a launch of workgroups `run`, which do the tiles `mine`, or ""."""
    rng = np.random.default_rng(case.groups)
    starts = np.cumsum([0, *case.sizes])
    m, n, tokens = case.n, case.k, case.total
    draw = lambda x, at: x.__setitem__(at, bf16(rng.standard_normal(x[at].shape)))
    if p.form == "m":
        a, b = np.zeros((tokens, p.k), np.uint16), bf16(rng.standard_normal(p.n * p.k + ROW_STEP * p.groups))
        c = np.zeros((tokens, p.n), np.uint16)
        number = {"a_row": p.k, "b_row": p.n, "b_col": p.k, "b_group": ROW_STEP, "c_row": p.n}
        where = lambda t: slice(starts[t.group] + t.rows.start, starts[t.group] + t.rows.stop)
        for rows in {(where(t).start, where(t).stop) for t in mine}:
            draw(a, slice(*rows))
        spot = lambda t: (where(t), t.columns)
    else:
        a, b = np.zeros((tokens, m), np.uint16), np.zeros((tokens, n), np.uint16)
        c = np.zeros((p.groups, m, n), np.uint16)
        number = {"a_col": m, "b_row": n, "c_row": n, "c_group": m * n}
        for g in {t.group for t in mine}:
            draw(a, slice(starts[g], starts[g + 1])), draw(b, slice(starts[g], starts[g + 1]))
        spot = lambda t: (t.group, t.rows, t.columns)
    for t in mine:
        c[spot(t)] = NAN
    held = {"a": a.reshape(-1), "b": b.reshape(-1), "offs": starts[1:].astype(np.int32), "c": c.reshape(-1)}
    args = [held[x] for x in pointers(p)] + [np.int64({"tokens": tokens, **number}[x]) for x in scalars(p)]
    if code.workspace:
        workspace = np.zeros(code.workspace_for({}) // 4, np.int32)
        workspace[0] = begin
        args.append(workspace)
    try:
        found = run_on_sim(code, args, (config.workgroups, 1, 1), workgroups=[(w, 0, 0) for w in run])
        found.raise_for_findings()
    except Exception as e:  # a fault of the kernel is an outcome, not the bench's end
        return f"{type(e).__name__}: {e}"
    for t in mine:
        if p.form == "m":
            layout = (p.n, p.k) if p.b == "col" else (p.k, p.n)
            weight = from_bf16(b[ROW_STEP * t.group :][: p.n * p.k]).reshape(layout)
            x, w = from_bf16(a[spot(t)[0]]), weight[t.columns].T if p.b == "col" else weight[:, t.columns]
        else:
            own = slice(starts[t.group], starts[t.group + 1])
            x, w = from_bf16(a[own, t.rows]).T, from_bf16(b[own, t.columns])
        got, want, size = from_bf16(c[spot(t)]), x @ w, np.abs(x) @ np.abs(w)
        bound = (EPSILON + (8 * np.sqrt(max(1, x.shape[1])) + 8) * SUM_STEP) * size.max(initial=0.0)
        if not (np.abs(got - want) <= bound).all():
            return f"group {t.group}, rows {t.rows}, columns {t.columns}: off by {np.abs(got - want).max():.3g}"
        if x.shape[1] == 0 and c[spot(t)].any():
            return f"group {t.group} is empty, and its gradient not exactly zero"
        c[spot(t)] = 0
    return "wrote to tiles that are others'" if c.any() else ""
