"""Configurations of grouped products on sm_90a: tiles for groups of several kinds, in as many stages as fit.

The estimate counts cycles of one multiprocessor as the dense one does, of workgroups that walk all groups' tiles, for
groups that are alike and groups that are not. Where groups have few rows each weight is read once and reading them is
all that counts. It tells large differences apart; measuring decides among the best few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from flykernels.targets.gpu import GpuLimits
from templates.gemm.sm90a_config import BLOCK_K, BLOCK_M, WARPGROUP, shared_memory
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
from .sm90a import as_dense, rows_may_lack, why_not
from .sm90a_config import GroupedSm90aConfig
from .sm90a_tiles import unit

TILES_M = (16, 32, 64, 128, 192, 256)
TILES_N = (64, 96, 128, 160, 192, 224, 256)
TILES_N_HIGH = (64, 96, 128, 192, 256)  # of tiles that several warpgroups share along M: others come out the same
TILES_N_OF_MANY = (128, 160, 192)  # of tiles of 64 rows of which a group has several
KEPT = 10  # as many as are compiled and measured
OF_LOW, OF_HIGH, OF_HEIGHT = (
    2,
    3,
    4,
)  # of tiles with as many rows: below 64, above, with 64 or where weights do not stream
LEAST, WORST = 4, 1.1  # beyond so many, none that is estimated at more than so many times the best
WORST_OF_FEW_ROWS = 1.5  # where a few rows more or less in each group decide
STREAMING_ROWS = 256  # of a group up to which its weights are not wanted again soon
L2_BYTES = 50 << 20  # NVIDIA's data sheet of the H200: weights that fit may still be there when the next call comes
SUMS_OF_THREE = 96  # of C a thread where three warpgroups share the registers: ptxas refuses more
BOARD_BYTES = 128  # where tiles are told of
TABLE_BYTES = 3 * 4  # of shared memory a group: where its tokens and its tiles begin, its rank
# As measured on an H200 with these kernels (see space_sm90a of the dense template for the others):
NOT_HIDDEN = 0.1  # of what takes less time than what counts
BEHIND_TMA, ROUND_BEHIND_TMA = 0.3, 0.5  # of writing C, and of the epilogue's rest, if TMA does it
TELLING = 300  # cycles a tile to hear which one is next
READ_AGAIN = 0.35  # of a weight, by tiles below each other that do not start together, if its lines leave L2 first
ALONE = 0.85  # of the multiprocessors must be at work for memory to be at its rate


def candidates(p: GroupedGemmProblem, target) -> Space:
    """At most KEPT, the likeliest first. `kept` is empty, with the reason in `dropped`, where none serves p."""
    reason = why_not(p)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    limits, space, found = target.limits, Space(), []
    for config, why in _variants(p, limits):
        reason = limit(p, config, limits)
        if reason:
            space.dropped.append(Dropped(config, reason))
        else:
            found.append((*estimate(p, config, limits), config, why))
    found.sort(key=lambda f: f[0])
    worst = WORST_OF_FEW_ROWS if _streams(p) else WORST
    seen: dict[tuple, int] = {}
    for cycles, words, config, why in found:
        height, tile = (config.tile_m,), (config.tile_m, config.tile_n)
        counts = seen.get(height, 0), seen.get(tile, 0)
        enough = len(space.kept) == KEPT or (len(space.kept) >= LEAST and cycles > worst * found[0][0])
        # measuring tells apart the ways to share out a tile's work where workgroups are many, or tiles low
        high = _streams(p) and config.tile_m > BLOCK_M
        ways, most = (1, OF_HIGH) if high else (2, OF_HEIGHT if config.tile_m >= BLOCK_M else OF_LOW)
        if enough or counts[0] == most or counts[1] == ways:
            than = f"estimated at {cycles / found[0][0]:.2f} times the best: {words}"
            space.dropped.append(Dropped(config, than))
            continue
        seen |= {height: counts[0] + 1, tile: counts[1] + 1}
        space.kept.append(Candidate(config, f"{words}; {why}"))
    return space


def _variants(p: GroupedGemmProblem, limits: GpuLimits) -> Iterator[tuple[GroupedSm90aConfig, str]]:
    """(configuration, what speaks for it) of every tile."""
    (rows, columns), streaming = _size(p), _streams(p)
    for m in TILES_M:
        if m > BLOCK_M and m >= 2 * rows:
            continue
        several = streaming and m == BLOCK_M < rows
        for n in TILES_N_HIGH if m > BLOCK_M else TILES_N_OF_MANY if several else TILES_N:
            if n > TILES_N[0] and (n >= 2 * columns or (m == TILES_M[-1] and n > COLUMNS_MOST // 2)):
                continue
            groups = (m // BLOCK_M, 1) if BLOCK_M < m < TILES_M[-1] else (2, 1) if m > BLOCK_M else (1, 1 + (n > 192))
            tile = GroupedSm90aConfig(tile_m=m, tile_n=n, groups=groups)
            deep = (64, 128) if streaming and m < BLOCK_M and n <= 128 else (64,)
            for depth in deep:
                yield from _ways(p, replace(tile, tile_k=depth), streaming, limits)


def _ways(
    p: GroupedGemmProblem, tile: GroupedSm90aConfig, streaming: bool, limits: GpuLimits
) -> Iterator[tuple[GroupedSm90aConfig, str]]:
    """How the workgroups may share out one tile's work, and how C leaves."""
    full = lambda config: _fullest(p, config, limits)
    free, dealt = "who is free takes the next tile", "workgroups with the same weight stay in step"
    if p.form == "k":
        yield full(tile), f"{free}, the largest groups first"
        yield full(replace(tile, tma_store=True)), f"{free}, TMA writes C meanwhile"
        return
    rows, columns = _size(p)
    if streaming:
        # an early start breaks up the step of workgroups that read the same at the same time
        tile = replace(tile, overlap="late" if rows <= BLOCK_M else "none")
        weights = p.groups * columns * _depth(p) * p.input_type.bytes
        leave = "; a weight's lines leave L2 first" if weights > L2_BYTES else ""
        first = replace(tile, evict="b" if leave else "none")
        one = tile.tile_m <= BLOCK_M
        yield full(first if one else tile), free + (leave if one else "")
        yield full(replace(first, queued=False)), dealt + leave
        return
    tile = replace(tile, overlap="early")
    yield full(tile), free
    yield full(replace(tile, tma_store=True)), f"{free}, TMA writes C meanwhile"
    yield full(replace(tile, tma_store=True, queued=False)), "all tiles cost the same, TMA writes C meanwhile"


def _streams(p: GroupedGemmProblem) -> bool:
    """Whether weights are read about once."""
    return _size(p)[0] <= STREAMING_ROWS and p.form != "k"


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


def limit(p: GroupedGemmProblem, cfg: GroupedSm90aConfig, limits: GpuLimits) -> str | None:
    """The limit of the hardware or of the kernel that a configuration runs into, in words; None if none."""
    reason = dense_limit(as_dense(p), cfg, limits)
    if reason:
        return reason
    if cfg.tma_store and (p.form == "n" or unit(p) > 1):
        return "TMA would write what belongs to other groups"
    if not cfg.persistent or cfg.split_k > 1 or cfg.stream_k or cfg.cluster_size > 1:
        return "workgroups of a grouped product stay, and each does whole tiles by itself"
    if p.form == "k" and unit(p) > 1 and cfg.blocks > 1:
        return f"{cfg.blocks} blocks of rows a warpgroup, and both ends of K are cleared: ptxas waits after each wgmma"
    if cfg.multipliers > 2 * WARPGROUP and cfg.sums > SUMS_OF_THREE:
        return f"{cfg.sums} sums a thread of three warpgroups; at most {SUMS_OF_THREE} fit into their registers"
    if cfg.columns > COLUMNS_MOST:
        return f"{cfg.columns} columns a warpgroup; wgmma takes {COLUMNS_MOST}"
    if _room(p, cfg) * cfg.beside > limits.shared_bytes:
        return f"{_room(p, cfg)} bytes of shared memory, {cfg.beside} times; there are {limits.shared_bytes}"
    return None


def shares(p: GroupedGemmProblem) -> list[list[int]]:
    """Of T, what each group that has any gets: all alike; the i-th 1 / i; alike with a third of the groups left out."""
    each, groups = p.group_hint, p.groups
    if p.form not in ("m", "n", "k"):
        return [[each] * groups]
    total, parts = each * groups, sum(1 / (1 + i) for i in range(groups))
    some = groups - groups // 3
    return [[each] * groups, [max(1, round(total / parts / (1 + i))) for i in range(groups)], [total // some] * some]


def estimate(p: GroupedGemmProblem, cfg: GroupedSm90aConfig, limits: GpuLimits) -> tuple[float, str]:
    """(cycles, what they are made of): the mean over `shares`."""
    found = [_estimate(p, cfg, limits, tokens) for tokens in shares(p)]
    cycles = sum(f[0] for f in found) / len(found)
    why, tiles = found[0][1:]
    return cycles, f"{tiles} tiles, bound by {why}, about {cycles:.0f} cycles"


def _estimate(p: GroupedGemmProblem, cfg: GroupedSm90aConfig, limits: GpuLimits, tokens: list[int]):
    """(cycles, what counts, tiles) where groups have so many of T: what a multiprocessor does, of each kind of work."""
    size, units = p.input_type.bytes, limits.compute_units * cfg.beside
    axis = "m" if p.form == "batch" else p.form
    sizes = [{"m": p.m, "n": p.n, "k": p.k, axis: t} for t in tokens]
    high = [ceil(x["m"] / cfg.tile_m) for x in sizes]  # tiles along M
    wide = [ceil(x["n"] / cfg.tile_n) for x in sizes]
    multiplied = [h * max(BLOCK_M, cfg.tile_m) for h in high]  # rows
    brought = [h * cfg.tile_m for h in high]
    if rows_may_lack(p, cfg):
        multiplied = brought = [ceil(x["m"] / BLOCK_M) * BLOCK_M for x in sizes]
    steps = [ceil(x["k"] / cfg.tile_k) for x in sizes]
    tiles = sum(h * w for h, w in zip(high, wide))
    # how much longer the busiest works than all would if work could be dealt out evenly
    uneven = max(1.0, units / tiles) if cfg.queued else ceil(tiles / units) / (tiles / units)
    each = uneven / units
    depth = cfg.tile_k * size
    products = sum(r * w * s for r, w, s in zip(multiplied, wide, steps)) * cfg.tile_n * cfg.tile_k * each
    loaded = sum((r * w + h * w * cfg.tile_n) * s for r, h, w, s in zip(brought, high, wide, steps)) * depth * each
    read = products / (BLOCK_M * cfg.tile_n * BLOCK_K) * cfg.groups[1] * (BLOCK_M + cfg.columns) * BLOCK_K * size
    weights = sum(x["n"] * x["k"] for x in sizes) * size
    moved: float = weights + sum(x["m"] * (x["n"] + x["k"]) for x in sizes) * size
    if cfg.evict == "b" and cfg.queued:
        moved += READ_AGAIN * sum((h - 1) * x["n"] * x["k"] for h, x in zip(high, sizes)) * size
    a_tile = cfg.tile_m * cfg.tile_n * p.output_type.bytes / STORED
    output = TELLING + (a_tile * BEHIND_TMA + ROUND * ROUND_BEHIND_TMA if cfg.tma_store else a_tile + ROUND)
    output *= tiles * each
    parts = {
        "tensor cores": products / MULTIPLY + output,
        "shared memory": (loaded + read) / SHARED + output,
        "L2": loaded / FILL,
        "memory": moved / MEMORY * max(1.0, ALONE * units / tiles),
        "latency": sum(h * w * s for h, w, s in zip(high, wide, steps)) * each * LATENCY / (cfg.stages - 1),
    }
    why = max(parts, key=parts.__getitem__)
    mean_depth = sum(x["k"] for x in sizes) / len(sizes)
    rows = max(BLOCK_M, cfg.tile_m)
    one = max(rows * cfg.tile_n / MULTIPLY, (cfg.tile_m + cfg.tile_n) * size / FILL) * mean_depth
    last = max(one / 2 if cfg.queued else 0.0, cfg.tile_n * mean_depth * size * units / MEMORY / 2 * (why == "memory"))
    cycles = START + parts[why] + NOT_HIDDEN * (sum(parts.values()) - parts[why]) + (last if tiles > units else 0.0)
    return cycles, why, tiles
