"""The board: candidates in shared memory, each a key with its position. In no order until `ranked` or `sorted`."""

from __future__ import annotations

from collections.abc import Callable

from flykernels.lang import Kernel, Value, atomic, constant, minimum, select, u32, u64
from flykernels.layout import Layout

from .gpu_search import Threshold, number, reaches
from .order import key_of, one

PAIR = 2  # candidates of a read of 16 bytes
PAIRS = 4  # such reads in flight while a candidate is ranked
PAD = PAIR * PAIRS
MOST_MERGED = 8  # candidates of a run that a thread makes at a time
MOST_SHARERS = 4  # lanes that share the ranking of a candidate


class Board:
    """Room for `capacity` candidates. `count` and what lies there are the same for all threads after a barrier."""

    def __init__(self, k: Kernel, capacity: int):
        self.k, self.capacity = k, capacity
        self.entries = k.shared(u64, Layout((capacity + PAD,), (1,)))
        self.counter = k.shared(u32, Layout((1,), (1,)))

    def empty(self):
        """Forgets all. A barrier must follow."""

        @self.k.when(self.k.thread.equals(0))
        def _():
            self.counter.put(number(0), 0)

    @property
    def count(self) -> Value:
        return self.counter.get(0)

    def add(self, entry: Value, wanted: Value):
        """This thread's entry where wanted. A barrier must follow."""

        @self.k.when(wanted)
        def _():
            self.entries.put(entry, atomic(self.k, "add", self.counter, number(1), 0))

    def fold(self, read: Callable[[Value], Value], count: Value):
        """The Fold of read(entry) over this thread's share of the candidates."""

        whole = getattr(self.k.target, "whole", lambda entry: entry)

        def fold(start, f):
            @self.k.loop(self.k.thread, count, self.k.workgroup_size, carry=start)
            def out(i, so_far):
                return f(so_far, read(whole(self.entries.get(i))))

            return out

        return fold

    def cut(self, threshold: Threshold, want: Value, most: Value) -> tuple[Value, Value]:
        """Drops candidates until between `want` and `most` are left, the best; (T, P) as Threshold's.

        Ends in a barrier. `threshold`'s words have been cleared, and a barrier has followed."""
        k, count = self.k, self.count
        complement = lambda e: e.to(u32)
        ties = lambda t: self.fold(lambda e: select(key_of(e).equals(t), complement(e), number(0)), count)
        limit, position = threshold(self.fold(key_of, count), self.capacity, want, most, ties)
        self.empty()

        @k.loop(0, count, k.workgroup_size)
        def _(first):
            at = first.to(u32) + k.thread.to(u32)

            @k.when(at < count, carry=constant(0, u64))
            def e(_):
                return self.entries.get(at)

            k.barrier()  # what is kept lies where all have read
            self.add(e, reaches(key_of(e), complement(e), limit, position) & (key_of(e) > 0))

        k.barrier()
        return limit, position

    def ranked(self, visit: Callable[[Value, Value], None]):
        """visit(rank, entry) for all candidates, by one thread each: a rank is how many are better.

        For few: the work is the square of their number. Where there are several threads for each candidate, they share
        it."""
        k, count, thread = self.k, self.count, self.k.thread.to(u32)

        @k.when(thread < PAD)
        def _():
            self.entries.put(constant(0, u64), count + thread)

        sharers, helpers = number(1), []  # lanes that share a candidate
        for n in (2, MOST_SHARERS):
            sharers = select(count * n <= k.workgroup_size, number(n), sharers)
            helpers.append(n // 2)
        lane, turn = thread % k.target.lanes, k.workgroup_size // sharers
        share = lane % sharers
        k.barrier()

        @k.loop((thread - lane) // sharers, count, turn)  # the same for all lanes of a wave
        def _(first):
            i = first.to(u32) + lane // sharers
            me = self.entries.get(minimum(i, count))  # beyond the last: an entry of zeros

            @k.loop(share * PAD, count, sharers * PAD, carry=number(0))
            def rank(j, rank):
                return self._better_of(j, me, rank)

            for distance in helpers:
                least, greatest = k.target.exchange(k, rank, distance)
                rank = select(sharers > distance, least + greatest, rank)

            @k.when(share.equals(0) & (i < count))
            def _():
                visit(rank, me)

    def sorted(self, visit: Callable[[Value, Value], None]):
        """visit(rank, entry) for all candidates, after sorting them: runs of a wave's length by counting, then two
        neighbouring runs become one, again and again. The board has room for them twice, and a wave's length more."""
        k, count, thread, length = self.k, self.count, self.k.thread.to(u32), self.k.target.lanes
        outputs = next(
            n for n in (1, 2, 4, MOST_MERGED) if n == MOST_MERGED or self.capacity // 2 <= n * k.workgroup_size
        )
        half = number(self.capacity // 2 // PAIR * PAIR)
        each = lambda visit: k.loop(k.thread, count, k.workgroup_size)(lambda i: visit(i.to(u32)))

        @k.when(thread < length)
        def _():
            self.entries.put(constant(0, u64), count + thread)

        @k.when(thread.equals(0))
        def _():
            self.entries.put(constant(0, u64), half + count)

        k.barrier()

        @each
        def _(i):
            me, run = self.entries.get(i), i - i % length

            @k.loop(0, length, PAD, carry=number(0))
            def rank(j, rank):
                return self._better_of(run + j.to(u32), me, rank)

            self.entries.put(me, half + run + rank)

        k.barrier()

        @k.repeat(carry=(number(length), half, number(0)), going=lambda s: s[0] < count)
        def in_order(s):
            run, source, free = s

            @k.loop(k.thread * outputs, count, k.workgroup_size * outputs)
            def _(first):
                self._merge_some(first.to(u32), outputs, run, count, source, free)

            k.barrier()
            return run + run, free, source

        each(lambda i: visit(i, self.entries.get(in_order[1] + i)))

    def _merge_some(self, first: Value, outputs: int, run: Value, count: Value, source: Value, free: Value):
        """Places first, ... first + outputs - 1 of what two neighbouring runs make: how many of them come from either
        run is found by halving (Green, McColl and Bader, GPU Merge Path, 2012), then they are merged one by one."""
        k = self.k
        start = first - (first & (run + run - 1))
        middle, end = minimum(start + run, count), minimum(start + run + run, count)
        ahead, left, right = first - start, middle - start, end - middle
        low = select(ahead > right, ahead - right, number(0))

        @k.repeat(carry=(low, minimum(ahead, left)), going=lambda s: s[0] < s[1])
        def taken(s):
            low, high = s
            at = (low + high) >> 1
            better = self.entries.get(source + (start + at)) > self.entries.get(source + (middle + (ahead - 1 - at)))
            return select(better, at + 1, low), select(better, high, at)

        a, b = start + taken[0], middle + (ahead - taken[0])
        of = lambda at, end: select(at < end, self.entries.get(source + minimum(at, count)), constant(0, u64))
        x, y, merged = of(a, middle), of(b, end), []
        for i in range(outputs):
            better = x > y
            merged.append(select(better, x, y))
            if i + 1 < outputs:
                a, b = a + one(better), b + one(better ^ 1)
                following = of(select(better, a, b), select(better, middle, end))
                x, y = select(better, following, x), select(better, y, following)
        place = self.entries.at(free + first)
        if outputs == 1:
            place.put(merged[0], 0)
        for i in range(0, outputs - 1, PAIR):
            two = merged[i].splat(PAIR).insert(1, merged[i + 1])
            place.write(place.at(i).pointer, two, PAIR * u64.bytes)

    def _better_of(self, first: Value, me: Value, rank: Value) -> Value:
        """rank and how many of the PAD candidates from an even place on are better."""
        for pair in range(PAIRS):
            two = self.entries.at(first + PAIR * pair)
            others = two.read(two.pointer, PAIR, PAIR * u64.bytes)
            rank = rank + one(others[0] > me) + one(others[1] > me)
        return rank
