"""Scaled grouped GEMM on a CPU: threads share the tiles of all groups by what they cost; a tile is the scaled kernel's,
which decodes FP8 and FP4 on their way into panels."""

from __future__ import annotations

from flykernels.dtypes import i64
from flykernels.lang import Kernel, constant, minimum
from templates.gemm.config import X86Config
from templates.gemm.x86_tile import Tile
from templates.scaled_gemm.x86 import ScaledPanels

from ..schedule import up
from ..x86 import share_tiles
from .arguments import declared
from .operands import matrix
from .problem import ScaledGroupedProblem


def scaled_grouped_gemm(k: Kernel, p: ScaledGroupedProblem, cfg: X86Config):
    """The kernel; arguments as in arguments.py, one workgroup a share. cfg: family "panel", both operands packed."""
    names = declared(p)
    given = dict(zip(names, k.args(**names)))
    share_tiles(k, p, cfg, given, one_tile, p.unit)


def one_tile(k: Kernel, p: ScaledGroupedProblem, cfg: X86Config, given: dict, g, first, size, i):
    """Tile number i of group g, down its columns."""
    view = lambda name: matrix(p, given, name, g, first, size)
    m = constant(p.m, i64) if p.form == "k" else size
    rows = up(m, cfg.tile_m)
    row = i % rows * cfg.tile_m
    tile = Tile(
        a=view("a"), b=view("b"), bias=None, residual=None, c=view("c"), m=m, k=size if p.form == "k" else p.k,
        first_row=row, end_row=minimum(row + cfg.tile_m, m), column_tile=i // rows,
    )  # fmt: skip
    ScaledPanels(k, p.dense, cfg, tile, view("scale_a"), view("scale_b")).run()
