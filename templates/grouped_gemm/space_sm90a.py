"""Configurations of grouped products on sm_90a: tiles for an average group, in as many stages as fit.

The estimate counts cycles of one multiprocessor as the dense one does, of workgroups that walk all groups' tiles. Where
groups have few rows each weight is read once and reading them is all that counts; how many tiles there are, and whether
they come out even, then decides. Real groups are not alike: measuring decides among the best few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

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

TILES_M = (16, 32, 64, 128, 256)
TILES_N = (64, 96, 128, 160, 192, 224, 256)
KEPT, TILES_KEPT = 10, 6  # as many as are compiled and measured; of the tiles, which come in variants
STREAMING_ROWS = 256  # of a group up to which its weights are not wanted again soon
TABLE_BYTES = 3 * 4  # of shared memory a group: where its tokens and its tiles begin, its rank
FINDING = 700  # cycles to find the next tile's group


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
    for _, words, config in found[:TILES_KEPT]:
        for variant, why in _variants(p, config):
            if len(space.kept) == KEPT:
                space.dropped.append(Dropped(variant, f"{KEPT} others are likelier"))
            else:
                space.kept.append(Candidate(variant, f"{words}; {why}" if why else words))
    for cycles, words, config in found[TILES_KEPT:]:
        space.dropped.append(Dropped(config, f"estimated at {cycles / found[0][0]:.2f} times the best: {words}"))
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
    table = TABLE_BYTES * (p.groups + 32) if p.ragged else 0
    return shared_memory(as_dense(p), config).total + ceil(table / 1024) * 1024


def _fullest(p: GroupedGemmProblem, config: GroupedSm90aConfig, limits: GpuLimits) -> GroupedSm90aConfig:
    """The configuration with as many stages as shared memory holds."""
    stages = STAGES_MOST
    while stages > STAGES_LEAST and _room(p, replace(config, stages=stages)) > limits.shared_bytes:
        stages -= 1
    return replace(config, stages=stages)


def _variants(p: GroupedGemmProblem, config: GroupedSm90aConfig) -> Iterator[tuple[GroupedSm90aConfig, str]]:
    """(configuration, what speaks for it) of one tile: what measuring must choose between."""
    if config.evict == "b":
        yield config, "a weight's lines leave L2 first"
        yield replace(config, evict="none"), "weights stay in L2"
    else:
        yield config, ""


def limit(p: GroupedGemmProblem, cfg: GroupedSm90aConfig, limits: GpuLimits) -> str | None:
    """The limit of the hardware or of the kernel that a configuration runs into, in words; None if none."""
    reason = dense_limit(as_dense(p), cfg, limits)
    if reason:
        return reason
    if not cfg.persistent or cfg.split_k > 1 or cfg.stream_k or cfg.cluster_size > 1 or cfg.tma_store:
        return "workgroups of a grouped product stay, and each does whole tiles by itself"
    if cfg.columns > COLUMNS_MOST:
        return f"{cfg.columns} columns a warpgroup; wgmma takes {COLUMNS_MOST}"
    if _room(p, cfg) * cfg.beside > limits.shared_bytes:
        return f"{_room(p, cfg)} bytes of shared memory, {cfg.beside} times; there are {limits.shared_bytes}"
    return None


def estimate(p: GroupedGemmProblem, cfg: GroupedSm90aConfig, limits: GpuLimits) -> tuple[float, str]:
    """(cycles, what they are made of): rounds of workgroups, each a loop over K tiles."""
    size, units = p.input_type.bytes, limits.compute_units * cfg.beside
    rows, columns = _size(p)
    high, wide = ceil(rows / cfg.tile_m), ceil(columns / cfg.tile_n)
    tiles = high * wide * p.groups
    loaded = (cfg.tile_m + cfg.tile_n) * cfg.tile_k * size
    multiplied = max(cfg.tile_m, BLOCK_M)
    instructions = cfg.blocks * cfg.groups[0] * cfg.groups[1] * cfg.tile_k // BLOCK_K
    read = instructions * (BLOCK_M + cfg.columns) * BLOCK_K * size
    # what the workgroups of a round read from memory, each byte once: whole groups, or some columns of one
    together = min(tiles, units)
    of_b = min(columns, cfg.tile_n * wide) * together / (high * wide)
    of_a = rows * max(1.0, together / (high * wide))
    slowest, why = max(
        (multiplied * cfg.tile_n * cfg.tile_k / MULTIPLY, "tensor cores"),
        ((read + loaded) / SHARED, "shared memory"),
        (loaded / FILL, "L2"),
        ((of_a + of_b) * cfg.tile_k * size / MEMORY, "memory"),
        (LATENCY / (cfg.stages - 1), "latency"),
    )
    rounds = ceil(tiles / units)
    output = cfg.tile_m * cfg.tile_n * p.output_type.bytes / STORED + ROUND + FINDING
    if why == "memory":  # the ring is filled meanwhile
        output = 0
    cycles = START + rounds * (ceil(_depth(p) / cfg.tile_k) * slowest + output)
    return cycles, f"{tiles} tiles in {rounds} rounds, bound by {why}, about {cycles:.0f} cycles"
