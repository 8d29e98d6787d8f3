"""Scaled GEMM on a CPU: FP8 and FP4 are decoded to f32 panels, and the dense panel kernel multiplies those.

With block scaling a panel holds numbers times their scales, which is exact in f32 unless it overflows; with one scale
a matrix or a row, the sums are scaled at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flykernels.codeobject import Extent
from flykernels.dtypes import f4e2m1, f32, i16, i32, i64, u8, u32
from flykernels.lang import Kernel, View, minimum, transpose
from flykernels.lang.microscaling import decoded, scale_factor
from flykernels.lang.values import Value, constant
from flykernels.microscaling import BLOCK
from templates.gemm.config import X86Config
from templates.gemm.x86_pack import wide
from templates.gemm.x86_panel import Panels
from templates.gemm.x86_tile import Tile

from .arguments import declared
from .problem import ScaledGemmProblem

DECODED = 8  # numbers that are decoded together: of FP4 one 32-bit word


def scaled_gemm(k: Kernel, p: ScaledGemmProblem, cfg: X86Config):
    """C = (A scales_a) (B scales_b) + bias; arguments as in arguments.py. cfg: family "panel", both operands packed."""
    names = declared(p)
    given = dict(zip(names, k.args(**names)))
    m = given["m"]
    row_tiles, column_tiles = Extent("m", cfg.tile_m), Extent(p.n, cfg.tile_n)
    k.grid = ((column_tiles, row_tiles),)
    work = k.workgroup_id().to(i64)
    tiles_m = (m + (cfg.tile_m - 1)) // cfg.tile_m
    tile_row, tile_column = work % tiles_m, work // tiles_m
    first = tile_row * cfg.tile_m
    matrix = lambda name, shape, stride: replace(given[name], shape=shape, stride=stride)
    tile = Tile(
        a=matrix("a", (m, p.row_bytes("a")), (given["a_row"], 1)),
        b=matrix("b", (p.row_bytes("b"), p.n), (1, given["b_col"])),
        bias=matrix("bias", (m, p.n), (0, 1)) if p.bias != "none" else None,
        residual=None,
        c=matrix("c", (m, p.n), (given["c_row"], 1)),
        m=m,
        k=p.k,
        first_row=first,
        end_row=minimum(first + cfg.tile_m, m),
        column_tile=tile_column,
    )
    each = lambda view: replace(view, shape=(1, p.blocks), stride=(p.blocks, 1)) if p.scaling == "block" else view
    ScaledPanels(k, p, cfg, tile, each(given["scale_a"]), each(given["scale_b"])).run()


class ScaledPanels(Panels):
    """The dense tile's loops over operands that are decoded on their way into panels.

    scale_a, scale_b: with block scaling views of (rows, blocks) and (columns, blocks)"""

    p: Any  # a ScaledGemmProblem, which has what the dense loops ask of theirs

    def __init__(self, k: Kernel, p: Any, cfg: X86Config, tile: Tile, scale_a: View, scale_b: View):
        super().__init__(k, p, cfg, tile)
        self.scale_a, self.scale_b = scale_a, scale_b

    def copy_a(self, row, panel, k0, count):
        to, kind = self.a_panels.at(panel)[0], self.p.a_type
        rows = [minimum(row + r, self.tile.m - 1) for r in range(self.cfg.rows)]
        lines = [self.tile.a.at(r) for r in rows]

        def group(k1, at, left: int):
            """DECODED steps from k1 on, which go to step `at` of the panel; only `left` of them are there."""
            scale = [self.scale(self.scale_a, r, k1) for r in rows]
            for r, (line, s) in enumerate(zip(lines, scale)):
                v = codes(line, k1, kind, left)
                v = v if s is None else v * s
                for j in range(left):
                    to.put(v[j], at + j, r)

        def zero(at):
            for r in range(self.cfg.rows):
                to.put(constant(0, f32), at, r)

        self.groups(k0, count, group, zero)

    def copy_b(self, column, valid: int, k0, count, panel: View):
        lanes, kind = self.lanes, self.p.b_type
        columns = [column + min(c, valid - 1) for c in range(-(-valid // lanes) * lanes)]
        lines = [self.tile.b.transposed().at(c) for c in columns]

        def group(k1, at, left: int):
            for first in range(0, len(lines), lanes):
                some = slice(first, first + lanes)
                scale = None
                if self.p.scaling == "block":
                    scale = constant(0, f32, lanes)
                    for i, c in enumerate(columns[some]):
                        scale = scale.insert(i, self.scale(self.scale_b, c, k1))
                for j, x in enumerate(across([codes(line, k1, kind, left) for line in lines[some]])[:left]):
                    panel.put(x if scale is None else x * scale, at + j, first)

        def zero(at):
            for first in range(0, len(lines), lanes):
                panel.put(constant(0, f32, lanes), at, first)

        self.groups(k0, count, group, zero)

    def groups(self, k0, count, group, zero):
        """Calls group(k, step of the panel, how many) for all of a block of K, and zero(step) for what fills it up."""
        whole, left = wide(count) // DECODED * DECODED, self.p.k % DECODED

        def rest():
            group(k0 + whole, whole, left)

        @self.k.loop(wide(0), whole, DECODED)
        def _(i):
            group(k0 + i, i, DECODED)

        if left:  # only the last block ends within a group
            self.k.when(wide(count) > whole)(rest)

        @self.k.loop(wide(count), wide(self.steps(count)))
        def _(i):
            zero(i)

    def scale(self, scales: View, row, k1) -> Value | None:
        """With block scaling the factor of the numbers of a row (or column) around k1."""
        if self.p.scaling != "block":
            return None
        return scale_factor(scales.get(row, k1 // BLOCK).to(i32))

    def finish(self, x: Value, row, column, count: int):
        p, tile = self.p, self.tile
        if p.scaling == "tensor":
            x = x * self.scale_a.recast(f32).get() * self.scale_b.recast(f32).get()
        elif p.scaling == "row":
            of_row, of_columns = (replace(s, shape=(1,), stride=(1,)) for s in (self.scale_a, self.scale_b))
            x = x * of_row.get(row) * of_columns.get(column, width=x.width, count=count)
        if tile.bias is not None:
            x = x + tile.bias.get(0, column, width=x.width, count=count).to(f32)
        tile.c.put(x.to(p.output_type), row, column, count=count)


def codes(line: View, k1, kind, left: int) -> Value:
    """DECODED numbers of a row from k1 on (a multiple of DECODED), f32; only the first `left` are read."""
    at = line.at(0, k1 // 2 if kind == f4e2m1 else k1)
    if kind == f4e2m1:  # a block is a multiple of DECODED, so here `left` is DECODED
        word, places = at.recast(u32).get().splat(DECODED), constant(0, u32, DECODED)
        for i in range(DECODED):
            places = places.insert(i, constant(kind.bits * i, u32))
        return decoded(((word >> places) & 15).to(i16), kind)
    return decoded(at.recast(u8).get(0, width=DECODED, count=left).to(i16), kind)


def across(rows: list[Value]) -> list[Value]:
    """Rows of DECODED numbers, one a lane -> DECODED vectors over the lanes."""
    if len(rows) == DECODED:
        return transpose(rows)
    halves = [transpose(rows[i : i + DECODED]) for i in range(0, len(rows), DECODED)]  # wider vectors: block by block
    while len(halves) > 1:
        n = 2 * halves[0][0].width
        halves = [[x.shuffle(range(n), y) for x, y in zip(a, b)] for a, b in zip(halves[::2], halves[1::2])]
    return halves[0]
