"""Arithmetic of kernel values against Python's and numpy's, run on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.lang import Global, Mode, ThreadValues, TraceError, f32, i32, i64, maximum, minimum, select, u32
from flykernels.lang.values import constant

from .host import run

NUMBERS = [-(2**31), -1000, -9, -8, -7, -1, 0, 1, 2, 7, 8, 9, 1000, 2**31 - 1]


def row(n: int) -> ThreadValues:
    return ThreadValues((n,), (Mode(1, 0, 1),), Mode(1, 0, 1), (Mode(n, 0, 1),))


def evaluate(dtype, out, pairs, expressions):
    """[[e(a, b) for e in expressions] for a, b in pairs], computed by one kernel."""
    kind = {i32: np.int32, i64: np.int64, u32: np.uint32, f32: np.float32}
    n, count = len(pairs), len(expressions)
    ab, got = np.array(pairs, kind[dtype]).T.copy(), np.zeros((n, count), kind[out])

    def kernel(k, p, c):
        a, b, o = k.args(a=Global(dtype, (n,)), b=Global(dtype, (n,)), o=Global(out, (n, count)))

        @k.loop(0, n)
        def _(i):
            x, y = (k.fragment(row(1)).load(v.tile((1,), i))[0,] for v in (a, b))
            here = k.fragment(row(count))
            here.store(o[i], here.load(o[i]).like([as_value(e(x, y), out) for e in expressions]))

    run(kernel, ab[0].copy(), ab[1].copy(), got)
    return got


def as_value(v, dtype):
    v = constant(v, dtype) if isinstance(v, (int, float)) else v.to(dtype)
    return v.splat(1)


@pytest.mark.parametrize("dtype", [i32, i64])
def test_signed_integers_are_pythons(dtype):
    pairs = [(a, b) for a in NUMBERS for b in (-9, -8, -3, -1, 1, 2, 3, 8, 100) if (a, b) != (-(2**31), -1)]
    expressions = [
        lambda a, b: a // b, lambda a, b: a % b, lambda a, b: a // 8, lambda a, b: a % 8, lambda a, b: a // 3,
        lambda a, b: a % -3, lambda a, b: a >> 2, lambda a, b: 1000 // b, lambda a, b: 1000 % b,
        lambda a, b: select(a < b, a, b), lambda a, b: maximum(a, b), lambda a, b: minimum(a, b),
        lambda a, b: select(a >= b, constant(1, dtype), 0), lambda a, b: (a & b) | (a ^ b),
    ]  # fmt: skip
    python = [
        lambda a, b: a // b, lambda a, b: a % b, lambda a, b: a // 8, lambda a, b: a % 8, lambda a, b: a // 3,
        lambda a, b: a % -3, lambda a, b: a >> 2, lambda a, b: 1000 // b, lambda a, b: 1000 % b,
        min, max, min, lambda a, b: int(a >= b), lambda a, b: (a & b) | (a ^ b),
    ]  # fmt: skip
    got = evaluate(dtype, dtype, pairs, [lambda a, b, e=e: one(e(a, b)) for e in expressions])
    assert got.tolist() == [[e(a, b) for e in python] for a, b in pairs]


def one(v):
    return v if isinstance(v, (int, float)) or v.width is None else v[0]


def test_unsigned_integers_are_never_negative():
    pairs = [(a, b) for a in (0, 1, 5, 2**31, 2**32 - 1) for b in (1, 2, 7, 2**31)]
    expressions = [lambda a, b: a // b, lambda a, b: a % b, lambda a, b: a >> 3, lambda a, b: maximum(a, b)]
    got = evaluate(u32, u32, pairs, [lambda a, b, e=e: one(e(one(a), one(b))) for e in expressions])
    assert got.tolist() == [[a // b, a % b, a >> 3, max(a, b)] for a, b in pairs]


def test_widening_keeps_the_sign():
    pairs = [(a, 0) for a in NUMBERS]
    got = evaluate(i32, i64, pairs, [lambda a, b: one(a).to(i64) * (1 << 20), lambda a, b: one(a) + constant(1, i64)])
    assert got.tolist() == [[a << 20, a + 1] for a, _ in pairs]
    assert evaluate(i32, f32, pairs, [lambda a, b: one(a).to(f32)]).ravel().tolist() == [
        np.float32(a) for a, _ in pairs
    ]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(1, 1e6, width=32)), min_size=1, max_size=8))
def test_floats(pairs):
    got = evaluate(
        f32, f32, pairs, [lambda a, b: one(a) + one(b), lambda a, b: one(a) * 0.5, lambda a, b: one(a) / one(b)]
    )
    a, b = np.array(pairs, np.float32).T
    assert (got == np.stack([a + b, a * np.float32(0.5), a / b], 1)).all()


def test_loops_carry_and_branches_choose():
    out = np.zeros(3, np.int32)

    def kernel(k, p, c):
        n, o = k.args(n=i32, o=Global(i32, (3,)))

        @k.loop(0, n, 2, carry=(constant(0, i32), constant(1, i32)))
        def result(i, carried):
            total, product = carried
            return total + i, product * 3

        @k.repeat(constant(100, i32), lambda x: x > n)
        def halved(x):
            return x // 2

        here = k.fragment(row(3))
        here.store(o, here.load(o).like([v.splat(1) for v in (*result, halved)]))

        @k.when(n > 1000)
        def _():
            here.store(o, here.load(o).like([constant(-1, i32, 1)] * 3))

    run(kernel, 9, out)
    assert out.tolist() == [0 + 2 + 4 + 6 + 8, 3**5, 6]
    run(kernel, 1001, out)
    assert out.tolist() == [-1, -1, -1]


def test_a_loop_of_a_wide_count_counts_in_64_bits():
    out = np.zeros(1, np.int64)

    def kernel(k, p, c):
        n, o = k.args(n=i64, o=Global(i64, (1,)))

        @k.loop(n - 3, n, carry=constant(0, i64))
        def total(i, total):
            assert i.dtype is i64
            return total + i

        k.fragment(row(1)).store(o, k.fragment(row(1)).load(o).like([total.splat(1)]))

    run(kernel, 2**40, out)
    assert out[0] == 3 * 2**40 - 6


def test_types_that_do_not_meet_say_so():
    def kernel(k, p, c):
        a, b = k.args(a=i32, b=f32)
        a + b

    with pytest.raises(TraceError, match=r"differ in type(.|\n)*a \+ b(.|\n)*\.to\("):
        run(kernel, 1, 1.0)
