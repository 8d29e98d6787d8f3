"""Scaled grouped GEMM on gfx950, form "m": workgroups that stay and walk the tiles of all groups, as the dense grouped
kernel's do; a tile is the scaled kernel's, its rings, slots of scales, loops and scaled matrix instructions."""

from __future__ import annotations

from typing import Any

from flykernels.codeobject import Extent
from flykernels.dtypes import i32
from flykernels.lang import Kernel, Value
from templates.gemm.gfx950 import shelves_of
from templates.gemm.gfx950_output import store
from templates.scaled_gemm import gfx950 as scaled
from templates.scaled_gemm.gfx950_operands import ScaledMma

from ..operands import Parked
from ..schedule import Schedule, Spot, turns, walk
from .arguments import POINTERS, WORD, declared
from .config import ScaledGroupedConfig
from .operands import matrix
from .problem import ScaledGroupedProblem


def why_not(p: ScaledGroupedProblem) -> str | None:
    """Why this template does not serve the problem, in words; None if it does."""
    if p.form != "m":
        return "weights' gradients, whose K only the run knows, have no kernel with scales on gfx950"
    if p.dense.blocks % WORD == 0 and p.align_scales < WORD:
        return f"scales begin at multiples of {p.align_scales} bytes; {WORD} are loaded together"
    return scaled.why_not(p.dense)


def scaled_grouped_gemm(k: Kernel, p: ScaledGroupedProblem, cfg: ScaledGroupedConfig):
    """The kernel; arguments as in arguments.py, a one-dimensional grid of `cfg.workgroups`."""
    names = declared(p)
    given = dict(zip(names, k.args(**names)))
    k.grid = ((Extent(cfg.workgroups),),)
    tile, me, dies = cfg.tile, k.workgroup_id(), k.target.limits.dies
    grouped: Any = p  # it has what the schedule asks of a problem
    schedule = Schedule(k, grouped, given["offs"], given["tokens"].to(i32), (tile.tile_m, tile.tile_n))
    parked = Parked(k, given, POINTERS)
    tiles = schedule.tiles

    def do(number):
        k.afresh()  # addresses of loads do not live through the epilogue of the tile before
        one_tile(k, p, cfg, parked, schedule.spot(number, tile.group_m))
        k.barrier()  # all have read LDS; the next tile's loads may write it

    @k.loop(0, turns(tiles, cfg.workgroups))
    def _(turn):
        number = walk(turn, me, cfg.workgroups, tiles, dies)
        k.when(number < tiles)(lambda: do(number))


def one_tile(k: Kernel, p: ScaledGroupedProblem, cfg: ScaledGroupedConfig, parked: Parked, spot: Spot):
    """One tile of one group's product."""
    d: Any = p.dense  # it has what the dense kernel's parts ask of theirs
    tile: Any = cfg.tile
    uniform = lambda x: k.target.uniform(x) if isinstance(x, Value) else x
    group, row, column, first, size = map(uniform, (spot.group, spot.row, spot.column, spot.first, spot.size))
    view = lambda name: matrix(p, parked.take(name), name, group, first, size)
    mma = ScaledMma(k, tile.spread_atom(d), tile.waves, tile.repeat(d), tile.k_waves)
    of_a, of_b = (tile.tile_m, row), (tile.tile_n, column)
    part = lambda x, rows, at: x.tile((rows, x.shape[1]), at, 0)
    views = {"a": part(view("a"), *of_a), "b": part(view("b").transposed(), *of_b)}
    scales = {"a": part(view("scale_a"), *of_a), "b": part(view("scale_b"), *of_b)}
    sums, rings = scaled.multiplied(k, d, tile, mma, views, scales)
    k.afresh()  # registers are for the main loop
    store(k, d, tile, mma, sums, view, (row, column), shelves_of(k, d, tile, rings))
