"""The tiles of a workgroup on sm_90a, one after the other: the warp that brings finds each, and tells who multiplies.

Tiles differ in what they cost: a group's last one has fewer rows, and where groups have few rows bringing their weights
is what counts. So who is free takes the next one, from a counter in device memory. What a tile is, is found once a
workgroup and put on a board in shared memory, while others still multiply the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from flykernels.dtypes import i32, i64
from flykernels.lang import Kernel, Layout, Value, View, constant, maximum, over_lanes
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_wgmma as wgmma
from templates.gemm.sm90a_config import WARP

from .problem import RUN_TIME, GroupedGemmProblem
from .schedule import Schedule, Spot
from .sm90a_config import GroupedSm90aConfig

UNIT = wgmma.UNIT  # bytes that are made zero together, and that a box's rows begin at a multiple of
COUNTER_BYTES = 128  # of device memory: a line of L2
SLOTS = 2  # tiles on the board: one is multiplied, the next is known
WORDS = 5  # of a tile on the board: what a Spot holds
NONE_LEFT = -1  # in a group's place


@dataclass(frozen=True)
class Tile:
    """A tile of one group's C: which, and what of A and B it is made from.

    c        the group's C as (rows, columns), which begins at `first` of T; at: number of the tile in it
    m, n, k  origin in A and B
    steps    K tiles
    before   of another group's K in the first of them (None: nothing), in form "k"
    left     in the last of them: where the group's K ends, in form "k"
    aligned  in form "n": whether the group begins and ends at multiples of 16 bytes of C's rows"""

    group: Any
    c: View
    first: Any
    at: tuple[Any, Any]
    m: Any
    n: Any
    k: Any
    steps: Any
    before: Any = None
    left: Any = None
    aligned: Any = True


class Tiles:
    """This workgroup's tiles, of those in `schedule.Schedule`; in form "n" of the product turned round.

    given    the kernel's arguments; first: the thread that prepares barriers, before anyone walks and a barrier"""

    def __init__(self, k: Kernel, p: GroupedGemmProblem, cfg: GroupedSm90aConfig, given: dict[str, Any], first: Value):
        self.k, self.p, self.cfg, self.given = k, p, cfg, given
        self.board = k.shared(i32, Layout((SLOTS * WORDS,), (1,)))
        marks = k.shared(i64, Layout((2 * SLOTS,), (1,))).pointer
        self.told = barriers.Barriers(marks, SLOTS)
        self.taken = barriers.Barriers(self.told.at(SLOTS), SLOTS)

        @k.when(first)
        def _():
            self.told.init(1)
            self.taken.init(cfg.multipliers // WARP)
            barriers.fence_init()

        tokens, turned = given["tokens"].to(i32), p.form == "n"
        tile = (cfg.tile_n, cfg.tile_m) if turned else (cfg.tile_m, cfg.tile_n)
        self.unit = unit(p)
        self.schedule = Schedule(k, p.flipped if turned else p, given.get("offs"), tokens, tile, self.unit)
        self.size = {"m": p.m, "n": p.n, "k": p.k} | {RUN_TIME[p.form]: tokens}

    def find(self, carry, body: Callable[[Tile, Any], Any]):
        """(carry, came) = body(tile, carry) for each tile, which the others are told of. By one warp.

        came: what its first lane got from `ask`, which it calls a little before the tile's end; 0 in others"""
        k, tiles = self.k, self.schedule.tiles
        start = barriers.Position.start(SLOTS, 1)

        @k.repeat((k.workgroup_id(), start.carried, carry), lambda carried: carried[0] < tiles)
        def after(carried):
            number, at, carry = carried
            at = barriers.Position.of(at, SLOTS)
            spot = self.schedule.spot(number, self.cfg.group_m)
            self._tell(at, spot)
            carry, came = body(self._tile(spot), carry)
            return self._next(number, came), at.next().carried, carry

        _, at, _ = after
        self._tell(barriers.Position.of(at, SLOTS), None)

    def walk(self, carry, body: Callable[[Tile, Any], Any]):
        """carry = body(tile, carry) for each tile that this workgroup's `find` has found. By whole warps."""
        k = self.k
        first, at = self._read(barriers.Position.start(SLOTS, 0))

        @k.repeat((first, at, carry), lambda carried: carried[0][0] >= 0)
        def after(carried):
            words, at, carry = carried
            carry = body(self._tile(Spot(*words)), carry)
            words, at = self._read(barriers.Position.of(at, SLOTS))
            return words, at, carry

        return after

    # -- the counter: 0 before and after a launch
    def ask(self) -> Value:
        """How many have asked before, on its way. By one thread."""
        return self.k.target.count_up(self.given["workspace"].pointer) if self.cfg.queued else constant(0, i32)

    def _next(self, number: Value, came: Value) -> Value:
        """The number of the next tile."""
        k, workgroups = self.k, barriers.workgroups()
        if not self.cfg.queued:
            return number + workgroups
        counter, last = self.given["workspace"], self.schedule.tiles - 1  # each tile is followed by one who asks

        @k.when(self._leads & came.equals(last))
        def _():
            counter.write(counter.pointer, constant(0, i32), i32.bytes)  # for the next launch

        return over_lanes(k, "add", came, WARP) + workgroups

    # -- the board
    @property
    def _leads(self) -> Value:
        return (self.k.thread % WARP).equals(0)

    def _tell(self, at: barriers.Position, spot: Spot | None) -> None:
        words = (NONE_LEFT,) if spot is None else (spot.group, spot.row, spot.column, spot.first, spot.size)
        self.taken.wait(at.stage, at.parity)

        @self.k.when(self._leads)
        def _():
            for i, word in enumerate(words):
                self.board.put(word if isinstance(word, Value) else constant(word, i32), at.stage * WORDS + i)
            self.told.arrive(at.stage)

    def _read(self, at: barriers.Position):
        """(what was told, where the next will be)."""
        self.told.wait(at.stage, at.parity)
        words = tuple(self.board.get(at.stage * WORDS + i) for i in range(WORDS))
        barriers.warp_barrier()  # all lanes have read
        self.k.when(self._leads)(lambda: self.taken.arrive(at.stage))
        return words, at.next().carried

    def _tile(self, spot: Spot) -> Tile:
        p, cfg, form = self.p, self.cfg, self.p.form
        row, column = (spot.column, spot.row) if form == "n" else (spot.row, spot.column)
        # tiles begin at multiples of `unit`, a little before the group
        before = spot.first % self.unit if p.ragged and self.unit > 1 else None
        begin, own = spot.first, spot.size
        if before is not None:
            begin, own = begin - before, own + before
        start = dict.fromkeys("mnk", 0) | ({form: begin} if p.ragged else {})
        size = self.size | ({form: own} if p.ragged else {})

        c = replace(self.given["c"], shape=(size["m"], size["n"]), stride=(self.given["c_row"], 1))
        if p.has_groups("c"):
            c = replace(c, pointer=advance(c.pointer, spot.group.to(i64) * self.given["c_group"], c.dtype))
        else:
            c = c.at(start["m"], start["n"])
        if before is not None and form != "k":
            c = replace(c, skipped=(before, 0) if form == "m" else (0, before))
        c = replace(c, alignment=p.align_c, stride_multiple=p.align_c // c.dtype.bytes)
        steps: Any = ceil(p.k / cfg.tile_k)
        left, aligned = None, True
        if form == "k":  # at least one step, so that a group without any K gets the sum of nothing
            steps = maximum((own + (cfg.tile_k - 1)) // cfg.tile_k, 1)
            left = own - (steps - 1) * cfg.tile_k
        if form == "n":
            aligned = ((spot.first | spot.size) % (UNIT // c.dtype.bytes)).equals(0)
        at_row, at_column = row * cfg.tile_m + start["m"], column * cfg.tile_n + start["n"]
        return Tile(spot.group, c, begin, (row, column), at_row, at_column, start["k"], steps, before, left, aligned)


def unit(p: GroupedGemmProblem) -> int:
    """Elements that tiles begin at a multiple of, along the ragged axis.

    TMA brings boxes whose rows begin at multiples of 16 bytes (an illegal instruction on the H200 otherwise), so where
    tokens are neighbours in memory a tile may begin with some of the group before."""
    neighbours = {"m": p.a == "col", "n": p.b == "row", "k": p.a == "row" or p.b == "col"}
    return UNIT // p.input_type.bytes if neighbours.get(p.form) else 1
