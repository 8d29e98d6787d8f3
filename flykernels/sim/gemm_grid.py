"""Composes a matrix kernel's simulated time over 256 compute units and 8 dies: what the caches must deliver, round by
round.

A kernel whose workgroups each compute a tile of C asks for the same rows of A and columns of B many times; L2 (one a
die),
the last-level cache and memory see each once. Their rates bound how fast a unit's loads are filled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from .report import run_together
from .timing import Machine950
from .trace import Recorder


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


def fill_rate(t: Tiling, first: int, count: int, c: Machine950) -> tuple[float, str]:
    """(bytes a cycle that each unit's loads are filled at, the level that bounds it) while workgroups first to
    first + count - 1 run, one a unit, spread over the dies in turn."""
    rows, columns = t.tiles
    line = lambda n: -(-int(n) // 128) * 128
    depth = line(t.tile_k * t.element_bytes)
    a_bytes, b_bytes = t.tile_m * depth, t.tile_n * depth
    dies: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i in range(first, first + count):
        dies[i % int(c.dies)].append(t.order(i, rows, columns))
    distinct = lambda tiles: len({m for m, _ in tiles}) * a_bytes + len({n for _, n in tiles}) * b_bytes
    filled = sum(distinct(v) for v in dies.values())
    from_memory = distinct([x for v in dies.values() for x in v])
    asked = a_bytes + b_bytes
    hertz = c.clock_ghz * 1e9
    cycles = {
        "L2": asked / c.fill_bytes,
        "last-level cache": filled / (c.last_level_tbs * 1e12 / hertz),
        "memory": from_memory / (c.memory_tbs * 1e12 / hertz),
    }
    level = max(cycles, key=lambda k: cycles[k])
    return asked / cycles[level], level


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
    total, units = rows * columns, int(c.units)
    seconds, cache = 0.0, {}
    fixed = each = 0.0
    bound = ""
    for first in range(0, total, units):
        rate, level = fill_rate(t, first, min(units, total - first), c)
        key = round(rate, 1)
        if key not in cache:
            at = replace(c, fill_bytes=rate)
            one, two = (run_together(r, 1, at).cycles for r in (short, long))
            slope = (two - one) / (depths[1] - depths[0])
            cache[key] = (one - depths[0] * slope, slope)
        start, slope = cache[key]
        seconds += (start + slope * t.K / t.tile_k) / (c.clock_ghz * 1e9)
        if first == 0:
            fixed, each, bound = start, slope, level
    seconds += c.launch_us * 1e-6
    return GemmEstimate(seconds * 1e6, 2 * t.M * t.N * t.K / seconds / 1e12, fixed, each, bound)
