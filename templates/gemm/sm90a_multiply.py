"""K tiles multiplied one after the other as they come, on sm_90a: what dense, scaled and grouped main loops share.

Two are under way at a time: one's wgmmas run while the next one's bytes are waited for.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import i32
from flykernels.lang import Kernel, constant
from flykernels.lang.fragment import Fragment
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_wgmma as wgmma

from .sm90a_config import BLOCK_M, Sm90aConfig
from .sm90a_ring import Stages

NOTHING = -1  # in place of the stage that is under way


class Multiplier:
    """A warpgroup's sums of a tile, from the stages of a ring. By all warpgroups.

    along  (row, column) of the warpgroup among those side by side; lane: of the thread in it"""

    def __init__(self, k: Kernel, cfg: Sm90aConfig, ring: Stages):
        self.k, self.cfg, self.ring = k, cfg, ring
        group = k.thread // wgmma.WARPGROUP if cfg.multipliers > wgmma.WARPGROUP else 0
        self.along, self.lane = (group % cfg.groups[0], group // cfg.groups[0]), k.thread % wgmma.WARPGROUP
        self.layout = wgmma.sums_layout(cfg.columns, cfg.blocks, cfg.groups)
        # a warpgroup's part of the tile begins at whole boxes or groups of rows: the distance is the same for each
        origin, a, b = wgmma.address_of(ring.memory), ring.a, ring.b
        a_start = origin + self.along[0] * a.step_bytes(BLOCK_M * cfg.blocks, 0)
        b_start = origin + (self.along[1] * b.step_bytes(cfg.columns, 0) + a.bytes)
        self.origins = wgmma.descriptor(a, a_start), wgmma.descriptor(b, b_start)

    def zeros(self) -> tuple:
        return tuple(wgmma.zeros(self.cfg.columns) for _ in range(self.cfg.blocks))

    def product(self, sums, stage, fresh: bool = False, depths: range | None = None) -> tuple:
        """sums + A B^T (fresh: A B^T alone) of the K tile in `stage`, started as one group; depths: see `Stages`."""
        return self.ring.product(self.origins, sums, stage, fresh, depths)

    def nothing(self) -> list:
        """Sums that a fresh product begins with."""
        return [wgmma.undefined(self.cfg.columns)] * self.cfg.blocks

    def begun(self, at: barriers.Position) -> tuple:
        """(sums, where the next K tile is, the stage that is under way) with the K tile at `at` started."""
        self.ring.full.wait(at.stage, at.parity)
        fresh = self.product(self.nothing(), at.stage, True)
        return fresh, at.next().carried, at.stage

    def added(self, first, end, begun) -> tuple:
        """(sums, where the next K tile is) with K tiles first .. end - 1 added to what `begun` gave, and all done."""
        return self._drained(self._added(first, end, begun, lambda _: True))

    def added_from_nothing(self, first, end, sums, now) -> tuple:
        """The same with sums of which none is under way; there may be no K tile to add."""
        some = lambda before: before > NOTHING
        return self._drained(self._added(first, end, (sums, now, constant(NOTHING, i32)), some), some)

    def fragment(self, sums) -> Fragment:
        return wgmma.fragment(self.k, self.layout, list(sums))

    def release(self, stage, certain: Any = True) -> None:
        """One thread of each warpgroup says that it is done with a stage, to every workgroup that fills it."""
        empty, size = self.ring.empty, self.cfg.cluster_size
        mine = self.lane.equals(0) if size == 1 else self.lane < size
        arrive = lambda: empty.arrive(stage) if size == 1 else empty.arrive_at(stage, self.lane)
        self.k.when(mine if certain is True else mine & certain)(arrive)

    def _added(self, first, end, begun, certain):
        @self.k.loop(first, end, carry=begun)
        def done(step, carried):
            sums, now, before = carried
            at = barriers.Position.of(now, self.cfg.stages)
            self.ring.full.wait(at.stage, at.parity)
            sums = self.product(sums, at.stage)
            wgmma.wait(1)
            self.release(before, certain(before))
            return sums, at.next().carried, at.stage

        return done

    def _drained(self, added, certain=lambda _: True):
        sums, now, last = added
        wgmma.wait(0)
        self.release(last, certain(last))
        return sums, now
