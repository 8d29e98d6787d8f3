"""Configurations of grouped products on sm_90a: tiles for an average group, in as many stages as fit.

The estimate counts cycles of one multiprocessor as the dense one does, of workgroups that walk all groups' tiles. Where
groups have few rows each weight is read once and reading them is all that counts; how many tiles there are, and whether
they come out even, then decides. Real groups are not alike: measuring decides among the best few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from statistics import mean

from flykernels.targets.gpu import GpuLimits
from templates.gemm.sm90a_config import BLOCK_K, BLOCK_M, shared_memory
from templates.gemm.space import Candidate, Dropped, Space
from templates.gemm.space_sm90a import (
    COLUMNS_MOST,
    FILL,
    LATENCY,
    MEMORY,
    MULTIPLY,
    ROUND,
    SHARED,
    STAGES_LEAST,
    STAGES_MOST,
    START,
    STORED,
)
from templates.gemm.space_sm90a import (
    limit as dense_limit,
)

from .problem import GroupedGemmProblem
from .sm90a import as_dense, why_not
from .sm90a_config import GroupedSm90aConfig
from .sm90a_tiles import unit

TILES_M = (16, 32, 64, 128, 256)
TILES_N = (64, 96, 128, 160, 192, 224, 256)
KEPT, OF_HEIGHT = 12, 4  # as many as are compiled and measured; of tiles with as many rows
WORST = 1.7  # times the best estimate: which groups will have how many rows is not known
STREAMING_ROWS = 256  # of a group up to which its weights are not wanted again soon
BOARD_BYTES = 128  # where tiles are told of
TABLE_BYTES = 3 * 4  # of shared memory a group: where its tokens and its tiles begin, its rank
FINDING = 700  # cycles to find the next tile's group
SHARES = (2, 0, 5)  # of the rows that groups get in turn: as routers deal them
NOT_HIDDEN = 0.2  # of what takes less time than what counts; as measured on an H200


def candidates(p: GroupedGemmProblem, target) -> Space:
    """At most KEPT, the likeliest first. `kept` is empty, with the reason in `dropped`, where none serves p."""
    reason = why_not(p)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    limits, space, found = target.limits, Space(), []
    for config in _tiles(p, limits):
        reason = limit(p, config, limits)
        if reason:
            space.dropped.append(Dropped(config, reason))
        else:
            found.append((*estimate(p, config, limits), config))
    found.sort(key=lambda f: f[0])
    best = [f[-1] for f in found[:2]]
    of_height: dict[int, int] = {}
    for cycles, words, config in found:
        height = of_height[config.tile_m] = of_height.get(config.tile_m, 0) + 1
        for variant, why in _variants(p, config, config in best, limits):
            if cycles > WORST * found[0][0] or height > OF_HEIGHT or len(space.kept) == KEPT:
                than = f"estimated at {cycles / found[0][0]:.2f} times the best: {words}"
                space.dropped.append(Dropped(variant, than))
            elif limit(p, variant, limits) is None:
                space.kept.append(Candidate(variant, f"{words}; {why}" if why else words))
    return space


def _tiles(p: GroupedGemmProblem, limits: GpuLimits) -> Iterator[GroupedSm90aConfig]:
    rows, columns = _size(p)
    for m in TILES_M:
        if m > BLOCK_M and m >= 2 * rows:
            continue
        for n in TILES_N:
            if n > TILES_N[0] and n >= 2 * columns:
                continue
            groups = (2, 1) if m > BLOCK_M else (1, 2) if n > 192 else (1, 1)
            if m > BLOCK_M and n < TILES_N[0]:
                continue
            evict = "b" if rows <= STREAMING_ROWS and p.form != "k" else "none"
            yield _fullest(p, GroupedSm90aConfig(tile_m=m, tile_n=n, groups=groups, evict=evict), limits)


def _size(p: GroupedGemmProblem) -> tuple[int, int]:
    """(rows, columns) of an average group's C."""
    size = {"m": p.m, "n": p.n} | ({p.form: p.group_hint} if p.form in ("m", "n") else {})
    return (p.group_hint if p.form == "batch" else size["m"]), size["n"]


def _depth(p: GroupedGemmProblem) -> int:
    return p.group_hint if p.form == "k" else p.k


def _room(p: GroupedGemmProblem, config: GroupedSm90aConfig) -> int:
    """Bytes of shared memory."""
    table = BOARD_BYTES + (TABLE_BYTES * (p.groups + 32) if p.ragged else 0)
    return shared_memory(as_dense(p), config).total + ceil(table / 1024) * 1024


def _fullest(p: GroupedGemmProblem, config: GroupedSm90aConfig, limits: GpuLimits) -> GroupedSm90aConfig:
    """The configuration with as many stages as shared memory holds."""
    stages = STAGES_MOST
    while stages > STAGES_LEAST and _room(p, replace(config, stages=stages)) > limits.shared_bytes:
        stages -= 1
    return replace(config, stages=stages)


def _variants(
    p: GroupedGemmProblem, config: GroupedSm90aConfig, best: bool, limits: GpuLimits
) -> Iterator[tuple[GroupedSm90aConfig, str]]:
    """(configuration, what speaks for it) of one tile: what measuring must choose between."""
    yield config, "a weight's lines leave L2 first" if config.evict == "b" else ""
    if not best:
        return
    if config.evict == "b":
        yield replace(config, evict="none"), "weights stay in L2"
    yield replace(config, tma_store=True), "TMA writes C while the next tile is multiplied"


def limit(p: GroupedGemmProblem, cfg: GroupedSm90aConfig, limits: GpuLimits) -> str | None:
    """The limit of the hardware or of the kernel that a configuration runs into, in words; None if none."""
    reason = dense_limit(as_dense(p), cfg, limits)
    if reason:
        return reason
    if cfg.tma_store and (p.form == "n" or unit(p) > 1):
        return "TMA would write what belongs to other groups"
    if not cfg.persistent or cfg.split_k > 1 or cfg.stream_k:
        return "workgroups of a grouped product stay, and each does whole tiles by itself"
    if cfg.cluster_size > 1 and (cfg.cluster[1] > 1 or cfg.queued or p.form not in ("m", "batch")):
        return "workgroups of a cluster have tiles of one group side by side along M, and are dealt them out"
    if cfg.columns > COLUMNS_MOST:
        return f"{cfg.columns} columns a warpgroup; wgmma takes {COLUMNS_MOST}"
    if _room(p, cfg) * cfg.beside > limits.shared_bytes:
        return f"{_room(p, cfg)} bytes of shared memory, {cfg.beside} times; there are {limits.shared_bytes}"
    return None


def estimate(p: GroupedGemmProblem, cfg: GroupedSm90aConfig, limits: GpuLimits) -> tuple[float, str]:
    """(cycles, what they are made of) of groups whose rows are shared out as SHARES says.

    What the multiprocessors do comes in whole rounds of tiles; memory is read at its rate until the end."""
    size, units = p.input_type.bytes, limits.compute_units * cfg.beside
    rows, columns = _size(p)
    all_rows = [rows * share * len(SHARES) / sum(SHARES) for share in SHARES] if p.form == "m" else [rows]
    high, wide = mean(ceil(r / cfg.tile_m) for r in all_rows), ceil(columns / cfg.tile_n)
    tiles, steps = ceil(p.groups * high * wide), ceil(_depth(p) / cfg.tile_k)
    rounds = ceil(tiles / units) * cfg.beside
    loaded = (cfg.tile_m + cfg.tile_n) * cfg.tile_k * size
    instructions = cfg.blocks * cfg.groups[0] * cfg.groups[1] * cfg.tile_k // BLOCK_K
    read = instructions * (BLOCK_M + cfg.columns) * BLOCK_K * size
    moved = p.groups * (mean(r > 0 for r in all_rows) * columns + rows) * _depth(p) * size
    last = cfg.tile_n * _depth(p) * size * units / MEMORY / 2  # half a tile, at the end, which others do not wait with
    output = cfg.tile_m * cfg.tile_n * p.output_type.bytes / STORED + ROUND + FINDING
    parts = {
        "tensor cores": rounds * (steps * max(cfg.tile_m, BLOCK_M) * cfg.tile_n * cfg.tile_k / MULTIPLY + output),
        "shared memory": rounds * (steps * (read + loaded) / SHARED + output),
        "L2": rounds * steps * loaded / FILL,
        "memory": moved / MEMORY * max(1.0, units / tiles) + last,
        "latency": rounds / cfg.beside * steps * LATENCY / (cfg.stages - 1),
    }
    why = max(parts, key=parts.__getitem__)
    cycles = START + parts[why] + NOT_HIDDEN * (sum(parts.values()) - parts[why])
    return cycles, f"{tiles} tiles in {rounds} rounds, bound by {why}, about {cycles:.0f} cycles"
