"""Configurations on sm_90a, from its registers, shared memory and multiprocessors: which to compile, which not and why.

The estimate that ranks tiles counts cycles of one multiprocessor. It tells large differences apart; small ones, and
what L2 holds when the kernel starts, are for measuring to decide: so the best tiles are kept in several variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from flykernels.targets.gpu import GpuLimits

from . import sm90a_cluster
from .problem import GemmProblem
from .sm90a import why_not
from .sm90a_config import (
    BLOCK_K,
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
KEPT, TILES_KEPT = 14, 4  # as many as are compiled and measured; of the tiles, which come in variants
SUMS_MOST = {1: 128, 2: 160}  # of C a thread, of one warpgroup, and of two that take the producer's registers
STAGES_MOST, STAGES_LEAST = 12, 3
RESERVED = 1024  # bytes of shared memory that a workgroup takes besides its own (CUDA programming guide, sm_90)
SPLITS = (2, 3, 4, 6, 8, 16)
CLUSTER_SPLIT, CLUSTER_M = 2, 128  # K split over a cluster wins for so many workgroups, and up to this M
STREAMING_M = 256  # up to here B is read about once, and bringing it takes longer than multiplying
# Cycles and bytes a cycle of one multiprocessor at 1.75 GHz, measured on an H200 with these kernels:
MULTIPLY = 2048  # multiply-adds of 16-bit elements (the data sheet's 989 TFLOP/s at 1.83 GHz)
SHARED = 144  # bytes of shared memory that wgmma reads and TMA writes: 128 are read, and some of what comes hides
FILL = 72  # bytes from L2
MEMORY = 2300  # bytes from memory, all multiprocessors together
LATENCY = 1200  # from asking for a K tile to having it
START, ROUND = 4500, 1500  # a workgroup before its first K tile; an epilogue that nothing hides
STORED = 24  # bytes of C written
ADDED = 12  # bytes of sums left for others and read again, where workgroups share tiles
SENT, MET = 32, 1000  # bytes of sums sent to another workgroup of a cluster; what the cluster's barriers take
COPIES = 12  # times slower are threads that copy by themselves than TMA
FEW_ROWS, MANY_ROWS = 4, 16  # of tiles that are worked on together
UNFILLED = 0.85  # of the last round: with less, the K steps of the last rounds are dealt out instead


def candidates(p: GemmProblem, target, further: Callable[[Sm90aConfig], str | None] = lambda _: None) -> Space:
    """At most KEPT, the likeliest first. `kept` is empty, with the reason in `dropped`, where none serves p.

    further: the limit beyond `limit` that a configuration runs into, in words, where the caller knows of one."""
    reason = why_not(p)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    limits, space, found = target.limits, Space(), []
    slow = tma_reads(p)
    for config in _copying(p) if slow else _tiles(p, limits):
        reason = limit(p, config, limits) or further(config)
        if reason:
            space.dropped.append(Dropped(config, reason))
        else:
            found.append((*estimate(p, config, limits), config))
    found.sort(key=lambda f: f[0])
    if slow:
        space.dropped.append(Dropped("kind wgmma", slow))
    for cycles, words, config in found[:TILES_KEPT]:
        for variant, why in _variants(p, config, cycles == found[0][0], limits):
            reason = limit(p, variant, limits) or further(variant)
            if reason or len(space.kept) == KEPT:
                space.dropped.append(Dropped(variant, reason or f"{KEPT} others are likelier"))
            elif variant not in [c.config for c in space.kept]:
                space.kept.append(Candidate(variant, f"{words}; {why}" if why else words))
    for cycles, words, config in found[TILES_KEPT:]:
        space.dropped.append(Dropped(config, f"estimated at {cycles / found[0][0]:.2f} times the best: {words}"))
    return space


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
            deep = 128 if m <= BLOCK_M and p.m_hint <= BLOCK_M and n <= 128 and p.k > 128 else 64
            count, units = ceil(p.m_hint / m) * ceil(p.n / n), limits.compute_units
            base = Sm90aConfig(
                tile_m=m, tile_n=n, tile_k=deep, groups=groups, persistent=count > units,
                evict="b" if p.m_hint <= STREAMING_M else "none",
            )  # fmt: skip
            yield _fullest(p, base, limits)
            if not p.batched and count * 2 <= units:
                for split in SPLITS:
                    if count * split <= units and base.steps(p) >= 4 * split:
                        yield _fullest(p, replace(base, split_k=split), limits)
                        if split == CLUSTER_SPLIT and m >= BLOCK_M and p.m_hint <= CLUSTER_M:
                            yield _fullest(p, replace(base, split_k=split, k_cluster=True), limits)
            if p.m_hint <= STREAMING_M and 1 < count / units < 4 and count / units / ceil(count / units) < UNFILLED:
                yield _fullest(p, replace(base, persistent=False, stream_k=units), limits)


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


def _variants(p: GemmProblem, config: Sm90aConfig, best: bool, limits: GpuLimits) -> Iterator[tuple[Sm90aConfig, str]]:
    """(configuration, what speaks for it) of one tile: what measuring must choose between."""
    if config.kind == "mma":
        yield config, ""
    elif p.m_hint <= BLOCK_M:
        early = replace(config, overlap="early")
        yield early, "B's lines leave L2 first, and drive nobody else's out"
        if p.n * p.k * p.input_type.bytes <= limits.l2_bytes:
            yield replace(early, evict="none"), "L2 holds B for the next call, whatever it held before"
        if best:
            yield replace(config, overlap="late"), "workgroups begin together"
            yield config, "the kernel ahead has ended"
    elif p.m_hint <= STREAMING_M:
        # workgroups that read the same at the same time read it once, which an early start would break up
        late = replace(config, overlap="late")
        yield replace(late, evict="none"), "B stays in L2 for the next call"
        yield replace(config, evict="none"), "the kernel ahead has ended"
        if best:
            yield late, "B's lines leave L2 first"
        if config.split_k == 1 and not config.stream_k:
            yield replace(late, evict="none", cluster=(2, 1)), "pairs of workgroups share B"
    else:
        early = replace(config, overlap="early")
        by_tma = replace(early, persistent=True, tma_store=True)
        if config.split_k > 1 or limit(p, by_tma, limits) is not None:
            by_tma = early
        told = "TMA writes C while the next tile is multiplied" if by_tma != early else ""
        yield replace(by_tma, group_m=FEW_ROWS), "; ".join(filter(None, [told, "few rows of tiles together"]))
        if best and p.m_hint >= MANY_ROWS * config.tile_m:
            yield replace(by_tma, group_m=MANY_ROWS), "many rows of tiles together"
        yield by_tma, told
        if config.split_k == 1:
            yield replace(by_tma, cluster=(2, 1)), "pairs of workgroups share B"
        yield early, "warps write C, and more stages fit"


def limit(p: GemmProblem, cfg: Sm90aConfig, limits: GpuLimits) -> str | None:
    """The limit of the hardware or of the kernel that a configuration runs into, in words; None if none."""
    if cfg.kind == "mma":
        if cfg.overlap != "none":
            return "kernels of kind mma do not overlap"
        room = copied_room(p, cfg).total
    else:
        reason = tma_reads(p)
        if reason:
            return reason
        if cfg.columns % COLUMN_STEP or cfg.columns > COLUMNS_MOST:
            return f"{cfg.columns} columns a warpgroup; wgmma and the output take multiples of 16 up to {COLUMNS_MOST}"
        room = shared_memory(p, cfg).total
        most = SUMS_MOST[min(2, cfg.multipliers // WARPGROUP)]
        if cfg.sums > most:
            return f"{cfg.sums} sums a thread; at most {most} fit into registers beside addresses"
        if cfg.cluster_size > 1 and (cfg.split_k > 1 or cfg.stream_k):
            return "workgroups that share a tile are no cluster"
        if cfg.k_cluster:
            reason = sm90a_cluster.why_not(p, cfg)
            if reason:
                return reason
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
    size, units = p.input_type.bytes, limits.compute_units * cfg.beside
    rows, slices = max(cfg.tile_m, BLOCK_M), cfg.split_k
    loaded = (cfg.tile_m + cfg.tile_n) * cfg.tile_k * size
    instructions = cfg.blocks * cfg.groups[0] * cfg.groups[1] * cfg.tile_k // BLOCK_K
    read = instructions * (BLOCK_M + cfg.columns) * BLOCK_K * size
    high, wide = ceil(p.m_hint / cfg.tile_m), ceil(p.n / cfg.tile_n)
    tiles = high * wide * slices
    # what the workgroups of a round read from memory, each byte once
    together = min(high * wide, units // slices)
    down = min(high, cfg.group_m)
    across = min(wide, ceil(together / down))
    distinct = min(p.n, across * cfg.tile_n) + min(p.m_hint, ceil(together / across) * cfg.tile_m)
    slowest, why = max(
        (rows * cfg.tile_n * cfg.tile_k / MULTIPLY, "tensor cores"),
        ((read + loaded) / SHARED, "shared memory"),
        (loaded / FILL, "L2"),
        (slices * distinct * cfg.tile_k * size / MEMORY, "memory"),
        (LATENCY / (cfg.stages - 1), "latency"),
    )
    if cfg.kind == "mma":
        slowest, why = COPIES * loaded / FILL, "copies"
    rounds = tiles / units if cfg.stream_k else ceil(tiles / units)
    output = cfg.tile_m * cfg.tile_n * p.output_type.bytes / STORED + (ROUND if rounds > 1 else 0)
    cycles = START + rounds * (ceil(cfg.steps(p) / slices) * slowest + output)
    parts = slices if slices > 1 else 2 if cfg.stream_k else 0
    sums = rows * cfg.tile_n * 4
    if cfg.k_cluster:
        cycles += MET + sums / SENT
    elif parts:
        cycles += (1 + parts) * sums / ADDED
    return cycles, f"{tiles} pieces in {rounds:.3g} rounds, bound by {why}, about {cycles:.0f} cycles"
