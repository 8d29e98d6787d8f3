"""Configurations on gfx950, from its registers, LDS, waves and compute units: which to compile, and why not the others.

The estimate that ranks them counts cycles of one compute unit from published rates. It tells large differences apart
and says nothing of small ones: measuring on the hardware does that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import ceil

from flykernels.targets.gpu import GpuLimits

from .gfx950 import why_not
from .gfx950_config import Gfx950Config, direct_bytes
from .problem import GemmProblem
from .space import Candidate, Dropped, Space

TILES_M, TILES_N = (16, 32, 64, 128, 256), (32, 64, 128, 256)
TILES_K, STAGES = (64, 128), (3, 2)
WAVES = ((2, 2), (1, 4), (4, 1), (4, 2), (2, 4))
SHAPES = ("16x16x32", "32x32x16")
KEPT, KEPT_OF_A_TILE = 8, 2  # as many as are compiled and measured; of those that share tile_m and tile_n
SUMS_MOST = 128  # of C a lane: with more, LLVM moves sums to AGPRs and back, and takes seconds over the epilogue
ADDRESS_REGISTERS = 24  # of a wave: thread offsets, LDS addresses, what the compiler keeps besides
BARRIER_CYCLES = 40  # a wait and a barrier, each K tile
WIDEST_READ = 16  # bytes a lane


def candidates(p: GemmProblem, target) -> Space:
    """All tiles that fit, the likeliest first. `kept` is empty, with the reason in `dropped`, where none serves p."""
    reason = why_not(p)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    space, found = Space(), []
    for config in _all(p):
        reason = limit(p, config, target.limits)
        if reason:
            space.dropped.append(Dropped(config, reason))
        else:
            found.append((*estimate(p, config, target.limits), config))
    found.sort(key=lambda f: (f[0], lds_read(p, f[2]), registers(p, f[2])))
    of_tile: Counter = Counter()
    for cycles, words, config in found:
        tile = config.tile_m, config.tile_n
        if len(space.kept) == KEPT:
            space.dropped.append(Dropped(config, f"estimated at {cycles / found[0][0]:.2f} times the best: {words}"))
        elif of_tile[tile] == KEPT_OF_A_TILE:
            space.dropped.append(Dropped(config, f"{KEPT_OF_A_TILE} others of this tile read less of LDS"))
        else:
            of_tile[tile] += 1
            space.kept.append(Candidate(config, words))
    return space


def _all(p: GemmProblem) -> Iterator[Gfx950Config]:
    stages = STAGES if direct_bytes(p) else STAGES[-1:]
    for m, n, k, s, w, shape in product(TILES_M, TILES_N, TILES_K, stages, WAVES, SHAPES):
        yield Gfx950Config(m, n, k, s, w, shape)


def registers(p: GemmProblem, cfg: Gfx950Config) -> int:
    """Vector registers that a wave needs, about: sums, two K steps of operands, addresses, tiles in flight."""
    rows, columns = cfg.repeat(p)
    atom = cfg.atom(p)
    per_lane = lambda tv: tv.vector.size * p.input_type.bytes // 4
    sums = cfg.tile_m * cfg.tile_n // cfg.workgroup_size
    operands = 2 * (rows * per_lane(atom.a) + columns * per_lane(atom.b))
    chunk = direct_bytes(p) or WIDEST_READ
    loads = (cfg.tile_m + cfg.tile_n) * cfg.tile_k * p.input_type.bytes // (chunk * cfg.workgroup_size)
    flying = 0 if direct_bytes(p) else loads * WIDEST_READ // 4
    return sums + operands + loads + flying + ADDRESS_REGISTERS


def lds_read(p: GemmProblem, cfg: Gfx950Config) -> int:
    """Bytes that a workgroup's waves read from LDS for one K tile."""
    atom, (rows, columns) = cfg.atom(p), cfg.repeat(p)
    per_wave = rows * atom.d.tile[0] + columns * atom.d.tile[1]
    return cfg.waves[0] * cfg.waves[1] * per_wave * cfg.tile_k * p.input_type.bytes


def limit(p: GemmProblem, cfg: Gfx950Config, limits: GpuLimits) -> str | None:
    """The limit that a configuration runs into, in words; None if it fits."""
    rows, columns = cfg.atom(p).d.tile
    if cfg.tile_m % (rows * cfg.waves[0]) or cfg.tile_n % (columns * cfg.waves[1]):
        return f"{cfg.waves[0]}x{cfg.waves[1]} waves of {rows}x{columns} do not fill the tile"
    chunk = direct_bytes(p) or WIDEST_READ
    for name, size in (("A", cfg.tile_m), ("B", cfg.tile_n)):
        if size * cfg.tile_k * p.input_type.bytes % (chunk * cfg.workgroup_size):
            return f"{name}'s tile is less than one load of {chunk} bytes by {cfg.workgroup_size} threads"
    if cfg.lds_bytes(p) > limits.shared_bytes:
        return f"{cfg.lds_bytes(p)} bytes of LDS; a workgroup has {limits.shared_bytes}"
    if cfg.tile_m * cfg.tile_n > SUMS_MOST * cfg.workgroup_size:
        return f"more than {SUMS_MOST} sums a lane"
    each = limits.registers // ceil(cfg.workgroup_size // limits.lanes / limits.simds)
    if registers(p, cfg) > each:
        return f"about {registers(p, cfg)} registers; a wave has {each}"
    if cfg.tile_m > 2 * max(16, p.m_hint) or cfg.tile_n > 2 * max(32, p.n):
        return f"more than half of the tile would lie outside {p.m_hint} x {p.n}"
    if cfg.tile_k > 64 and p.k <= 64:
        return f"K = {p.k} fills at most half a tile"
    if cfg.stages > 2 and p.k <= 2 * cfg.tile_k:
        return f"K = {p.k} is done before a third stage is used"
    return None


def estimate(p: GemmProblem, cfg: Gfx950Config, limits: GpuLimits) -> tuple[float, str]:
    """(cycles, what they are made of): rounds of workgroups over the compute units, each a loop over K tiles."""
    atom, (rows, columns), waves = cfg.atom(p), cfg.repeat(p), cfg.waves[0] * cfg.waves[1]
    steps = cfg.tile_k // atom.a.tile[1]
    multiply = ceil(waves / limits.simds) * rows * columns * steps * atom.cycles
    read = lds_read(p, cfg) / limits.shared_read
    chunk = direct_bytes(p)
    slower = 1 if chunk == WIDEST_READ else 4 if chunk else 8  # narrow loads: as many more instructions
    fill = slower * (cfg.tile_m + cfg.tile_n) * cfg.tile_k * p.input_type.bytes / limits.shared_fill
    side = min(
        limits.shared_bytes // cfg.lds_bytes(p), max(1, limits.waves_with(registers(p, cfg)) * limits.simds // waves)
    )
    groups = ceil(p.m_hint / cfg.tile_m) * ceil(p.n / cfg.tile_n)
    together = min(side, ceil(groups / limits.compute_units))  # workgroups that share a compute unit
    rounds = ceil(groups / (limits.compute_units * together))
    hidden = 1 if cfg.stages > 2 or together > 1 else 0
    slowest = max((multiply * together, "matrix units"), (read * together, "LDS reads"), (fill * together, "loads"))
    exposed = 0 if hidden else limits.latency / 2  # a single stage of look-ahead covers half
    one = ceil(p.k / cfg.tile_k) * (max(slowest[0], exposed) + BARRIER_CYCLES) + 2 * limits.latency
    words = f"{rounds} rounds of {together} workgroups a compute unit, bound by {slowest[1]}, about"
    return rounds * one, f"{words} {rounds * one:.0f} cycles"
