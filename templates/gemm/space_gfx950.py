"""Configurations on gfx950, from its registers, LDS, waves and compute units: which to compile, and why not the others.

The estimate that ranks them counts cycles of one compute unit from published rates. It tells large differences apart
and says nothing of small ones: measuring on the hardware does that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil

from flykernels.targets.gpu import GpuLimits

from .gfx950 import why_not
from .gfx950_config import DIRECT_BYTES, Gfx950Config, direct_bytes
from .gfx950_hti import SCHEDULES
from .problem import GemmProblem
from .space import Candidate, Dropped, Space

TILES_M, TILES_N = (16, 32, 64, 128, 256), (32, 64, 128, 256)
TILES_K, STAGES = (64, 128, 256), (2, 3, 4, 5, 8)
WAVES = ((2, 2), (1, 4), (4, 1), (4, 2), (2, 4), (1, 2), (2, 1), (4, 4), (1, 1))
INTERLEAVED = ((256, 256, (2, 4)), (256, 128, (2, 4)), (128, 256, (2, 4)), (128, 128, (2, 4)), (128, 128, (2, 2)))
SHAPES = ("16x16x32", "32x32x16")
SPLITS, K_WAVES = (2, 4, 8, 16), (2, 4)
KEPT, KEPT_OF_A_TILE = 10, 3  # as many as are compiled and measured; of those that share tile_m and tile_n
SPLIT_OF_A_BATCH = 4  # of the kept, where the number of workgroups is not known: it grows with the batch
SUMS_MOST = 128  # of C a lane, with half the registers a SIMD's two waves have
SPLIT_SUMS_MOST = 64  # where slices are added up: as many again are on their way from memory
ADDRESS_REGISTERS = 24  # of a wave: thread offsets, LDS addresses, what the compiler keeps besides
SCALARS_MOST, SCALARS_MOST_CUT = 96, 40  # of stages x loads: each has its LDS address in a scalar register; where the
# last K tile is cut, or loads are narrow, more of the others are taken
LOOP_TILES = 6  # K tiles from which an interleaved kernel has a loop; with fewer, all its K tiles are one piece
SUMS_UNLOOPED = 64  # a lane: with more, LLVM spills in that piece (256x256 tiles of 3 to 5 K tiles: up to 9 registers),
# and in the piece after the loop of "four" where both operands are read transposed (15 to 27)
SHARED = 0.8  # of the time do interleaved workgroups keep the matrix units of one compute unit busy: their bursts meet
BARRIER_CYCLES = 40  # a wait and a barrier, each K tile
PHASE_CYCLES, MOVE_CYCLES = 8, 140  # a barrier; from a phase's first LDS read to the barrier after its last has come
WIDEST_READ = 16  # bytes a lane
NOT_LOOKED_AT = (
    "not listed one by one: more than half of the tile outside C or K, waves that do not fill it, fewer than 256 or "
    "more than 4096 sums a wave, K tiles above 64 for large tiles, 32x32x16 for tiles below 128"
)
# What the estimate takes from the traces that flykernels/sim/timing.py names, in cycles and bytes a cycle:
WARM = 600  # from a load to its data in a running loop
START = 4400  # a workgroup before its first and after its last K tile, but for its stores
STORED = 20  # bytes of C
ADDED_START, ADDED = 2400, 40  # partial sums: fences and counter; bytes written and read again
LAUNCH = 4700  # a launch: 2.6 us
LAST_LEVEL, MEMORY = 3300, 3550  # bytes from the last-level cache and from memory, all units together


def candidates(p: GemmProblem, target) -> Space:
    """All tiles that fit, the likeliest first. `kept` is empty, with the reason in `dropped`, where none serves p."""
    reason = why_not(p)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    space, found = Space(), []
    for config in every(p, target.limits):
        reason = limit(p, config, target.limits)
        if reason:
            space.dropped.append(Dropped(config, reason))
        else:
            found.append((*estimate(p, config, target.limits), config))
    space.dropped.append(Dropped("other tiles", NOT_LOOKED_AT))
    found.sort(key=lambda f: (round(f[0]), abs(f[2].workgroup_size - 256), -f[2].stages, lds_read(p, f[2])))
    of_tile: Counter = Counter()
    split = 0
    for cycles, words, config in found:
        tile = config.tile_m, config.tile_n, config.interleaved
        if len(space.kept) == KEPT:
            space.dropped.append(Dropped(config, f"estimated at {cycles / found[0][0]:.2f} times the best: {words}"))
        elif of_tile[tile] == KEPT_OF_A_TILE:
            space.dropped.append(Dropped(config, f"{KEPT_OF_A_TILE} others of this tile are estimated to be faster"))
        elif p.batched and config.split_k > 1 and split == SPLIT_OF_A_BATCH:
            space.dropped.append(Dropped(config, f"{split} others split K, which pays for a batch of few tiles only"))
        else:
            of_tile[tile] += 1
            split += config.split_k > 1
            space.kept.append(Candidate(config, words))
    return space


def every(p: GemmProblem, limits: GpuLimits) -> Iterator[Gfx950Config]:
    """Rings and interleaved tiles; K is split, over workgroups or waves, only where tiles are fewer than units need."""
    stages = STAGES if direct_bytes(p) else STAGES[:1]
    for m, n, k, w, shape in product(TILES_M, TILES_N, TILES_K, WAVES, SHAPES):
        if not _worth_looking(p, m, n, k, w, shape):
            continue
        for s in stages:
            for split in _splits(p, m, n, limits):
                yield Gfx950Config(m, n, k, s, w, shape, split_k=split)
            if m <= 32 and s > 2 and w in ((1, 1), (1, 2)):
                yield from (Gfx950Config(m, n, k, s, w, shape, k_waves=kw) for kw in K_WAVES)
    for (m, n, w), schedule in product(INTERLEAVED, ("four", "eight")):
        for split in _splits(p, m, n, limits):
            yield Gfx950Config(m, n, TILES_K[0], 2, w, schedule=schedule, split_k=split)


def _worth_looking(p: GemmProblem, m: int, n: int, k: int, waves: tuple[int, int], shape: str) -> bool:
    """Leaves out what never wins: far too large or deep a tile, waves that do not fit it, two shapes of skinny ones."""
    count, atom = waves[0] * waves[1], int(shape.split("x")[0])
    if m > 2 * max(16, p.m_hint) or n > 2 * max(32, p.n) or (k > TILES_K[0] and k >= 2 * p.k):
        return False
    if m % (atom * waves[0]) or n % (atom * waves[1]) or (atom == 32 and min(m, n) < 128):
        return False
    if k > TILES_K[0] and m * n > 64 * 128:  # such tiles fill LDS, and their loads are long enough, with 64
        return False
    return m * n // count >= 256 and m * n // count <= 64 * 64 and max(m // waves[0], n // waves[1]) <= 128


def _splits(p: GemmProblem, m: int, n: int, limits: GpuLimits) -> tuple[int, ...]:
    groups = ceil(p.m_hint / m) * ceil(p.n / n)
    return (1, *(s for s in SPLITS if groups * s <= 2 * limits.compute_units))


def registers(p: GemmProblem, cfg: Gfx950Config) -> int:
    """Vector registers that a wave needs, about: sums, operands on their way, addresses, tiles in flight."""
    rows, columns = cfg.repeat(p)
    atom = cfg.atom(p)
    per_lane = lambda tv: tv.vector.size * p.input_type.bytes // 4
    sums = cfg.tile_m * cfg.tile_n * cfg.k_waves // cfg.workgroup_size
    steps = 2  # a ring holds two K steps of operands; interleaved halves are held whole, both of B and one of A
    if cfg.interleaved:
        steps = cfg.tile_k // atom.a.tile[1]
        operands = steps * (rows * per_lane(atom.a) + 2 * columns * per_lane(atom.b))
    else:
        operands = steps * (rows * per_lane(atom.a) + columns * per_lane(atom.b))
    chunk = direct_bytes(p) or WIDEST_READ
    loads = (cfg.tile_m + cfg.tile_n) * cfg.tile_k * p.input_type.bytes // (chunk * cfg.workgroup_size)
    flying = 0 if direct_bytes(p) else loads * WIDEST_READ // 4
    loads += loads // 2 if cfg.interleaved and chunk < WIDEST_READ else 0  # each has its place in LDS to remember
    return sums + operands + loads + flying + ADDRESS_REGISTERS


def lds_read(p: GemmProblem, cfg: Gfx950Config) -> int:
    """Bytes that a workgroup's waves read from LDS for one K tile."""
    atom, (rows, columns) = cfg.atom(p), cfg.repeat(p)
    per_wave = rows * atom.d.tile[0] + columns * atom.d.tile[1]
    parts = 2 if cfg.interleaved else 1
    return parts * cfg.waves[0] * cfg.waves[1] * per_wave * cfg.tile_k * p.input_type.bytes


def limit(p: GemmProblem, cfg: Gfx950Config, limits: GpuLimits) -> str | None:
    """The limit that a configuration runs into, in words; None if it fits."""
    atom, (tile_m, tile_n) = cfg.atom(p), cfg.part
    rows, columns = atom.d.tile
    if tile_m % (rows * cfg.waves[0]) or tile_n % (columns * cfg.waves[1]):
        return f"{cfg.waves[0]}x{cfg.waves[1]} waves of {rows}x{columns} do not fill the tile"
    if cfg.workgroup_size > limits.max_workgroup:
        return f"{cfg.workgroup_size} threads; a workgroup has at most {limits.max_workgroup}"
    if cfg.interleaved and not direct_bytes(p):
        least = f"halves come straight into LDS, {DIRECT_BYTES[-1]} bytes a lane at least"
        return f"{least}: operands are not aligned so, and sums leave no registers to bring them in"
    if cfg.tile_k % (atom.a.tile[1] * cfg.k_waves):
        return f"{cfg.k_waves} waves along K need tiles of {atom.a.tile[1] * cfg.k_waves} of K"
    if cfg.k_waves > 1 and cfg.tile_m * cfg.tile_n < 4 * cfg.workgroup_size:
        return "too few sums for so many waves to add"
    chunk = direct_bytes(p) or WIDEST_READ
    for name, size in (("A", tile_m), ("B", tile_n)):
        if size * cfg.tile_k * p.input_type.bytes % (chunk * cfg.workgroup_size):
            return f"{name}'s tile is less than one load of {chunk} bytes by {cfg.workgroup_size} threads"
    loads = (cfg.tile_m + cfg.tile_n) * cfg.tile_k * p.input_type.bytes // (chunk * cfg.workgroup_size)
    most = SCALARS_MOST_CUT if chunk < WIDEST_READ or p.k % (cfg.tile_k * cfg.split_k) else SCALARS_MOST
    if direct_bytes(p) and cfg.stages * loads > most:
        return f"{cfg.stages} stages of {loads} loads: scalar registers hold {most} addresses"
    if cfg.lds_bytes(p) > limits.shared_bytes:
        return f"{cfg.lds_bytes(p)} bytes of LDS; a workgroup has {limits.shared_bytes}"
    sums = cfg.tile_m * cfg.tile_n * cfg.k_waves // cfg.workgroup_size
    most = SPLIT_SUMS_MOST if cfg.split_k > 1 else SUMS_MOST
    if sums > most:
        return f"{sums} sums a lane; at most {most} here"
    each = limits.registers // ceil(cfg.workgroup_size // limits.lanes / limits.simds)
    if registers(p, cfg) > each:
        return f"about {registers(p, cfg)} registers; a wave has {each}"
    if cfg.tile_m > 2 * max(16, p.m_hint) or cfg.tile_n > 2 * max(32, p.n):
        return f"more than half of the tile would lie outside {p.m_hint} x {p.n}"
    if cfg.split_k > 1 and p.k < 2 * cfg.stages * cfg.split_k * cfg.tile_k:
        return f"K = {p.k} is not {cfg.split_k} slices of {2 * cfg.stages} or more K tiles each"
    if cfg.tile_k > TILES_K[0] and p.k <= cfg.tile_k // 2:
        return f"K = {p.k} fills at most half a tile"
    if cfg.interleaved and sums > SUMS_UNLOOPED:
        tiles = ceil(p.k / cfg.tile_k)
        if tiles < LOOP_TILES:
            return f"K = {p.k} is {tiles} K tiles: no loop, and without one they need more registers than there are"
        if cfg.schedule == "four" and (p.a, p.b) == ("col", "row") and p.k % cfg.tile_k and tiles % 2 == 0:
            return f"K = {p.k} ends in a cut second stage: both operands read transposed leave no registers for it"
    if cfg.stages > 2 and p.k <= (cfg.stages - 1) * cfg.tile_k:
        return f"K = {p.k} is done before stage {cfg.stages} is used"
    return None


def side_by_side(p: GemmProblem, cfg: Gfx950Config, limits: GpuLimits) -> int:
    """Workgroups that fit on a compute unit, by LDS and (about) registers."""
    by_registers = limits.waves_with(registers(p, cfg)) * limits.simds * limits.lanes // cfg.workgroup_size
    return max(1, min(limits.shared_bytes // cfg.lds_bytes(p), by_registers))


def estimate(p: GemmProblem, cfg: Gfx950Config, limits: GpuLimits, products: int = 1) -> tuple[float, str]:
    """(cycles, what they are made of): rounds of workgroups over the compute units, each a loop over K tiles.

    products: so many of the same size are done at once, each with its own A and B."""
    atom, waves = cfg.atom(p), cfg.workgroup_size // limits.lanes
    bytes_each = p.input_type.bytes
    multiply = cfg.tile_m * cfg.tile_n * cfg.tile_k * atom.cycles
    multiply /= atom.d.tile[0] * atom.d.tile[1] * atom.a.tile[1] * min(waves, limits.simds)
    tile_bytes = (cfg.tile_m + cfg.tile_n) * cfg.tile_k * bytes_each
    read, write = lds_read(p, cfg) / limits.shared_read, tile_bytes * 2 / limits.shared_read
    chunk = direct_bytes(p)
    slower = 1 if chunk == WIDEST_READ else 4 if chunk else 8  # narrow loads: as many more instructions
    groups = ceil(p.m_hint / cfg.tile_m) * ceil(p.n / cfg.tile_n) * cfg.split_k * products
    side = side_by_side(p, cfg, limits)
    together = min(side, ceil(groups / limits.compute_units))  # workgroups that share a compute unit
    at_once = limits.compute_units * together
    fill, level = _fill(p, cfg, min(groups, at_once), together, limits)
    fill = max(fill * slower, write) * together
    hidden = cfg.stages - 1  # K tiles on their way while one is multiplied
    alone = _phases(p, cfg, multiply, limits) if cfg.interleaved else multiply + read + write
    shared = SHARED if cfg.interleaved and together > 1 else 1
    slowest, why = max(
        (multiply * together / shared, "matrix units"), (read * together, "LDS reads"), (fill, level),
        (alone, "waves in step"), ((WARM + fill) / hidden if not cfg.interleaved else 0, "latency"),
    )  # fmt: skip
    barriers = 0 if cfg.interleaved else BARRIER_CYCLES
    stored = cfg.tile_m * cfg.tile_n
    one = ceil(p.k / (cfg.tile_k * cfg.split_k)) * (slowest + barriers)
    one += START + together * stored * p.output_type.bytes / STORED
    if cfg.split_k > 1:
        one += ADDED_START + together * cfg.split_k * stored * 4 / ADDED
    if cfg.k_waves > 1:
        one += BARRIER_CYCLES + cfg.tile_bytes(p) * 2 / limits.shared_read
    full, rest = divmod(groups, at_once)
    rounds = full + (max(0.5, rest / at_once) if full and rest else bool(rest))  # a short round has its unit for itself
    cycles = rounds * one + LAUNCH
    return (
        cycles,
        f"{ceil(rounds)} rounds of {together} workgroups a compute unit, bound by {why}, about {cycles:.0f} cycles",
    )


def _phases(p: GemmProblem, cfg: Gfx950Config, multiply: float, limits: GpuLimits) -> float:
    """Cycles of a K tile of an interleaved workgroup: in turn one group multiplies and the other reads, the slower
    counts. With fewer waves than two a SIMD the groups are on different SIMDs, and each leaves the other's idle."""
    phases, (rows, columns) = SCHEDULES[cfg.schedule], cfg.repeat(p)
    idle = max(1, 2 * limits.simds * limits.lanes // cfg.workgroup_size)
    half = {"A": rows * cfg.atom(p).d.tile[0], "B": columns * cfg.atom(p).d.tile[1]}  # rows of a wave
    waves = cfg.workgroup_size // limits.lanes // 2
    cycles = 0.0
    for phase in phases:
        read = sum(half[name[0]] for name, _ in phase.reads) * waves * cfg.tile_k * p.input_type.bytes
        multiplied = multiply * idle * len(phase.quadrants) / 8
        cycles += 2 * max(multiplied + PHASE_CYCLES, read / limits.shared_read + MOVE_CYCLES)
    return cycles


def _fill(p: GemmProblem, cfg: Gfx950Config, groups: int, together: int, limits: GpuLimits) -> tuple[float, str]:
    """(cycles that one workgroup's loads of a K tile take, what bounds them) while `groups` run, `together` a unit."""
    return _fill_of(
        ceil(p.m_hint / cfg.tile_m), ceil(p.n / cfg.tile_n), min(cfg.tile_m, p.m_hint), min(cfg.tile_n, p.n),
        cfg.tile_k * p.input_type.bytes, cfg.split_k, cfg.group_m, groups, together, limits,
    )  # fmt: skip


@lru_cache(4096)
def _fill_of(rows, columns, tile_m, tile_n, depth, split, group_m, groups, together, limits) -> tuple[float, str]:
    def distinct(count: int) -> float:
        """Bytes that `count` neighbours in the order of order.py read of A and B, each once."""
        layers = max(1.0, count / (rows * columns))
        inside = min(count, rows * columns)
        high = min(rows, group_m)
        wide = min(columns, ceil(inside / high))
        deep = high * max(1, ceil(inside / (high * columns)))
        return layers * (min(rows, deep) * tile_m + wide * tile_n) * depth

    dies = min(groups, limits.dies)
    found = (
        ((tile_m + tile_n) * depth / limits.shared_fill, "loads"),
        (dies * distinct(ceil(groups / dies)) / (LAST_LEVEL * together), "last-level cache"),
        (distinct(groups) / (MEMORY * together), "memory"),
    )
    return max(found)
