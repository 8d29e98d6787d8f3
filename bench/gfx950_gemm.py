"""The gfx950 GEMM: every candidate compiles and is right on the simulator; simulated time against Triton's kernels.

Nothing here ran on an MI350. Times are *simulated* (bench/_gfx950_model.py), compile times are measured on this CPU.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from flykernels.sim.timing import Machine950
from flykernels.targets import gfx950
from templates.gemm.build import build
from templates.gemm.gfx950_config import Gfx950Config
from templates.gemm.problem import GemmProblem
from templates.gemm.space import candidates
from templates.gemm.workers import Workers

from ._gfx950_candidates import all_work, outcomes
from ._gfx950_model import DEPTHS, TRITON, estimate, ours, triton
from .common import Report, geomean, parser, tracked

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
    theirs = [triton((bm, bn, bk), warps, stages) for bm, bn, bk, warps, stages in tracked(TRITON, "Triton's kernels")]
    ratios: dict[str, list[float]] = {end: [] for end in ENDS}
    ranks = []
    for m, n, k in tracked(DENSE15, "dense15"):
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
        name = f"interleaved 256x256x64, {schedule} barriers a K tile"
        report.bar(f"{name}: matrix units busy in the main loop, simulated", busy["middle"], at_least=0.95)
        report.bar(f"{name}: LDS bank conflicts on reads, cycles", conflicts, at_most=0)
        report.bar(f"{name}: LDS bank conflicts on the C shuffle, ways", ways, at_most=2)
        report.bar(f"{name}: vector registers", code.registers, at_most=256)
        report.bar(f"{name}: spills", code.spills, at_most=0)


def precompile(report: Report) -> None:
    """All candidates of one problem with one building process, and with as many as there are cores.

    Processor time over wall time says how many cores were at work; starting the processes is not counted."""
    p = dense(1024, 4096, 4096)
    configs = [c.config for c in candidates(p, gfx950).kept]
    cores = len(os.sched_getaffinity(0))
    wall, at_work = {}, {}
    for count in (1, cores):
        with Workers(count) as pool:
            pool.build_all(p, configs * 2, "gfx950")  # starts them, and brings what they use into memory
            before, start = processor_seconds(pool.pids()), time.perf_counter()
            pool.build_all(p, configs, "gfx950")
            wall[count] = time.perf_counter() - start
            at_work[count] = (processor_seconds(pool.pids()) - before) / wall[count]
        report.row(
            processes=count, candidates=len(configs), wall_seconds_measured_on_cpu=round(wall[count], 2),
            cores_at_work=round(at_work[count], 2),
        )  # fmt: skip
    least = 0.75 * min(cores, len(configs))
    report.bar(f"cores at work of {cores} while precompiling, measured on CPU", at_work[cores], at_least=least)
    report.bar("precompiling with all of them, times faster than with one", wall[1] / wall[cores])


def processor_seconds(pids: list[int]) -> float:
    """Processor time of these processes so far (Linux)."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")  # user and system, see proc(5)


def every_candidate(report: Report, sample: int, file: Path | None, jobs: int) -> None:
    """Each candidate of each suite shape: right on the simulator, nothing spilled, soon compiled."""
    work, shapes, refused = [], 0, []
    for name, p, configs in all_work(suite()):
        shapes += 1
        if not configs:
            refused.append(name)
        chosen = random.Random(name).sample(configs, max(1, len(configs) // sample)) if sample > 1 else configs
        work += [(name, p, config) for config in chosen]
    found = outcomes(work, file, jobs)
    wrong, spilled = [o for o in found if o.wrong], [o for o in found if o.spilled]
    for o in wrong:
        report.note(f"{o.shape}: {o.config}: {o.wrong}")
    for o in spilled:
        report.note(f"{o.shape}: {o.config}: {o.spills} spills, {o.scratch_bytes} bytes, {o.registers} registers")
    for name in refused:
        report.note(f"{name}: no candidate")
    slowest = max(found, key=lambda o: o.seconds)
    report.row(
        candidates_compiled_and_run=len(found), shapes=shapes, one_in=sample,
        most_registers=max(o.registers for o in found), slowest_compile_cpu_seconds=slowest.seconds,
        slowest=f"{slowest.shape}: {slowest.config}",
    )  # fmt: skip
    report.bar("candidates that are wrong or have a finding, simulated", len(wrong), at_most=0)
    report.bar("candidates with spills or scratch", len(spilled), at_most=0)
    report.bar("shapes without a candidate", len(refused), at_most=0)
    median = statistics.median(o.seconds for o in found)
    report.bar("compiling a candidate, median CPU seconds, measured on CPU", median, at_most=1.5)


def main(argv: list[str]) -> int:
    options = parser("gfx950-gemm", "the gfx950 GEMM on the simulator: candidates, main loop, predicted times")
    options.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    options.add_argument("--sample", type=int, default=1, metavar="N", help="one in N candidates of a shape")
    options.add_argument(
        "--save", type=Path, metavar="FILE", help="candidates: save here as it goes, and go on from it"
    )
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="candidates: processes")
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
        every_candidate(report, chosen.sample, chosen.save, chosen.jobs)
    return report.close(chosen.json)
