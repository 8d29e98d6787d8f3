"""How a gfx950 GEMM is cut up: tiles, waves, stages; and the LDS swizzles that follow from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from math import log2

import numpy as np

from flykernels.dtypes import dtype
from flykernels.lang.matrix import MatrixAtom, TiledMma
from flykernels.lang.ring import transposing
from flykernels.layout import IDENTITY, Mode, Swizzle, ThreadValues, bank_conflicts
from flykernels.targets import gfx950

from .problem import GemmProblem

TILE_MOST = 256  # rows, columns or K of a tile
DIRECT_BYTES = (16, 4)  # what one lane can bring from memory straight into LDS


@dataclass(frozen=True)
class Gfx950Config:
    """One way to cut the work.

    tile_m, tile_n  of C, a workgroup's
    tile_k          of A and B, a stage's
    stages          K tiles in LDS: one read, the others arriving (2 where operands come through registers)
    waves           along (M, N)
    shape           of the matrix instruction, a key of gfx950.atoms
    schedule        "ring": all waves do the same; else half-tile interleaved, a key of gfx950_hti.SCHEDULES, 2 stages
    k_waves         waves that share a tile of C, each with a part of every K tile; summed through LDS at the end
    split_k         workgroups that share a tile of C, each with a part of K; the last to come sums in a fixed order
    group_m         rows of tiles that are worked on together: see order.py
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 3
    waves: tuple[int, int] = (2, 2)
    shape: str = "16x16x32"
    schedule: str = "ring"
    k_waves: int = 1
    split_k: int = 1
    group_m: int = 8

    def __post_init__(self):
        object.__setattr__(self, "waves", tuple(self.waves))  # JSON has lists

    @property
    def workgroup_size(self) -> int:
        return gfx950.limits.lanes * self.waves[0] * self.waves[1] * self.k_waves

    @property
    def interleaved(self) -> bool:
        return self.schedule != "ring"

    @property
    def part(self) -> tuple[int, int]:
        """(rows, columns) of C that one set of sums covers: a quadrant where tiles are interleaved by halves."""
        return (self.tile_m // 2, self.tile_n // 2) if self.interleaved else (self.tile_m, self.tile_n)

    def atom(self, p: GemmProblem) -> MatrixAtom:
        return gfx950.atoms[dtype(p.dtype), self.shape]

    def repeat(self, p: GemmProblem) -> tuple[int, int]:
        """Matrix instructions of one wave along (M, N) of a part."""
        rows, columns = self.atom(p).d.tile
        return self.part[0] // (rows * self.waves[0]), self.part[1] // (columns * self.waves[1])

    def lds_bytes(self, p: GemmProblem) -> int:
        """Of the rings, of sums that waves add up, and of a word that says which slice came last."""
        return self.ring_bytes(p) + (self.tile_bytes(p) if self.k_waves > 1 else 0) + (4 if self.split_k > 1 else 0)

    def ring_bytes(self, p: GemmProblem) -> int:
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * p.input_type.bytes

    def tile_bytes(self, p: GemmProblem) -> int:
        """Of all waves' sums of a tile, f32."""
        return self.k_waves * self.tile_m * self.tile_n * 4

    def key(self) -> dict:
        """Readable JSON form."""
        return {**asdict(self), "waves": list(self.waves)}

    def __str__(self) -> str:
        waves = "x".join(map(str, self.waves)) + (f"x{self.k_waves}" if self.k_waves > 1 else "")
        how = f"{self.stages} stages" if not self.interleaved else f"interleaved, {self.schedule} barriers a tile"
        split = f", K in {self.split_k}" if self.split_k > 1 else ""
        return f"{self.tile_m}x{self.tile_n}x{self.tile_k}, {how}, {waves} waves of {self.shape}{split}"


def along_k(p: GemmProblem, operand: str) -> bool:
    """Whether the operand's image in LDS runs along K: where K is its contiguous axis, or neither is."""
    return p.a in ("row", "any") if operand == "a" else p.b in ("col", "any")


def direct_bytes(p: GemmProblem) -> int:
    """Bytes a lane that both operands allow to bring straight into LDS: 16 or 4; 0: they go through registers."""
    if "any" in (p.a, p.b):
        return 0
    return next((size for size in DIRECT_BYTES if min(p.align_a, p.align_b) >= size), 0)


@cache
def swizzle(atom: MatrixAtom, which: str, rows: int, depth: int, contiguous_k: bool) -> Swizzle:
    """The swizzle of a (rows, depth) operand tile whose LDS reads conflict least; in doubt the plainest.

    which: "a" or "b" of the atom. contiguous_k: the image in LDS is (rows, depth), else (depth, rows)."""
    best, turns = IDENTITY, read_conflicts(atom, which, rows, depth, contiguous_k, IDENTITY)
    for candidate in _swizzles(depth if contiguous_k else rows):
        if turns == 1:
            break
        found = read_conflicts(atom, which, rows, depth, contiguous_k, candidate)
        best, turns = (candidate, found) if found < turns else (best, turns)
    return best


def _swizzles(row_elements: int):
    """Those that move whole 16-byte chunks of 8 elements within a row by looking at the row's number, in one or two."""
    chunk, row = 3, int(log2(row_elements))
    sources = lambda base: range(row - base, row - base + 3)  # the bits looked at lie in the row's number
    sizes = lambda base: range(1, min(3, row - base) + 1)
    whole = [Swizzle(b, base, shift) for base in range(chunk, row) for b in sizes(base) for shift in sources(base)]
    yield from whole
    for low, high in product(whole, whole):
        if low.base + low.bits == high.base and low.shift != high.shift:
            try:
                yield Swizzle(low.bits, low.base, low.shift, also=high)
            except ValueError:
                continue  # one looks at bits that the other changes


def read_conflicts(atom: MatrixAtom, which: str, rows: int, depth: int, contiguous_k: bool, swizzle: Swizzle) -> int:
    """Turns of the slowest LDS read of one wave, in the worst order that lanes may be served in (1: no conflicts)."""
    operand: ThreadValues = getattr(atom, which)
    if contiguous_k:
        tv, pitch, size, orders = operand, depth, 16, list(gfx950.read_phases.values())
    else:
        tv, pitch, size, orders = transposing(operand), rows, 8, [list(gfx950.read_phases_8_bytes)]
    lanes, worst = np.arange(gfx950.limits.lanes), 1
    for step, digits in product({0, depth - operand.tile[1]}, np.ndindex(*tv.piece_sizes)):
        shifted = tv.shifted(0, step) if contiguous_k else tv.shifted(step, 0)
        row, column = (o + w for o, w in zip(shifted.origin(lanes), shifted.walk(digits)))
        at = swizzle(row * pitch + column) * 2
        worst = max([worst, *(bank_conflicts(at, phases, size, gfx950.limits.banks) for phases in orders)])
    return worst


@cache
def shelf_swizzle(held: ThreadValues, taken: ThreadValues) -> Swizzle:
    """The swizzle of a tile of 16-bit values that is put into LDS as `held` says and read as `taken` says, row by row
    in vectors of 8: the one with the fewest turns, of reads first."""
    rows, columns = taken.tile
    lanes = np.arange(gfx950.limits.lanes)

    def turns(tv: ThreadValues, phases, size: int, banks: int, moved: Swizzle) -> int:
        row, column = tv.origin(lanes)
        return bank_conflicts(moved(row * columns + column) * 2, phases, size, banks)

    def cost(moved: Swizzle) -> tuple[int, int]:
        reads = max(turns(taken, orders, 16, gfx950.limits.banks, moved) for orders in gfx950.read_phases.values())
        return reads, turns(held, gfx950.write_phases_8_bytes, 8, gfx950.write_banks, moved)

    return min((IDENTITY, *_swizzles(columns)), key=cost)


def by_rows(tile: tuple[int, int], threads: int, vector: int) -> ThreadValues:
    """A tile of C spread over a workgroup row by row, `vector` neighbours a thread at a time."""
    wide = min(threads, tile[1] // vector)
    deep, pieces = threads // wide, (tile[1] // (wide * vector), -(-tile[0] // (threads // wide)))
    return ThreadValues(
        tile,
        (Mode(wide, 1, vector), Mode(deep, 0, 1)),
        Mode(vector, 1, 1),
        (Mode(pieces[1], 0, deep), Mode(pieces[0], 1, wide * vector)),
    )


def mma_of(k, p: GemmProblem, cfg: Gfx950Config) -> TiledMma:
    """The workgroup's matrix multiply, of a part."""
    return TiledMma(k, cfg.atom(p), cfg.waves, cfg.repeat(p), cfg.k_waves)
