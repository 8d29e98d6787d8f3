"""The gfx950 scaled GEMM (MXFP8, MXFP4): right on the simulator, and simulated time against Triton's tl.dot_scaled.

Nothing here ran on an MI350. Times are *simulated* (bench/_gfx950_model.py): both sides' recordings go through the same
functions. Loads of scales are in the recordings; what rates they are filled at is counted for A and B alone.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from flykernels.dtypes import dtype
from flykernels.microscaling import FORMATS
from flykernels.sim.report import profile
from flykernels.sim.timing import Machine950
from flykernels.targets import gfx950
from templates.gemm.gfx950_output import slot_bytes
from templates.gemm.order import tile_of
from templates.scaled_gemm.build import build
from templates.scaled_gemm.gfx950_config import ScaledConfig
from templates.scaled_gemm.problem import ScaledGemmProblem
from templates.scaled_gemm.space import candidates

from ._gfx950_model import DEPTHS, Recorded, estimate
from .common import Report, geomean, parser

ROWS = (32, 128, 512, 2048)
WEIGHTS = ((4096, 4096), (14336, 4096), (4096, 14336), (6144, 4096))  # (N, K)
SUITE = [(m, n, k) for m in ROWS for n, k in WEIGHTS] + [(8192, 8192, 8192)]
KINDS = {"MXFP8": "f8E4M3FN", "MXFP4": "f4E2M1FN"}
TRITON_NAMES = {"f8E4M3FN": "e4m3", "f4E2M1FN": "e2m1"}
MOST = 4  # candidates of a shape that are simulated: the space's first guesses
TRITON_TILES = (  # (BM, BN, bytes of a K tile, warps, stages): those Inductor's list for scaled products is drawn from
    (32, 32, 128, 4, 2), (32, 64, 128, 4, 2), (32, 64, 256, 4, 2), (32, 128, 128, 4, 2), (64, 64, 128, 4, 2),
    (64, 128, 128, 4, 2), (128, 64, 128, 4, 2), (128, 128, 128, 4, 2), (128, 128, 128, 8, 2), (128, 256, 128, 8, 2),
    (256, 128, 128, 8, 2), (256, 256, 128, 8, 2),
)  # fmt: skip
PARTS = ("predicted", "loop", "right")
ENDS = ("low", "middle", "high")


def problem(kind: str, m: int, n: int, k: int) -> ScaledGemmProblem:
    return ScaledGemmProblem(n=n, k=k, a_dtype=kind, b_dtype=kind, m_hint=m)


def in_pairs(kind: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """A shape with K in units of two bytes, as the model counts it."""
    m, n, k = shape
    return m, n, k // (2 * FORMATS[dtype(kind)].per_byte)


@cache
def ours(cfg: ScaledConfig, kind: str) -> Recorded:
    """A configuration's recordings: one whole tile; the slice that adds up the others' sums where K is split."""
    reports = []
    for depth in DEPTHS:
        k, m, n = depth * cfg.tile_k * cfg.split_k, cfg.tile_m, cfg.tile_n
        p = problem(kind, m, n, k)
        code = build(p, cfg, gfx950)
        row = p.row_bytes("a")
        args: list = [np.zeros(s, np.uint8) for s in (m * row, n * row, m * p.blocks, n * p.blocks)]
        args += [np.zeros(m * n, np.uint16), *(np.int64(x) for x in (m, row, row, n))]
        if code.workspace:
            workspace = np.zeros(code.workspace_for({"m": m}) // 4, np.int32)
            workspace[:: slot_bytes(cfg) // 4] = cfg.split_k - 1
            args.append(workspace)
        reports.append(profile(code, args, (*code.grid_for({"m": m}), 1, 1)))
    order = lambda i, layers, rows, columns: tile_of(i, rows, columns, layers, cfg.group_m, gfx950.limits.dies)
    tile = in_pairs(kind, (cfg.tile_m, cfg.tile_n, cfg.tile_k))
    return Recorded(str(cfg), tile, tuple(reports), order, cfg.split_k)


@cache
def triton(tile: tuple[int, int, int], warps: int, stages: int, kind: str) -> Recorded:
    """The recordings of Triton's kernel for the same product, bf16 out, compiled here; in an order that knows of dies.

    tile: (BM, BN, bytes of a K tile)."""
    from .simcases.triton_cases import TYPES, compile
    from .simcases.triton_kernels import matmul_scaled

    per, name = FORMATS[dtype(kind)].per_byte, TRITON_NAMES[kind]
    BM, BN, row = tile
    signature = dict.fromkeys(("a", "sa", "b", "sb"), "*u8") | {"c": "*bf16", "K": "i32"}
    if per == 1:
        signature |= {"a": TYPES[name], "b": TYPES[name]}
    constants = {"FMT": name, "PACK": per, "BM": BM, "BN": BN, "BK": row * per}
    made = compile(matmul_scaled, signature, constants, warps, stages, matrix_instr_nonkdim=16)
    reports = []
    for depth in DEPTHS:
        k = depth * row * per
        sizes = (BM * k // per, BM * k // 32, BN * k // per, BN * k // 32)
        args: list = [np.zeros(s, np.uint8) for s in sizes] + [np.zeros(BM * BN, np.uint16), k]
        args += [np.zeros(64, np.uint8)] * 2
        reports.append(profile(made.asm["amdgcn"], args, (1, 1, 1), shared_bytes=made.metadata.shared))
    order = lambda i, layers, rows, columns: tile_of(i, rows, columns, layers, 8, gfx950.limits.dies)
    label = f"{BM}x{BN}x{row * per}, {warps} warps, {stages} stages"
    return Recorded(label, (BM, BN, row // 2), tuple(reports), order)


def predicted(report: Report, kinds: list[str]) -> None:
    """The suite: our candidates' and Triton's simulated times, at three ends of the constants' bands."""
    machine = Machine950()
    machines = {end: machine if end == "middle" else machine.end(end) for end in ENDS}
    for name in kinds:
        kind = KINDS[name]
        theirs = [triton((bm, bn, row), warps, stages, kind) for bm, bn, row, warps, stages in TRITON_TILES]
        ratios: dict[str, list[float]] = {end: [] for end in ENDS}
        for shape in SUITE:
            mine = [ours(c.config, kind) for c in candidates(problem(kind, *shape), gfx950).kept[:MOST]]
            pairs, best = in_pairs(kind, shape), {}
            for end, c in machines.items():
                us = lambda r, c=c: estimate(r, pairs, c).microseconds
                fastest, other = min(mine, key=us), min(theirs, key=us)
                best[end] = us(fastest), fastest, us(other), other
                ratios[end].append(best[end][2] / best[end][0])
            us_ours, fastest, us_theirs, other = best["middle"]
            m, n, k = shape
            report.row(
                kind=name, shape=f"{m}x{n}x{k}", ours_simulated_us=round(us_ours, 1),
                triton_simulated_us=round(us_theirs, 1), ratio=round(us_theirs / us_ours, 3),
                low=round(ratios["low"][-1], 3), high=round(ratios["high"][-1], 3), ours=fastest.name,
                triton=other.name, tflops_simulated=round(2e-6 * m * n * k / us_ours),
            )  # fmt: skip
        report.bar(
            f"{name} geomean, simulated, tl.dot_scaled's time over ours", geomean(ratios["middle"]), at_least=1.25
        )
        report.bar(f"{name} lowest of the suite, simulated", min(ratios["middle"]))
        for end in ("low", "high"):
            report.bar(f"{name} geomean at the {end} end of the band", geomean(ratios[end]))


def loop(report: Report, kinds: list[str]) -> None:
    """The interleaved 256 x 256 tile: matrix units in the main loop, registers, accumulators that are moved."""
    machine = Machine950()
    for name in kinds:
        kind = KINDS[name]
        cfg = ScaledConfig(256, 256, 128 * FORMATS[dtype(kind)].per_byte, 2, (2, 4), schedule="four")
        p = problem(kind, 4096, 4096, 4096)
        r, atom = ours(cfg, kind), cfg.atom(p)
        work = cfg.tile_m * cfg.tile_n * cfg.bytes_of(p, "a") / (atom.d.tile[0] * atom.d.tile[1] * atom.a.tile[1])
        ideal = work * atom.cycles / gfx950.limits.simds
        busy = {end: ideal / r.cost(1, machine if end == "middle" else machine.end(end))[1] for end in ENDS}
        reads = [s for s in r.reports[1].lds if s.text.startswith("ds_read_b128")]
        code = build(p, cfg, gfx950)
        moved = code.text.count("v_accvgpr")
        report.row(
            kind=name, matrix_busy_simulated=round(busy["middle"], 4), low=round(busy["low"], 4),
            high=round(busy["high"], 4), registers=code.registers, spills=code.spills, accumulator_moves=moved,
            read_conflict_cycles=sum(s.conflict_cycles - s.ideal_cycles for s in reads),
        )  # fmt: skip
        report.bar(f"{name} interleaved loop, matrix units busy, simulated", busy["middle"], at_least=0.9)
        report.bar(f"{name} moves of accumulators", moved, at_most=0)
        report.bar(f"{name} spills", code.spills, at_most=0)


def right(report: Report, kinds: list[str]) -> None:
    """The candidates that `predicted` simulates: compiled, nothing spilled, right on the simulator, corners and all.

    Where K is large the kernel for a K of a few tiles stands for it."""
    from tests.scaled_gemm.gfx950_case import run

    tried, spilled, wrong, seconds = 0, 0, 0, []
    known = set()
    for name, shape in product(kinds, SUITE):
        p = problem(KINDS[name], *shape)
        for c in candidates(p, gfx950).kept[:MOST]:
            cfg, m = c.config, min(p.m_hint, 2 * c.config.tile_m)
            start = time.process_time()
            code = build(p, cfg, gfx950)
            seconds.append(time.process_time() - start)
            spilled += bool(code.spills or code.scratch_bytes)
            tried += 1
            deep = cfg.split_k * cfg.tile_k * (2 * max(cfg.stages, cfg.tiles_a_slot) + 2)
            small = replace(p, k=min(p.k, deep), n=min(p.n, 2 * cfg.tile_n))
            if (small, cfg, m) in known:
                continue
            known.add((small, cfg, m))
            count = -(-m // cfg.tile_m) * -(-small.n // cfg.tile_n) * cfg.split_k
            groups = None if cfg.split_k > 1 or count <= 2 else [(0, 0, 0), (count - 1, 0, 0)]
            try:
                run(small, cfg, m, workgroups=groups)
            except Exception as e:  # a finding, a wrong value, a fault: all count
                wrong += 1
                report.note(f"{name} {shape}: {cfg}: {type(e).__name__} {str(e)[:200]}")
    report.row(compiled=tried, run=len(known), compile_cpu_seconds_median=round(statistics.median(seconds), 2))
    report.bar("candidates that are wrong or have a finding, simulated", wrong, at_most=0)
    report.bar("candidates with spills or scratch", spilled, at_most=0)


def main(argv: list[str]) -> int:
    options = parser(
        "gfx950-mxfp", "the gfx950 scaled GEMM on the simulator: predicted times, main loop, right results"
    )
    options.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    options.add_argument("--kind", choices=KINDS, nargs="*", default=list(KINDS))
    chosen = options.parse_args(argv)
    parts = chosen.only.split(",")
    if unknown := set(parts) - set(PARTS):
        options.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    report = Report("gfx950-mxfp", "simulated")
    report.note(f"simulated from recordings of one workgroup with {DEPTHS} K tiles; nothing ran on an MI350")
    for name, part in (("predicted", predicted), ("loop", loop), ("right", right)):
        if name in parts:
            part(report, chosen.kind)
    return report.close(chosen.json)
