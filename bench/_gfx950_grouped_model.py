"""Simulated time of a grouped GEMM on gfx950: one staying workgroup's recordings, on 256 units turn by turn.

Ours and Triton's kernels go through the same functions. Recordings of one workgroup that does all tiles there are
tell what it costs before its first tile, what a tile costs however deep K is, and what each K tile costs. In every turn
each workgroup does a tile; which, the kernel's own order says, and from what the tiles of a turn share follows how fast
their loads are filled (flykernels/sim/gemm_grid.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path

import numpy as np

from flykernels.sim.gemm_grid import fill_rate, lines
from flykernels.sim.load import load
from flykernels.sim.report import occupancy, run_together
from flykernels.sim.run import Simulation
from flykernels.sim.timing import Machine950
from flykernels.sim.trace import Recorder
from flykernels.targets import gfx950
from templates.gemm.gfx950_config import Gfx950Config
from templates.gemm.order import grouped
from templates.grouped_gemm.build import build
from templates.grouped_gemm.config import GroupedConfig
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.schedule import turns, walk

from ._gfx950_model import TRITON as OF_PRODUCTS

DEPTHS = (8, 16)  # K tiles of two recordings: more than the deepest ring holds
TURNS_LOOKED_AT = 6  # of a launch, evenly spread: what their tiles share stands for the others
ELEMENT = 2  # bytes
RATES = (57.6, 32.0, 16.0, 6.0)  # bytes a cycle and unit at which costs are simulated; between them, and
# below, they are taken to be linear in the time that a byte takes
LDS_MOST = gfx950.limits.shared_bytes
# (BM, BN, BK, warps, stages): what Inductor's list for _grouped_mm holds (torch/_inductor/kernel/mm_grouped.py) as far
# as LDS does, and what its and published lists hold for one product, which AMD's pipeline with 2 stages is made for
INDUCTOR = (
    (m, n, k, warps, stages)
    for m, n, k in product((16, 32, 64, 128), (64, 128, 256), (64, 128, 256))
    for warps, stages in product((4, 8), (3, 4))
    if (m + n) * k * ELEMENT * stages <= LDS_MOST
)
TRITON = tuple(dict.fromkeys((*OF_PRODUCTS, *INDUCTOR)))
SAME_LINE = 150.0  # cycles of a load from a line of memory that this unit has just read: 32 groups' offs share one


class Saved:
    """What has been simulated, one JSON line each in a file: a bench that is started again goes on from there."""

    def __init__(self):
        self.known: dict[str, float] = {}
        self.file: Path | None = None

    def keep_in(self, file: Path) -> None:
        self.file = file
        if file.exists():
            self.known |= dict(json.loads(line) for line in file.read_text().splitlines())

    def get(self, key: list, make: Callable[[], float]) -> float:
        name = json.dumps(key)
        if name not in self.known:
            self.known[name] = make()
            if self.file is not None:
                with self.file.open("a") as f:  # one write, appended: several processes may
                    f.write(json.dumps([name, self.known[name]]) + "\n")
        return self.known[name]


SAVED = Saved()


@dataclass
class Recorded:
    """A kernel's recordings.

    tile     (M, N, K)
    record   (groups, tiles, depth) -> (recording of a workgroup that does so many tiles in the last of so many groups,
             how many of them fit on a compute unit)
    place    (turn, workgroup, workgroups, tiles) -> number of a tile, >= tiles if there is none
    within   (number in the group, rows, columns of tiles) -> (row, column)"""

    name: str
    tile: tuple[int, int, int]
    record: Callable
    place: Callable
    within: Callable
    records: dict = field(default_factory=dict)
    sources: Callable[[], str] = str  # digest of what the kernel is made from

    def recording(self, groups: int, tiles: int, depth: int) -> tuple[Recorder, int]:
        key = groups, tiles, depth
        if key not in self.records:
            self.records[key] = self.record(*key)
        return self.records[key]

    @property
    def together(self) -> int:
        """Workgroups that fit on a compute unit."""
        make = lambda: self.recording(1, 1, DEPTHS[0])[1]
        return int(SAVED.get([self.sources(), self.name, "together"], make))

    def cycles(self, groups: int, tiles: int, depth: int, together: int, machine: Machine950) -> float:
        make = lambda: run_together(self.recording(groups, tiles, depth)[0], together, machine).cycles
        return SAVED.get([self.sources(), self.name, groups, tiles, depth, together, *astuple(machine)], make)

    def tile_cost(self, together: int, rate: float, machine: Machine950) -> tuple[float, float, float]:
        """(cycles of a tile whatever K is, cycles a K tile, cycles before the first tile), of so many workgroups on one
        compute unit whose loads are filled at `rate` bytes a cycle."""
        at = min(max(np.searchsorted([1 / r for r in RATES], 1 / rate), 1), len(RATES) - 1)
        fast, slow = RATES[at - 1], RATES[at]
        part = max(0.0, (1 / rate - 1 / fast) / (1 / slow - 1 / fast))
        one, other = (np.array(self._cost(together, replace(machine, fill_bytes=r))) for r in (fast, slow))
        return tuple(one + part * (other - one))

    def _cost(self, together: int, machine: Machine950) -> tuple[float, float, float]:
        short, long, two = (
            self.cycles(1, n, d, together, machine) for n, d in ((1, DEPTHS[0]), (1, DEPTHS[1]), (2, DEPTHS[0]))
        )
        slope = (long - short) / (DEPTHS[1] - DEPTHS[0])
        fixed = two - short - DEPTHS[0] * slope
        return fixed, slope, short - fixed - DEPTHS[0] * slope

    def search(self, groups: int, machine: Machine950) -> float:
        """Cycles that a workgroup spends on so many groups beyond what it spends on one, their offs at hand."""
        near = replace(
            machine, latency=SAME_LINE, latency_cold=SAME_LINE, scalar_latency=min(SAME_LINE, machine.scalar_latency)
        )
        many, one = (self.cycles(g, 1, DEPTHS[0], 1, near) for g in (groups, 1))
        return max(0.0, many - one)


@dataclass
class Estimate:
    """Simulated microseconds, and what they are made of."""

    microseconds: float
    turns: int
    together: int
    bound: str


def estimate(r: Recorded, sizes: np.ndarray, n: int, k: int, c: Machine950, together: int, search: float) -> Estimate:
    """Simulated time of groups of these sizes, with at most `together` workgroups on each compute unit. search: cycles
    that each spends to find its way about the groups."""
    units = int(c.units)
    strips = -(-sizes // r.tile[0])
    columns = -(-n // r.tile[1])
    ends = np.cumsum(strips) * columns
    total = int(ends[-1])
    together = min(together, -(-total // units))
    workgroups = units * together
    count = turns(total, workgroups)
    looked_at = sorted({round(i * (count - 1) / max(1, TURNS_LOOKED_AT - 1)) for i in range(TURNS_LOOKED_AT)})
    costs, levels, start = [], [], 0.0
    depth, k_tiles = lines(r.tile[2] * ELEMENT), -(-k // r.tile[2])
    for turn in looked_at:
        busy = [t for w in range(workgroups) if (t := r.place(turn, w, workgroups, total)) < total]
        tiles, rows = [], 0
        for t in busy:
            g = int(np.searchsorted(ends, t, "right"))
            row, column = r.within(t - (int(ends[g - 1]) if g else 0), int(strips[g]), columns)
            tiles.append((g, row, column))
            rows += min(r.tile[0], int(sizes[g]) - row * r.tile[0])
        rate, level = fill_rate(tiles, 0, depth * rows / len(tiles), r.tile[1] * depth, c)
        fixed, slope, before = r.tile_cost(-(-len(busy) // units), rate, c)
        costs.append(fixed + slope * k_tiles)
        levels.append(level)
        start = start or before
    *full, last = costs
    cycles = start + search + (count - 1) * (sum(full) / len(full) if full else 0) + last
    return Estimate(cycles / (c.clock_ghz * 1e3) + c.launch_us, count, together, levels[0])


def recorded(code, args: list, shared_bytes: int = 0) -> tuple[Recorder, int]:
    """(a recording of one workgroup, how many fit on a compute unit)."""
    loaded = load(code)
    recorder = Recorder(instructions=loaded.code.instructions)
    simulation = Simulation(loaded, args, (1, 1, 1), trace=recorder, shared_bytes=shared_bytes)
    simulation.run()
    return recorder, occupancy(loaded.kernel, simulation.waves_each, simulation.lds_bytes).workgroups


def operands(groups: int, tiles: int, depth: int, tile: tuple[int, int, int]):
    """(A, B, offs, C) of one workgroup's recording: all groups are empty but the last, which has `tiles` tiles."""
    m, n, k = tile[0] * tiles, tile[1], tile[2] * depth
    offs = np.zeros(groups, np.int32)
    offs[-1] = m
    b = np.zeros(groups * n * k, np.uint16)
    return np.zeros(m * k, np.uint16), b, offs, np.zeros(m * n, np.uint16), m, n, k


@cache
def ours(tile: Gfx950Config) -> Recorded:
    """A configuration's recordings, of a kernel for one workgroup."""
    shape = tile.tile_m, tile.tile_n, tile.tile_k

    @cache
    def made(groups, tiles, depth):
        m, n, k = shape[0] * tiles, shape[1], shape[2] * depth
        return build(GroupedGemmProblem("m", groups, n=n, k=k, tokens_hint=m), GroupedConfig(tile, 1), gfx950)

    def record(groups, tiles, depth):
        a, b, offs, c, m, n, k = operands(groups, tiles, depth, shape)
        args = [a, b, offs, c, *(np.int64(x) for x in (m, k, k, n, n * k))]
        return recorded(made(groups, tiles, depth), args)

    @cache
    def sources():
        return hashlib.sha256(made(1, 1, DEPTHS[0]).binary).hexdigest()

    place = lambda turn, w, workgroups, total: walk(turn, w, workgroups, total, gfx950.limits.dies)
    return Recorded(
        str(tile),
        shape,
        record,
        place,
        lambda i, rows, columns: grouped(i, rows, columns, tile.group_m),
        sources=sources,
    )


@cache
def triton(tile: tuple[int, int, int], warps: int, stages: int) -> Recorded:
    """The recordings of Triton's kernel, compiled here for one program. Its tiles are given the benefit of a die-aware
    numbering of programs too."""
    from .simcases import triton_kernels
    from .simcases.triton_cases import TYPES, compile

    BM, BN, BK = tile
    signature = {"a": TYPES["bf16"], "b": TYPES["bf16"], "offs": "*i32", "c": TYPES["bf16"]}
    signature |= dict.fromkeys(("K", "sam", "sbn", "sbg", "scm"), "i32")

    @cache
    def made(groups: int):
        sizes = {"G": groups, "N": BN, "PROGRAMS": 1, "BM": BM, "BN": BN, "BK": BK}
        return compile(triton_kernels.grouped_matmul, signature, sizes, warps, stages, matrix_instr_nonkdim=16)

    def record(groups, tiles, depth):
        a, b, offs, c, _, n, k = operands(groups, tiles, depth, tile)
        hidden = [np.zeros(64, np.uint8)] * 2
        code = made(groups)
        args = [a, b, offs, c, k, k, k, n * k, n, *hidden]
        return recorded(code.asm["amdgcn"], args, code.metadata.shared)

    place = lambda turn, w, workgroups, total: walk(turn, w, workgroups, total, gfx950.limits.dies)
    sources = lambda: hashlib.sha256(Path(triton_kernels.__file__).read_bytes()).hexdigest()
    name = f"{BM}x{BN}x{BK}, {warps} warps, {stages} stages, Triton {version('triton')}"
    return Recorded(name, tile, record, place, lambda i, rows, _: (i % rows, i // rows), sources=sources)


__all__ = ["SAVED", "TRITON", "Estimate", "Recorded", "estimate", "ours", "triton"]
