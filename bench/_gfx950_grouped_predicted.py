"""Which grouped kernel is the fastest in the model, ours and Triton's, for every case of the suite: by many processes.

A kernel's recordings serve all cases, so a process takes a kernel, and times it for all of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from flykernels.lang import TraceError
from flykernels.sim.timing import Machine950
from flykernels.targets import gfx950
from templates.gemm.gfx950_config import Gfx950Config
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.space import candidates

from ._gfx950_grouped_model import SAVED, TRITON, Recorded, estimate, ours, triton
from ._grouped_suite import Case
from .common import Report, geomean, spread

ENDS = ("low", "middle", "high")  # of the constants' bands
FIT = 0  # as many workgroups on a compute unit as there is room for
# Whose way through the groups is timed, which all kernels of a side share
SEARCH = {"ours": Gfx950Config(16, 64, 128, 4, (1, 4)), "triton": (16, 64, 128, 4, 2)}


@dataclass(frozen=True)
class Entrant:
    """kernel    our tile, or Triton's (BM, BN, BK, warps, stages)
    together  workgroups that are launched for each compute unit, or FIT"""

    kernel: Gfx950Config | tuple[int, ...]
    together: int

    @property
    def side(self) -> str:
        return "ours" if isinstance(self.kernel, Gfx950Config) else "triton"

    @property
    def cost(self) -> int:
        """Of recording and timing it, about."""
        k = self.kernel
        size = k.tile_m * k.tile_n * k.tile_k if isinstance(k, Gfx950Config) else k[0] * k[1] * k[2]
        return size * (self.together or 4)

    def recorded(self) -> Recorded:
        k = self.kernel
        return ours(k) if isinstance(k, Gfx950Config) else triton(k[:3], *k[3:])


@dataclass(frozen=True)
class Task:
    """An entrant's times for some cases, with the constants at one of ENDS.

    search: cycles that the way through so many groups takes"""

    entrant: Entrant
    end: str
    cases: tuple[Case, ...]
    search: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Times:
    """Simulated us of each case; how many workgroups fit on a compute unit; why there are none, or ""."""

    us: dict[Case, float]
    fit: int
    failed: str = ""


def begin(save: Path | None) -> None:
    """Of a process: what has been simulated before is known."""
    if save:
        SAVED.keep_in(save)


def at(end: str) -> Machine950:
    return Machine950() if end == "middle" else Machine950().end(end)


def search(task: tuple[str, int, str]) -> float:
    """(side, groups, one of ENDS) -> cycles of the way through so many groups beyond that through one."""
    side, groups, end = task
    return Entrant(SEARCH[side], 1).recorded().search(groups, at(end))  # type: ignore[arg-type]


def timed(task: Task) -> Times:
    """What a process does with a task. A kernel that does not compile has no times."""
    machine, way, us = at(task.end), dict(task.search), {}
    try:
        kernel = task.entrant.recorded()
        fit = kernel.together
        for case in task.cases:
            together = task.entrant.together or fit
            found = estimate(kernel, np.array(case.sizes), case.n, case.k, machine, together, way[case.groups])
            us[case] = found.microseconds
    except (TraceError, ValueError, RuntimeError) as e:  # more LDS than there is; a compiler's complaint
        return Times({}, 0, f"{type(e).__name__}: {e}")
    return Times(us, fit)


def offered(mean: float, block_m: int) -> bool:
    """Whether Inductor would try this many rows a tile for groups of so many rows on average."""
    if mean <= 16:
        return block_m <= 32
    if mean <= 32:
        return block_m <= 64
    return block_m > (16 if mean <= 64 else 32)


def ours_for(case: Case) -> list[Entrant]:
    """Our candidates, the likeliest first."""
    p = GroupedGemmProblem("m", case.groups, n=case.n, k=case.k, tokens_hint=case.total)
    kept = [c.config for c in candidates(p, gfx950).kept]
    return [Entrant(c.tile, c.workgroups // gfx950.limits.compute_units) for c in kept]


def theirs_for(case: Case, together: int) -> list[Entrant]:
    """Triton's, of those that Inductor would try."""
    fits = lambda t: offered(case.tokens, t[0]) and case.n % t[1] == 0 and case.k % t[2] == 0
    return [Entrant(t, together) for t in TRITON if fits(t)]


def predicted(report: Report, cases: list[Case], jobs: int, save: Path | None, crowd: bool) -> None:
    """Our candidates' and Triton's simulated times. The ends of the constants' bands are taken of the kernels that are
    the fastest in the middle. crowd: Triton's also with as many programs a unit as fit."""
    ways = list(product(SEARCH, sorted({c.groups for c in cases}), ENDS))
    found = dict(zip(ways, spread(search, ways, jobs, "ways through groups", begin, (save,)), strict=True))
    way = lambda side, end: tuple((g, cycles) for (s, g, e), cycles in found.items() if (s, e) == (side, end))

    entrants = {c: {"ours": ours_for(c), "triton": theirs_for(c, 1)} for c in cases}
    if crowd:
        for case, sides in entrants.items():
            sides["beside"] = theirs_for(case, FIT)
    wanted: dict[tuple[Entrant, str], list[Case]] = defaultdict(list)
    for case, sides in entrants.items():
        for entrant in (e for side in sides.values() for e in side):
            wanted[entrant, "middle"].append(case)
    us, fit = run(wanted, way, jobs, save, report)
    best = {
        case: {side: min(es, key=lambda e: us[e, "middle", case]) for side, es in sides.items()}
        for case, sides in entrants.items()
    }
    wanted = defaultdict(list)
    for case, sides in best.items():
        for side, end in product(("ours", "triton"), ("low", "high")):
            wanted[sides[side], end].append(case)
    ends, _ = run(wanted, way, jobs, save, report)
    us |= ends

    ratios: dict[str, list[float]] = defaultdict(list)
    for case, sides in best.items():
        mine, other = sides["ours"], sides["triton"]
        for end in ENDS:
            ratios[end].append(us[other, end, case] / us[mine, end, case])
        if crowd:
            more = min(us[x, "middle", case] for x in (other, sides["beside"]))
            ratios["beside"].append(more / us[mine, "middle", case])
        ratios["first"].append(us[entrants[case]["ours"][0], "middle", case] / us[mine, "middle", case])
        report.row(
            groups=case.groups, tokens=case.tokens, set=case.share, n=case.n, k=case.k,
            ours_simulated_us=round(us[mine, "middle", case], 1),
            triton_simulated_us=round(us[other, "middle", case], 1),
            ratio=round(ratios["middle"][-1], 3), low=round(ratios["low"][-1], 3), high=round(ratios["high"][-1], 3),
            **({"beside": round(ratios["beside"][-1], 3)} if crowd else {}), ours=mine.recorded().name,
            triton=other.recorded().name,
        )  # fmt: skip
    report.note(
        "Triton: the fastest of Inductor's configurations for _grouped_mm and of published ones, as Inductor launches "
        "its template, one program a compute unit"
        + ("; beside: as many programs a unit as fit, which it does not do" if crowd else "")
    )
    report.bar("geomean, simulated, Triton's time over ours", geomean(ratios["middle"]), at_least=1.20)
    for end in ("low", "high"):
        report.bar(f"the same at the {end} end of the band", geomean(ratios[end]), at_least=1)
    report.bar("lowest, simulated", min(ratios["middle"]))
    for tokens in sorted({c.tokens for c in cases}):
        some = [r for r, c in zip(ratios["middle"], best, strict=True) if c.tokens == tokens]
        report.bar(f"geomean at {tokens} tokens a group", geomean(some))
    if crowd:
        report.bar("geomean with as many of Triton's programs a unit as fit", geomean(ratios["beside"]))
    report.bar("the first candidate's simulated time over the best candidate's, geomean", geomean(ratios["first"]))
    report.bar("the same, worst", max(ratios["first"]))
    crowded = [e for e, n in fit.items() if e.side == "ours" and n and n < e.together]
    for e in crowded:
        report.note(f"{e.recorded().name}: {e.together} are launched for a unit, where {fit[e]} fit")
    report.bar("our kernels that are launched with more workgroups than fit", len(crowded), at_most=0)


def run(wanted, way, jobs: int, save: Path | None, report: Report):
    """({(entrant, end, case): us}, {entrant: workgroups that fit on a unit}), the costliest first. inf where a kernel
    does not compile."""
    tasks = [Task(e, end, tuple(cases), way(e.side, end)) for (e, end), cases in wanted.items()]
    tasks.sort(key=lambda t: t.entrant.cost, reverse=True)
    us, fit = {}, {}
    for task, times in zip(tasks, spread(timed, tasks, jobs, "kernels", begin, (save,)), strict=True):
        fit[task.entrant] = times.fit
        us |= {(task.entrant, task.end, c): times.us.get(c, float("inf")) for c in task.cases}
        if times.failed:
            report.note(f"{task.entrant.kernel}: {times.failed[:200]}")
    return us, fit
