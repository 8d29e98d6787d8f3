"""The gfx950 grouped GEMM: every candidate is right on the simulator; simulated time against Triton's kernel; balance.

Nothing here ran on an MI350. Times are *simulated* (bench/_gfx950_grouped_model.py); balance is *counted*.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flykernels.targets import gfx950
from templates.digest import digest
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.schedule import turns, walk
from templates.grouped_gemm.space import candidates

from . import _gfx950_grouped_right, _gfx950_grouped_whole, _gfx950_scaled_grouped
from ._gfx950_grouped_predicted import predicted
from ._gfx950_grouped_right import Outcome
from ._grouped_suite import Case, cases
from .common import Report, parser, resumed

PARTS = ("predicted", "balance", "right", "whole", "scaled")


def forward(case: Case) -> GroupedGemmProblem:
    """A layer's product."""
    return GroupedGemmProblem("m", case.groups, n=case.n, k=case.k, tokens_hint=case.total)


def balance(report: Report) -> None:
    """What the busiest workgroup does over the least that any sharing of whole tiles must give one, counted: tiles for
    the forward pass; for the weight's gradient what tiles sum over."""
    worst: dict[str, float] = {}
    for case in cases():
        p, kind, sizes = forward(case), case.share, np.array(case.sizes)
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


def right(report: Report, sample: int, jobs: int, save: Path | None) -> None:
    """Every candidate of the suite's problems and of `other_problems`: compiled for their sizes to see what it costs,
    run on a few groups with fewer columns and K tiles."""
    problems = [*dict.fromkeys(forward(c) for c in cases()), *other_problems()]
    tasks = _gfx950_grouped_right.dense_tasks(problems, sample)
    found = resumed(_gfx950_grouped_right.tried, tasks, jobs, "kernels", save, digest("grouped_gemm"))
    checked(report, found, sample, "")


def whole(report: Report, jobs: int, save: Path | None) -> None:
    """Every case forward and backward in its own size, some workgroups of each launch."""
    parts = _gfx950_grouped_whole.PARTS
    tasks = [_gfx950_grouped_whole.Task(case, part, n) for n, case in enumerate(cases()) for part in parts]
    tasks.sort(key=lambda t: t.case.total, reverse=True)
    wrong = 0
    found = resumed(_gfx950_grouped_whole.tried, tasks, jobs, "launches", save, digest("grouped_gemm"))
    ran = [(task, _gfx950_grouped_whole.Ran(**made)) for task, made in zip(tasks, found, strict=True)]
    for task, r in ran:
        if r.wrong:
            wrong += 1
            report.note(f"{task.case}, {task.part}: {r.config}: {r.wrong}")
    for part in parts:
        some = [r for task, r in ran if task.part == part]
        count = lambda name, some=some: sum(getattr(r, name) for r in some)
        report.row(
            part=part, launches=len(some), all_of=sum(r.tiles == r.of_tiles for r in some), tiles=count("tiles"),
            of_tiles=count("of_tiles"), workgroups=count("workgroups"), of_workgroups=count("of_workgroups"),
        )  # fmt: skip
    report.bar("launches in the suite's own sizes that are wrong or have a finding, simulated", wrong, at_most=0)


def scaled(report: Report, sample: int, jobs: int, save: Path | None) -> None:
    """The same for the suite's problems in MXFP8 and MXFP4, their weights' gradients, and in FP8 with a scale for each
    row and column."""
    shapes = [*dict.fromkeys((c.groups, c.tokens, c.n, c.k) for c in cases())]
    problems = [_gfx950_scaled_grouped.problem(kind, *s) for kind in _gfx950_scaled_grouped.KINDS for s in shapes]
    tasks = _gfx950_scaled_grouped.tasks(problems, sample)
    found = resumed(_gfx950_scaled_grouped.tried, tasks, jobs, "scaled kernels", save, digest("grouped_gemm"))
    checked(report, found, sample, "scaled ")


def checked(report: Report, tried: list[list[dict]], sample: int, which: str) -> None:
    found = [Outcome(**made) for some in tried for made in some]
    wrong, spilled = [], []
    for outcome in found:
        if outcome.wrong:
            wrong.append(outcome)
            report.note(f"{outcome.problem}: {outcome.config}: {outcome.wrong}")
        if outcome.spills:
            spilled.append(outcome)
            report.note(f"{outcome.problem}: {outcome.config}: {outcome.spills} spills")
    report.row(kernels=f"{which}grouped", compiled=len(found), run=len(tried), one_in=sample)
    report.bar(f"{which}kernels that are wrong or have a finding, simulated", len(wrong), at_most=0)
    report.bar(f"{which}kernels with spills or scratch", len(spilled), at_most=0)
    report.bar(
        f"{which}compiling one, median CPU seconds, measured on CPU",
        statistics.median(o.seconds for o in found),
        at_most=1.5,
    )


def main(argv: list[str]) -> int:
    options = parser("gfx950-grouped", "the gfx950 grouped GEMM on the simulator: candidates, balance, predicted times")
    options.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    options.add_argument(
        "--sample", type=int, default=1, metavar="N", help="right, scaled: one in N candidates of a problem"
    )
    options.add_argument("--save", type=Path, metavar="FILE", help="keep what is done here, and go on from it")
    options.add_argument("--crowd", action="store_true", help="predicted: Triton also with more programs a unit")
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    chosen = options.parse_args(argv)
    parts = chosen.only.split(",")
    if unknown := set(parts) - set(PARTS):
        options.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    report = Report("gfx950-grouped", "simulated")
    report.note("simulated from recordings of one workgroup; nothing ran on an MI350")
    if "balance" in parts:
        balance(report)
    if "predicted" in parts:
        predicted(report, list(cases()), chosen.jobs, chosen.save, chosen.crowd)
    if "right" in parts:
        right(report, chosen.sample, chosen.jobs, chosen.save)
    if "whole" in parts:
        whole(report, chosen.jobs, chosen.save)
    if "scaled" in parts:
        scaled(report, chosen.sample, chosen.jobs, chosen.save)
    return report.close(chosen.json)
