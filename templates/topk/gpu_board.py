"""The board: candidates in shared memory, each a key with its position. In no order until `ranked` or `sort`."""

from __future__ import annotations

from collections.abc import Callable

from flykernels.lang import Kernel, Value, atomic, constant, select, u32, u64
from flykernels.layout import Layout

from .gpu_search import Threshold, number, reaches
from .order import key_of, one

PAIRS = 4  # 16-byte reads in flight while a candidate is ranked
PAD = 2 * PAIRS


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

        def fold(start, f):
            @self.k.loop(self.k.thread, count, self.k.workgroup_size, carry=start)
            def out(i, so_far):
                return f(so_far, read(self.entries.get(i)))

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
        """visit(rank, entry) for all candidates, by the thread that comes upon each: its rank is how many are better.

        For few: the work is the square of their number."""
        k, count = self.k, self.count

        @k.when(k.thread < PAD)
        def _():
            self.entries.put(constant(0, u64), count + k.thread.to(u32))

        k.barrier()

        @k.loop(k.thread, count, k.workgroup_size)
        def _(i):
            me = self.entries.get(i)

            @k.loop(0, count, PAD, carry=number(0))
            def rank(j, rank):
                for pair in range(PAIRS):
                    two = self.entries.at(j + 2 * pair)
                    others = two.read(two.pointer, 2, 2 * u64.bytes)
                    rank = rank + one(others[0] > me) + one(others[1] > me)
                return rank

            visit(rank, me)

    def sorted(self, visit: Callable[[Value, Value], None]):
        """visit(rank, entry) for all candidates, after sorting them (Batcher's bitonic network).

        The board must have room for the next power of two."""
        k, count = self.k, self.count

        @k.repeat(carry=number(1), going=lambda n: n < count)
        def size(n):
            return n + n

        @k.loop(k.thread.to(u32) + count, size, k.workgroup_size)
        def _(i):
            self.entries.put(constant(0, u64), i)

        k.barrier()

        @k.repeat(carry=number(2), going=lambda run: run <= size)
        def _(run):
            @k.repeat(carry=run >> 1, going=lambda stride: stride > 0)
            def _(stride):
                @k.loop(k.thread, size >> 1, k.workgroup_size)
                def _(pair):
                    pair = pair.to(u32)
                    low = pair + pair - (pair & (stride - 1))
                    a, b = self.entries.get(low), self.entries.get(low + stride)

                    @k.when((a < b) ^ ((low & run) > 0))
                    def _():
                        self.entries.put(b, low)
                        self.entries.put(a, low + stride)

                k.barrier()
                return stride >> 1

            return run + run

        @k.loop(k.thread, count, k.workgroup_size)
        def _(i):
            visit(i.to(u32), self.entries.get(i))
