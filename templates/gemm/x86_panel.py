"""GEMM by panels: a block of C stays in registers while A's columns are broadcast over B's rows.

Loops, from outside in: blocks of K; blocks of rows of A (which stay in L2); panels of B (which stay in L1); panels of
A; steps along K. See Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
"""

from __future__ import annotations

from dataclasses import replace

from flykernels.dtypes import bf16, f32
from flykernels.lang import Kernel, Layout, View, fma, maximum, minimum, select
from flykernels.lang.values import Value, constant

from .config import X86Config
from .packing import packed_shape
from .problem import GemmProblem
from .x86_pack import pack_a, pack_b, read_pair, wide
from .x86_tile import Tile, finish


def make_tile(k: Kernel, p: GemmProblem, cfg: X86Config, tile: Tile):
    """One workgroup's tile of C."""
    Panels(k, p, cfg, tile).run()


class Panels:
    """The tile's loops; a class for what they all look at."""

    def __init__(self, k: Kernel, p: GemmProblem, cfg: X86Config, tile: Tile):
        self.k, self.p, self.cfg, self.tile = k, p, cfg, tile
        self.lanes = k.target.vector_bytes // f32.bytes
        known = isinstance(tile.k, int)
        self.one_block = known and tile.k <= cfg.k_block
        blocks = (tile.k + (cfg.k_block - 1)) // cfg.k_block
        self.blocks = blocks if known else maximum(blocks, 1)  # at least one, which writes zeros
        self.filled = min(cfg.k_block, self.steps(tile.k)) if known else cfg.k_block  # steps of a block, with the zeros
        self.whole_panels, self.tail = divmod(p.n, cfg.columns)
        tile_panels = cfg.tile_n // cfg.columns
        self.first_panel = tile.column_tile * tile_panels
        self.end_panel = minimum(self.first_panel + tile_panels, self.whole_panels + (1 if self.tail else 0))
        if cfg.pack_a:
            self.a_panels = k.private(f32, cfg.m_block // cfg.rows, self.filled, cfg.rows)
        if p.packed_b:
            self.b_panels = packed_view(tile.b, p, cfg)
        elif cfg.pack_b:
            self.b_panels = k.private(f32, tile_panels, self.filled, cfg.columns)
        self.sums = k.private(f32, *((cfg.rows, cfg.columns) if self.one_block else (cfg.tile_m, cfg.tile_n)))

    def run(self):
        k, p, cfg, tile = self.k, self.p, self.cfg, self.tile

        @k.loop(wide(0), wide(self.blocks))
        def _(block):
            k0 = block * cfg.k_block
            count = tile.k if self.one_block else minimum(tile.k - k0, cfg.k_block)

            @k.loop(tile.first_row, tile.end_row, cfg.m_block)
            def _(row):
                end = minimum(row + cfg.m_block, tile.end_row)
                if cfg.pack_a:
                    self.each_row_panel(row, end, lambda at, panel: self.copy_a(at, panel, k0, count))

                @k.loop(self.first_panel, minimum(self.end_panel, self.whole_panels))
                def _(panel):
                    self.column_panel(block, k0, count, row, end, panel, cfg.columns)

                if self.tail:

                    @k.when(self.end_panel > self.whole_panels)
                    def _():
                        self.column_panel(block, k0, count, row, end, wide(self.whole_panels), self.tail)

    def each_row_panel(self, row, end, visit):
        """visit(first row, number of the panel in the block)"""

        @self.k.loop(row, end, self.cfg.rows)
        def _(at):
            visit(at, (at - row) // self.cfg.rows)

    def copy_a(self, row, panel, k0, count):
        pack_a(
            self.k,
            self.tile.a,
            self.tile.m,
            row,
            k0,
            count,
            self.steps(count),
            self.a_panels.at(panel)[0],
            self.cfg.rows,
            self.lanes,
        )

    def copy_b(self, column, valid: int, k0, count, panel: View):
        """`valid` columns of B's block to a panel."""
        pack_b(self.k, self.tile.b, self.p.b, k0, count, self.steps(count), column, valid, panel, self.lanes)

    def finish(self, x: Value, row, column, count: int):
        """What is done with `count` finished sums at (row, column...)."""
        finish(self.p, self.tile, x, row, column, count)

    def steps(self, count):
        """`count` with the zeros behind it."""
        unroll = self.cfg.unroll
        return -(-count // unroll) * unroll if isinstance(count, int) else (count + (unroll - 1)) // unroll * unroll

    def column_panel(self, block, k0, count, row, end, panel, valid: int):
        """Columns `valid` wide from panel `panel` on, for the rows of one block of A."""
        k, cfg, tile = self.k, self.cfg, self.tile
        column, here = panel * cfg.columns, panel - self.first_panel
        b = tile.b.at(k0, column)
        if self.p.packed_b:
            b = self.b_panels.at(panel, k0 // (2 if b.dtype == bf16 else 1))[0]
        elif cfg.pack_b:
            b = self.b_panels.at(here)[0]

            @k.when(row.equals(tile.first_row))
            def _():
                self.copy_b(column, valid, k0, count, b)

        self.each_row_panel(
            row, end, lambda at, i: self.register_block(block, k0, count, at, i, column, here, b, valid)
        )

    def register_block(self, block, k0, count, row, a_panel, column, here, b: View, valid: int):
        """rows x columns of C for one block of K."""
        k, p, cfg, tile, lanes = self.k, self.p, self.cfg, self.tile, self.lanes
        starts = [(v, min(lanes, valid - v)) for v in range(0, valid, lanes)]
        a = self.read_a(k0, row, a_panel)
        acc = tuple(tuple(self.start(block, row, here, r, v) for v, _ in starts) for r in range(cfg.rows))

        def add(acc, columns: list[Value], row_of_b: list[Value]):
            return tuple(
                tuple(fma(x.splat(lanes), y, s) for y, s in zip(row_of_b, sums)) for x, sums in zip(columns, acc)
            )

        packed = cfg.pack_b or self.p.packed_b
        zeros = packed and cfg.pack_a  # both have them: the steps beyond K add nothing
        whole = wide(self.steps(count)) if zeros else wide(count) // cfg.unroll * cfg.unroll

        @k.loop(wide(0), whole, cfg.unroll, carry=acc)
        def most(i, acc):
            for u in range(0, cfg.unroll, 2):
                for j, row_of_b in enumerate(self.two_rows(b, i, u, starts, packed)):
                    acc = add(acc, a(i, u + j), row_of_b)
            return acc

        def others():
            @k.loop(whole, wide(count), carry=most)
            def total(i, acc):
                return add(acc, a(i, 0), self.one_row(b, i, starts, packed))

            return total

        left = self.left(row, here)
        for r, line in enumerate(most if zeros or (isinstance(tile.k, int) and tile.k % cfg.unroll == 0) else others()):
            for (v, _), x in zip(starts, line):
                left.put(x, r, v)

        @k.when(True if self.one_block else block.equals(self.blocks - 1))
        def finished():
            @k.loop(wide(0), minimum(tile.end_row - row, cfg.rows))
            def _(r):
                for v, n in starts:
                    self.finish(left.get(r, v, width=lanes), row + r, column + v, n)

    def left(self, row, here) -> View:
        """Where a register block leaves its sums: for the next block of K, or for the loop that finishes rows of C."""
        return self.sums if self.one_block else self.sums.at(row - self.tile.first_row, here * self.cfg.columns)

    def two_rows(self, b: View, i, u: int, starts, packed: bool):
        """Rows i + u and i + u + 1 of a panel of B, as vectors; the second is read when the first has been used."""
        if packed:
            return read_pair(b.at(i // 2 if b.dtype == bf16 else i), u, len(starts), self.lanes)
        return (self.one_row(b.at(i), u + j, starts, packed) for j in range(2))

    def one_row(self, b: View, i, starts, packed: bool) -> list[Value]:
        if packed:
            return [b.get(i, v, width=self.lanes).to(f32) for v, _ in starts]
        return [b.get(i, v, width=self.lanes, count=n).to(f32) for v, n in starts]

    def read_a(self, k0, row, a_panel):
        """(step, further) -> A's column there, as scalars; `further` is an int, folded into the address."""
        cfg, tile = self.cfg, self.tile
        if cfg.pack_a:
            panel = self.a_panels.at(a_panel)[0]
            return lambda i, u: [panel.at(i).get(u, r).to(f32) for r in range(cfg.rows)]
        lines = [tile.a.at(minimum(row + r, tile.m - 1), k0) for r in range(cfg.rows)]
        return lambda i, u: [line.at(0, i).get(0, u).to(f32) for line in lines]

    def start(self, block, row, here, r, v) -> Value:
        """What the sums begin with: nothing, or what the blocks of K before left."""
        zero = constant(0, f32, self.lanes)
        if self.one_block:
            return zero
        return select(block > 0, self.left(row, here).get(r, v, width=self.lanes), zero)


def packed_view(b: View, p: GemmProblem, cfg: X86Config) -> View:
    """What pack_b made: (panel, K, columns), or for bf16 (panel, K/2, columns, 2)."""
    shape = packed_shape(p, cfg)
    return replace(b, shape=shape, stride=Layout.compact(*shape).stride)
