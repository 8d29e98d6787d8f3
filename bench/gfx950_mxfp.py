"""The gfx950 scaled GEMM (MXFP8, MXFP4): right on the simulator, and simulated time against Triton's tl.dot_scaled.

Nothing here ran on an MI350. Times are *simulated* (bench/_gfx950_model.py): both sides' recordings go through the same
functions. Loads of scales are in the recordings; what rates they are filled at is counted for A and B alone.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from flykernels.dtypes import dtype
from flykernels.microscaling import FORMATS
from flykernels.sim.report import profile
from flykernels.sim.timing import Machine950
from flykernels.targets import gfx950
from templates.digest import digest
from templates.gemm.gfx950_output import slot_bytes
from templates.gemm.order import tile_of
from templates.scaled_gemm.build import build
from templates.scaled_gemm.gfx950_config import ScaledConfig
from templates.scaled_gemm.problem import ScaledGemmProblem
from templates.scaled_gemm.space import candidates

from ._gfx950_model import DEPTHS, Recorded, estimate
from ._resumed import resumed
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
MODEL = ("_gfx950_model.py", "simcases/triton_kernels.py")  # of the benches: what simulated times come from


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
def triton(kind: str, tile: tuple[int, int, int], warps: int, stages: int, folder: Path | None = None) -> Recorded:
    """The recordings of Triton's kernel for the same product, bf16 out; in an order that knows of dies.

    tile: (BM, BN, bytes of a K tile). folder: where its assembly is kept."""
    per = FORMATS[dtype(kind)].per_byte
    BM, BN, row = tile
    code = compiled_by_triton(kind, tile, warps, stages, folder)
    reports = []
    for depth in DEPTHS:
        k = depth * row * per
        sizes = (BM * k // per, BM * k // 32, BN * k // per, BN * k // 32)
        args: list = [np.zeros(s, np.uint8) for s in sizes] + [np.zeros(BM * BN, np.uint16), k]
        args += [np.zeros(64, np.uint8)] * 2
        reports.append(profile(code["text"], args, (1, 1, 1), shared_bytes=code["shared_bytes"]))
    order = lambda i, layers, rows, columns: tile_of(i, rows, columns, layers, 8, gfx950.limits.dies)
    label = f"{BM}x{BN}x{row * per}, {warps} warps, {stages} stages"
    return Recorded(label, (BM, BN, row // 2), tuple(reports), order)


def compiled_by_triton(kind: str, tile: tuple[int, int, int], warps: int, stages: int, folder: Path | None) -> dict:
    """{"text", "shared_bytes", "triton": its version} of Triton's kernel, from the folder or compiled here (and put
    there): Triton's versions do not compile alike, and the sweep may run where another one is."""
    from .simcases.triton_kernels import matmul_scaled

    name = "-".join(map(str, (TRITON_NAMES[kind], *tile, warps, stages)))
    file = folder / f"{name}.json" if folder else None
    if file is not None and file.exists():
        return json.loads(file.read_text())
    import triton as installed

    from .simcases.triton_cases import TYPES, compile

    per, name = FORMATS[dtype(kind)].per_byte, TRITON_NAMES[kind]
    signature = dict.fromkeys(("a", "sa", "b", "sb"), "*u8") | {"c": "*bf16", "K": "i32"}
    if per == 1:
        signature |= {"a": TYPES[name], "b": TYPES[name]}
    constants = {"FMT": name, "PACK": per, "BM": tile[0], "BN": tile[1], "BK": tile[2] * per}
    made = compile(matmul_scaled, signature, constants, warps, stages, matrix_instr_nonkdim=16)
    code = {"text": made.asm["amdgcn"], "shared_bytes": made.metadata.shared, "triton": installed.__version__}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(code))
    return code


def microseconds(whose: str, kind: str, which: tuple, shapes: list[tuple[int, int, int]]) -> dict:
    """Simulated times of one kernel for some shapes: {"name": the kernel's, "us": for each shape {end: time}}."""
    r = (ours if whose == "ours" else triton)(*(which if whose == "ours" else (kind, *which)))
    machine = Machine950()
    machines = {end: machine if end == "middle" else machine.end(end) for end in ENDS}
    times = [{end: estimate(r, in_pairs(kind, s), c).microseconds for end, c in machines.items()} for s in shapes]
    return {"name": r.name, "us": times}


def sources() -> str:
    """What simulated times depend on."""
    model = b"".join((Path(__file__).parent / name).read_bytes() for name in MODEL)
    return f"{digest('scaled_gemm')} {hashlib.sha256(model).hexdigest()}"


def predicted(report: Report, chosen) -> None:
    """The suite: our candidates' and Triton's simulated times, at three ends of the constants' bands."""
    work: dict[str, tuple] = {}
    offered: dict[tuple, list[str]] = {}  # of a kind and a shape, the pieces of its candidates
    for name in chosen.kind:
        kind = KINDS[name]
        for tile_m, tile_n, row, *rest in sorted(TRITON_TILES, key=lambda t: -t[0] * t[1]):
            which = ((tile_m, tile_n, row), *rest, chosen.triton)
            work[f"{name} triton {which[:3]}"] = "triton", kind, which, SUITE
        for shape in SUITE:
            kept = candidates(problem(kind, *shape), gfx950).kept[:MOST]
            offered[name, shape] = [f"{name} {c.config.key()}" for c in kept]
            for c in kept:
                work.setdefault(f"{name} {c.config.key()}", ("ours", kind, (c.config, kind), []))[3].append(shape)
    found = resumed(work, microseconds, sources(), chosen.save, chosen.jobs, "kernels")
    of = lambda piece, shape: found[piece]["us"][work[piece][3].index(shape)]
    for name in chosen.kind:
        theirs = [piece for piece in work if piece.startswith(f"{name} triton")]
        ratios: dict[str, list[float]] = {end: [] for end in ENDS}
        for shape in SUITE:
            best = {}
            for end in ENDS:
                fastest, other = (
                    min(pieces, key=lambda piece: of(piece, shape)[end]) for pieces in (offered[name, shape], theirs)
                )
                best[end] = of(fastest, shape)[end], fastest, of(other, shape)[end], other
                ratios[end].append(best[end][2] / best[end][0])
            us_ours, fastest, us_theirs, other = best["middle"]
            m, n, k = shape
            report.row(
                kind=name, shape=f"{m}x{n}x{k}", ours_simulated_us=round(us_ours, 1),
                triton_simulated_us=round(us_theirs, 1), ratio=round(us_theirs / us_ours, 3),
                low=round(ratios["low"][-1], 3), high=round(ratios["high"][-1], 3), ours=found[fastest]["name"],
                triton=found[other]["name"], tflops_simulated=round(2e-6 * m * n * k / us_ours),
            )  # fmt: skip
        report.bar(
            f"{name} geomean, simulated, tl.dot_scaled's time over ours", geomean(ratios["middle"]), at_least=1.25
        )
        report.bar(f"{name} lowest of the suite, simulated", min(ratios["middle"]))
        for end in ("low", "high"):
            report.bar(f"{name} geomean at the {end} end of the band", geomean(ratios[end]))
    versions = {compiled_by_triton(KINDS[chosen.kind[0]], t[:3], *t[3:], chosen.triton)["triton"] for t in TRITON_TILES}
    report.note(f"Triton's kernels were compiled by triton {', '.join(sorted(versions))}")


def loop(report: Report, chosen) -> None:
    """The interleaved 256 x 256 tile: matrix units in the main loop, registers, accumulators that are moved."""
    machine = Machine950()
    for name in chosen.kind:
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


def attempt(p: ScaledGemmProblem, cfg: ScaledConfig) -> dict:
    """Compiles a candidate and runs it: {"seconds": of CPU to compile it, "spilled", "wrong": what was, or ""}.

    Random operands and scales from 2^-6 to 2^6; every element of C that the first and the last workgroup write must be
    the float64 result rounded once, or explained by the accumulation bound; the checker must find nothing. Where K is
    large the kernel for a K of a few tiles stands for it."""
    from tests.scaled_gemm.gfx950_case import run

    start, m = time.process_time(), min(p.m_hint, 2 * cfg.tile_m)
    code = build(p, cfg, gfx950)
    seconds = time.process_time() - start
    deep = cfg.split_k * cfg.tile_k * (2 * max(cfg.stages, cfg.tiles_a_slot) + 2)
    small = replace(p, k=min(p.k, deep), n=min(p.n, 2 * cfg.tile_n))
    count = -(-m // cfg.tile_m) * -(-small.n // cfg.tile_n) * cfg.split_k
    groups = None if cfg.split_k > 1 or count <= 2 else [(0, 0, 0), (count - 1, 0, 0)]
    wrong = ""
    try:
        run(small, cfg, m, workgroups=groups)
    except Exception as e:  # a finding, a wrong value, a fault: all count
        wrong = f"{type(e).__name__} {str(e)[:200]}"
    return {"seconds": seconds, "spilled": bool(code.spills or code.scratch_bytes), "wrong": wrong}


def right(report: Report, chosen) -> None:
    """The candidates that `predicted` simulates: compiled, nothing spilled, right on the simulator, corners and all."""
    work: dict[str, tuple] = {}
    for name, shape in product(chosen.kind, SUITE):
        p = problem(KINDS[name], *shape)
        for c in candidates(p, gfx950).kept[:MOST]:
            work[f"right {name} {shape} {c.config.key()}"] = p, c.config
    found = resumed(work, attempt, sources(), chosen.save, chosen.jobs, "candidates")
    for piece, outcome in found.items():
        if outcome["wrong"]:
            report.note(f"{piece}: {outcome['wrong']}")
    each = list(found.values())
    report.row(
        compiled_and_run=len(each), shapes=len(SUITE) * len(chosen.kind),
        compile_cpu_seconds_median=round(statistics.median(o["seconds"] for o in each), 2),
    )  # fmt: skip
    report.bar("candidates that are wrong or have a finding, simulated", sum(bool(o["wrong"]) for o in each), at_most=0)
    report.bar("candidates with spills or scratch", sum(o["spilled"] for o in each), at_most=0)


def main(argv: list[str]) -> int:
    options = parser(
        "gfx950-mxfp", "the gfx950 scaled GEMM on the simulator: predicted times, main loop, right results"
    )
    options.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    options.add_argument("--kind", choices=KINDS, nargs="*", default=list(KINDS))
    options.add_argument(
        "--save", type=Path, metavar="FILE", help="predicted, right: save here as it goes, and go on from it"
    )
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="predicted, right: processes")
    options.add_argument("--triton", type=Path, metavar="FOLDER", help="where Triton's compiled kernels are kept")
    chosen = options.parse_args(argv)
    parts = chosen.only.split(",")
    if unknown := set(parts) - set(PARTS):
        options.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    report = Report("gfx950-mxfp", "simulated")
    report.note(f"simulated from recordings of one workgroup with {DEPTHS} K tiles; nothing ran on an MI350")
    for name, part in (("predicted", predicted), ("loop", loop), ("right", right)):
        if name in parts:
            part(report, chosen)
    return report.close(chosen.json)
