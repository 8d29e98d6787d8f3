"""Sums of FP8 products on sm_90a: wgmma's own, or begun anew every PROMOTE of K and added in f32 registers."""

from __future__ import annotations

from flykernels.dtypes import f32
from flykernels.lang import Value
from flykernels.lang.fragment import Fragment
from flykernels.lang.values import mlir_type
from flykernels.mlir import llvm
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_wgmma as wgmma
from templates.gemm.sm90a_multiply import Multiplier
from templates.gemm.sm90a_work import Piece

PROMOTE = 128  # of K, whose products wgmma adds up by itself: four instructions
STEP = 32  # of K, an instruction's


class Sums(Multiplier):
    """Of one tile's K tiles, as they come; each gives (sums, where the ring is then)."""

    def fast(self, piece: Piece, at: barriers.Position) -> tuple[Fragment, tuple]:
        """All in wgmma's own sums, the next K tile begun before one is done."""
        sums, after = self.added(piece.first + 1, piece.end, self.begun(at))
        return self.fragment(sums), after

    def promoted(self, piece: Piece, at: barriers.Position) -> tuple[Fragment, tuple]:
        """wgmma's sums of each PROMOTE of K added in f32: while one warpgroup adds, another multiplies."""

        @self.k.loop(piece.first + 1, piece.end, carry=(self._tile(at, None), at.next().carried))
        def done(step, carried):
            total, now = carried
            at = barriers.Position.of(now, self.cfg.stages)
            return self._tile(at, total), at.next().carried

        total, after = done
        each = len(total) // self.cfg.blocks

        def pair(digits):
            half, column, block = digits
            i = block * each + 4 * column + 2 * half  # as `wgmma.fragment` finds them
            return total[i].splat(2).insert(1, total[i + 1])

        return Fragment(self.k, self.layout, False, pair), after

    def _tile(self, at: barriers.Position, total: tuple | None) -> tuple:
        """total (None: nothing) and the K tile at `at`, added up."""
        self.ring.full.wait(at.stage, at.parity)
        for first in range(0, self.cfg.tile_k, PROMOTE):
            part = self.product(self.nothing(), at.stage, True, range(first, first + PROMOTE, STEP))
            wgmma.wait(0)
            if first + PROMOTE == self.cfg.tile_k:
                self.release(at.stage)
            new = [element(sums, i) for sums in part for i in range(sums.width)]
            total = tuple(new) if total is None else tuple(t + n for t, n in zip(total, new))
        assert total is not None
        return total


def element(struct: Value, i: int) -> Value:
    """Register i of what a wgmma gave."""
    return Value(llvm.extractvalue(mlir_type(f32), struct.ssa, [i]), f32)
