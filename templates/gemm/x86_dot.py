"""GEMM by dot products, for A row-major and B column-major: both run along K, so vectors do too and nothing is packed.

What a small M wants: a panel of B would be packed only to be read a few times. A block of rows x columns sums stays in
registers, each a vector along K; at the end of a block of K they are folded to numbers.
"""

from __future__ import annotations

from flykernels.dtypes import bf16, f32, i32
from flykernels.lang import Kernel, View, fma, minimum, select, sums
from flykernels.lang.values import Value, constant, lanes_where

from .config import X86Config
from .problem import GemmProblem
from .x86_pack import high_half, low_half, wide
from .x86_tile import Tile, finish

GROUP = 4  # sums folded together, and written as one vector


def make_tile(k: Kernel, p: GemmProblem, cfg: X86Config, tile: Tile):
    """One workgroup's tile of C: columns outermost, so that B is read once and a block of it stays in L1."""
    first = tile.column_tile * cfg.tile_n
    blocks, groups = -(-p.k // cfg.k_block), -(-cfg.columns // GROUP)
    partial = k.private(f32, cfg.tile_m, groups * GROUP) if blocks > 1 else None
    b = tile.b.transposed()

    @k.loop(first, minimum(first + cfg.tile_n, p.n), cfg.columns)
    def _(column):
        b_lines = [b.at(minimum(column + c, p.n - 1)) for c in range(cfg.columns)]

        @k.loop(wide(0), wide(blocks))
        def _(block):
            k0 = block * cfg.k_block

            @k.loop(tile.first_row, tile.end_row, cfg.rows)
            def _(row):
                a_lines = [tile.a.at(minimum(row + r, tile.m - 1)) for r in range(cfg.rows)]
                acc = dot_products(k, p, cfg, a_lines, b_lines, k0, blocks)
                for r, line in enumerate(acc):

                    @k.when(row + r < tile.end_row)
                    def _():
                        for g in range(groups):
                            x = folded(line[g * GROUP : (g + 1) * GROUP])
                            leave(k, p, cfg, tile, x, row + r, column, g * GROUP, block, blocks, partial)


def dot_products(k, p, cfg, a_lines, b_lines, k0, blocks):
    """rows x columns vectors whose elements add up to the products over one block of K."""
    lanes = k.target.vector_bytes // f32.bytes
    step = 2 * lanes if p.input_type == bf16 else lanes  # elements of K a load brings
    zero = constant(0, f32, lanes)
    acc = tuple((zero,) * cfg.columns for _ in range(cfg.rows))
    count = minimum(p.k - k0, cfg.k_block) if blocks > 1 else wide(p.k)
    end = k0 + count
    whole = k0 + count // step * step

    halves = range(step // lanes)
    few, many, flip = (a_lines, b_lines, False) if cfg.rows <= cfg.columns else (b_lines, a_lines, True)

    def add(acc, at, keep=lambda half, v: v):
        """The shorter side is held in registers, the other passes by."""
        out = [list(row) for row in acc]
        read = lambda line: [keep(half, along_k(line, at, half, lanes)) for half in halves]
        held = [read(line) for line in few]
        for j, line in enumerate(many):
            passing = read(line)
            for half in halves:
                for i, x in enumerate(held):
                    r, c = (j, i) if flip else (i, j)
                    out[r][c] = fma(x[half], passing[half], out[r][c])
        return tuple(map(tuple, out))

    @k.loop(k0, whole, step, carry=acc)
    def most(i, acc):
        return add(acc, i)

    left = p.k % step
    if not left:
        return most

    @k.loop(whole, end, step, carry=most)
    def total(_, acc):
        """The last vector reaches back over elements that have been counted, and drops them."""
        fresh = lambda half, lane: step - left <= (2 * lane + half if step > lanes else lane)
        masks = [lanes_where([fresh(half, lane) for lane in range(lanes)]) for half in halves]
        return add(acc, wide(p.k - step), lambda half, v: select(masks[half], v, 0.0))

    return total


def along_k(line: View, at, half: int, lanes: int) -> Value:
    """A vector of f32 from `at` on. Of bf16 the even elements (half 0) or the odd ones (half 1) of twice as many."""
    if line.dtype != bf16:
        return line.get(0, at, width=lanes).to(f32)
    words = line.at(0, at).recast(i32).get(width=lanes)
    return high_half(words) if half else low_half(words)


def folded(vectors) -> Value:
    """The sums of up to GROUP vectors, as a vector of GROUP."""
    return sums([*vectors, *[constant(0, f32, vectors[0].width)] * (GROUP - len(vectors))])


def leave(k, p, cfg, tile, x, row, column, ahead: int, block, blocks: int, partial):
    """Adds what earlier blocks of K left, and leaves the sum for the next block, or finished in C.

    ahead: columns of the block of sums before these."""
    whole, tail = min(GROUP, cfg.columns - ahead), max(0, min(GROUP, p.n % cfg.columns - ahead))

    def write(x):
        @k.when(column + cfg.columns <= p.n)
        def _():
            finish(p, tile, x, row, column + ahead, whole)

        if tail:

            @k.when(column + cfg.columns > p.n)
            def _():
                finish(p, tile, x, row, column + ahead, tail)

    if partial is None:
        write(x)
        return
    here = row - tile.first_row, ahead
    so_far = partial.get(*here, width=GROUP)
    x = x + select(block > 0, so_far, constant(0, f32, GROUP))

    @k.when(block < blocks - 1)
    def _():
        partial.put(x, *here)

    @k.when(block.equals(blocks - 1))
    def _():
        write(x)
