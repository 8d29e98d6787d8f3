"""GEMM on a CPU: what both families share - operands, the workgroup's tile of C, what is done with a finished sum."""

from __future__ import annotations

from dataclasses import replace

from flykernels.codeobject import Extent
from flykernels.dtypes import i64
from flykernels.lang import Kernel, View, minimum

from . import x86_dot, x86_panel
from .arguments import declared
from .config import X86Config
from .problem import GemmProblem
from .x86_tile import Tile


def gemm(k: Kernel, p: GemmProblem, cfg: X86Config):
    """C = activation(A B + bias) + residual; arguments as in arguments.py."""
    names = declared(p)
    given = dict(zip(names, k.args(**names)))
    row_tiles, column_tiles = Extent("m", cfg.tile_m), Extent(p.n, cfg.tile_n)
    k.grid = ((*((Extent("batch"),) if p.batched else ()), column_tiles, row_tiles),)
    work = k.workgroup_id().to(i64)
    tiles_m = (given["m"] + (cfg.tile_m - 1)) // cfg.tile_m
    tile_row, rest = work % tiles_m, work // tiles_m
    batch, tile_column = (rest // column_tiles.count({}), rest % column_tiles.count({})) if p.batched else (0, rest)
    first = tile_row * cfg.tile_m
    view = lambda name: _operand(p, given, name, batch)
    tile = Tile(
        a=view("a"),
        b=view("b"),
        bias=view("bias") if p.bias != "none" else None,
        residual=view("residual") if p.residual else None,
        c=view("c"),
        m=given["m"],
        k=p.k,
        first_row=first,
        end_row=minimum(first + cfg.tile_m, given["m"]),
        column_tile=tile_column,
    )
    {"panel": x86_panel, "dot": x86_dot}[cfg.family].make_tile(k, p, cfg, tile)


def _operand(p: GemmProblem, given: dict, name: str, batch) -> View:
    """An operand as a matrix with run-time strides."""
    view = given[name]
    if f"{name}_batch" in given:
        view = replace(view, shape=(1,), stride=(given[f"{name}_batch"],)).at(batch)
    if name == "b" and p.packed_b:
        return view
    row = 0 if name == "bias" and p.bias == "row" else given.get(f"{name}_row", 1)
    column = given.get(f"{name}_col", 1)
    shape = {"a": (given["m"], p.k), "b": (p.k, p.n)}.get(name, (given["m"], p.n))
    return replace(view, shape=shape, stride=(row, column))
