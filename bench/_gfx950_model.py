"""Simulated time of a whole GEMM on gfx950: one workgroup's recording, put on 256 compute units round by round.

Ours and Triton's kernels go through the same functions. A recording at two depths gives what a workgroup costs however
deep K is, and what each K tile costs; the rate at which loads are filled comes from what the workgroups of a round
share in their die's L2, in the last-level cache and in memory (flykernels/sim/gemm_grid.py says where rates are from).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from flykernels.sim.gemm_grid import fill_rate, in_rounds
from flykernels.sim.report import profile, run_together
from flykernels.sim.timing import Machine950
from flykernels.targets import gfx950
from templates.gemm.build import build
from templates.gemm.gfx950_config import Gfx950Config
from templates.gemm.gfx950_output import slot_bytes
from templates.gemm.order import tile_of
from templates.gemm.problem import GemmProblem

DEPTHS = (12, 24)  # K tiles of the two recordings: more than the deepest ring holds
LINE = 128
TRITON = (  # (BM, BN, BK, warps, stages): what Inductor's and published Triton lists for this family hold
    (16, 32, 256, 4, 2), (16, 64, 128, 4, 2), (16, 128, 128, 4, 2), (16, 64, 256, 4, 2), (32, 32, 128, 4, 2),
    (32, 64, 128, 4, 2), (32, 128, 64, 4, 2), (64, 32, 128, 4, 2), (64, 64, 64, 4, 2), (64, 64, 128, 4, 2),
    (64, 128, 64, 4, 2), (64, 256, 64, 8, 2), (128, 64, 64, 4, 2), (128, 128, 64, 4, 2), (128, 128, 64, 8, 2),
    (128, 128, 64, 8, 3), (128, 128, 32, 4, 3), (128, 256, 64, 8, 2), (256, 128, 64, 8, 2), (256, 256, 64, 8, 2),
    (256, 256, 32, 8, 2), (16, 32, 256, 4, 3), (16, 64, 128, 4, 3), (16, 64, 256, 4, 3), (16, 128, 128, 4, 3),
    (32, 32, 128, 4, 3), (32, 64, 128, 4, 3), (32, 128, 64, 4, 3), (64, 32, 128, 4, 3), (64, 64, 64, 4, 3),
    (64, 64, 128, 4, 3), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3), (256, 256, 32, 8, 3),
)  # fmt: skip


@dataclass
class Recorded:
    """A kernel's two recordings. order: (number, layers, rows, columns) -> (layer, row, column) of a workgroup."""

    name: str
    tile: tuple[int, int, int]
    reports: tuple
    order: Callable
    split: int = 1
    known: dict = field(default_factory=dict)

    @property
    def together(self) -> int:
        """Workgroups that fit on a compute unit."""
        return self.reports[0].occupancy.workgroups

    def cost(self, together: int, machine: Machine950) -> tuple[float, float]:
        """(cycles whatever K is, cycles a K tile) of so many workgroups on one compute unit."""
        key = together, machine
        if key not in self.known:
            short, long = (run_together(r.recorder, together, machine).cycles for r in self.reports)
            slope = (long - short) / (DEPTHS[1] - DEPTHS[0])
            self.known[key] = short - DEPTHS[0] * slope, slope
        return self.known[key]


@dataclass
class Estimate:
    """Simulated microseconds, and what they are made of in the first round."""

    microseconds: float
    rounds: int
    together: int
    bound: str


def shared_rate(r: Recorded, shape, first: int, count: int, c: Machine950) -> tuple[float, str]:
    """fill_rate while workgroups first .. first+count-1 run."""
    rows, columns = (-(-n // t) for n, t in zip(shape[:2], r.tile))
    tiles = [r.order(i, r.split, rows, columns) for i in range(first, first + count)]
    depth = -(-r.tile[2] * 2 // LINE) * LINE
    return fill_rate(tiles, first, min(r.tile[0], shape[0]) * depth, min(r.tile[1], shape[1]) * depth, c)


def estimate(r: Recorded, shape: tuple[int, int, int], c: Machine950) -> Estimate:
    """Simulated time of an M x N x K product."""
    M, N, K = shape
    total = -(-M // r.tile[0]) * -(-N // r.tile[1]) * r.split
    units = int(c.units)
    at_once = units * min(r.together, -(-total // units))
    depth = -(-K // (r.tile[2] * r.split))
    rate = lambda first, count: shared_rate(r, shape, first, count, c)
    cycles, start = in_rounds(total, at_once, depth, c, rate, r.cost)
    microseconds = cycles / (c.clock_ghz * 1e3) + c.launch_us
    return Estimate(microseconds, -(-total // at_once), start.together, start.bound)


@cache
def ours(cfg: Gfx950Config, dtype: str = "bf16", a: str = "row", b: str = "col") -> Recorded:
    """A configuration's recordings: one whole tile; the slice that adds up the others' sums where K is split."""
    reports = []
    for depth in DEPTHS:
        k, m, n = depth * cfg.tile_k * cfg.split_k, cfg.tile_m, cfg.tile_n
        p = GemmProblem(n, k, dtype, dtype, a, b, m_hint=m)
        code = build(p, cfg, gfx950)
        args = [np.zeros(s, np.uint16) for s in (m * k, n * k, m * n)]
        args += [np.int64(x) for x in (m, k if a == "row" else m, n if b == "row" else k, n)]
        if code.workspace:
            workspace = np.zeros(code.workspace_for({"m": m}) // 4, np.int32)
            workspace[:: slot_bytes(cfg) // 4] = cfg.split_k - 1
            args.append(workspace)
        reports.append(profile(code, args, (*code.grid_for({"m": m}), 1, 1)))
    order = lambda i, layers, rows, columns: tile_of(i, rows, columns, layers, cfg.group_m, gfx950.limits.dies)
    return Recorded(str(cfg), (cfg.tile_m, cfg.tile_n, cfg.tile_k), tuple(reports), order, cfg.split_k)


@cache
def triton(tile: tuple[int, int, int], warps: int, stages: int, on_dies: bool = True) -> Recorded:
    """The recordings of Triton's kernel for C = A B^T in bf16, compiled here; its order is given the benefit of a
    die-aware numbering too."""
    from .simcases.triton_cases import TYPES, compile
    from .simcases.triton_kernels import matmul

    signature = {"a": TYPES["bf16"], "b": TYPES["bf16"], "c": TYPES["bf16"]}
    signature |= dict.fromkeys(("M", "N", "K", "sam", "sbn", "scm"), "i32")
    BM, BN, BK = tile
    made = compile(matmul, signature, {"BM": BM, "BN": BN, "BK": BK}, warps, stages, matrix_instr_nonkdim=16)
    reports = []
    for depth in DEPTHS:
        k = depth * BK
        args = [np.zeros(s, np.uint16) for s in ((BM, k), (BN, k), (BM, BN))] + [BM, BN, k, k, k, BN]
        args += [np.zeros(64, np.uint8)] * 2
        reports.append(profile(made.asm["amdgcn"], args, (1, 1, 1), shared_bytes=made.metadata.shared))
    dies = gfx950.limits.dies if on_dies else 1
    order = lambda i, layers, rows, columns: tile_of(i, rows, columns, layers, 8, dies)
    return Recorded(f"Triton {BM}x{BN}x{BK}, {warps} warps, {stages} stages", tile, tuple(reports), order)


__all__ = ["DEPTHS", "TRITON", "Estimate", "Recorded", "estimate", "ours", "triton"]
