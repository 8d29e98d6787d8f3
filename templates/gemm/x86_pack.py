"""Copies of operands in the order in which the register block reads them.

A's panel is (K, rows) in f32. B's panel is (K, columns) in f32; of bf16 it keeps the 16 bits and lays k and k+1 of a
column side by side, (K/2, columns, 2), so that one load gives both and a shift or a mask makes f32 of either. Where K
is no multiple of the unrolled steps both are filled up with zeros: 0 * 0 adds nothing.
"""

from __future__ import annotations

from flykernels.dtypes import DType, bf16, f32, i16, i32, i64
from flykernels.lang import Kernel, View, minimum, transpose
from flykernels.lang.values import Value, constant

HIGH_HALF = 0xFFFF0000 - 2**32  # as a signed 32-bit number
QUAD = 4  # rows of a panel of A that are transposed together: a 128-bit lane of f32


def wide(x) -> Value:
    """x as a 64-bit Value, what all coordinates of these kernels are."""
    return x.to(i64) if isinstance(x, Value) else constant(x, i64)


def panel_type(dtype: DType) -> DType:
    """Element type of B's panels."""
    return bf16 if dtype == bf16 else f32


def low_half(pairs: Value) -> Value:
    """Of 32-bit pairs of bf16 the first ones, as f32."""
    return (pairs << 16).bitcast(f32, pairs.width)


def high_half(pairs: Value) -> Value:
    """The second ones."""
    return (pairs & HIGH_HALF).bitcast(f32, pairs.width)


def read_pair(panel: View, step, vectors: int, lanes: int) -> list[list[Value]]:
    """Rows step and step + 1 (step even) of a packed panel of B: the f32 vectors of one, those of the other."""
    if panel.dtype == f32:
        return [[panel.get(step + i, v * lanes, width=lanes) for v in range(vectors)] for i in range(2)]
    words = [panel.get(step // 2, v * lanes, 0, width=2 * lanes).bitcast(i32, lanes) for v in range(vectors)]
    return [[half(w) for w in words] for half in (low_half, high_half)]


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
    pairs = to.dtype == bf16
    place = (lambda i, c: (i // 2, c, i % 2)) if pairs else (lambda i, c: (i, c))
    element = (lambda i, c: at.get(i, c)) if pairs else (lambda i, c: at.get(i, c).to(f32))

    @k.loop(whole, wide(count))
    def _(i):
        @k.loop(wide(0), wide(valid))
        def _(c):
            to.put(element(i, c), *place(i, c))

    @k.loop(wide(count), wide(filled))
    def _(i):
        @k.loop(wide(0), wide(valid))
        def _(c):
            to.put(constant(0, to.dtype), *place(i, c))


def _rows(k, b: View, count, valid: int, to: View, lanes: int):
    """B row-major: rows are copied vector by vector. How many rows were."""
    vectors = [(first, min(lanes, valid - first)) for first in range(0, valid, lanes)]
    line = lambda i, first, n: b.get(i, first, width=lanes, count=n)
    if to.dtype == bf16:
        bits = lambda i, first, n: line(i, first, n).bitcast(i16, lanes).to(i32)
        whole = count // 2 * 2

        @k.loop(wide(0), whole, 2)
        def _(i):
            for first, n in vectors:
                words = bits(i, first, n) | (bits(i + 1, first, n) << 16)
                to.put(words.bitcast(bf16, 2 * lanes), i // 2, first, 0)

        return whole

    @k.loop(wide(0), count)
    def _(i):
        for first, n in vectors:
            to.put(line(i, first, n).to(f32), i, first)

    return count


def _columns(k, b: View, count, valid: int, to: View, lanes: int):
    """B column-major: blocks of `lanes` columns, a vector of K each, are transposed. How many rows were copied.

    Of bf16 the 32-bit pairs are transposed, which leaves them as the panel wants them."""
    step = 2 * lanes if to.dtype == bf16 else lanes
    whole = count // step * step
    if to.dtype == bf16:
        vector = lambda line, i: line.get(i, 0, width=step).bitcast(i32, lanes)
        put = lambda row, i, j, first: to.put(row.bitcast(bf16, step), i // 2 + j, first, 0)
    else:
        vector = lambda line, i: line.get(i, 0, width=lanes).to(f32)
        put = lambda row, i, j, first: to.put(row, i + j, first)
    lines = [b.at(0, min(c, valid - 1)) for c in range(-(-valid // lanes) * lanes)]

    @k.loop(wide(0), whole, step)
    def _(i):
        for first in range(0, len(lines), lanes):
            for j, row in enumerate(transpose([vector(line, i) for line in lines[first : first + lanes]])):
                put(row, i, j, first)

    return whole
