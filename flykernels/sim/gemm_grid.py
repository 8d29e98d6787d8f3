"""Composes a matrix kernel's simulated time over 256 compute units and 8 dies: what the caches must deliver, round by
round.

A kernel whose workgroups each compute a tile of C asks for the same rows of A and columns of B many times; L2 (one a
die), the last-level cache and memory see each once. Their rates bound how fast a unit's loads are filled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from .report import run_together
from .timing import Machine950
from .trace import LINE, Recorder


@dataclass(frozen=True)
class Tiling:
    """A GEMM of M x N x K in tiles; bytes an element of A and B; `order` maps a workgroup's number to its tile."""

    M: int
    N: int
    K: int
    tile_m: int
    tile_n: int
    tile_k: int
    element_bytes: float
    order: Callable[[int, int, int], tuple[int, int]]

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.M // self.tile_m), -(-self.N // self.tile_n)


def grouped(group_m: int, dies: int = 1) -> Callable[[int, int, int], tuple[int, int]]:
    """Workgroup number -> tile: `group_m` rows of tiles together; with dies > 1 neighbours go to the same die."""

    def order(i: int, rows: int, columns: int) -> tuple[int, int]:
        count = rows * columns
        if dies > 1 and count % dies == 0:
            i = (i % dies) * (count // dies) + i // dies
        size = group_m * columns
        first = i // size * group_m
        high = min(rows - first, group_m)
        return first + (i % size) % high, (i % size) // high

    return order


def fill_rate(
    tiles: Sequence[tuple[int, int, int]], first: int, a_bytes: int, b_bytes: int, c: Machine950
) -> tuple[float, str]:
    """(bytes a cycle that each unit's loads are filled at, the level that bounds it) while some workgroups run.

    tiles             (slice of K or batch, row, column) of each workgroup, the first of them number `first`; they are
                      spread over the dies in turn
    a_bytes, b_bytes  what a tile needs of A and B each K tile
    """
    dies: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for i, tile in enumerate(tiles, first):
        dies[i % int(c.dies)].append(tile)
    distinct = lambda ts: len({(s, m) for s, m, _ in ts}) * a_bytes + len({(s, n) for s, _, n in ts}) * b_bytes
    filled = sum(distinct(v) for v in dies.values())
    asked = (a_bytes + b_bytes) * len(tiles) / min(len(tiles), int(c.units))  # a unit's
    hertz = c.clock_ghz * 1e9
    cycles = {
        "L2": asked / c.fill_bytes,
        "last-level cache": filled / (c.last_level_tbs * 1e12 / hertz),
        "memory": distinct(tiles) / (c.memory_tbs * 1e12 / hertz),
    }
    level = max(cycles, key=lambda k: cycles[k])
    return asked / cycles[level], level


def lines(size: float) -> int:
    """Bytes, as whole lines of the L2."""
    return -(-int(size) // LINE) * LINE


@dataclass(frozen=True)
class Round:
    """Workgroups together on a compute unit; cycles whatever K is, and a K tile; the level that bounds loads."""

    together: int
    fixed: float
    each: float
    bound: str


def in_rounds(
    total: int, at_once: int, depth: float, c: Machine950,
    rate: Callable[[int, int], tuple[float, str]], cost: Callable[[int, Machine950], tuple[float, float]],
) -> tuple[float, Round]:  # fmt: skip
    """(cycles until `total` workgroups of `depth` K tiles have run, `at_once` at a time, the first round). Simulated.

    rate  (first, count) -> what `fill_rate` says while these workgroups run
    cost  (workgroups on a unit, constants) -> (cycles whatever K is, cycles a K tile)"""
    cycles, units, seen = 0.0, int(c.units), []
    for first in range(0, total, at_once):
        count = min(at_once, total - first)
        together = -(-count // units)
        filled, level = rate(first, count)
        fixed, each = cost(together, replace(c, fill_bytes=round(filled, 1)))
        cycles += fixed + each * depth
        seen.append(Round(together, fixed, each, level))
    return cycles, seen[0]


@dataclass
class GemmEstimate:
    """Simulated time of a GEMM in microseconds and its rate; `fixed` and `each` are cycles a workgroup and a K tile."""

    microseconds: float
    tflops: float
    fixed: float
    each: float
    bound: str


def estimate(short: Recorder, long: Recorder, depths: tuple[int, int], t: Tiling, c: Machine950) -> GemmEstimate:
    """Time of the whole GEMM from two recordings of one workgroup with `depths` K tiles each: what does not depend on K
    and what each K tile takes. Simulated."""
    rows, columns = t.tiles
    depth = lines(t.tile_k * t.element_bytes)

    def rate(first: int, count: int) -> tuple[float, str]:
        tiles = [(0, *t.order(i, rows, columns)) for i in range(first, first + count)]
        return fill_rate(tiles, first, t.tile_m * depth, t.tile_n * depth, c)

    @cache
    def cost(together: int, at: Machine950) -> tuple[float, float]:
        one, two = (run_together(r, together, at).cycles for r in (short, long))
        slope = (two - one) / (depths[1] - depths[0])
        return one - depths[0] * slope, slope

    cycles, start = in_rounds(rows * columns, int(c.units), t.K / t.tile_k, c, rate, cost)
    seconds = cycles / (c.clock_ghz * 1e9) + c.launch_us * 1e-6
    tflops = 2 * t.M * t.N * t.K / seconds / 1e12
    return GemmEstimate(seconds * 1e6, tflops, start.fixed, start.each, start.bound)
