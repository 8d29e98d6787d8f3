"""Sorting the board: Batcher's bitonic network, which moves data the same way whatever the data are.

A thread holds neighbouring entries in registers. A step compares entries whose numbers differ in one bit: two registers
of a thread, the registers of two lanes, or, through shared memory, those of two waves. There the lanes of a wave use
neighbouring places, always: no two of them want the same bank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flykernels.lang import Kernel, Value, constant, i32, minimum, select, u32, u64

from .gpu_board import Board
from .gpu_search import number
from .order import ENTRY_BYTES, entry_of, key_of

WORD_BYTES = 4  # of a bank


def room(most: int, threads: int) -> int:
    """Places of one of the board's halves: for all entries, with gaps when they are read by rank."""
    return held(most, threads) * threads + threads


def held(most: int, threads: int) -> int:
    """Entries of a thread, where `most`, a power of two, are sorted."""
    return max(1, most // threads)


def sort(board: Board, most: int, visit: Callable[[Value, Value], None]) -> None:
    """visit(rank, entry) for all entries of the board, best first. They are at most `most`, a power of two, and the
    board has twice their `room`. Threads side by side visit neighbours."""
    k, count = board.k, board.count
    network = Network(k, k.thread.to(u32), held(most, k.workgroup_size))
    threads, lanes, n = k.workgroup_size, k.target.lanes, network.held
    half, entries = number(room(most, threads)), board.entries
    place = lambda e: e * threads + network.thread

    mine = []
    for e in range(n):

        @k.when(place(e) < count, carry=constant(0, u64))
        def found(_):
            return entries.get(place(e))

        mine.append(found)
    for size in powers(2, n * lanes):  # of runs within a wave
        step = network.anew(number(size))
        mine = step.merge(mine, step.descending(size), size // 2)

    taken = minimum(count, threads)  # threads that hold something

    @k.repeat(carry=(tuple(mine), number(lanes), half), going=lambda s: s[1] < taken)
    def merged(s):
        """Two runs of so many threads become one. The halves take turns, so that one barrier a step does."""
        mine, run, at = s
        descending = (network.thread & (run + run)).equals(0)

        @k.repeat(carry=(mine, run, at), going=lambda s: s[1] >= lanes)
        def across(s):
            mine, distance, at = s
            for e, v in enumerate(mine):
                entries.put(v, at + place(e))
            k.barrier()
            partner, best = network.thread ^ distance, descending ^ ((network.thread & distance) > 0)
            others = [entries.get(at + (e * threads + partner)) for e in range(n)]
            return tuple(better(a, b, best) for a, b in zip(mine, others)), distance >> 1, half - at

        mine, _, at = across
        return tuple(network.anew(run).merge(list(mine), descending, n * lanes // 2)), run + run, at

    mine, _, at = merged
    if n == 1:
        visit_one(k, network.thread, count, mine[0], visit)
        return
    gap = k.target.limits.banks * WORD_BYTES // ENTRY_BYTES // n  # a rank's neighbours lie in rows: each its own banks
    row = threads + gap
    for e, v in enumerate(mine):
        entries.put(v, at + e * row + network.thread)
    k.barrier()
    for e in range(n):
        rank = place(e)
        visit_one(k, rank, count, entries.get(at + (rank % n * row + rank // n)), visit)


def visit_one(k: Kernel, rank: Value, count: Value, entry: Value, visit: Callable[[Value, Value], None]) -> None:
    @k.when(rank < count)
    def _():
        visit(rank, entry)


def powers(first: int, last: int):
    """first, 2 first, ... up to `last`."""
    while first <= last:
        yield first
        first *= 2


@dataclass
class Network:
    """Steps within a wave. Entry number thread * held + e is in register e."""

    k: Kernel
    thread: Value
    held: int

    def anew(self, size: Value) -> Network:
        """The same for runs of so many, of which LLVM does not know that it is: else it would keep what it asks of the
        thread's bits for all steps, in more registers than there are."""
        opaque = self.k.target.opaque((self.thread + size).to(i32)).to(u32)
        return replace(self, thread=opaque - size)

    def descending(self, size: int) -> list[bool] | Value:
        """Whether a run of `size` becomes one that descends: every second does. For each register, or for all."""
        if size < self.held:
            return [not e & size for e in range(self.held)]
        return (self.thread & (size // self.held)).equals(0)

    def merge(self, mine: list[Value], descending, first: int) -> list[Value]:
        """The steps with distances first, first / 2, ... 1."""
        each = descending if isinstance(descending, list) else [descending] * self.held
        for distance in reversed(list(powers(1, first))):
            if distance >= self.held:
                lanes = distance // self.held
                upper = (self.thread & lanes) > 0
                best = upper ^ each[0]
                mine = [self.exchanged(v, lanes, best) for v in mine]
            else:
                for e in range(self.held):
                    if not e & distance:
                        a, b = mine[e], mine[e | distance]
                        swap = (a > b) ^ each[e]
                        mine[e], mine[e | distance] = select(swap, b, a), select(swap, a, b)
        return mine

    def exchanged(self, mine: Value, lanes: int, best: Value) -> Value:
        """The better of this lane's entry and that of lane ^ lanes, or the worse."""
        high = self.k.target.exchange(self.k, key_of(mine), lanes)
        low = self.k.target.exchange(self.k, mine.to(u32), lanes)
        a, b = (entry_of(h, w) for h, w in zip(high, low))  # in the same order both times
        return better(a, b, best)


def better(a: Value, b: Value, best: Value) -> Value:
    """The greater where `best`, else the lesser."""
    return select((a > b) ^ best, b, a)
