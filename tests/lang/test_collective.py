"""What threads do together (on the gfx950 simulator, checker silent), branches that carry values, and counting bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from flykernels.lang import (
    Global,
    Tally,
    TraceError,
    arrive,
    atomic,
    constant,
    f32,
    lanes_mask,
    maximum_or_nan,
    over_lanes,
    popcount,
    select,
    trace,
    trailing_zeros,
    u32,
)
from flykernels.layout import Layout
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950, sm90a

from .host import run

THREADS = 192


@dataclass(frozen=True)
class Threads:
    workgroup_size: int = THREADS


def on_sim(kernel, *arrays, grid=1):
    code = gfx950.compile(trace(kernel, gfx950, None, Threads()))
    run_on_sim(code, list(arrays), (grid, 1, 1)).raise_for_findings()


X = np.random.default_rng(0).integers(0, 1000, THREADS).astype(np.uint32)


@pytest.mark.parametrize("kind, of", [("add", np.sum), ("max", np.max), ("min", np.min)])
@pytest.mark.parametrize("lanes, first", [(4, 1), (16, 1), (64, 1), (4, 16)])
def test_over_lanes(kind, of, lanes, first):
    def kernel(k, p, c):
        x, y = k.args(x=Global(u32, (THREADS,)), y=Global(u32, (THREADS,)))
        y.put(over_lanes(k, kind, x.get(k.thread), lanes, first), k.thread)

    out = np.zeros(THREADS, np.uint32)
    on_sim(kernel, X, out)
    groups = X.reshape(-1, lanes, first)
    want = np.broadcast_to(of(groups, axis=1, keepdims=True), groups.shape)
    assert np.array_equal(out.reshape(groups.shape), want)


def test_tallies_one_after_the_other():
    def kernel(k, p, c):
        x, y = k.args(x=Global(u32, (THREADS,)), y=Global(u32, (5,)))
        tally = Tally(k, u32)
        tally.clear()
        k.barrier()
        mine = x.get(k.thread)

        @k.loop(0, 5, carry=constant(0, u32))
        def _(i, slot):
            total = tally.sum(mine + i.to(u32), slot)

            @k.when(k.thread.equals(i))
            def _():
                y.put(total, i)

            return tally.next_slot(slot)

    out = np.zeros(5, np.uint32)
    on_sim(kernel, X, out)
    assert out.tolist() == [int(X.sum()) + THREADS * i for i in range(5)]


def test_atomics_and_counts():
    def kernel(k, p, c):
        x, y = k.args(x=Global(u32, (THREADS,)), y=Global(u32, (4,)))
        board, tally = k.shared(u32, Layout((3,), (1,))), Tally(k, u32)

        @k.when(k.thread < 3)
        def _():
            board.put(select(k.thread.equals(1), constant(2**32 - 1, u32), constant(0, u32)), k.thread)

        tally.clear()
        k.barrier()
        v = x.get(k.thread)
        for i, kind in enumerate(("max", "min", "add")):
            atomic(k, kind, board, v, i)
        odd = tally.count((v & 1) > 0, constant(0, u32))

        @k.when(k.thread < 3)
        def _():
            y.put(board.get(k.thread), k.thread)

        @k.when(k.thread.equals(3))
        def _():
            y.put(odd, 3)

    out = np.zeros(4, np.uint32)
    on_sim(kernel, X, out)
    assert out.tolist() == [X.max(), X.min(), X.sum(), (X & 1).sum()]


def test_the_last_workgroup_to_arrive_reads_what_all_have_stored():
    def kernel(k, p, c):
        counter, parts, y = k.args(counter=Global(u32, (1,)), parts=Global(u32, (4,)), y=Global(u32, (1,)))
        k.grid = ((),)

        @k.when(k.thread.equals(0))
        def _():
            parts.put(k.workgroup_id().to(u32) + 10, k.workgroup_id())

        @k.when(arrive(k, counter, 0).equals(3) & k.thread.equals(0))
        def _():
            y.put(sum((parts.get(i) for i in range(1, 4)), parts.get(0)), 0)

    out, counter = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    on_sim(kernel, counter, np.zeros(4, np.uint32), out, grid=4)
    assert out[0] == 46 and counter[0] == 4


def test_branches_hand_values_on():
    def kernel(k, p, c):
        (y,) = k.args(y=Global(u32, (8,)))

        @k.loop(0, 8)
        def _(i):
            @k.when(i < 3, carry=(i.to(u32), constant(7, u32)))
            def out(s):
                return s[0] + 100, s[1] + 1

            @k.when(True, carry=out[1])
            def always(v):
                return v + 10

            @k.when(False, carry=always)
            def never(v):
                return v + 1000

            y.put(out[0] + never, i)

    out = np.zeros(8, np.uint32)
    run(kernel, out)
    assert out.tolist() == [100 + i + 18 if i < 3 else i + 17 for i in range(8)]


def test_a_branch_that_returns_another_type_is_refused():
    def kernel(k, p, c):
        (y,) = k.args(y=Global(u32, (1,)))

        @k.when(y.get(0) > 1, carry=y.get(0))
        def out(v):
            return v.to(f32)

    with pytest.raises(TraceError, match="branch out carries"):
        trace(kernel, gfx950, None, Threads())


def test_bits():
    words = np.array([0, 1, 0x80000000, 0xFFFFFFFF, 0x12345678], np.uint32)

    def kernel(k, p, c):
        x, y = k.args(x=Global(u32, (5,)), y=Global(u32, (5, 2)))

        @k.loop(0, 5)
        def _(i):
            y.put(popcount(x.get(i)), i, 0)
            y.put(trailing_zeros(x.get(i)), i, 1)

    out = np.zeros((5, 2), np.uint32)
    run(kernel, words, out)
    assert out.tolist() == [[0, 32], [1, 0], [1, 31], [32, 0], [13, 3]]


def test_masks_and_packed_lanes():
    """The lanes whose condition holds, as bits; moved to the front; and the lowest bits of a mask."""
    x = np.array([5, -1, 7, -3, 2, 9, -8, 1], np.float32)

    def kernel(k, p, c):
        x, y, bits = k.args(x=Global(f32, (8,)), y=Global(f32, (8,)), bits=Global(u32, (2,)))
        v = x.get(0, width=8)
        mask = lanes_mask(v > 0.0)
        y.put(k.target.compress(v, mask), 0)
        bits.put(mask, 0)
        bits.put(k.target.deposit(constant(0b111, u32), mask), 1)

    out, bits = np.zeros(8, np.float32), np.zeros(2, np.uint32)
    run(kernel, x, out, bits)
    assert out[:5].tolist() == [5, 7, 2, 9, 1] and bits.tolist() == [0b10110101, 0b00010101]


def test_maximum_or_nan():
    a = np.array([1, np.nan, 3, -np.inf], np.float32)
    b = np.array([2, 1, np.nan, -5], np.float32)

    def kernel(k, p, c):
        a, b, y = k.args(a=Global(f32, (4,)), b=Global(f32, (4,)), y=Global(f32, (4,)))

        @k.loop(0, 4)
        def _(i):
            y.put(maximum_or_nan(a.get(i), b.get(i)), i)

    out = np.zeros(4, np.float32)
    run(kernel, a, b, out)
    assert np.array_equal(out, np.maximum(a, b), equal_nan=True)


def test_sm90a_has_its_own_instructions_for_these():
    def kernel(k, p, c):
        x, y = k.args(x=Global(u32, (THREADS,)), y=Global(u32, (THREADS,)))
        tally = Tally(k, u32)
        tally.clear()
        k.barrier()
        n = tally.count(x.get(k.thread) > 5, constant(0, u32))
        y.put(over_lanes(k, "max", x.get(k.thread) + n, 16), k.thread)

    text = sm90a.compile(trace(kernel, sm90a, None, Threads())).text
    assert "redux.sync.max.u32" in text and "bar.red.popc" in text
