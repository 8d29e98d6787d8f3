"""Scaled grouped GEMM on gfx950: workgroups that stay and walk the tiles of all groups, as the dense grouped kernel's
do; a tile is the scaled kernel's, its rings, slots of scales, loops and scaled matrix instructions.

Where only the run knows K (form "k"), a group may begin at any block of 32: its scales begin at any byte, and come
straight from memory."""

from __future__ import annotations

from typing import Any

from flykernels.lang import Kernel, Value
from templates.gemm.gfx950 import shelves_of
from templates.gemm.gfx950_output import store
from templates.scaled_gemm import gfx950 as scaled
from templates.scaled_gemm.gfx950_operands import ScaledMma

from ..gfx950 import over_tiles, workspace
from ..operands import Parked
from ..schedule import Spot
from .arguments import POINTERS, WORD, declared
from .config import ScaledGroupedConfig
from .operands import matrix
from .problem import ScaledGroupedProblem


def why_not(p: ScaledGroupedProblem) -> str | None:
    """Why this template does not serve the problem, in words; None if it does."""
    if p.form == "m" and p.scaling == "block" and p.dense.blocks % WORD == 0 and p.align_scales < WORD:
        return f"scales begin at multiples of {p.align_scales} bytes; {WORD} are loaded together"
    return scaled.why_not(p.dense)


def scaled_grouped_gemm(k: Kernel, p: Any, cfg: Any):
    """The kernel; arguments as in arguments.py (in form "k" `workspace` at the end), a one-dimensional grid of
    `cfg.workgroups`. p: a ScaledGroupedProblem, cfg: a ScaledGroupedConfig: they have what the dense grouped kernel's
    parts ask of theirs."""
    names = declared(p) | workspace(p)
    given = dict(zip(names, k.args(**names)))
    over_tiles(k, p, cfg, given, Parked(k, given, POINTERS), one_tile, p.unit)


def one_tile(k: Kernel, p: ScaledGroupedProblem, cfg: ScaledGroupedConfig, parked: Parked, spot: Spot, then):
    """One tile of one group's product. then: done between the sums and C."""
    d: Any = p.dense  # it has what the dense kernel's parts ask of theirs
    tile: Any = cfg.tile
    uniform = lambda x: k.target.uniform(x) if isinstance(x, Value) else x
    group, row, column, first, size = map(uniform, (spot.group, spot.row, spot.column, spot.first, spot.size))
    view = lambda name: matrix(p, parked.take(name), name, group, first, size)
    mma = ScaledMma(k, tile.spread_atom(d), tile.waves, tile.repeat(d), tile.k_waves)
    of_a, of_b = (tile.tile_m, row), (tile.tile_n, column)
    part = lambda x, rows, at: x.tile((rows,), at)
    views = {"a": part(view("a"), *of_a), "b": part(view("b").transposed(), *of_b)}
    blocks = {"a": of_a, "b": of_b} if p.scaling == "block" else {}
    scales = {which: part(view(f"scale_{which}"), *of) for which, of in blocks.items()}
    sums, rings = scaled.multiplied(k, d, tile, mma, views, scales)
    k.afresh()  # registers are for the main loop
    then()
    if p.scaling == "row":
        given = {"m": size, "scale_a": view("scale_a"), "scale_b": view("scale_b")}
        sums = scaled.scaled(k, d, tile, mma, sums, given, (row, column))
    store(k, d, tile, mma, sums, view, (row, column), shelves_of(k, d, tile, rings))
