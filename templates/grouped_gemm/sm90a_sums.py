"""The sums of a tile of one group's product on sm_90a: K tiles multiplied one after the other as they come.

Two are always under way: one's wgmmas run while the next one's bytes are waited for. In form "k" a tile's K is its
group's: what the first and last K tiles have of other groups is made zero in shared memory before it is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flykernels.dtypes import i32
from flykernels.lang import Kernel, Value, View, constant, select
from flykernels.lang.fragment import Fragment
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_wgmma as wgmma
from templates.gemm.sm90a import Stages
from templates.gemm.sm90a_config import BLOCK_K, BLOCK_M

from .sm90a_config import GroupedSm90aConfig
from .sm90a_tiles import UNIT, Tile

CLEARED = 1  # the named barrier where warpgroups meet when they have made zeros of what lies past a group's K
NOTHING = -1  # in a stage's place


@dataclass(frozen=True)
class Part:
    """What one warpgroup has of a tile, as (row, column) of the warpgroups side by side."""

    along_m: Any
    along_n: Any


class Sums:
    """What a warpgroup adds up, from the stages of a ring. By all warpgroups."""

    def __init__(self, k: Kernel, cfg: GroupedSm90aConfig, ring: Stages):
        self.k, self.cfg, self.ring = k, cfg, ring
        group = k.thread // wgmma.WARPGROUP if cfg.multipliers > wgmma.WARPGROUP else 0
        self.part = Part(group % cfg.groups[0], group // cfg.groups[0])
        self.lane = k.thread % wgmma.WARPGROUP
        self.layout = wgmma.sums_layout(cfg.columns, cfg.blocks, cfg.groups)
        origin, a, b = wgmma.address_of(ring.memory), ring.a, ring.b
        # a warpgroup's part of the tile begins at whole boxes or groups of rows, the same distance for each
        a_start = origin + self.part.along_m * a.step_bytes(BLOCK_M * cfg.blocks, 0)
        b_start = origin + (self.part.along_n * b.step_bytes(cfg.columns, 0) + a.bytes)
        self.origins = wgmma.descriptor(a, a_start), wgmma.descriptor(b, b_start)

    def whole(self, tile: Tile, at: barriers.Position) -> tuple[Fragment, tuple]:
        """(sums over a K that all groups have, where the next tile's K begins)."""
        self.ring.full.wait(at.stage, at.parity)
        fresh = self._product([wgmma.undefined(self.cfg.columns)] * self.cfg.blocks, at.stage, True)
        sums, now, last = self._upto(1, tile.steps, (fresh, at.next().carried, at.stage))
        wgmma.wait(0)
        self._release(last)
        return self._fragment(sums), now

    def ragged(self, tile: Tile, at: barriers.Position) -> tuple[Fragment, tuple]:
        """The same over a group's own K.

        A K tile of which something is cleared is done before the next is begun: with sums under way through two
        branches, some versions of ptxas wait by themselves, and say so (C7517)."""
        nothing = tuple(wgmma.zeros(self.cfg.columns) for _ in range(self.cfg.blocks))
        several, done = tile.steps > 1, 0
        sums, now = nothing, at.carried
        if tile.before is not None:
            done = select(several, constant(1, i32), 0)

            @self.k.loop(0, done, carry=(nothing, at.carried))
            def first(_, carried):
                return self._cleared(carried[0], carried[1], tile.before, None)

            sums, now = first
        sums, now, last = self._upto(done, tile.steps - 1, (sums, now, constant(NOTHING, i32)))
        wgmma.wait(0)
        self.k.when(last > NOTHING)(lambda: self._release(last))
        before = None if tile.before is None else select(several, 0, tile.before)
        sums, now = self._cleared(sums, now, before, tile.left)
        return self._fragment(sums), now

    def none(self, tile: Tile, at: barriers.Position) -> tuple:
        """Where the next tile's K begins, for a warpgroup that has no rows of this one."""

        @self.k.loop(0, tile.steps, carry=at.carried)
        def after(_, carried):
            at = barriers.Position.of(carried, self.cfg.stages)
            self.ring.full.wait(at.stage, at.parity)
            self._release(at.stage)
            return at.next().carried

        return after

    def _release(self, stage) -> None:
        """One thread of each warpgroup says that it is done with a stage, to every workgroup that fills it."""
        self.k.when(self.lane < self.cfg.cluster_size)(lambda: self._arrive(stage))

    def _arrive(self, stage) -> None:
        if self.cfg.cluster_size == 1:
            self.ring.empty.arrive(stage)
        else:
            self.ring.empty.arrive_at(stage, self.lane)

    def _fragment(self, sums) -> Fragment:
        return wgmma.fragment(self.k, self.layout, list(sums))

    def _product(self, sums, stage, fresh: bool = False):
        """sums + A B^T of the K tile in `stage`, started as one group."""
        cfg, A, B = self.cfg, self.ring.a, self.ring.b
        offset = (stage * (self.ring.room.stage // wgmma.UNIT)).to(self.origins[0].dtype)
        (a, b), sums = (x + offset for x in self.origins), list(sums)
        wgmma.fence()
        for depth in range(0, cfg.tile_k, BLOCK_K):
            for block in range(cfg.blocks):
                at_a = wgmma.moved(a, A.step_bytes(BLOCK_M * block, depth))
                at_b = wgmma.moved(b, B.step_bytes(0, depth))
                sums[block] = wgmma.multiply(at_a, at_b, sums[block], A, B, fresh and depth == 0)
        wgmma.commit()
        return tuple(sums)

    def _upto(self, begin, end, carried):
        """K tiles begin .. end - 1 added. carried: (sums, where the ring stands, the stage that is under way or
        NOTHING); the last one is under way afterwards."""

        @self.k.loop(begin, end, carry=carried)
        def done(step, carried):
            sums, now, before = carried
            at = barriers.Position.of(now, self.cfg.stages)
            self.ring.full.wait(at.stage, at.parity)
            sums = self._product(sums, at.stage)
            wgmma.wait(1)
            if isinstance(begin, int) and begin == 1:  # one was under way
                self._release(before)
            else:
                self.k.when((self.lane < self.cfg.cluster_size) & (before > NOTHING))(lambda: self._arrive(before))
            return sums, at.next().carried, at.stage

        return done

    def _cleared(self, sums, now, first, end):
        """A K tile added of which only what lies from `first` (None: 0) up to `end` (None: all) is the group's."""
        k, cfg, ring = self.k, self.cfg, self.ring
        at = barriers.Position.of(now, cfg.stages)
        ring.full.wait(at.stage, at.parity)
        some = ([] if first is None else [first > 0]) + ([] if end is None else [end < cfg.tile_k])

        @k.when(some[0] if len(some) == 1 else some[0] | some[1])
        def _():
            for operand, start in zip((ring.a, ring.b), ring.at(at.stage)):
                clear(k, cfg, operand, start, first, end)
            barriers.fence_async()
            barriers.named_barrier(CLEARED, cfg.multipliers)

        sums = self._product(sums, at.stage)
        wgmma.wait(0)
        self._release(at.stage)
        return sums, at.next().carried


def clear(k: Kernel, cfg: GroupedSm90aConfig, operand, start, first: Value | None, end: Value | None) -> None:
    """Makes zeros of an operand's tile in shared memory before depth `first` and from `end` on. By all warpgroups.

    Both operands are cleared: what lies there may be infinite or not a number, which 0 does not undo."""
    per = UNIT // operand.dtype.bytes
    line = operand.swizzle // UNIT  # 16-byte units of a box's row
    units = operand.bytes // UNIT
    view = View(start, operand.dtype, (units * per,), (1,))
    both = lambda conditions: conditions[0] if len(conditions) == 1 else conditions[0] | conditions[1]
    outside = lambda depth, size: both(
        ([depth < first] if first is not None else []) + ([depth + size > end] if end is not None else [])
    )
    for i in range(0, units, cfg.multipliers):
        number = k.thread + i
        at = advance(start, number * per, operand.dtype)
        some = number < units if units - i < cfg.multipliers else True
        if operand.along_k:
            row, box = number // line % operand.rows, number // (line * operand.rows)
            depth = box * operand.row + (number % line ^ row % wgmma.GROUP) * per  # as the swizzle has moved it
            reaches = outside(depth, per)
        else:
            depth = number // line % operand.depth
            reaches = outside(depth, 1)

        @k.when(reaches if some is True else reaches & some)
        def _():
            kept = constant(0, operand.dtype, per)
            if operand.along_k:  # the group may begin or end within a unit
                held, zero = view.read(at, per, UNIT), constant(0, operand.dtype)
                for e in range(per):
                    kept = kept.insert(e, select(outside(depth + e, 1), zero, held[e]))
            view.write(at, kept, UNIT)
