"""The quantiser on a CPU. X is read once, in blocks of 32 rows and 32 columns: their f32 values stay in L1.

Along a row a block's numbers lie in the lanes of a few vectors; along columns each lane has a block of its own, 32
vectors deep, and codes are gathered four or eight rows to a word before they are turned round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i32, i64, u8
from flykernels.lang import Kernel, View, maximum, minimum, transpose
from flykernels.lang.microscaling import encoded, is_finite, power_of_two, scale_of, words
from flykernels.lang.values import Value, constant, select
from flykernels.microscaling import BLOCK, SCALE_NAN

from .arguments import declared
from .problem import QuantizeProblem

LINE = 64  # bytes of a cache line: so much of a column is written together
MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class X86Config:
    """band: rows of X that a workgroup takes; with columns a multiple of 32."""

    band: int = LINE

    workgroup_size = 1

    def key(self) -> dict:
        """Readable JSON form."""
        return {"band": self.band}


def quantize(k: Kernel, p: QuantizeProblem, cfg: X86Config):
    """The kernel; arguments as in arguments.py, a grid of bands of rows."""
    names = declared(p)
    given = dict(zip(names, k.args(**names)))
    m, row_blocks = given["m"], p.n // BLOCK
    k.grid = ((Extent("m", cfg.band),),)
    first = k.workgroup_id().to(i64) * cfg.band
    end = minimum(first + cfg.band, m)
    matrix = lambda name, stride: replace(given[name], shape=(1, 1), stride=(stride, 1))
    x = matrix("x", given["x_row"])
    block = Block(k, p, k.private(f32, BLOCK, BLOCK))
    if p.rows:
        codes, scales = matrix("codes", p.n // p.per_byte), matrix("scales", row_blocks)
    if p.columns:
        codes_t, scales_t = matrix("codes_t", m // p.per_byte), matrix("scales_t", m // BLOCK)

    if not p.columns:

        @k.loop(first, end)
        def _(row):
            @k.loop(0, row_blocks)
            def _(b):
                block.row(block.load(x.at(row, b.to(i64) * BLOCK)), codes, scales, row, b)

        return

    def tile(column, b, valid: int):
        """32 columns (or the `valid` last ones) of the band."""

        @k.loop(first, end, BLOCK)
        def _(row):
            @k.loop(0, BLOCK)
            def _(r):
                vectors = block.load(x.at(row + r.to(i64), column), valid)
                block.keep(vectors, r)
                if p.rows:
                    block.row(vectors, codes, scales, row + r.to(i64), b)

            for lane in range(0, valid, block.lanes):
                block.columns(lane, min(block.lanes, valid - lane), codes_t, scales_t, column, row)

    @k.loop(0, row_blocks)
    def _(b):
        tile(b.to(i64) * BLOCK, b, BLOCK)

    if p.n % BLOCK:
        tile(constant(row_blocks * BLOCK, i64), None, p.n % BLOCK)


class Block:
    """32 rows and 32 columns of X: how they are read, and how a row of them or some columns are written."""

    def __init__(self, k: Kernel, p: QuantizeProblem, board: View):
        self.k, self.p, self.board = k, p, board
        self.lanes = k.target.vector_bytes // f32.bytes
        self.starts = range(0, BLOCK, self.lanes)

    def load(self, at: View, valid: int = BLOCK) -> list[Value]:
        """32 numbers of a row as f32 vectors; zeros from `valid` on."""
        left = [max(0, min(self.lanes, valid - v)) for v in self.starts]
        zeros = constant(0, f32, self.lanes)
        return [at.get(0, v, width=self.lanes, count=n).to(f32) if n else zeros for v, n in zip(self.starts, left)]

    def keep(self, vectors: list[Value], r):
        for v, x in zip(self.starts, vectors):
            self.board.put(x, r, v)

    def row(self, vectors: list[Value], codes: View, scales: View, row, b):
        """Block number b of a row."""
        size = magnitude_max(vectors).fold(maximum)
        byte, factor, mask = scale_or_nan(size, self.p)
        scales.put(byte.to(u8), row, b)
        each = [words(x, (factor,), self.p.output_type) & mask for x in vectors]
        at = codes.at(row, b.to(i64) * (BLOCK // self.p.per_byte)).recast(i32)
        step = each[0].width
        for i, w in enumerate(each):
            at.put(w, i * step)

    def columns(self, lane: int, count: int, codes: View, scales: View, column, row):
        """`count` columns from `lane` on, one a vector lane."""
        k, p, lanes = self.k, self.p, self.lanes
        line = lambda r: self.board.get(r, lane, width=lanes)

        @k.loop(1, BLOCK // 4, carry=magnitude_max([line(r) for r in range(4)]))
        def size(i, size):
            return maximum(size, magnitude_max([line(i * 4 + r) for r in range(4)]))

        byte, factor, mask = scale_or_nan(size, p)
        each = 32 // p.output_type.bits  # rows in a word
        found = []
        for first in range(0, BLOCK, each):
            word = None
            for r in range(each):
                code = encoded(line(first + r) * factor, p.output_type) << (p.output_type.bits * r)
                word = code if word is None else word | code
            found.append(word & mask)
        for i, w in enumerate(turned(found)[:count]):
            at = codes.at(column + (lane + i), row // p.per_byte).recast(i32)
            at.put(w, 0)
            scales.put(byte[i].to(u8), column + (lane + i), row // BLOCK)


def scale_or_nan(size: Value, p: QuantizeProblem) -> tuple[Value, Value, Value]:
    """(bytes, factors, masks for the codes) of blocks: where one is not finite SCALE_NAN and 0, else all ones."""
    byte, exponent = scale_of(size, p.output_type, p.round_up)
    finite, number = is_finite(size), lambda x: constant(x, i32, size.width)
    return select(finite, byte, number(SCALE_NAN)), power_of_two(exponent), select(finite, number(-1), number(0))


def magnitude_max(vectors: list[Value]) -> Value:
    """Element by element the largest magnitude's bits, as i32: their order is that of the numbers, NaN the highest."""
    sizes = [x.bitcast(i32, x.width) & MAGNITUDE for x in vectors]
    while len(sizes) > 1:
        sizes = [maximum(a, b) for a, b in zip(sizes[::2], sizes[1::2])]
    return sizes[0]


def turned(rows: list[Value]) -> list[Value]:
    """n vectors (n = 4 or 8, their width a multiple of it) -> for each lane a vector of n."""
    n = len(rows)
    out: list[Value] = []
    for first in range(0, rows[0].width, n):
        out += transpose([r.shuffle(list(range(first, first + n))) for r in rows])
    return out
