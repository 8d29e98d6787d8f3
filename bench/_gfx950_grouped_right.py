"""Grouped kernels compiled for the suite's sizes, and run on the simulator with fewer columns and K tiles.

A simulated launch of the suite's own sizes would take hours: what a kernel does for one tile does not depend on how
many there are, and groups of every kind (none, one row, a tile and a row, a few rows) are in each run."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flykernels.lang import TraceError
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.grouped_gemm.arguments import pointers, scalars
from templates.grouped_gemm.build import build
from templates.grouped_gemm.config import GroupedConfig
from templates.grouped_gemm.problem import RUN_TIME, GroupedGemmProblem
from templates.grouped_gemm.reference import reference, tolerance
from templates.grouped_gemm.space import candidates

from .simcases.case import bf16, from_bf16

RUN_WORKGROUPS = 3  # of a simulated launch, so that each does several tiles
NAN = 0x7FC1  # of bf16
SPARE = 3  # of T that no group has


@dataclass(frozen=True)
class Outcome:
    """One configuration of one problem. seconds: of CPU to compile; wrong: a finding, a fault, a wrong value, or ""."""

    problem: str
    config: str
    seconds: float
    spills: int
    wrong: str


@dataclass(frozen=True)
class Task:
    """Problems that one configuration is a candidate of, and whose small runs are the same."""

    problems: tuple
    config: Any


def tasks(problems: Iterable, sample: int, kept_of: Callable, cut: Callable) -> list[Task]:
    """Each candidate of each problem, or one in `sample`. kept_of: problem -> configurations; cut: (problem,
    configuration) -> the problem that is run, as far as it tells kernels apart."""
    found: dict[tuple, list] = defaultdict(list)
    for p in problems:
        kept = kept_of(p)
        if not kept:
            raise ValueError(f"{p} has no candidate")
        for config in random.Random(str(p)).sample(kept, max(1, len(kept) // sample)):
            found[cut(p, config), config].append(p)
    return [Task(tuple(ps), config) for (_, config), ps in found.items()]


def dense_tasks(problems: Iterable[GroupedGemmProblem], sample: int) -> list[Task]:
    kept = lambda p: [c.config for c in candidates(p, gfx950).kept]
    return tasks(problems, sample, kept, lambda p, config: replace(small(p, config)[0], tokens_hint=1))


def tried(task: Task) -> list[dict]:
    """One configuration, built in each problem's full size and run small."""
    name = lambda p: f"{p.form} {p.groups} groups, T {p.tokens_hint}, {p.m or p.n} x {p.k or p.n}, {p.a},{p.b}"
    return outcomes(task, name, build, run)


def outcomes(task: Task, name: Callable, build: Callable, run: Callable) -> list[dict]:
    """Outcomes as dictionaries."""
    found, wrong = [], run(task.problems[0], task.config)
    for p in task.problems:
        start = time.process_time()
        try:
            code = build(p, task.config, gfx950)
            spills, refused = code.spills + code.scratch_bytes, ""
        except (TraceError, ValueError) as e:
            spills, refused = 0, str(e)
        found.append(Outcome(name(p), str(task.config), time.process_time() - start, spills, refused or wrong))
    return [asdict(o) for o in found]


def small(p: GroupedGemmProblem, config: GroupedConfig) -> tuple[GroupedGemmProblem, np.ndarray]:
    """The problem with at most a tile and a half of columns, as many K tiles as the loop needs; groups' sizes."""
    tile = config.tile
    turned = p.form == "n"
    depth = tile.tile_k * max(7, tile.stages + 2)
    columns, rows = tile.tile_n + min(tile.tile_n // 2, 32), tile.tile_m + min(tile.tile_m // 2, 16)
    some = depth + 5 if p.form == "k" else tile.tile_m + 1
    sizes = np.array([0, 1, some, 0, 5])
    size = {"m": columns if turned else rows, "n": columns, "k": depth, RUN_TIME[p.form]: 0}
    cut = lambda own, new: new if new == 0 or own % 8 == 0 else new - 8 + own % 8  # a tail stays one
    size = {x: cut(getattr(p, x), n) for x, n in size.items()}
    return replace(p, groups=len(sizes), tokens_hint=p.tokens_hint, **size), sizes


def run(problem: GroupedGemmProblem, config: GroupedConfig) -> str:
    """What is wrong with a launch of a few groups, or ""."""
    p, sizes = small(problem, config)
    offs = np.cumsum(sizes).astype(np.int32)
    tokens = int(sizes.max()) if p.form == "batch" else int(offs[-1]) + SPARE
    extent = {"m": p.m, "n": p.n, "k": p.k, RUN_TIME[p.form]: tokens}
    rng = np.random.default_rng(0)
    held, number, values = {}, {"tokens": tokens}, {}
    for name, (rows, columns), layout in (("a", "mk", p.a), ("b", "kn", p.b), ("c", "mn", p.c)):
        high, wide = extent[rows], extent[columns]
        lead = (p.groups,) if p.has_groups(name) else ()
        x = (
            bf16(rng.standard_normal((*lead, high, wide)))
            if name != "c"
            else np.full((*lead, high, wide), NAN, np.uint16)
        )
        align = max(1, getattr(p, f"align_{name}") // 2)
        up = lambda n, align=align: -(-n // align) * align
        along, across = (wide, high) if layout == "row" else (high, wide)
        stored = np.full((*lead, across, up(along)), NAN, np.uint16)
        stored[..., :along] = x if layout == "row" else np.swapaxes(x, -1, -2)
        held[name], values[name] = stored, x
        number |= {f"{name}_{layout}": up(along), f"{name}_group": across * up(along)}
    held["offs"] = offs
    args = [held[x] if x == "offs" else held[x].reshape(-1) for x in pointers(p)]
    args += [np.int64(number[x]) for x in scalars(p)]
    code = build(p, replace(config, workgroups=RUN_WORKGROUPS), gfx950)
    args += [np.zeros(code.workspace_for({}) // 4, np.int32)] if code.workspace else []
    try:
        run_on_sim(code, args, (RUN_WORKGROUPS, 1, 1)).raise_for_findings()
    except Exception as e:  # a fault of the kernel is an outcome, not the bench's end
        return f"{type(e).__name__}: {e}"
    a, b = from_bf16(values["a"]), from_bf16(values["b"])
    given = None if p.form == "batch" else offs
    want = reference(p, a, b, given)
    c = held["c"] if p.c == "row" else np.swapaxes(held["c"], -1, -2)
    got = from_bf16(c[..., : want.shape[-1]])
    mine = ~np.isnan(want)
    if not np.isnan(got[~mine]).all():
        return "rows of no group were written"
    error, allowed = np.abs(got - want)[mine].max(initial=0.0), tolerance(p, a, b, given)
    return "" if error <= allowed else f"error {error:.3g}, more than {allowed:.3g}"
