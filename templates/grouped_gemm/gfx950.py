"""Grouped GEMM on gfx950: workgroups that stay and walk the tiles of all groups; a tile is the dense kernel's.

`schedule.py` says which tile comes next, `operands.py` what a group's matrices are; rings, main loops (full tiles and
half-tile-interleaved ones) and the way from sums to C are templates/gemm's. Rows past a group's end lie outside the
buffers that loads go through, and outside the view that stores are guarded by.
"""

from __future__ import annotations

from collections.abc import Callable

from flykernels.codeobject import Extent
from flykernels.dtypes import i32
from flykernels.lang import Global, Kernel, Value
from templates.gemm import gfx950 as dense
from templates.gemm.gfx950_config import mma_of
from templates.gemm.gfx950_operands import part_of_k
from templates.gemm.gfx950_output import COUNTER_BYTES, store

from .config import GroupedConfig
from .operands import Parked, arguments, matrix
from .problem import GroupedGemmProblem
from .schedule import Queue, Schedule, Spot, turns, walk


def why_not(p: GroupedGemmProblem, strides: dict[str, int] | None = None) -> str | None:
    """Why this template does not serve the problem, in words; None if it does. strides: as templates.gemm.gfx950's."""
    return dense.why_not(p.dense, strides)


def grouped_gemm(k: Kernel, p: GroupedGemmProblem, cfg: GroupedConfig):
    """The kernel; arguments as in arguments.py (in form "k" `workspace` at the end), a one-dimensional grid of
    `cfg.workgroups`."""
    p, given = arguments(k, p, **workspace(p))
    over_tiles(k, p, cfg, given, Parked(k, given), one_tile)


def workspace(p: GroupedGemmProblem) -> dict:
    """The argument that a kernel has besides the operands: form "k" counts the tiles that are taken."""
    return {"workspace": Global(i32, (1,))} if p.form == "k" else {}


def over_tiles(
    k: Kernel, p: GroupedGemmProblem, cfg: GroupedConfig, given: dict, parked: Parked, one_tile: Callable,
    block: int = 1,
):  # fmt: skip
    """Workgroups that stay do all tiles, each by one_tile(k, p, cfg, parked, Spot, then): in turns or, form "k", where
    tiles cost what only the run knows, whoever is free takes the next. block: see Schedule."""
    k.grid = ((Extent(cfg.workgroups),),)
    tile = cfg.tile
    schedule = Schedule(k, p, given.get("offs"), given["tokens"].to(i32), (tile.tile_m, tile.tile_n), block=block)
    tiles, me, dies = schedule.tiles, k.workgroup_id(), k.target.limits.dies

    def do(number, then=lambda: None):
        k.afresh()  # addresses of loads do not live through the epilogue of the tile before
        one_tile(k, p, cfg, parked, schedule.spot(number, tile.group_m), then)
        k.barrier()  # all have read LDS; the next tile's loads may write it

    if p.form == "k":
        k.workspace = (Extent(COUNTER_BYTES),)
        queue = Queue(k, given["workspace"], tiles, cfg.workgroups)
        queue.take()
        k.barrier()

        @k.repeat(queue.taken(), lambda number: number < tiles)
        def _(number):
            do(number, queue.take)
            return queue.taken()
    else:

        @k.loop(0, turns(tiles, cfg.workgroups))
        def _(turn):
            number = walk(turn, me, cfg.workgroups, tiles, dies)
            k.when(number < tiles)(lambda: do(number))


def one_tile(k: Kernel, p: GroupedGemmProblem, cfg: GroupedConfig, parked: Parked, spot: Spot, then):
    """One tile of one group's product. then: done between the sums and C."""
    d, tile = p.dense, cfg.tile
    uniform = lambda x: k.target.uniform(x) if isinstance(x, Value) else x
    group, row, column, first, size = map(uniform, (spot.group, spot.row, spot.column, spot.first, spot.size))
    view = lambda name: matrix(p, parked.take(name), name, group, first, size)
    mma = mma_of(k, d, tile)
    if p.k or p.form == "k":
        operands = (view("a"), tile.tile_m, row), (view("b").transposed(), tile.tile_n, column)
        if p.form == "k":
            (a, b), last = (x.tile((n,), at) for x, n, at in operands), None
        else:
            (a, last), (b, _) = (part_of_k(d, tile, *x, 0) for x in operands)
        sums, rings = dense.multiplied(k, d, tile, mma, a, b, last)
        k.afresh()  # registers are for the main loop
        shelves = dense.shelves_of(k, d, tile, rings)
    else:  # a product of nothing
        parts = [(i, j) for i in range(2) for j in range(2)] if tile.interleaved else [(0, 0)]
        sums, shelves = {part: mma.zeros() for part in parts}, [(None, 0)] * len(parts)
    then()
    store(k, d, tile, mma, sums, view, (row, column), shelves)
