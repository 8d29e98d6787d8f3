"""How a scaled gfx950 GEMM is cut up. Operands are bytes: FP8 one number each, FP4 two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from flykernels.lang.matrix import MatrixAtom
from flykernels.layout import IDENTITY, Swizzle, ThreadValues, bank_conflicts
from flykernels.microscaling import BLOCK, FORMATS
from flykernels.targets import gfx950
from templates.gemm.gfx950_config import Gfx950Config

STEP = 128  # a K tile is whole steps of this
WORD = 4  # scales in a word: what a direct load brings to a lane, and what one 16x16x128 instruction takes of a row
SLOTS = 2  # of scales: one is read while the next arrives
SLOT_BYTES = 8  # of a row at least; with more, the interleaved loop's turns hold more addresses than registers do


@dataclass(frozen=True)
class ScaledConfig(Gfx950Config):
    """As the dense kernel's, but tile_k counts numbers (a multiple of 128) and shape is "16x16x128" or "32x32x64".

    With block scaling the scales of several K tiles share a slot of LDS; where rows of scales are no whole words
    (K no multiple of 128), they are loaded into registers instead."""

    tile_k: int = 128
    shape: str = "16x16x128"

    def atom(self, p: Any) -> MatrixAtom:
        return gfx950.scaled_atoms[p.a_type, p.b_type, self.shape]

    def bytes_of(self, p, which: str) -> int:
        """Bytes of a K tile of a row of "a" or "b"."""
        return self.tile_k // FORMATS[p.a_type if which == "a" else p.b_type].per_byte

    def ring_bytes(self, p) -> int:
        """Of the rings of A, B and scales."""
        tiles = self.stages * (self.tile_m * self.bytes_of(p, "a") + self.tile_n * self.bytes_of(p, "b"))
        return tiles + (SLOTS * (self.tile_m + self.tile_n) * self.slot_bytes if staged(p) else 0)

    @property
    def tiles_a_slot(self) -> int:
        """K tiles whose scales share a slot: as many as make whole loads by all threads, and SLOT_BYTES a row."""
        of_tile = self.tile_k // BLOCK
        whole = lambda per: all(rows * per * of_tile % (WORD * self.workgroup_size) == 0 for rows in self.tile_mn)
        per = 2
        while per * of_tile < SLOT_BYTES or not whole(per):
            per *= 2
        return per

    @property
    def tile_mn(self) -> tuple[int, int]:
        return self.tile_m, self.tile_n

    @property
    def slot_bytes(self) -> int:
        """Of a row's scales in a slot."""
        return self.tiles_a_slot * self.tile_k // BLOCK


def staged(p) -> bool:
    """Whether scales come through LDS."""
    return p.scaling == "block" and p.k % (BLOCK * WORD) == 0


@cache
def byte_swizzle(operand: ThreadValues, rows: int, depth: int) -> Swizzle:
    """The swizzle of (rows, depth) bytes, moved 16 at a time, whose reads as `operand` conflict least."""
    return min(_swizzles(rows, depth), key=lambda s: _turns(operand, depth, s))


def _swizzles(rows: int, depth: int):
    """The plain order first, then those that look at bits of the row's number."""
    base, row = gfx950.vector_bytes.bit_length() - 1, depth.bit_length() - 1
    yield IDENTITY
    for bits in range(1, row - base + 1):
        for source in range(row, row + 3):
            if source + bits <= row + rows.bit_length() - 1:
                yield Swizzle(bits, base, source - base)


def _turns(operand: ThreadValues, depth: int, swizzle: Swizzle) -> int:
    """Turns of the slowest read of one wave, in the worst order that lanes may be served in."""
    lanes, worst = np.arange(gfx950.limits.lanes), 1
    for step, digits in product({0, depth - operand.tile[1]}, np.ndindex(*operand.piece_sizes)):
        tv = operand.shifted(0, step)
        row, column = (o + w for o, w in zip(tv.origin(lanes), tv.walk(digits)))
        at = swizzle(row * depth + column)
        orders = gfx950.read_phases.values()
        worst = max([worst, *(bank_conflicts(at, o, gfx950.vector_bytes, gfx950.limits.banks) for o in orders)])
    return worst
