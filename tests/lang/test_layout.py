"""The layout algebra against its definitions, by enumeration."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.lang.matrix import TiledMma
from flykernels.lang.ring import transposing
from flykernels.layout import Layout, LayoutError, Mode, Swizzle, ThreadValues, bank_conflicts, flatten, unflatten
from flykernels.targets import gfx950, sm90a

SIZES, STRIDES = st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([0, 1, 2, 3, 4, 8, 16])
settings.register_profile("here", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("here")


@st.composite
def layouts(draw, depth=2, most=3):
    def nest(level):
        if level == 0 or draw(st.booleans()):
            return draw(SIZES), draw(STRIDES)
        parts = [nest(level - 1) for _ in range(draw(st.integers(1, 2)))]
        return tuple(p[0] for p in parts), tuple(p[1] for p in parts)

    parts = [nest(depth - 1) for _ in range(draw(st.integers(1, most)))]
    return Layout(tuple(p[0] for p in parts), tuple(p[1] for p in parts))


@st.composite
def compact(draw):
    """A permutation of 0 .. size-1: the modes of a dense array in any order."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    strides, at = [0] * len(sizes), 1
    for i in order:
        strides[i], at = at, at * sizes[i]
    return Layout(tuple(sizes), tuple(strides))


# -- coordinates and offsets
@given(layouts())
def test_call_offsets_and_size_agree(a):
    every = [a(i) for i in range(a.size)]
    assert every == a.offsets() and max(every) == a.cosize - 1
    assert [a(tuple(unflatten(i, [m.size for m in a]))) for i in range(a.size)] == every
    assert (a(np.arange(a.size)) == np.array(every)).all()


def test_nested_coordinates():
    a = Layout(((2, 3), 4), ((1, 8), 2))
    assert a((1, 2), 3) == 1 + 16 + 6 == a(1 + 2 * 2, 3)


@given(layouts())
def test_coalesce_is_the_same_function_with_no_more_modes(a):
    b = a.coalesce()
    assert b.offsets() == a.offsets() and len(b.modes) <= len(a.modes)
    assert all(n > 1 for n, _ in b.modes) or b.size == 1


@given(layouts(), layouts())
def test_compose(a, b):
    if b.cosize > a.size:
        return
    try:
        c = a.compose(b)
    except LayoutError:
        return
    assert c.size == b.size and c.rank == b.rank
    assert c.offsets() == [a(o) for o in b.offsets()]


@given(compact(), st.integers(0, 3))
def test_compose_of_compact_layouts_with_a_tile_of_the_first_modes_always_exists(a, modes):
    n = prod(size for size, _ in a.modes[:modes])
    assert a.compose(Layout((n,), (1,))).offsets() == a.offsets()[:n]


@given(layouts(depth=1), st.integers(1, 200))
def test_complement_covers_everything_once(a, size):
    try:
        rest = a.complement(size)
    except LayoutError:
        return
    together = sorted(x + y for x in a.offsets() for y in rest.offsets())
    assert len(set(together)) == len(together) and set(range(size)) <= set(together)


@given(compact(), st.data())
def test_divide_is_a_reordering(a, data):
    first = a.modes[0][0]
    tile = data.draw(st.sampled_from([n for n in range(1, first + 1) if first % n == 0]))
    b = a.divide(Layout((tile,), (1,)))
    assert sorted(b.offsets()) == sorted(a.offsets()) and b[0].size == tile
    assert b[0].offsets() == a.offsets()[:tile]


def test_divide_modes_is_a_tile_of_a_matrix():
    a = Layout.compact(8, 12)
    b = a.divide_modes(4, 3)
    for i, j, ti, tj in np.ndindex(4, 3, 2, 4):
        assert b((i, j), (ti, tj)) == a(ti * 4 + i, tj * 3 + j)


@given(compact(), st.integers(1, 5), st.sampled_from([1, 2]))
def test_product_lays_out_disjoint_copies(a, n, step):
    b = a.product(Layout((n,), (step,)))
    assert b[0].offsets() == a.offsets()
    assert len(set(b.offsets())) == a.size * n
    assert [b(0, i) if b[1].rank == 1 else b[1](i) for i in range(n)] == [i * step * a.size for i in range(n)]


@given(compact())
def test_inverse(a):
    back = a.inverse()
    assert [a(back(o)) for o in range(a.size)] == list(range(a.size))


@pytest.mark.parametrize("make, words", [
    (lambda: Layout((4,), (1, 2)), "nested alike"),
    (lambda: Layout((4, 6), (6, 1)).compose(Layout((3,), (3,))), "unevenly"),
    (lambda: Layout((4,), (0,)).complement(8), "complement"), (lambda: Layout((4,), (2,)).inverse(), "inverse"),
    (lambda: Layout.compact(4, order="up"), "order"), (lambda: Layout.compact(2, 3)(1, 2, 3), "modes"),
])  # fmt: skip
def test_what_does_not_exist_says_so(make, words):
    with pytest.raises(LayoutError, match=words):
        make()


# -- what one sees
def test_notation_and_table():
    a = Layout(((2, 2), 3), ((1, 6), 2))
    assert repr(a) == a.notation == "((2,2),3):((1,6),2)"
    lines = str(a).splitlines()
    assert lines[0] == a.notation and lines[-1].split("|")[1].split() == [str(a((1, 1), j)) for j in range(3)]
    assert str(Layout.compact(1000, 1000)) == "(1000,1000):(1000,1)"


def test_pictures(tmp_path):
    Layout.compact(4, 8).draw(tmp_path / "a.svg", elements_per_colour=8)
    text = (tmp_path / "a.svg").read_text()
    assert text.startswith("<svg") and text.count("<rect") == 32 and ">31<" in text
    gfx950.mma_bf16.d.draw(tmp_path / "d.svg")
    assert (tmp_path / "d.svg").read_text().count("<rect") == 256
    with pytest.raises(ValueError, match="svg"):
        Layout.compact(2).draw(tmp_path / "a.png")


def test_thread_values_print_their_table():
    tv = ThreadValues((2, 4), (Mode(2, 0, 1),), Mode(2, 1, 1), (Mode(2, 1, 2),))
    assert tv.table() == [["0.0", "0.1", "0.2", "0.3"], ["1.0", "1.1", "1.2", "1.3"]]
    assert str(tv).startswith(repr(tv)) and "1.3" in str(tv)


def test_an_axis_that_is_reduced_away_leaves_the_others_where_they_begin():
    tv = ThreadValues((4, 8), (Mode(2, 1, 4), Mode(2, 0, 1)), Mode(4, 1, 1), (Mode(2, 0, 2),), start=(16, 24))
    rest = tv.without(1)
    assert rest.start == (16, 0) and rest.edge(0) == tv.edge(0)
    for thread in range(tv.thread_count):
        assert rest.origin(thread) == [tv.origin(thread)[0], 0]


# -- swizzles
@given(st.integers(0, 3), st.integers(0, 4), st.integers(3, 6), st.integers(0, 2), st.integers(0, 9))
def test_swizzles_are_their_own_inverse_and_keep_chunks_together(bits, base, shift, bits2, base2):
    try:
        s = Swizzle(bits, base, shift, also=Swizzle(bits2, base2, 4))
    except ValueError:
        return
    x = np.arange(1 << 16)
    assert (s(s(x)) == x).all() and len(set(s(x))) == len(x)
    assert (s(x + s.period) == s(x) + s.period)[: len(x) - s.period].all()
    if s.chunk:
        assert (s(x) // s.chunk * s.chunk + x % s.chunk == s(x)).all()
    assert bool(s) == bool((s(x) != x).any())


def test_a_swizzle_that_overlaps_itself_is_refused():
    with pytest.raises(ValueError, match="it looks at"):
        Swizzle(3, 0, 1)
    with pytest.raises(ValueError, match="it looks at"):
        Swizzle(2, 3, 3, also=Swizzle(1, 6, 3))
    with pytest.raises(ValueError, match="same bits"):
        Swizzle(2, 3, 4, also=Swizzle(1, 4, 5))


def test_bank_conflicts():
    lanes, phases = np.arange(16), [range(16)]
    assert bank_conflicts(lanes * 16, phases, 16, 64) == 1
    assert bank_conflicts(lanes * 256, phases, 16, 64) == 16
    assert bank_conflicts(lanes * 0, phases, 16, 64) == 1  # the same words


# -- who holds what
def covered_evenly(tv: ThreadValues) -> bool:
    held = tv.holders()
    return len(held) == prod(tv.tile) and len({len(h) for h in held.values()}) == 1


@pytest.mark.parametrize("operand", ["a", "b", "d"])
@pytest.mark.parametrize("target, atom, waves, repeat", [
    *((gfx950, atom, w, (2, 3)) for atom in gfx950.atoms.values() for w in ((1, 1), (2, 2), (1, 4))),
    (sm90a, sm90a.mma_bf16, (2, 2), (2, 4)),
])  # fmt: skip
def test_matrix_operands_cover_their_tiles(target, atom, waves, repeat, operand):
    mma = TiledMma(None, atom, waves, repeat)
    tv = getattr(mma, operand)
    assert covered_evenly(tv) and tv.thread_count == target.lanes * prod(waves)


@pytest.mark.parametrize("atom", gfx950.atoms.values(), ids=lambda a: a.name)
def test_transposing_reads_deliver_the_operand(atom):
    """ds_read_b64_tr_b16 as specified: in each group of 16 lanes, lane i gets element i % 4 of lanes 4j + i // 4."""
    operand = atom.a.repeat(2, 1)
    image = transposing(operand)
    lanes = np.arange(64)
    for piece in range(2):
        for half in range(2):
            at = [o + w for o, w in zip(image.origin(lanes), image.walk((piece, 0, half)))]
            source = [
                np.stack([at[0], at[1] + e]) for e in range(4)
            ]  # coordinate (k, row) of each element a lane reads
            want = [o + w for o, w in zip(operand.origin(lanes), operand.walk((piece, 0)))]
            for lane in lanes:
                group, i = lane // 16 * 16, lane % 16
                for j in range(4):
                    k, row = source[i % 4][:, group + 4 * j + i // 4]
                    assert (row, k) == (want[0][lane], want[1][lane] + 4 * half + j)


def test_a_tile_smaller_than_its_threads_is_overhung():
    tv = ThreadValues((3, 10), (Mode(4, 1, 4),), Mode(4, 1, 1), (Mode(3, 0, 1),))
    assert set(tv.holders()) == set(np.ndindex(3, 10))


def test_flatten():
    assert flatten(((2, 3), 4)) == [2, 3, 4] and unflatten(11, [2, 3, 4]) == [1, 2, 1]
