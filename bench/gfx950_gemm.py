"""The gfx950 GEMM: every candidate compiles and is right on the simulator; simulated time against Triton's kernels.

Nothing here ran on an MI350. Times are *simulated* (bench/_gfx950_model.py), compile times are measured on this CPU.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from flykernels.sim.timing import Machine950
from flykernels.targets import gfx950
from templates.gemm.build import build
from templates.gemm.gfx950_config import Gfx950Config
from templates.gemm.problem import GemmProblem
from templates.gemm.space import candidates
from templates.gemm.workers import Workers

from ._gfx950_model import DEPTHS, TRITON, estimate, ours, triton
from .common import Report, geomean, parser

ROWS = (16, 64, 256, 1024, 4096)
WEIGHTS = ((4096, 4096), (14336, 4096), (4096, 14336))  # (N, K)
DENSE15 = [(m, n, k) for m in ROWS for n, k in WEIGHTS]
LAYOUTS = [(a, b) for a in ("row", "col") for b in ("row", "col")]
ODD_SHAPES = 40
PARTS = ("predicted", "loop", "precompile", "candidates")
ENDS = ("low", "middle", "high")


def dense(m: int, n: int, k: int, **kw) -> GemmProblem:
    """A linear layer's product: B is the transpose of a row-major weight."""
    return GemmProblem(**{"n": n, "k": k, "dtype": "bf16", "out_dtype": "bf16", "b": "col", "m_hint": m, **kw})


def suite() -> Iterator[tuple[str, GemmProblem]]:
    """(name, problem) of dense15, the four layouts and fp16 at 1024 x 4096 x 4096, and the odd shapes."""
    for m, n, k in DENSE15:
        yield f"dense {m}x{n}x{k}", dense(m, n, k)
    for dtype in ("bf16", "f16"):
        for a, b in LAYOUTS:
            if (dtype, a, b) != ("bf16", "row", "col"):  # in dense15
                yield f"{dtype} {a},{b}", dense(1024, 4096, 4096, a=a, b=b, dtype=dtype, out_dtype=dtype)
    yield from odd_shapes()


def odd_shapes() -> Iterator[tuple[str, GemmProblem]]:
    """Shapes drawn by hypothesis: any sizes, layouts, alignments; the same ones every time."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    found: dict[str, GemmProblem] = {}
    size = st.one_of(st.integers(1, 64), st.integers(1, 700))

    @settings(
        max_examples=2 * ODD_SHAPES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(size, size, size, st.sampled_from(LAYOUTS), st.sampled_from([2, 4, 8, 16]), st.sampled_from(["bf16", "f16"]))
    def draw(m, n, k, layouts, align, dtype):
        a, b = layouts
        p = dense(m, n, k, a=a, b=b, dtype=dtype, out_dtype=dtype, align_a=align, align_b=align, align_c=2)
        if len(found) < ODD_SHAPES:
            found[f"odd {m}x{n}x{k} {a},{b} {dtype} align {align}"] = p

    draw()
    yield from found.items()


def predicted(report: Report) -> None:
    """dense15: our candidates' and Triton's simulated times, at three ends of the constants' bands."""
    machine = Machine950()
    machines = {end: machine if end == "middle" else machine.end(end) for end in ENDS}
    theirs = [triton((bm, bn, bk), warps, stages) for bm, bn, bk, warps, stages in TRITON]
    ratios: dict[str, list[float]] = {end: [] for end in ENDS}
    ranks = []
    for m, n, k in DENSE15:
        p = dense(m, n, k)
        mine = [ours(c.config) for c in candidates(p, gfx950).kept]
        best = {}
        for end, c in machines.items():
            times = [estimate(r, (m, n, k), c) for r in mine]
            fastest = min(range(len(mine)), key=lambda i: times[i].microseconds)
            other = min(theirs, key=lambda r: estimate(r, (m, n, k), c).microseconds)
            best[end] = times[fastest].microseconds, mine[fastest], estimate(other, (m, n, k), c).microseconds, other
            ratios[end].append(best[end][2] / best[end][0])
            if end == "middle":
                ranks.append(times[fastest].microseconds / times[0].microseconds)
        us, mine_best, triton_us, other = best["middle"]
        report.row(
            shape=f"{m}x{n}x{k}", ours_simulated_us=round(us, 1), triton_simulated_us=round(triton_us, 1),
            ratio=round(triton_us / us, 3), low=round(ratios["low"][-1], 3), high=round(ratios["high"][-1], 3),
            ours=mine_best.name, triton=other.name.removeprefix("Triton "),
            tflops_simulated=round(2e-6 * m * n * k / us),
        )  # fmt: skip
    report.bar("geomean over dense15, simulated, Triton's time over ours", geomean(ratios["middle"]), at_least=1.15)
    for end in ("low", "high"):
        report.bar(f"the same at the {end} end of the band", geomean(ratios[end]), at_least=1)
    report.bar("lowest of dense15, simulated", min(ratios["middle"]), at_least=0.97)
    report.bar("lowest of dense15 at either end of the band", min(ratios["low"] + ratios["high"]))
    report.bar("the first candidate's simulated time against the best candidate's, geomean", geomean(ranks))


def loop(report: Report) -> None:
    """The interleaved 256x256x64: matrix units in the main loop, LDS conflicts, registers."""
    machine = Machine950()
    for schedule in ("four", "eight"):
        cfg = Gfx950Config(256, 256, 64, 2, (2, 4), schedule=schedule)
        r = ours(cfg)
        atom = cfg.atom(dense(256, 256, 64))
        work = cfg.tile_m * cfg.tile_n * cfg.tile_k / (atom.d.tile[0] * atom.d.tile[1] * atom.a.tile[1])
        ideal = work * atom.cycles / gfx950.limits.simds
        busy = {end: ideal / r.cost(1, machine if end == "middle" else machine.end(end))[1] for end in ENDS}
        sites = r.reports[1].lds
        reads = [s for s in sites if s.text.startswith("ds_read")]
        writes = [s for s in sites if s.text.startswith("ds_write")]
        conflicts = sum(s.conflict_cycles - s.ideal_cycles for s in reads)
        ways = max(s.conflict_cycles / s.ideal_cycles for s in writes)
        code = build(dense(4096, 4096, 4096), cfg, gfx950)
        report.row(
            schedule=schedule, matrix_busy_simulated=round(busy["middle"], 4), low=round(busy["low"], 4),
            high=round(busy["high"], 4), read_conflict_cycles=conflicts, shuffle_ways=ways, registers=code.registers,
            spills=code.spills,
        )  # fmt: skip
        if schedule == "four":
            report.bar("HTI main loop, matrix units busy, simulated", busy["middle"], at_least=0.95)
            report.bar("LDS bank conflicts on reads, cycles", conflicts, at_most=0)
            report.bar("LDS bank conflicts on the C shuffle, ways", ways, at_most=2)
            report.bar("vector registers", code.registers, at_most=256)


def precompile(report: Report) -> None:
    """All candidates of one problem with one building process, and with as many as there are cores."""
    p = dense(1024, 4096, 4096)
    configs = [c.config for c in candidates(p, gfx950).kept]
    seconds = {}
    for count in (1, len(os.sched_getaffinity(0))):
        with Workers(count) as pool:
            pool.build_all(p, configs[:1] * count, "gfx950")  # starts them
            start = time.perf_counter()
            pool.build_all(p, configs, "gfx950")
            seconds[count] = time.perf_counter() - start
            report.row(processes=count, candidates=len(configs), wall_seconds_measured_on_cpu=round(seconds[count], 2))
    report.bar("precompiling with all cores, times faster, measured on CPU", seconds[1] / min(seconds.values()))


def every_candidate(report: Report, sample: int) -> None:
    """Each candidate of each suite shape: compiled, and run on the simulator on a few workgroups, edges included."""
    from tests.gemm.gfx950_case import run

    seconds, wrong, spilled, count, refused = [], [], [], 0, []
    for name, p in suite():
        kept = candidates(p, gfx950).kept
        if not kept:
            refused.append(name)
        chosen = random.Random(name).sample(kept, max(1, len(kept) // sample)) if sample > 1 and kept else kept
        for candidate in chosen:
            cfg, count = candidate.config, count + 1
            start = time.process_time()
            code = build(p, cfg, gfx950)
            seconds.append(time.process_time() - start)
            if code.spills or code.scratch_bytes or code.registers > 512 // -(-cfg.workgroup_size // 256):
                spilled.append(f"{name}: {cfg}")
            try:
                run_cut(run, p, cfg, code)
            except Exception as e:  # a finding, a wrong value, a fault: all count
                wrong.append(f"{name}: {cfg}: {type(e).__name__} {str(e)[:200]}")
    for text in (*wrong, *spilled, *refused):
        report.note(text)
    report.row(candidates_compiled_and_run=count, shapes=len(list(suite())), one_in=sample)
    report.bar("candidates that are wrong or have a finding, simulated", len(wrong), at_most=0)
    report.bar("candidates with spills or scratch", len(spilled), at_most=0)
    report.bar("shapes without a candidate", len(refused), at_most=0)
    report.bar("compiling a candidate, median CPU seconds, measured on CPU", statistics.median(seconds), at_most=1.5)


def run_cut(run, p: GemmProblem, cfg: Gfx950Config, code) -> None:
    """The candidate's own kernel where K is small, else one for a K of a few tiles: the first and last workgroup."""
    deepest = cfg.split_k * cfg.tile_k * (2 * cfg.stages + 1)
    if p.k > 2 * deepest:
        p, code = replace(p, k=deepest + p.k % (cfg.tile_k * cfg.split_k)), None
    n = min(p.n, 2 * cfg.tile_n + p.n % cfg.tile_n)
    m = min(p.m_hint, 2 * cfg.tile_m + p.m_hint % cfg.tile_m)
    if n != p.n:
        p, code = replace(p, n=n), None
    step = p.align_a // 2
    pads = [-(p.k if along else size) % step for along, size in ((p.a == "row", m), (p.b == "col", n))]
    count = -(-m // cfg.tile_m) * -(-n // cfg.tile_n) * cfg.split_k
    groups = None if cfg.split_k > 1 or count <= 2 else [(0, 0, 0), (count - 1, 0, 0)]
    run(p, cfg, m, pads=(*pads, -n % (p.align_c // 2)), workgroups=groups, code=code)


def main(argv: list[str]) -> int:
    options = parser("gfx950-gemm", "the gfx950 GEMM on the simulator: candidates, main loop, predicted times")
    options.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    options.add_argument("--sample", type=int, default=1, metavar="N", help="one in N candidates of a shape")
    chosen = options.parse_args(argv)
    parts = chosen.only.split(",")
    if unknown := set(parts) - set(PARTS):
        options.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    report = Report("gfx950-gemm", "simulated")
    report.note(f"simulated from recordings of one workgroup with {DEPTHS} K tiles; nothing ran on an MI350")
    if "predicted" in parts:
        predicted(report)
    if "loop" in parts:
        loop(report)
    if "precompile" in parts:
        precompile(report)
    if "candidates" in parts:
        every_candidate(report, chosen.sample)
    return report.close(chosen.json)
