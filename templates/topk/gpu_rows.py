"""TopK of short rows on a GPU: a few lanes hold a whole row in registers, and a wave several rows.

Each lane's best is a group's. The k-th of these is a threshold that at least k elements reach, and in most rows only a
few more. They go to shared memory, where each finds its place by counting who is better. If equal elements overflow
that board: k rounds of looking for the best instead.
"""

from __future__ import annotations

from functools import reduce

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, u64
from flykernels.lang import Kernel, constant, maximum, minimum, over_lanes, select, u32
from flykernels.layout import Layout

from .access import Given, vector_of, write_result
from .config import TopKConfig
from .gpu_search import number
from .order import ALL, NOBODY, Order, entry, one
from .problem import TopKProblem

QUAD = 4  # keys of 16 bytes
PAIR = 2  # candidates of 16 bytes


def room_of(cfg: TopKConfig) -> int:
    """Candidates of one row that its board holds."""
    return 2 * cfg.lanes


def topk_rows(k: Kernel, p: TopKProblem, cfg: TopKConfig):
    given, order = Given.declare(k, p, cfg), Order(p.largest)
    rows_here = cfg.workgroup_size // cfg.lanes
    k.grid = ((Extent("rows", rows_here),),)
    width, want, rows = given["width"].to(u32), given["k"].to(u32), given["rows"].to(u32)
    vector, lanes, room = vector_of(p), cfg.lanes, room_of(cfg)
    over_row = lambda kind, v: over_lanes(k, kind, v, lanes)
    any_row = lambda v: over_lanes(k, "max", v, k.target.lanes // lanes, lanes)  # of what the lanes of a row share

    # prologue: the row's keys are in registers, with their positions
    lane, slot = k.thread.to(u32) % lanes, k.thread.to(u32) // lanes
    row = k.workgroup_id().to(u32) * rows_here + slot
    here = row < rows
    row = select(here, row, number(0))
    x, values, indices = (given.row(name, row) for name in ("x", "values", "indices"))
    vectors = width // vector * vector
    keys, positions = [], []
    for c in range(cfg.elements // vector):
        first = (lane + c * lanes) * vector
        inside = first < vectors
        wide = x.read(select(inside, first, number(0)), vector if vector > 1 else None).to(f32)
        for j in range(vector):
            keys.append(select(inside, order.key(wide[j]), number(NOBODY)))
            positions.append(first + j)
    if vector > 1:  # the elements after the last whole vector, one a lane
        at = vectors + lane
        inside = at < width
        keys.append(select(inside, order.key(x.read(select(inside, at, number(0))).to(f32)), number(NOBODY)))
        positions.append(at)

    # the k-th of the lanes' bests: each lane counts how many are better than its own
    best = reduce(maximum, keys)
    bests = k.shared(u32, Layout((rows_here * lanes,), (1,)))
    bests.put(best, k.thread.to(u32))
    stride = room + lanes  # two rows that are read at a time are half of all banks apart
    board = k.shared(u64, Layout((rows_here * stride,), (1,)))
    k.barrier()
    rank = number(0)
    for i in range(0, lanes, QUAD):
        four = bests.at(slot * lanes + i)
        others = four.read(four.pointer, QUAD, QUAD * u32.bytes)
        for j in range(QUAD):
            other = others[j]
            rank = rank + one((other > best) | (other.equals(best) & (lane > i + j)))
    threshold = maximum(over_row("max", select(rank + 1 >= want, best, number(NOBODY))), 1)

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
                board.put(entry(key, at), place)

            place = place + one(wanted)

    @k.when((total < room) & lane.equals(0))
    def _():
        board.put(constant(0, u64), at_board + total)  # the other half of the last pair

    k.barrier()

    @k.when(fits)
    def _():
        for i in range(0, room, lanes):
            turn = lane + i

            @k.when(turn < total)
            def _():
                me = board.get(at_board + turn)

                @k.loop(0, total, PAIR, carry=number(0))
                def rank(j, rank):
                    two = board.at(at_board + j.to(u32))
                    others = two.read(two.pointer, PAIR, PAIR * u64.bytes)
                    return rank + one(others[0] > me) + one(others[1] > me)

                @k.when(rank < want)
                def _():
                    write_result(k, order, x, values, indices, rank, me)

    flood = one((fits ^ 1) & here)

    @k.when(any_row(flood) > 0)
    def _():
        @k.loop(0, want, carry=tuple(keys))
        def _(r, keys):
            best = over_row("max", reduce(maximum, keys))
            found = reduce(minimum, [select(q.equals(best), at, number(ALL)) for q, at in zip(keys, positions)])
            found = over_row("min", found)

            @k.when((flood > 0) & lane.equals(r.to(u32) % lanes))
            def _():
                write_result(k, order, x, values, indices, r.to(u32), entry(best, found))

            return tuple(select(at.equals(found), number(NOBODY), q) for q, at in zip(keys, positions))
