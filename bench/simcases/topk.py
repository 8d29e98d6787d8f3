"""The largest k of each row: 16 lanes hold a row of at most 1024 values; ties go to the lower index, NaN is greatest.

Group maxima (one a lane) give a threshold with at least k elements at or above it. The few elements there go to LDS,
where each finds its place by counting who is greater. If ties overflow that board: k rounds of arg-max instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flykernels.lang import Global, Kernel, Mode, ThreadValues, constant, f32, i64, maximum, minimum, select, u32, u64
from flykernels.lang.memory import advance
from flykernels.layout import Layout

L, ROOM = 16, 32  # lanes a row, and entries of its board


@dataclass(frozen=True)
class TopKProblem:
    rows: int
    n: int
    k: int


@dataclass(frozen=True)
class TopKConfig:
    rows_per_workgroup: int = 16

    @property
    def workgroup_size(self) -> int:
        return L * self.rows_per_workgroup

    def rows_of(self, n: int) -> ThreadValues:
        return ThreadValues(
            (self.rows_per_workgroup, n),
            threads=(Mode(L, 1, 4), Mode(self.rows_per_workgroup, 0, 1)),
            vector=Mode(4, 1, 1),
            pieces=(Mode(ceil(n / (4 * L)), 1, 4 * L),),
        )


def number(x: int):
    return constant(x, u32)


def order_key(v):
    """A float's place as an unsigned number: -0 equals +0, NaN is greatest."""
    plain = v + 0.0
    bits = select(plain.equals(plain), plain.bitcast(u32), number(0x7FFFFFFF))
    return bits ^ select(bits < number(0x80000000), number(0x80000000), number(0xFFFFFFFF))


def add(x, y):
    return x + y


def one(condition):
    return select(condition, number(1), number(0))


def topk_rows(k: Kernel, p: TopKProblem, cfg: TopKConfig):
    x, values, indices = k.args(
        x=Global(f32, (p.rows, p.n)), values=Global(f32, (p.rows, p.k)), indices=Global(i64, (p.rows, p.k))
    )
    board = k.shared(u64, Layout((cfg.rows_per_workgroup * ROOM,), (1,)))
    lane, slot = k.thread % L, k.thread // L
    row = k.workgroup_id() * cfg.rows_per_workgroup + slot

    def over_row(v, combine):
        for distance in (1, 2, 4, 8):
            v = combine(*k.target.exchange(k, v, distance))
        return v

    def over_wave(v, combine):
        """Of a value that the lanes of a row share."""
        distance = L
        while distance < k.target.lanes:
            v = combine(*k.target.exchange(k, v, distance))
            distance *= 2
        return v

    # prologue: keys in the registers, and where in the row they are
    tile = k.fragment(cfg.rows_of(p.n)).load(x.tile((cfg.rows_per_workgroup, p.n), k.workgroup_id()))
    keys, where = [], []
    for piece, v in enumerate(tile.values()):
        for j in range(4):
            at = lane * 4 + (piece * 4 * L + j)
            key = order_key(v[j])
            keys.append(key if (piece + 1) * 4 * L <= p.n else select(at < p.n, key, number(0)))
            where.append(at.to(u32))
    best = keys[0]
    for q in keys[1:]:
        best = maximum(best, q)

    # the threshold, by bisection between the least and the greatest of the lanes' maxima
    @k.repeat(
        carry=(over_row(best, minimum), over_row(best, maximum)),
        going=lambda s: number(0) < over_wave(s[1] - s[0], maximum),
    )
    def bounds(s):
        low, high = s
        distance = high - low
        middle = low + (distance >> 1) + (distance & 1)
        count = over_row(one(best >= middle), add)
        enough, close = count >= min(p.k, L), count <= min(p.k + 1, L)
        above = select(distance.equals(0), high, middle - 1)
        return select(enough, middle, low), select(enough, select(close, middle, high), above)

    threshold = maximum(bounds[0], number(1))
    mine = [q >= threshold for q in keys]
    total = sum((one(c) for c in mine[1:]), one(mine[0]))
    before = number(0)
    for distance in (1, 2, 4, 8):  # exclusive sum over the row's lanes
        _, other = k.target.exchange(k, total, distance)
        before = before + select((lane & distance).equals(0), number(0), other)
        total = total + other

    entry = lambda i: advance(board.pointer, slot.to(u32) * ROOM + i.to(u32), u64)
    place = before
    for key, at, chosen in zip(keys, where, mine, strict=True):

        @k.when(chosen & (place < ROOM))
        def _(key=key, at=at, place=place):
            board.write(entry(place), (key.to(u64) << 32) | (at ^ number(0xFFFFFFFF)).to(u64), 8)

        place = place + one(chosen)
    k.barrier()

    def write(rank, at):
        out = row.to(i64) * p.k + rank.to(i64)
        source = advance(x.pointer, row.to(i64) * p.n + at.to(i64), f32)
        values.write(advance(values.pointer, out, f32), x.read(source, None, 4), 4)
        indices.write(advance(indices.pointer, out, i64), at.to(i64), 8)

    fits = (total <= ROOM) & (total >= p.k) & (row < p.rows)
    for i in (lane.to(u32), lane.to(u32) + L):

        @k.when(fits & (i < total))
        def _(i=i):
            me = board.read(entry(i), None, 8)

            @k.loop(0, total, carry=number(0))
            def rank(j, rank):
                return rank + one(board.read(entry(j), None, 8) > me)

            @k.when(rank < p.k)
            def _():
                write(rank, me.to(u32) ^ number(0xFFFFFFFF))

    flood = one((total > ROOM) | (total < p.k))

    @k.when(number(0) < over_wave(flood, maximum))
    def _():
        @k.loop(0, p.k, carry=tuple(keys))
        def _(r, keys):
            best = keys[0]
            for q in keys[1:]:
                best = maximum(best, q)
            best = over_row(best, maximum)
            at = number(0x7FFFFFFF)
            for q, a in zip(keys, where, strict=True):
                at = minimum(at, select(q.equals(best), a, number(0x7FFFFFFF)))
            at = over_row(at, minimum)

            @k.when((number(0) < flood) & (row < p.rows) & lane.equals(r % L))
            def _():
                write(r, at)

            return tuple(select(a.equals(at), number(0), q) for q, a in zip(keys, where, strict=True))
