"""The sums of a tile of one group's product on sm_90a.

In form "k" a tile's K is its group's: what the first and last K tiles have of other groups is made zero in shared
memory before it is multiplied.
"""

from __future__ import annotations

from flykernels.dtypes import i32
from flykernels.lang import Kernel, Value, View, constant, select
from flykernels.lang.fragment import Fragment
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_wgmma as wgmma
from templates.gemm.sm90a_config import Sm90aConfig
from templates.gemm.sm90a_multiply import Multiplier

from .sm90a_tiles import UNIT, Tile

CLEARED = 1  # the named barrier where warpgroups meet when they have made zeros of what lies past a group's K


class Sums(Multiplier):
    """What a warpgroup adds up; each gives where the next tile's K begins in the ring, too."""

    def whole(self, tile: Tile, at: barriers.Position) -> tuple[Fragment, tuple]:
        """Over a K that all groups have."""
        sums, now = self.added(1, tile.steps, self.begun(at))
        return self.fragment(sums), now

    def ragged(self, tile: Tile, at: barriers.Position) -> tuple[Fragment, tuple]:
        """Over a group's own K.

        A K tile of which something is cleared is done before the next is begun: with sums under way through two
        branches, some versions of ptxas wait by themselves, and say so (C7517)."""
        several, done, before = tile.steps > 1, 0, None
        sums, now = self.zeros(), at.carried
        if tile.before is not None:
            done, before = select(several, constant(1, i32), 0), select(several, 0, tile.before)

            @self.k.loop(0, done, carry=(sums, now))
            def first(_, carried):
                return self._cleared(carried, tile.before, None)

            sums, now = first
        sums, now = self.added_from_nothing(done, tile.steps - 1, sums, now)
        sums, now = self._cleared((sums, now), before, tile.left)
        return self.fragment(sums), now

    def none(self, tile: Tile, at: barriers.Position) -> tuple:
        """Of a warpgroup that has no rows of the tile."""

        @self.k.loop(0, tile.steps, carry=at.carried)
        def after(_, carried):
            at = barriers.Position.of(carried, self.cfg.stages)
            self.ring.full.wait(at.stage, at.parity)
            self.release(at.stage)
            return at.next().carried

        return after

    def _cleared(self, carried, first, end):
        """A K tile added of which only what lies from `first` (None: 0) up to `end` (None: all) is the group's."""
        k, cfg, ring, (sums, now) = self.k, self.cfg, self.ring, carried
        at = barriers.Position.of(now, cfg.stages)
        ring.full.wait(at.stage, at.parity)
        some = ([] if first is None else [first > 0]) + ([] if end is None else [end < cfg.tile_k])

        @k.when(some[0] if len(some) == 1 else some[0] | some[1])
        def _():
            for operand, start in zip((ring.a, ring.b), ring.at(at.stage)):
                clear(k, cfg, operand, start, first, end)
            barriers.fence_async()
            barriers.named_barrier(CLEARED, cfg.multipliers)

        sums = self.product(sums, at.stage)
        wgmma.wait(0)
        self.release(at.stage)
        return sums, at.next().carried


def clear(k: Kernel, cfg: Sm90aConfig, operand, start, first: Value | None, end: Value | None) -> None:
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
