"""TopK of short rows on a GPU: a few lanes hold a whole row in registers, and a wave several rows.

Each lane's best is a group's. The k-th of these is a threshold that at least k elements reach, and in most rows only a
few more. They go to shared memory, where each finds its place by counting who is better. If equal elements overflow
that board: k rounds of looking for the best instead. Where a row's candidates go depends on the data; on gfx950 there
are no more of them than banks, and lanes of other rows write in another phase: no two lanes want one bank.

Short keys leave room for the position in the same 32 bits: no two elements are equal then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from flykernels.codeobject import Extent
from flykernels.dtypes import f32
from flykernels.lang import Kernel, Value, maximum, minimum, over_lanes, select, u32
from flykernels.layout import Layout

from .access import Given, Row, vector_of, write_result
from .config import TopKConfig
from .gpu_search import number
from .order import ALL, NOBODY, Order, entry, entry_of, one, tree
from .problem import TopKProblem

WORD = 32  # bits
READ = 16  # bytes of shared memory that a lane reads at a time


def room_of(cfg: TopKConfig, target) -> int:
    """Candidates of one row that its board holds: no more than there are banks that a write tells apart, where the
    target says so."""
    return min(2 * cfg.lanes, getattr(target, "write_banks", 2 * cfg.lanes))


def place_bits_of(p: TopKProblem, cfg: TopKConfig) -> int:
    """Bits of a position in a row, where they have room beside a key."""
    bits = (cfg.most_width + WORD).bit_length()  # what is read after the last whole vector lies beyond a row's end
    return bits if Order.short(p.largest, p.element).key_bits + bits <= WORD else 0


@dataclass
class HeldRow:
    """A row in the registers of `lanes` lanes: this thread's keys and their positions, and who the thread is."""

    k: Kernel
    order: Order
    lanes: int
    lane: Value
    slot: Value  # of the row among the workgroup's
    here: Value  # whether there is such a row
    want: Value
    place_bits: int  # of a key that are the complement of the position; 0: a key does not tell it
    keys: list[Value]
    positions: list[Value]
    x: Row
    values: Row
    indices: Row

    @staticmethod
    def load(k: Kernel, p: TopKProblem, cfg: TopKConfig) -> HeldRow:
        given, order, lanes = Given.declare(k, p, cfg), Order.short(p.largest, p.element), cfg.lanes
        vector, place_bits = min(vector_of(p), cfg.elements), place_bits_of(p, cfg)
        rows_here = cfg.workgroup_size // lanes
        k.grid = ((Extent("rows", rows_here),),)
        width, want, rows = given["width"].to(u32), given["k"].to(u32), given["rows"].to(u32)
        lane, slot = k.thread.to(u32) % lanes, k.thread.to(u32) // lanes
        row = k.workgroup_id().to(u32) * rows_here + slot
        here = row < rows
        row = select(here, row, number(0))
        x, values, indices = (given.row(name, row) for name in ("x", "values", "indices"))
        vectors = width // vector * vector
        loaded = []  # (elements, first position, whether they are in the row)
        for c in range(cfg.elements // vector):
            first = (lane + c * lanes) * vector
            inside = first < vectors
            loaded.append((x.read(select(inside, first, number(0)), vector if vector > 1 else None), first, inside))
        if vector > 1:  # the elements after the last whole vector, one a lane
            at = vectors + lane
            loaded.append((x.read(select(at < width, at, number(0))), at, at < width))
        keys, positions = [], []
        for v, first, inside in loaded:
            for j in range(v.width or 1):
                key = order.key(v[j].to(f32))
                if place_bits:
                    key = key << place_bits | (first + j) ^ ((1 << place_bits) - 1)
                keys.append(select(inside, key, number(NOBODY)))
                positions.append(first + j)
        return HeldRow(k, order, lanes, lane, slot, here, want, place_bits, keys, positions, x, values, indices)

    def told(self, key: Value) -> Value:
        """The candidate whose position is in its key."""
        everywhere = (1 << self.place_bits) - 1
        return entry(key >> self.place_bits, (key & everywhere) ^ everywhere)

    def over(self, kind: str, v: Value) -> Value:
        """The sum, greatest or least over the row's lanes."""
        return over_lanes(self.k, kind, v, self.lanes)

    def write(self, rank: Value, e: Value) -> None:
        write_result(self.k, self.order, self.x, self.values, self.indices, rank, e)

    def one_by_one(self, on: Value) -> None:
        """Writes the row's results where `on`, looking for the best k times over. k is at most `lanes`."""
        k, nothing = self.k, number(NOBODY)
        if self.place_bits:
            self._one_by_one_of_unequal(on)
            return

        @k.loop(0, self.want, carry=(tuple(self.keys), nothing, nothing))
        def found(r, s):
            keys, my_key, my_position = s
            best = self.over("max", tree(maximum, keys))
            ties = [select(q.equals(best), at, number(ALL)) for q, at in zip(keys, self.positions)]
            first = self.over("min", tree(minimum, ties))
            mine = self.lane.equals(r.to(u32))
            left = tuple(select(at.equals(first), nothing, q) for q, at in zip(keys, self.positions))
            return left, select(mine, best, my_key), select(mine, first, my_position)

        @k.when(on & (self.lane < self.want))
        def _():
            self.write(self.lane, entry(found[1], found[2]))

    def _one_by_one_of_unequal(self, on: Value) -> None:
        k = self.k

        @k.loop(0, self.want, carry=(tuple(self.keys), number(NOBODY)))
        def found(r, s):
            keys, mine = s
            best = self.over("max", tree(maximum, keys))
            left = tuple(select(q.equals(best), number(NOBODY), q) for q in keys)
            return left, select(self.lane.equals(r.to(u32)), best, mine)

        @k.when(on & (self.lane < self.want))
        def _():
            self.write(self.lane, self.told(found[1]))


def better(a: list[Value], b: list[Value]) -> Value:
    """Whether candidate a is better than b: by its key, and of equals by the position's complement, if there is one."""
    if len(a) == 1:
        return a[0] > b[0]
    return (a[0] > b[0]) | (a[0].equals(b[0]) & (a[1] > b[1]))


def topk_rounds(k: Kernel, p: TopKProblem, cfg: TopKConfig):
    row = HeldRow.load(k, p, cfg)
    row.one_by_one(row.here)


def topk_rows(k: Kernel, p: TopKProblem, cfg: TopKConfig):
    row = HeldRow.load(k, p, cfg)
    lanes, room, rows_here = cfg.lanes, room_of(cfg, k.target), cfg.workgroup_size // cfg.lanes
    lane, slot, here, want, keys, positions = row.lane, row.slot, row.here, row.want, row.keys, row.positions

    told = row.place_bits > 0  # keys are unequal, and candidates by themselves
    quad = READ // u32.bytes

    # the k-th of the lanes' bests: each lane counts how many are better than its own
    best = tree(maximum, keys)
    bests = k.shared(u32, Layout((rows_here * lanes,), (1,)))
    bests.put(best, k.thread.to(u32))
    stride = 3 * lanes  # two rows that are read at a time are half of all banks apart
    board = [k.shared(u32, Layout((rows_here * stride,), (1,))) for _ in range(1 if told else 2)]  # keys, complements
    k.barrier()
    rank = number(0)
    for i in range(0, lanes, quad):
        four = bests.at(slot * lanes + i)
        others = four.read(four.pointer, quad, READ)
        for j in range(quad):
            other = others[j]
            rank = rank + one(other > best if told else (other > best) | (other.equals(best) & (lane > i + j)))
    threshold = maximum(row.over("max", select(rank + 1 >= want, best, number(NOBODY))), 1)

    # what reaches it goes to the row's board, in the order of lanes
    chosen = [key >= threshold for key in keys]
    mine = reduce(lambda a, b: a + b, map(one, chosen))
    total, before = mine, number(0)
    distance = 1
    while distance < lanes:
        least, greatest = k.target.exchange(k, total, distance)
        other = least + greatest - total
        before = before + select((lane & distance).equals(0), number(0), other)
        total = total + other
        distance *= 2
    fits = (total <= room) & (total >= want) & here
    at_board = slot * stride

    @k.when((mine > 0) & (total <= room))
    def _():
        place = at_board + before
        for key, at, wanted in zip(keys, positions, chosen):

            @k.when(wanted)
            def _():
                for words, word in zip(board, (key, at ^ ALL)):
                    words.put(word, place)

            place = place + one(wanted)

    @k.when((total <= room) & (lane < quad - 1))
    def _():
        for words in board:
            words.put(number(NOBODY), at_board + total + lane)  # what else is read with the last one

    k.barrier()

    @k.when(fits)
    def _():
        for i in range(0, room, lanes):
            turn = lane + i

            @k.when(turn < total)
            def _():
                mine = [words.get(at_board + turn) for words in board]

                @k.loop(0, total, quad, carry=number(0))
                def rank(j, rank):
                    several = [words.at(at_board + j.to(u32)) for words in board]
                    others = [v.read(v.pointer, quad, READ) for v in several]
                    return reduce(lambda n, i: n + one(better([o[i] for o in others], mine)), range(quad), rank)

                @k.when(rank < want)
                def _():
                    row.write(rank, row.told(*mine) if told else entry_of(*mine))

    flood = (fits ^ 1) & here
    any_row = over_lanes(k, "max", one(flood), k.target.lanes // lanes, lanes)  # of what a row's lanes share

    @k.when(any_row > 0)
    def _():
        row.one_by_one(flood)
