"""Grouped GEMM on a CPU: threads share the tiles of all groups by what they cost; a tile is the dense kernel's.

All tiles stand in one line, group by group. A tile costs its rows (form "k": what it sums over) and a constant for what
does not depend on them: B is read and packed. Each of `threads` shares is a stretch of the line of the same cost; where
it begins and ends follows from offs, so that no thread waits for another and none is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flykernels.codeobject import Extent
from flykernels.dtypes import i64
from flykernels.lang import Kernel, View, constant, maximum, minimum
from templates.gemm import x86_dot, x86_panel
from templates.gemm.config import X86Config
from templates.gemm.x86_tile import Tile

from .operands import arguments, matrix
from .problem import GroupedGemmProblem
from .schedule import up

FIXED_ROWS = 16  # what reading and packing B costs, in rows of A multiplied


def grouped_gemm(k: Kernel, p: GroupedGemmProblem, cfg: X86Config):
    """The kernel; arguments as in arguments.py, one workgroup a share."""
    p, given = arguments(k, p)
    share_tiles(k, p, cfg, given, one_tile)


def share_tiles(k: Kernel, p: Any, cfg: X86Config, given: dict, tile: Callable, unit: int = 1):
    """Does the tiles of this workgroup's share: tile(k, p, cfg, given, group, first of T, size, number of the tile).

    p: a problem not of form "n". unit: groups begin and end at multiples of it; other offs are rounded down."""
    k.grid = ((Extent(cfg.threads),),)
    share, tokens = k.workgroup_id().to(i64), given["tokens"]
    columns = up(p.n, cfg.tile_n)
    zero = constant(0, i64)

    def group(g, before):
        """(first, end of T, tiles, cost) of group g; before: where the one before ends."""
        if p.ragged:
            end = minimum(given["offs"].get(g).to(i64), tokens)
            end = maximum(before, end if unit == 1 else end // unit * unit)
        else:
            before, end = zero, tokens
        size = end - before
        rows = up(p.m, cfg.tile_m) if p.form == "k" else up(size, cfg.tile_m)
        tiles = constant(rows * columns, i64) if isinstance(rows, int) else rows * columns
        return before, end, tiles, tiles * (size + FIXED_ROWS) if p.form == "k" else size * columns + tiles * FIXED_ROWS

    @k.loop(zero, constant(p.groups, i64), carry=(zero, zero))
    def counted(g, carry):
        _, end, _, cost = group(g, carry[0])
        return end, carry[1] + cost

    begin, stop = (counted[1] * s // cfg.threads for s in (share, share + 1))

    @k.loop(zero, constant(p.groups, i64), carry=(zero, zero))
    def _(g, carry):
        first, end, tiles, cost = group(g, carry[0])
        inside = lambda x: minimum(maximum(((x - carry[1]) * tiles + (cost - 1)) // maximum(cost, 1), 0), tiles)

        @k.loop(inside(begin), inside(stop))
        def _(i):
            tile(k, p, cfg, given, g, first, end - first, i)

        return end, carry[1] + cost


def one_tile(k: Kernel, p: GroupedGemmProblem, cfg: X86Config, given: dict, g, first, size, i):
    """Tile number i of group g, down its columns."""
    d = p.dense
    view = lambda name: matrix(p, given, name, g, first, size)
    m = constant(p.m, i64) if p.form == "k" else size
    rows = up(m, cfg.tile_m)
    row = i % rows * cfg.tile_m
    tile = Tile(
        a=view("a"), b=view("b"), bias=None, residual=None, c=view("c"), m=m, k=size if p.form == "k" else p.k,
        first_row=row, end_row=minimum(row + cfg.tile_m, m), column_tile=i // rows,
    )  # fmt: skip
    if p.k == 0 and p.form != "k":
        zeros(k, p, cfg, tile)
    else:
        {"panel": x86_panel, "dot": x86_dot}[cfg.family].make_tile(k, d, cfg, tile)


def zeros(k: Kernel, p: GroupedGemmProblem, cfg: X86Config, tile: Tile):
    """A tile of a product of nothing."""
    left = tile.column_tile * cfg.tile_n
    c: View = tile.c

    @k.loop(tile.first_row, tile.end_row)
    def _(row):
        @k.loop(left, minimum(left + cfg.tile_n, p.n))
        def _(column):
            c.put(constant(0, p.output_type), row, column)
