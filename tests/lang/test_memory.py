"""Views with run-time sizes, strides, tails, transposition and nested axes, on the CPU against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.lang import Global, Mode, ThreadValues, Value, f32, i32, i64
from flykernels.mlir import ir, llvm

from .host import run


def tile_layout(rows: int, columns: int, vector: int, along: int = 1) -> ThreadValues:
    size = (rows, columns)[along]
    pieces = (Mode(size // vector, along, vector), Mode((rows, columns)[1 - along], 1 - along, 1))
    return ThreadValues((rows, columns), (Mode(1, 1, 1),), Mode(vector, along, 1), pieces)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(1, 13), st.integers(1, 40), st.integers(0, 5), st.sampled_from(["rows", "columns", "apart"]),
    st.sampled_from([i32, i64]), st.integers(0, 3),
)  # fmt: skip
def test_copy_with_run_time_sizes_and_any_strides(m, n, pad, order, kind, offset):
    """y = 2 x over tiles of 4 x 8 whose last ones hang over; nothing between or beyond the rows is touched."""
    row, column = {"rows": (n + pad, 1), "columns": (1, m + pad), "apart": ((n + pad) * 3, 3)}[order]
    vector = 8 if column == 1 else 1
    layout = tile_layout(4, 8, vector)

    def kernel(k, p, c):
        contiguous = 1 if column == 1 else "column"
        x, y, m_, n_, *_ = k.args(
            x=Global(f32, ("m", "n"), ("row", contiguous), alignment=4),
            y=Global(f32, ("m", "n"), ("row", contiguous), alignment=4),
            m=i32, n=i32, row=kind, column=kind,
        )  # fmt: skip
        held = k.fragment(layout)

        @k.loop(0, (m_ + 3) // 4)
        def _(i):
            @k.loop(0, (n_ + 7) // 8)
            def _(j):
                held.store(y.tile((4, 8), i, j), held.load(x.tile((4, 8), i, j)) * 2.0)

    count = (m - 1) * row + (n - 1) * column + 1
    x = np.full(count + offset, np.nan, np.float32)[offset:]
    y = np.full(count + 64, np.nan, np.float32)
    at = np.arange(m)[:, None] * row + np.arange(n) * column
    x[at] = np.random.default_rng(0).standard_normal((m, n))
    run(kernel, x, y, m, n, row, column)
    assert (y[at] == x[at] * 2).all()
    beyond = np.ones(len(y), bool)
    beyond[at.ravel()] = False
    assert np.isnan(y[beyond]).all()


@pytest.mark.parametrize("rows, columns", [(0, 0), (3, 0), (0, 5), (2, 3), (6, 9), (7, 16)])
def test_what_is_skipped_is_left_alone(rows, columns):
    """The first rows and columns of a view, across several tiles; vectors that a bound cuts go element by element."""
    m, n = 11, 19
    layout = tile_layout(4, 8, 8)

    def kernel(k, p, c):
        x, y, m_, n_, rows_, columns_ = k.args(
            x=Global(f32, ("m", "n"), (n, 1), alignment=4), y=Global(f32, ("m", "n"), (n, 1), alignment=4),
            m=i32, n=i32, rows=i32, columns=i32,
        )  # fmt: skip
        y = replace(y, skipped=(rows_, columns_))
        held = k.fragment(layout)

        @k.loop(0, (m_ + 3) // 4)
        def _(i):
            @k.loop(0, (n_ + 7) // 8)
            def _(j):
                held.store(y.tile((4, 8), i, j), held.load(x.tile((4, 8), i, j)))

    x, y = np.random.default_rng(0).standard_normal((m, n)).astype(np.float32), np.full((m, n), np.nan, np.float32)
    run(kernel, x, y, m, n, rows, columns)
    assert (y[rows:, columns:] == x[rows:, columns:]).all()
    assert np.isnan(y[:rows]).all() and np.isnan(y[:, :columns]).all()


def test_elementwise_and_transposed_views_agree():
    x, y = np.arange(48, dtype=np.float32).reshape(6, 8), np.zeros((8, 6), np.float32)

    def kernel(k, p, c):
        a, b = k.args(a=Global(f32, (6, 8)), b=Global(f32, (8, 6)))
        down = k.fragment(tile_layout(8, 6, 2), elementwise=True)  # vectors across a's rows
        down.store(b, down.load(a.transposed()))

    run(kernel, x, y)
    assert (y == x.T).all()


def test_a_nested_axis():
    """Rows in pairs that lie far apart: row i at 8 * (i % 2) + 100 * (i // 2)."""
    x, y = np.arange(400, dtype=np.float32), np.zeros((6, 8), np.float32)

    def kernel(k, p, c):
        a, b = k.args(a=Global(f32, ((2, 3), 8), ((8, 100), 1)), b=Global(f32, (6, 8)))
        whole = k.fragment(tile_layout(6, 8, 4))
        whole.store(b, whole.load(a))

        @k.loop(0, 3)
        def _(i):  # and by tiles of whole pairs
            pair = k.fragment(tile_layout(2, 8, 4))
            pair.store(b.tile((2,), i), pair.load(a.tile((2,), i)) + pair.load(b.tile((2,), i)))

    run(kernel, x, y)
    rows = [8 * (i % 2) + 100 * (i // 2) for i in range(6)]
    assert (y == 2 * np.stack([x[r : r + 8] for r in rows])).all()


def test_rows_beyond_32_bits():
    """An i64 stride: the last row would start more than 2**32 bytes in; only its address is worked out."""
    stride, x = 2**31 + 5, np.zeros(2, np.float32)
    y = np.zeros(2, np.int64)

    def kernel(k, p, c):
        a, o, i, _ = k.args(a=Global(f32, (4, 4), ("row", 1)), o=Global(i64, (2,)), i=i32, row=i64)
        view = a.tile((1, 4), i)
        wide = ir.IntegerType.get_signless(64)
        address = lambda v: Value(llvm.ptrtoint(wide, v.pointer), i64)
        held = k.fragment(ThreadValues((2,), (Mode(1, 0, 1),), Mode(1, 0, 1), (Mode(2, 0, 1),)))
        held.store(o, held.load(o).like([address(view).splat(1), address(a).splat(1)]))

    run(kernel, x, y, 3, stride)
    assert y[0] - y[1] == 3 * stride * 4


@pytest.mark.parametrize("m", [0, 1, 5])
def test_masks_in_reductions_with_a_run_time_edge(m):
    x, y = np.arange(1, 9, dtype=np.float32), np.zeros(1, np.float32)

    def kernel(k, p, c):
        a, o, _ = k.args(a=Global(f32, ("m",)), o=Global(f32, (1,)), m=i32)
        held = k.fragment(ThreadValues((8,), (Mode(1, 0, 1),), Mode(8, 0, 1)))
        total = held.load(a).sum(axis=0)
        one = k.fragment(ThreadValues((1,), (Mode(1, 0, 1),), Mode(1, 0, 1)))
        one.store(o, one.load(o).like([total[()].splat(1)]))

    run(kernel, x, y, m)
    assert y[0] == x[:m].sum()
