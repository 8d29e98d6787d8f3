"""Which tile of which group a workgroup computes next, worked out on the device from `offs`.

A fixed number of workgroups stay, and walk the tiles of all groups, which stand in one line. Nothing is asked of the
host. Each workgroup makes a table in shared memory when it starts: one wave's lanes read offs side by side, a scan over
the lanes gives where groups begin and how many tiles lie before each. To find a tile's group the lanes compare the
table with the tile's number.

Balance. Tiles of forms "m" and "batch" cost the same but for the last rows of a group: workgroup w does the tiles w,
w + P, w + 2 P ..., so that each has as many as any other, or one less (`walk`). Tiles of form "k" cost what their group
has of T: there the groups stand in order of their size, the largest first, and who is free takes the next tile from a
counter in memory (`Queue`). Which workgroup does a tile changes nothing in the result.

`walk` is pure arithmetic on ints or kernel Values, so that what kernels use is tested on many sets of groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flykernels.dtypes import i32
from flykernels.lang import Kernel, Layout, Value, View, constant, maximum, minimum, over_lanes, select
from flykernels.lang.collective import scan_lanes
from templates.gemm.order import grouped, on_dies

from .problem import GroupedGemmProblem


@dataclass(frozen=True)
class Spot:
    """A tile: which group's, where in the group's product, and which of T the group has. i32 Values or ints."""

    group: Any
    row: Any  # number of the tile along M
    column: Any  # along N
    first: Any  # of T
    size: Any  # of T; may be 0 in form "k"


def walk(turn, workgroup, workgroups, tiles, dies: int):
    """The number of the tile that a workgroup does in its turn, at least `tiles` if it has none left.

    A die's workgroups do neighbouring tiles, whose operands its L2 cache then holds; also in the last turn, which has
    fewer tiles than there are workgroups."""
    first = turn * workgroups
    count = minimum(tiles - first, workgroups)
    at = first + on_dies(workgroup, count, dies)
    return _choose(workgroup < count, at, tiles)


def turns(tiles, workgroups: int):
    """How many turns the longest-working workgroup has."""
    return (tiles + (workgroups - 1)) // workgroups


def _choose(condition, yes, no):
    if isinstance(condition, Value):
        model = constant(0, i32)
        return select(condition, yes if isinstance(yes, Value) else model + yes, no)
    return yes if condition else no


class Schedule:
    """The tiles of all groups of a problem whose form is not "n", for workgroups of a GPU.

    p      the problem; offs: View of its G values (None in form "batch"); tokens: T, an i32 Value
    tile   (rows, columns) of a workgroup's tile
    unit   form "m": a group's first tile begins at a multiple of this, and may so have rows of the group before
    block  groups begin and end at multiples of this, offs are rounded down

    offs are cut to 0 .. T, and a group that would begin before another's end begins there (reference.bounds): nothing
    is read or written outside, and no row of C by two groups, whatever offs say. Made once at the kernel's beginning,
    by all threads; ends in a barrier."""

    def __init__(
        self, k: Kernel, p: GroupedGemmProblem, offs: View | None, tokens: Value, tile: tuple[int, int],
        unit: int = 1, block: int = 1,
    ):  # fmt: skip
        self.k, self.p, self.tokens, self.tile, self.unit, self.block = k, p, tokens, tile, unit, block
        self.columns = -(-p.n // tile[1])
        self.chunks = -(-p.groups // k.target.lanes)
        room = self.chunks * k.target.lanes
        self.bounds: Any = None  # Views, where the form has them
        self.starts: Any = None
        self.ranked: Any = None
        if offs is None:
            self.rows = up(tokens, tile[0])
            self.tiles = self.rows * (self.columns * p.groups)
            return
        table = lambda n: k.shared(i32, Layout((n,), (1,)))
        self.bounds = table(room + 1)
        if p.form == "k":
            self.rows = -(-p.m // tile[0])
            self.ranked = table(room)
            self.tiles = constant(self.rows * self.columns * p.groups, i32)
        else:
            self.starts = table(room + 1)

        @k.when(True if isinstance(k.subgroup, int) else k.subgroup.equals(0))
        def _():
            self._fill(offs)

        k.barrier()
        if p.form == "k":
            self._rank()
        else:
            self.tiles = self._uniform(self.starts.get(room)) * self.columns

    @property
    def _lane(self):
        return self.k.thread % self.k.target.lanes

    def _uniform(self, x: Value) -> Value:
        uniform = getattr(self.k.target, "uniform", None)
        return uniform(x) if uniform else x

    def _fill(self, offs: View):
        """One wave: bounds and starts of all groups, as many at a time as there are lanes."""
        k, p, lane = self.k, self.p, self._lane
        zero = constant(0, i32)
        so_far, tiles = zero, zero

        @k.when(lane.equals(0))
        def _():
            for t in (self.bounds, self.starts):
                if t is not None:
                    t.put(zero, 0)

        for c in range(self.chunks):
            g = lane + c * k.target.lanes
            end = offs.get(minimum(g, p.groups - 1))  # past the last group: as the last one, so empty
            end = maximum(minimum(end, self.tokens), 0)
            if self.block > 1:
                end = end // self.block * self.block
            before, until = scan_lanes(k, "max", end, so_far)
            upto = maximum(before, end)
            self.bounds.put(upto, g + 1)
            if self.starts is not None:
                rows = up(upto - before, self.tile[0])
                if self.unit > 1:
                    rows = select(upto > before, up(upto - before + before % self.unit, self.tile[0]), 0)
                ahead, total = scan_lanes(k, "add", rows, tiles)
                self.starts.put(ahead + rows, g + 1)
                tiles = total
            so_far = until

    def _rank(self):
        """Form "k": groups by size, the largest first, of equal ones the lower number. Every thread ranks a group."""
        k, p = self.k, self.p
        size = lambda g: self.bounds.get(g + 1) - self.bounds.get(g)

        @k.loop(k.thread if isinstance(k.thread, Value) else 0, p.groups, k.workgroup_size)
        def _(g):
            mine = size(g)

            @k.loop(0, p.groups, carry=constant(0, i32))
            def rank(other, rank):
                theirs = size(other)
                before = (theirs > mine) | (theirs.equals(mine) & (other < g))
                return rank + select(before, constant(1, i32), constant(0, i32))

            self.ranked.put(g, rank)

        k.barrier()

    def spot(self, i: Value, group_m: int) -> Spot:
        """The tile number i, 0 <= i < self.tiles. group_m: rows of tiles that are worked on together, see order.py."""
        p, columns = self.p, self.columns
        if p.form != "m":
            each = self.rows * columns
            at, within = i // each, i % each
            row, column = grouped(within, self.rows, columns, group_m)
            if p.form == "batch":
                return Spot(at, row, column, constant(0, i32), self.tokens)
            g = self._uniform(self.ranked.get(at))
            first, end = self._between(self.bounds, g)
            return Spot(g, row, column, first, end - first)
        strip = i // columns
        g = self._group_of(strip)
        first, end = self._between(self.bounds, g)
        start, after = self._between(self.starts, g)
        row, column = grouped(i - start * columns, after - start, columns, group_m)
        return Spot(g, row, column, first, end - first)

    def _between(self, table: View, g):
        return self._uniform(table.get(g)), self._uniform(table.get(g + 1))

    def _group_of(self, strip: Value) -> Value:
        """The group that has row of tiles number `strip`, of all groups' rows: as many as end before it."""
        k, one, zero = self.k, constant(1, i32), constant(0, i32)
        count = zero
        for c in range(self.chunks):
            ends = self.starts.get(self._lane + (c * k.target.lanes + 1))
            count = count + select(ends < strip + 1, one, zero)
        return self._uniform(over_lanes(k, "add", count, k.target.lanes))


def up(size, tile: int):
    """How many tiles cover `size` (an int or a Value)."""
    return (size + (tile - 1)) // tile


class Queue:
    """Hands out tiles: the workgroup that is free takes the next number from a counter, 0 before and after a launch.

    counter     i32 View in device memory
    workgroups  that take part, each until it gets a number beyond the last tile's"""

    def __init__(self, k: Kernel, counter: View, tiles: Value, workgroups: int):
        self.k, self.counter, self.takings = k, counter, tiles + workgroups
        self.board = k.shared(i32, Layout((1,), (1,)))

    def take(self):
        """Asks for the next number; after a barrier `taken` has it."""

        @self.k.when(self.k.thread.equals(0))
        def _():
            number = self.k.target.count_up(self.counter.pointer)
            self.board.put(number, 0)

            @self.k.when(number.equals(self.takings - 1))
            def _():
                self.k.target.count_up(self.counter.pointer, 0 - self.takings)  # the last to ask: for the next launch

    def taken(self) -> Value:
        """The number that came, in all threads. Ends in a barrier."""
        number = self.k.target.uniform(self.board.get(0))
        self.k.barrier()  # all have read it; the next may be put there
        return number
