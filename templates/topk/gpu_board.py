"""The board: candidates in shared memory, each a key with its position. In no order until they are `ranked`."""

from __future__ import annotations

from collections.abc import Callable

from flykernels.lang import Kernel, Value, atomic, constant, minimum, select, u32, u64
from flykernels.layout import Layout

from .gpu_search import Threshold, number, reaches
from .order import key_of, one

PAIR = 2  # candidates of a read of 16 bytes
PAIRS = 4  # such reads in flight while a candidate is ranked
PAD = PAIR * PAIRS
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

    def threshold(self, threshold: Threshold, count: Value, want: Value, most: Value) -> tuple[Value, Value]:
        """(T, P) of the first `count` entries, as Threshold's."""
        ties = lambda t: self.fold(lambda e: select(key_of(e).equals(t), e.to(u32), number(0)), count)
        return threshold(self.fold(key_of, count), self.capacity, want, most, ties)

    def cut(self, threshold: Threshold, want: Value, most: Value) -> tuple[Value, Value]:
        """Drops candidates until between `want` and `most` are left, the best; (T, P) as Threshold's.

        Ends in a barrier. `threshold`'s words have been cleared, and a barrier has followed."""
        k, count = self.k, self.count
        limit, position = self.threshold(threshold, count, want, most)
        self.empty()

        @k.loop(0, count, k.workgroup_size)
        def _(first):
            at = first.to(u32) + k.thread.to(u32)

            @k.when(at < count, carry=constant(0, u64))
            def e(_):
                return self.entries.get(at)

            k.barrier()  # what is kept lies where all have read
            self.add(e, reaches(key_of(e), e.to(u32), limit, position) & (key_of(e) > 0))

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

    def _better_of(self, first: Value, me: Value, rank: Value) -> Value:
        """rank and how many of the PAD candidates from an even place on are better."""
        for pair in range(PAIRS):
            two = self.entries.at(first + PAIR * pair)
            others = two.read(two.pointer, PAIR, PAIR * u64.bytes)
            rank = rank + one(others[0] > me) + one(others[1] > me)
        return rank
