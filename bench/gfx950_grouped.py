"""The gfx950 grouped GEMM: every candidate is right on the simulator; simulated time against Triton's kernel; balance.

Nothing here ran on an MI350. Times are *simulated* (bench/_gfx950_grouped_model.py); balance is *counted*.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flykernels.sim.timing import Machine950
from flykernels.targets import gfx950
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.schedule import turns, walk
from templates.grouped_gemm.space import candidates

from . import _gfx950_scaled_grouped as scaled_grouped
from ._gfx950_grouped_model import SAVED, TRITON, estimate, ours, triton
from ._gfx950_grouped_right import Outcome, attempts
from .common import Report, geomean, parser, tracked

GROUPS, TOKENS, WEIGHTS = (8, 16, 64, 128), (16, 128, 1024), ((2048, 4096), (4096, 1536))  # (N, K)
SETS = ("balanced", "zipf", "third empty")
PARTS = ("predicted", "balance", "right", "scaled")
SMALLEST = ((16, 64, 128), 4, 2)  # Triton's kernel that the search through groups is timed with: it is the same in all


def sizes_of(groups: int, tokens: int, kind: str, seed: int = 0) -> np.ndarray:
    """Rows of each group, groups * tokens in all. zipf: as 1, 1/2, 1/3 ..., in any order; third empty: every third has
    none."""
    total = groups * tokens
    share = np.ones(groups)
    if kind == "zipf":
        share = np.random.default_rng(seed).permutation(1 / np.arange(1, groups + 1))
    elif kind == "third empty":
        share[::3] = 0
    ends = np.rint(np.cumsum(share) / share.sum() * total).astype(np.int64)
    return np.diff(ends, prepend=0)


def suite() -> Iterator[tuple[GroupedGemmProblem, str, np.ndarray]]:
    for groups in GROUPS:
        for tokens in TOKENS:
            for n, k in WEIGHTS:
                p = GroupedGemmProblem("m", groups, n=n, k=k, tokens_hint=groups * tokens)
                for kind in SETS:
                    yield p, kind, sizes_of(groups, tokens, kind)


def offered(mean: float, block_m: int) -> bool:
    """Whether Inductor would try this many rows a tile for groups of so many rows on average."""
    if mean <= 16:
        return block_m <= 32
    if mean <= 32:
        return block_m <= 64
    return block_m > (16 if mean <= 64 else 32)


def predicted(report: Report) -> None:
    """Our candidates' and Triton's simulated times. The ends of the constants' bands are taken of the kernels that are
    the fastest in the middle."""
    machine = Machine950()
    ends = {end: machine.end(end) for end in ("low", "high")}
    theirs = [triton(t[:3], *t[3:]) for t in TRITON]
    look = triton(*SMALLEST)
    ratios: dict[str, list[float]] = {"middle": [], "low": [], "high": []}
    beside, ranks = [], []
    for p, kind, sizes in tracked(list(suite()), "suite"):
        mine = [
            (ours(c.config.tile), c.config.workgroups // gfx950.limits.compute_units)
            for c in candidates(p, gfx950).kept
        ]
        others = [
            r for r in theirs if offered(p.group_hint, r.tile[0]) and p.n % r.tile[1] == 0 and p.k % r.tile[2] == 0
        ]
        found = lambda r, together, search, c=machine: estimate(r, sizes, p.n, p.k, c, together, search(c)).microseconds
        my_search = lambda c: mine[0][0].search(p.groups, c)
        search = lambda c: look.search(p.groups, c)
        times = [found(r, together, my_search) for r, together in mine]
        best, (fastest, together) = min(times), mine[times.index(min(times))]
        other_times = [found(r, 1, search) for r in others]
        other_best, other = min(other_times), others[other_times.index(min(other_times))]
        more = min(other_best, min(found(r, r.together, search) for r in others))
        ratios["middle"].append(other_best / best)
        beside.append(more / best)
        ranks.append(times[0] / best)
        for end, c in ends.items():
            ratios[end].append(found(other, 1, search, c) / found(fastest, together, my_search, c))
        report.row(
            groups=p.groups, tokens=p.group_hint, set=kind, n=p.n, k=p.k, ours_simulated_us=round(best, 1),
            triton_simulated_us=round(other_best, 1), ratio=round(ratios["middle"][-1], 3),
            low=round(ratios["low"][-1], 3), high=round(ratios["high"][-1], 3), beside=round(beside[-1], 3),
            ours=fastest.name, triton=other.name,
        )  # fmt: skip
    report.note(
        "Triton: Inductor's template as it is launched, one program a compute unit, the fastest configuration; "
        "beside: the same kernels with as many programs a unit as fit, which Inductor does not do"
    )
    report.bar("geomean, simulated, Triton's time over ours", geomean(ratios["middle"]), at_least=1.20)
    for end in ("low", "high"):
        report.bar(f"the same at the {end} end of the band", geomean(ratios[end]), at_least=1)
    report.bar("lowest, simulated", min(ratios["middle"]))
    report.bar("geomean with as many of Triton's programs a unit as fit", geomean(beside))
    report.bar("the first candidate's simulated time over the best candidate's, geomean", geomean(ranks))
    report.bar("the same, worst", max(ranks))


def balance(report: Report) -> None:
    """What the busiest workgroup does over the least that any sharing of whole tiles must give one, counted: tiles for
    the forward pass; for the weight's gradient what tiles sum over."""
    worst: dict[str, float] = {}
    for p, kind, sizes in suite():
        q = GroupedGemmProblem("k", p.groups, m=p.n, n=p.k, a="col", b="row", tokens_hint=p.tokens_hint)
        for form, problem in (("forward", p), ("gradient", q)):
            config = candidates(problem, gfx950).kept[0].config
            found, least = loads(problem, sizes, config.tile.tile_m, config.tile.tile_n, config.workgroups)
            over = found.max() / least - 1
            report.row(form=form, groups=p.groups, tokens=p.group_hint, set=kind, m=problem.m, n=problem.n,
                       k=problem.k, workgroups=config.workgroups, imbalance=round(over, 4))  # fmt: skip
            name = form, "skewed" if kind != "balanced" else kind
            worst[name] = max(worst.get(name, 0.0), over)
    for (form, kind), over in worst.items():
        report.bar(f"imbalance, {form}, {kind} sets, worst", over, at_most=0.05)


def loads(p: GroupedGemmProblem, sizes: np.ndarray, tile_m: int, tile_n: int, workgroups: int):
    """(work of each workgroup, the least that the busiest can have), in tiles or (form "k") in what they sum over."""
    if p.form == "m":
        costs = np.ones(int((-(-sizes // tile_m)).sum()) * -(-p.n // tile_n))
        mine = np.zeros(workgroups)
        for turn in range(turns(len(costs), workgroups)):
            for w in range(workgroups):
                mine[w] += walk(turn, w, workgroups, len(costs), gfx950.limits.dies) < len(costs)
    else:
        costs = np.repeat(np.sort(sizes)[::-1].astype(float), -(-p.m // tile_m) * -(-p.n // tile_n))
        free = [0.0] * workgroups
        for cost in costs:  # who is free first takes the next
            heapq.heapreplace(free, free[0] + cost)
        mine = np.array(free)
    rounds = range(1, (len(costs) - 1) // workgroups + 1)  # of r P + 1 tiles some workgroup has r + 1
    several = max((costs[r * workgroups - r : r * workgroups + 1].sum() for r in rounds), default=0.0)
    return mine, max(costs.sum() / workgroups, costs.max(), several)


def other_problems() -> Iterator[GroupedGemmProblem]:
    """The other forms and layouts, and sizes with tails: what the suite of forward passes leaves out."""
    for groups, tokens in ((8, 128), (64, 1024)):
        hint = {"groups": groups, "tokens_hint": groups * tokens}
        yield GroupedGemmProblem("k", m=2048, n=4096, a="col", b="row", **hint)
        yield GroupedGemmProblem("k", m=264, n=520, a="col", b="row", **hint)
        yield GroupedGemmProblem("k", m=264, n=520, a="row", b="col", **hint)
        yield GroupedGemmProblem("n", m=2048, k=4096, a="row", b="col", **hint)
        yield GroupedGemmProblem("n", m=2048, k=4096, a="row", b="row", **hint)
        yield GroupedGemmProblem("m", n=2048, k=4096, a="row", b="row", **hint)
        yield GroupedGemmProblem("m", n=2048, k=4096, a="col", b="col", **hint)
        yield GroupedGemmProblem("m", n=520, k=1000, **hint)
        yield GroupedGemmProblem("m", n=517, k=997, align_a=2, align_b=2, align_c=2, **hint)
        yield GroupedGemmProblem("batch", groups, n=2048, k=4096, tokens_hint=tokens)
        yield GroupedGemmProblem("batch", groups, n=520, k=512, b="row", tokens_hint=tokens)


def right(report: Report, sample: int) -> None:
    """Every candidate of the suite's problems and of `other_problems`: compiled for their sizes to see what it costs,
    run on a few groups with fewer columns and K tiles."""
    problems = [*dict.fromkeys(p for p, _, _ in suite()), *other_problems()]
    checked(report, (outcome for p in tracked(problems, "problems") for outcome in attempts(p, sample)), sample, "")


def scaled(report: Report, sample: int) -> None:
    """The same for the suite's problems in MXFP8 and MXFP4."""
    shapes = [(g, t, *weight) for g in GROUPS for t in TOKENS for weight in WEIGHTS]
    problems = [scaled_grouped.problem(kind, *shape) for kind in scaled_grouped.FORMATS for shape in shapes]
    found = (outcome for p in tracked(problems, "problems") for outcome in scaled_grouped.attempts(p, sample))
    checked(report, found, sample, "MXFP8 and MXFP4 ")


def checked(report: Report, found: Iterator[Outcome], sample: int, which: str) -> None:
    wrong, spilled, seconds, runs = [], [], [], 0
    for outcome in found:
        runs += 1
        seconds.append(outcome.seconds)
        if outcome.wrong:
            wrong.append(outcome)
            report.note(f"{outcome.problem}: {outcome.config}: {outcome.wrong}")
        if outcome.spills:
            spilled.append(outcome)
            report.note(f"{outcome.problem}: {outcome.config}: {outcome.spills} spills")
    report.row(kernels=f"{which}grouped", kernels_compiled_and_run=runs, one_in=sample)
    report.bar(f"{which}kernels that are wrong or have a finding, simulated", len(wrong), at_most=0)
    report.bar(f"{which}kernels with spills or scratch", len(spilled), at_most=0)
    report.bar(f"{which}compiling one, median CPU seconds, measured on CPU", statistics.median(seconds), at_most=1.5)


def main(argv: list[str]) -> int:
    options = parser("gfx950-grouped", "the gfx950 grouped GEMM on the simulator: candidates, balance, predicted times")
    options.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    options.add_argument(
        "--sample", type=int, default=1, metavar="N", help="right, scaled: one in N candidates of a problem"
    )
    options.add_argument("--save", type=Path, metavar="FILE", help="predicted: save here as it goes, and go on from it")
    chosen = options.parse_args(argv)
    parts = chosen.only.split(",")
    if unknown := set(parts) - set(PARTS):
        options.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    report = Report("gfx950-grouped", "simulated")
    report.note("simulated from recordings of one workgroup; nothing ran on an MI350")
    if chosen.save:
        SAVED.keep_in(chosen.save)
    if "balance" in parts:
        balance(report)
    if "predicted" in parts:
        predicted(report)
    if "right" in parts:
        right(report, chosen.sample)
    if "scaled" in parts:
        scaled(report, chosen.sample)
    return report.close(chosen.json)
