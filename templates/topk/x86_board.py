"""The board of one CPU thread: candidates in its own memory, keys and positions apart, in the order of positions.

That order is kept all along, so that of equal keys the first ones are the ones to keep, with no look at positions."""

from __future__ import annotations

from collections.abc import Callable

from flykernels.dtypes import DType, i32
from flykernels.lang import Kernel, Value, View, constant, lanes_mask, maximum, minimum, popcount, select, u32

from .order import ALL, NOBODY, one

PIVOTS = 3  # of one round of the search: what a pass over the keys can count beside its loads
COUNT_MOST = 164  # candidates up to which ranking by counting costs less than sorting
DIGIT = 8  # bits that one pass of the sort looks at


def lane_numbers(n: int) -> Value:
    """0, 1, ... n - 1."""
    out = constant(0, u32, n)
    for lane in range(1, n):
        out = out.insert(lane, number(lane))
    return out


def number(x: int) -> Value:
    return constant(x, u32)


class Board:
    """keys (u32 or u64) and positions (u32): `capacity` each, and room for a vector more."""

    def __init__(self, k: Kernel, keys: View, positions: View):
        self.k, self.lanes, self.keys, self.positions = k, k.target.vector_bytes // u32.bytes, keys, positions

    @staticmethod
    def make(k: Kernel, capacity: int, keys: DType = u32) -> Board:
        room = capacity + k.target.vector_bytes // u32.bytes
        return Board(k, k.private(keys, room), k.private(u32, room))

    def beyond(self, count: int) -> Board:
        """What is left of it above `count` candidates, as another board."""
        return Board(self.k, self.keys.at(count), self.positions.at(count))

    def put(self, at: Value, keys: Value, positions: Value):
        """One candidate, or a vector of neighbours, from place `at` on."""
        self.keys.put(keys, at)
        self.positions.put(positions, at)

    def _vectors(self, count: Value, start, f: Callable):
        """f(f(start, keys), keys) ... over whole vectors: what stands beyond `count` counts too."""

        @self.k.loop(0, count.to(i32), self.lanes, carry=start)
        def out(i, so_far):
            return f(so_far, self.keys.get(i, width=self.lanes))

        return out

    def _key(self, x: int, width: int | None = None) -> Value:
        return constant(x, self.keys.dtype, width)

    def threshold(self, count: Value, want: Value, most: Value) -> tuple[Value, Value]:
        """(T, how many of the keys T are wanted): at least `want` keys are >= T, at most `most` unless more equal T.

        count >= want >= 1."""
        k, n = self.k, self.lanes
        ends = self._ends(count)
        self.keys.put(self._key(NOBODY, n), count)

        @k.repeat(
            carry=(*ends, count, number(0)),
            going=lambda s: (s[0] < s[1]) & (s[2] > most),
        )
        def found(s):
            low, high, reach, above = s
            span = high - low
            step = span >> 2
            at = [low + minimum(span, maximum(step * j, j)) for j in range(1, PIVOTS + 1)]
            add = lambda s, v: tuple(c + one(v >= pivot) for c, pivot in zip(s, at))
            totals = self._vectors(count, tuple(constant(0, u32, n) for _ in at), add)  # pivots are above 0
            counts = [c.fold(lambda a, b: a + b) for c in totals]
            for pivot, c in zip(at, counts):
                low, reach = select(c >= want, pivot, low), select(c >= want, c, reach)
            for pivot, c in reversed(list(zip(at, counts))):
                high, above = select(c < want, pivot - 1, high), select(c < want, c, above)
            return low, high, reach, above

        limit, _, reach, above = found
        return limit, select(reach > most, want - above, number(ALL))

    def _ends(self, count: Value) -> tuple[Value, Value]:
        """The least and the greatest key."""
        some = self.keys.get(0).splat(self.lanes)
        self.keys.put(some, count)
        ends = self._vectors(count, (some, some), lambda s, v: (minimum(s[0], v), maximum(s[1], v)))
        return ends[0].fold(minimum), ends[1].fold(maximum)

    def _packed(self, keys: Value, chosen: Value) -> Value:
        """The keys of the chosen lanes, moved to the front: of 64 bits by halves."""
        pack = self.k.target.compress
        if keys.dtype.bits == u32.bits:
            return pack(keys, chosen)
        low, high = pack(keys.to(u32), chosen), pack((keys >> u32.bits).to(u32), chosen)
        return (high.to(keys.dtype) << u32.bits) | low.to(keys.dtype)

    def add(self, count: Value, keys: Value, positions: Value, chosen: Value) -> Value:
        """The lanes whose bits are set in `chosen`; the new count."""
        self.put(count, self._packed(keys, chosen), self.k.target.compress(positions, chosen))
        return count + popcount(chosen)

    def cut(self, count: Value, want: Value, most: Value) -> tuple[Value, Value]:
        """Drops candidates until between `want` and `most` are left, the best; (how many, T as `threshold`'s)."""
        k, n = self.k, self.lanes
        limit, ties = self.threshold(count, want, most)  # has put nobody's keys behind the last one

        @k.loop(0, count.to(i32), n, carry=(number(0), ties))
        def left(first, s):
            out, ties = s
            keys, positions = self.keys.get(first, width=n), self.positions.get(first, width=n)
            better, tied = lanes_mask(keys > limit), lanes_mask(keys.equals(limit))
            first_of = select(ties < n, (number(1) << ties) - 1, number(ALL))
            tied = k.target.deposit(first_of, tied)
            return self.add(out, keys, positions, better | tied), ties - popcount(tied)  # out <= first: all is read

        return left[0], limit

    def ranked(self, count: Value, visit: Callable[[Value, Value, Value], None]):
        """visit(rank, key, position) for all candidates: a rank is how many are better. For few."""
        k, n = self.k, self.lanes
        ranks, lane = k.private(u32, COUNT_MOST + n), lane_numbers(n)

        @k.loop(0, count.to(i32), n)
        def _(first):
            mine = self.keys.get(first, width=n)

            @k.loop(0, count.to(i32), carry=constant(0, u32, n))
            def rank(j, rank):
                other = self.keys.get(j).splat(n)
                later = lane + first.to(u32) > j.to(u32)
                return rank + one((other > mine) | (other.equals(mine) & later))

            ranks.put(rank, first)

        @k.loop(0, count.to(i32))
        def _(i):
            visit(ranks.get(i), self.keys.get(i), self.positions.get(i))

    def sorted(self, count: Value, spare: Board, visit: Callable[[Value, Value, Value], None]):
        """visit(rank, key, position) for all candidates, after sorting them digit by digit: stable, so equal keys stay
        in the order of positions. `spare` has room for `count`."""
        k, digits = self.k, 1 << DIGIT
        starts = k.private(u32, digits)
        source, target = self, spare
        for shift in range(0, self.keys.dtype.bits, DIGIT):
            digit = lambda key: ((key >> shift).to(u32) ^ ALL) & (digits - 1)  # the best first

            @k.loop(0, digits)
            def _(d):
                starts.put(number(0), d)

            @k.loop(0, count.to(i32))
            def _(i):
                d = digit(source.keys.get(i))
                starts.put(starts.get(d) + 1, d)

            @k.loop(0, digits, carry=number(0))
            def _(d, before):
                here = starts.get(d)
                starts.put(before, d)
                return before + here

            @k.loop(0, count.to(i32))
            def _(i):
                key = source.keys.get(i)
                d = digit(key)
                at = starts.get(d)
                target.put(at, key, source.positions.get(i))
                starts.put(at + 1, d)

            source, target = target, source

        @k.loop(0, count.to(i32))
        def _(i):
            visit(i.to(u32), source.keys.get(i), source.positions.get(i))
