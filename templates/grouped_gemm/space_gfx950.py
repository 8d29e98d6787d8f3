"""Configurations on gfx950: the dense template's tiles, ranked for as many products as there are groups."""

from __future__ import annotations

from collections import Counter

from flykernels.dtypes import i32, i64
from flykernels.targets.gpu import GpuLimits
from templates.gemm.gfx950_config import Gfx950Config, direct_bytes
from templates.gemm.space import Candidate, Dropped, Space
from templates.gemm.space_gfx950 import NOT_LOOKED_AT, estimate, every, lds_read, side_by_side
from templates.gemm.space_gfx950 import limit as dense_limit

from .arguments import scalars
from .config import GroupedConfig
from .gfx950 import why_not
from .problem import GroupedGemmProblem

# As many as are compiled and measured; of those that share tile_m and tile_n: how uneven groups are is not known, so
# different tiles are worth more than different stages.
KEPT, KEPT_OF_A_TILE = 10, 1
COPIED_K_MOST = 128  # elements of K a tile, through registers: 64x64x256 spills where every size has a tail
RUN_TIME_TILE = 128 * 256  # of C: a larger interleaved tile leaves no registers for two loops over K


def candidates(p: GroupedGemmProblem, target) -> Space:
    """All tiles that fit, the likeliest first. `kept` is empty, with the reason in `dropped`, where none serves p."""
    reason = why_not(p)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    p = p.flipped if p.form == "n" else p
    d, limits, space, found = p.dense, target.limits, Space(), []
    for tile in every(d, limits):
        if tile.split_k > 1:
            continue
        reason = dense_limit(d, tile, limits) or limit(p, tile, limits)
        if reason:
            space.dropped.append(Dropped(tile, reason))
        else:
            found.append((*estimate(d, tile, limits, p.groups), tile))
    space.dropped.append(Dropped("other tiles", NOT_LOOKED_AT))
    space.dropped.append(
        Dropped("K split over workgroups", "groups are many tiles already, and none waits for another")
    )
    found.sort(key=lambda f: (round(f[0]), abs(f[2].workgroup_size - 256), -f[2].stages, lds_read(d, f[2])))
    of_tile: Counter = Counter()
    for cycles, words, tile in found:
        kind = tile.tile_m, tile.tile_n, tile.interleaved
        if len(space.kept) == KEPT:
            space.dropped.append(Dropped(tile, f"estimated at {cycles / found[0][0]:.2f} times the best: {words}"))
        elif of_tile[kind] == KEPT_OF_A_TILE:
            space.dropped.append(Dropped(tile, "another of this tile is estimated to be faster"))
        else:
            of_tile[kind] += 1
            space.kept.append(Candidate(GroupedConfig(tile, limits.compute_units * together(p, tile, limits)), words))
    return space


def together(p: GroupedGemmProblem, tile: Gfx950Config, limits: GpuLimits) -> int:
    """Workgroups that fit on a compute unit, which all stay: one more would wait for another to end."""
    by_lds = limits.shared_bytes // (tile.lds_bytes(p.dense) + table_bytes(p.groups, len(scalars(p)), limits))
    return min(by_lds, side_by_side(p.dense, tile, limits))


def table_bytes(groups: int, numbers: int, limits: GpuLimits) -> int:
    """Of LDS, the most that is kept beside the tiles: two tables of groups, the arguments (of which so many are
    numbers), a word of the queue."""
    lanes = limits.lanes
    return 2 * (-(-groups // lanes) * lanes + 1) * i32.bytes + numbers * 2 * i64.bytes + i32.bytes


def limit(p: GroupedGemmProblem, tile: Gfx950Config, limits: GpuLimits) -> str | None:
    """The limit that a tile runs into besides the dense template's, in words; None if it fits."""
    room = limits.shared_bytes - table_bytes(p.groups, len(scalars(p)), limits)
    if tile.lds_bytes(p.dense) > room:
        return f"{tile.lds_bytes(p.dense)} bytes of LDS; {room} are left beside the table of groups"
    if not direct_bytes(p.dense) and tile.tile_k > COPIED_K_MOST:
        return f"K tiles of {tile.tile_k} come through registers, of which walking the groups leaves too few"
    if p.form == "k" and tile.interleaved and tile.tile_m * tile.tile_n > RUN_TIME_TILE:
        return "K is only known at run time: the loop and the one for its end spill with this interleaved tile"
    return None
