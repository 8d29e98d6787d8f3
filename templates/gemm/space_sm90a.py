"""Configurations on sm_90a, from its registers, shared memory and multiprocessors: which to compile, which not and why.

The estimate that ranks tiles counts cycles of one multiprocessor. It tells large differences apart; small ones, and
what L2 holds when the kernel starts, are for measuring to decide: so the best tiles are kept in several variants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from flykernels.targets.gpu import GpuLimits

from .problem import GemmProblem
from .sm90a import why_not
from .sm90a_config import (
    BLOCK_M,
    COLUMNS_MOST,
    SWIZZLE_MOST,
    WARP,
    WARPGROUP,
    Sm90aConfig,
    copied_room,
    shared_memory,
    stores_wide,
    tma_reads,
)
from .space import Candidate, Dropped, Space

TILES_M = (16, 32, 64, 128, 256)
COLUMN_STEP = 16  # of a warpgroup's columns: what the output turns round at a time, and the narrowest swizzle
KEPT = 12  # as many as are compiled and measured
SUMS_MOST = {1: 128, 2: 160}  # of C a thread, of one warpgroup, and of two that take the producer's registers
STAGES_MOST, STAGES_LEAST = 16, 3
RESERVED = 1024  # bytes of shared memory that a workgroup takes besides its own (CUDA programming guide, sm_90)
SPLITS = (2, 3, 4, 6, 8, 16)
STREAMING_M = 256  # up to here B is read about once, and bringing it takes longer than multiplying
# Cycles and bytes a cycle of one multiprocessor at 1.75 GHz, measured on an H200 with these kernels:
MULTIPLY = 2048  # multiply-adds of 16-bit elements (the data sheet's 989 TFLOP/s at 1.83 GHz)
SHARED = 128  # bytes of shared memory that wgmma reads
FILL = 40  # bytes from L2, all multiprocessors at work
MEMORY = 2300  # bytes from memory, all together
START, ADDED = 4500, 3500  # a workgroup before its first K tile; adding up shared tiles
STORED = 24  # bytes of C written
ROUND = 1500  # an epilogue that the next tile's multiplications do not hide


def candidates(p: GemmProblem, target) -> Space:
    """At most KEPT, the likeliest first. `kept` is empty, with the reason in `dropped`, where none serves p."""
    reason = why_not(p)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    limits, space, found = target.limits, Space(), []
    slow = tma_reads(p)
    for config in _copying(p) if slow else _tiles(p, limits):
        reason = limit(p, config, limits)
        if reason:
            space.dropped.append(Dropped(config, reason))
        else:
            found.append((*estimate(p, config, limits), config))
    found.sort(key=lambda f: f[0])
    if slow:
        space.dropped.append(Dropped("kind wgmma", slow))
    for cycles, words, config in found[: _tiles_kept(p)]:
        for variant, why in _variants(p, config, cycles == found[0][0]):
            reason = limit(p, variant, limits)
            if reason or len(space.kept) == KEPT:
                space.dropped.append(Dropped(variant, reason or f"{KEPT} others are likelier"))
            elif variant not in [c.config for c in space.kept]:
                space.kept.append(Candidate(variant, f"{words}; {why}" if why else words))
    for cycles, words, config in found[_tiles_kept(p) :]:
        space.dropped.append(Dropped(config, f"estimated at {cycles / found[0][0]:.2f} times the best: {words}"))
    return space


def _tiles_kept(p: GemmProblem) -> int:
    return 4


def _tiles(p: GemmProblem, limits: GpuLimits) -> Iterator[Sm90aConfig]:
    """Every tile, in as many stages as fit; K split only where tiles leave multiprocessors idle."""
    for m in TILES_M:
        if m > 16 and m >= 2 * p.m_hint and m > BLOCK_M:
            continue
        if m < BLOCK_M and p.m_hint > m:
            continue
        groups = (1, 1) if m <= BLOCK_M else (2, 1)
        for n in range(COLUMN_STEP, COLUMNS_MOST + 1, COLUMN_STEP):
            if n >= 2 * max(p.n, COLUMN_STEP):
                continue
            if m >= 128 and n < 64:
                continue
            count = ceil(p.m_hint / m) * ceil(p.n / n)
            deep = 128 if m <= BLOCK_M and p.m_hint <= BLOCK_M and n <= 128 and p.k > 128 else 64
            base = Sm90aConfig(
                tile_m=m, tile_n=n, tile_k=deep, groups=groups, persistent=count > limits.compute_units,
                evict="b" if p.m_hint <= STREAMING_M else "none",
            )  # fmt: skip
            yield _fullest(p, base, limits)
            if count * 2 <= limits.compute_units and not p.batched:
                for split in SPLITS:
                    if count * split <= limits.compute_units and base.steps(p) >= 4 * split:
                        yield _fullest(p, replace(base, split_k=split), limits)


def _fullest(p: GemmProblem, config: Sm90aConfig, limits: GpuLimits) -> Sm90aConfig:
    """The configuration with as many stages as shared memory holds and K needs."""
    one = shared_memory(p, config).stage
    stages = min(STAGES_MOST, limits.shared_bytes // one, max(STAGES_LEAST, ceil(config.steps(p) / config.split_k)))
    while stages > STAGES_LEAST and shared_memory(p, replace(config, stages=stages)).total > limits.shared_bytes:
        stages -= 1
    return replace(config, stages=stages)


def _copying(p: GemmProblem) -> Iterator[Sm90aConfig]:
    """Tiles for operands that TMA cannot read: small enough that addresses fit into registers."""
    together = "any" not in (p.a, p.b) and min(p.align_a, p.align_b) >= 4
    stages, depth = (4, 64) if together else (2, 32)
    for m, n, groups in ((64, 64, (1, 1)), (128, 64, (2, 1)), (64, 128, (1, 2)), (128, 128, (2, 2)), (64, 32, (1, 1))):
        base = Sm90aConfig("mma", m, n, depth, stages, groups)
        yield base
        for split in SPLITS[:3]:
            if not p.batched and base.steps(p) >= 4 * split and ceil(p.m_hint / m) * ceil(p.n / n) * split <= 264:
                yield replace(base, split_k=split)


def _variants(p: GemmProblem, config: Sm90aConfig, best: bool) -> Iterator[tuple[Sm90aConfig, str]]:
    """(configuration, what speaks for it) of one tile: what measuring must choose between."""
    yield config, ""
    if config.kind == "mma":
        return
    if p.m_hint <= STREAMING_M:
        yield replace(config, evict="none"), "B stays in L2 for the next call"
        if best:
            yield replace(config, evict="both"), "nothing of A is kept in L2 either"
        return
    if stores_wide(p) and config.persistent and config.columns >= SWIZZLE_MOST // p.output_type.bytes:
        yield replace(config, tma_store=True), "TMA writes C while the next tile is multiplied"
    if ceil(p.m_hint / config.tile_m) % 2 == 0:
        yield replace(config, cluster=(2, 1)), "pairs of workgroups share B"
    yield replace(config, cluster=(1, 2)), "pairs of workgroups share A"


def limit(p: GemmProblem, cfg: Sm90aConfig, limits: GpuLimits) -> str | None:
    """The limit of the hardware or of the kernel that a configuration runs into, in words; None if none."""
    if cfg.kind == "mma":
        room = copied_room(p, cfg).total
    else:
        reason = tma_reads(p)
        if reason:
            return reason
        if cfg.columns % COLUMN_STEP or cfg.columns > COLUMNS_MOST:
            return f"{cfg.columns} columns a warpgroup; wgmma and the output take multiples of 16 up to {COLUMNS_MOST}"
        room = shared_memory(p, cfg).total
        sums = cfg.blocks * cfg.columns * BLOCK_M // WARPGROUP
        most = SUMS_MOST[min(2, cfg.multipliers // WARPGROUP)]
        if sums > most:
            return f"{sums} sums a thread; at most {most} fit into registers beside addresses"
        if cfg.cluster_size > 1 and (cfg.split_k > 1 or cfg.stream_k):
            return "workgroups that share a tile are no cluster"
        if cfg.tma_store and not stores_wide(p):
            return "C is not aligned to 16 bytes, which TMA needs"
        if cfg.tma_store and cfg.columns * p.output_type.bytes < SWIZZLE_MOST:
            return f"{cfg.columns} columns a warpgroup are less than a box of C"
    if (room + RESERVED) * cfg.beside > limits.shared_bytes + RESERVED:
        return f"{room} bytes of shared memory, {cfg.beside} times; there are {limits.shared_bytes}"
    if cfg.workgroup_size * cfg.beside > limits.simds * limits.max_waves * WARP:
        return f"{cfg.workgroup_size} threads, {cfg.beside} times: more than a multiprocessor's"
    return None


def estimate(p: GemmProblem, cfg: Sm90aConfig, limits: GpuLimits) -> tuple[float, str]:
    """(cycles, what they are made of): rounds of workgroups, each a loop over K tiles."""
    size = p.input_type.bytes
    rows = max(cfg.tile_m, BLOCK_M)
    multiply = rows * cfg.tile_n * cfg.tile_k / MULTIPLY
    instructions = cfg.blocks * cfg.groups[0] * cfg.groups[1] * cfg.tile_k // 16
    read = instructions * (BLOCK_M + cfg.columns) * 16 * size / SHARED
    loaded = (cfg.tile_m + cfg.tile_n) * cfg.tile_k * size
    tiles = ceil(p.m_hint / cfg.tile_m) * ceil(p.n / cfg.tile_n) * cfg.split_k
    at_once = min(tiles, limits.compute_units * cfg.beside)
    columns = max(1, at_once // max(1, min(ceil(p.m_hint / cfg.tile_m), cfg.group_m)) // cfg.split_k)
    distinct = min(p.n, columns * cfg.tile_n) + min(p.m_hint, ceil(at_once / columns) * cfg.tile_m)
    memory = cfg.split_k * distinct * cfg.tile_k * size / MEMORY
    slowest, why = max(
        (multiply, "tensor cores"), (read, "shared memory"), (loaded / FILL, "L2"), (memory, "memory"),
    )  # fmt: skip
    if cfg.kind == "mma":
        slowest, why = max(4 * multiply, 12 * loaded / FILL), "copies"
    ahead = (cfg.stages - 1) * loaded
    slowest = max(slowest, loaded * 1200 / ahead if ahead else 0)  # latency of memory over what is on its way
    rounds = ceil(tiles / (limits.compute_units * cfg.beside))
    one = ceil(cfg.steps(p) / cfg.split_k) * slowest
    output = cfg.tile_m * cfg.tile_n * p.output_type.bytes / STORED
    cycles = START + rounds * (one + (ROUND if rounds > 1 else 0) + output)
    cycles += ADDED + cfg.split_k * cfg.tile_n * rows * 4 / STORED / 2 if cfg.split_k > 1 else 0
    return cycles, f"{rounds} rounds of {tiles} tiles, bound by {why}, about {cycles:.0f} cycles"
