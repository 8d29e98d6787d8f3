"""Copies of operands in the order in which the register block reads them.

A's panel is (K, rows) and B's (K, columns), both in f32. A weight that was packed ahead keeps its own type, for the
sake of memory; of bf16 it has k and k+1 of a column side by side, (K/2, columns, 2), so that one load gives both and a
shift or a mask makes f32 of either. Where K is no multiple of the unrolled steps, panels are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

from flykernels.dtypes import bf16, f32, i32, i64
from flykernels.lang import Kernel, View, minimum, transpose
from flykernels.lang.values import Value, constant

HIGH_HALF = 0xFFFF0000 - 2**32  # as a signed 32-bit number
QUAD = 4  # rows of a panel of A that are transposed together: a 128-bit lane of f32


def wide(x) -> Value:
    """x as a 64-bit Value, what all coordinates of these kernels are."""
    return x.to(i64) if isinstance(x, Value) else constant(x, i64)


def low_half(pairs: Value) -> Value:
    """Of 32-bit pairs of bf16 the first ones, as f32."""
    return (pairs << 16).bitcast(f32, pairs.width)


def high_half(pairs: Value) -> Value:
    """The second ones."""
    return (pairs & HIGH_HALF).bitcast(f32, pairs.width)


def read_pair(panel: View, step, vectors: int, lanes: int) -> Iterator[list[Value]]:
    """Rows step and step + 1 (step even) of a packed panel of B, one after the other, as vectors of f32."""
    if panel.dtype != bf16:
        for i in range(2):
            yield [panel.get(step + i, v * lanes, width=lanes).to(f32) for v in range(vectors)]
        return
    words = [panel.at(step // 2, v * lanes).recast(i32).get(width=lanes) for v in range(vectors)]
    for half in (low_half, high_half):
        yield [half(w) for w in words]


def pack_a(k: Kernel, a: View, m: Value, row, k0, count, filled, to: View, rows: int, lanes: int):
    """Rows row .. row+rows-1, columns k0 .. k0+count-1 of A to `to`, which is (filled, rows).

    Rows from m on repeat the last one: what comes of them is not written."""
    lines = [a.at(minimum(row + r, m - 1), k0) for r in range(rows)]
    whole = wide(0)
    if isinstance(a.stride[1], int) and rows == QUAD:
        whole = wide(count) // lanes * lanes

        @k.loop(wide(0), whole, lanes)
        def _(i):
            block = [line.get(0, i, width=lanes).to(f32) for line in lines]
            for first in range(0, lanes, QUAD):
                quad = [v.shuffle(range(first, first + QUAD)) for v in block]
                for j, column in enumerate(transpose(quad)):
                    to.put(column, i + (first + j), 0)

    @k.loop(whole, wide(count))
    def _(i):
        for r, line in enumerate(lines):
            to.put(line.get(0, i).to(f32), i, r)

    @k.loop(wide(count), wide(filled))
    def _(i):
        for r in range(rows):
            to.put(constant(0, f32), i, r)


def pack_b(k: Kernel, b: View, layout: str, k0, count, filled, column, valid: int, to: View, lanes: int):
    """Rows k0 .. k0+count-1 and `valid` columns from `column` on of B to the panel `to`.

    The panel's further columns get anything: what comes of them is not written."""
    at = b.at(k0, column)
    copy = {"row": _rows, "col": _columns, "any": lambda *_: wide(0)}[layout]
    whole = copy(k, at, wide(count), valid, to, lanes)

    @k.loop(whole, wide(count))
    def _(i):
        @k.loop(wide(0), wide(valid))
        def _(c):
            to.put(at.get(i, c).to(f32), i, c)

    @k.loop(wide(count), wide(filled))
    def _(i):
        @k.loop(wide(0), wide(valid))
        def _(c):
            to.put(constant(0, f32), i, c)


def _rows(k, b: View, count, valid: int, to: View, lanes: int):
    """B row-major: rows are copied vector by vector. How many rows were."""

    @k.loop(wide(0), count)
    def _(i):
        for first in range(0, valid, lanes):
            to.put(b.get(i, first, width=lanes, count=min(lanes, valid - first)).to(f32), i, first)

    return count


def _columns(k, b: View, count, valid: int, to: View, lanes: int):
    """B column-major: blocks of `lanes` columns, a vector of K each, are transposed. How many rows were copied.

    Of bf16 32-bit pairs are transposed, and taken apart afterwards."""
    step = 2 * lanes if b.dtype == bf16 else lanes
    whole = count // step * step
    lines = [b.at(0, min(c, valid - 1)) for c in range(-(-valid // lanes) * lanes)]

    @k.loop(wide(0), whole, step)
    def _(i):
        for first in range(0, len(lines), lanes):
            some = lines[first : first + lanes]
            if b.dtype == bf16:
                words = transpose([line.at(i).recast(i32).get(width=lanes) for line in some])
                rows = [half(w) for w in words for half in (low_half, high_half)]
            else:
                rows = transpose([line.at(i).get(width=step).to(f32) for line in some])
            for j, row in enumerate(rows):
                to.put(row, i + j, first)

    return whole
