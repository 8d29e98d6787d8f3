"""How a scaled gfx950 GEMM is cut up. Operands are bytes: FP8 one number each, FP4 two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from flykernels.dtypes import DType
from flykernels.lang.matrix import MatrixAtom
from flykernels.layout import IDENTITY, Mode, Swizzle, ThreadValues, bank_conflicts
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
    (K no multiple of 128), those of a ring are loaded into registers instead."""

    tile_k: int = 128
    shape: str = "16x16x128"

    def atom(self, p: Any) -> MatrixAtom:
        return gfx950.scaled_atoms[p.a_type, p.b_type, self.shape]

    def steps(self) -> int:
        """Instructions along K of a wave and K tile."""
        return self.tile_k // (self.k_waves * int(self.shape.split("x")[2]))

    def spread_atom(self, p: Any) -> MatrixAtom:
        """The atom over the K tile of a wave, of which it takes every `steps`-th block of 32 at a time.

        Which blocks an instruction multiplies is free as long as A and B agree. So chosen, the scales that a lane needs
        for consecutive steps are neighbours in memory: one read brings them, and the instruction picks its byte."""
        atom, steps = self.atom(p), self.steps()
        rows, groups = atom.scale.tile  # type: ignore[union-attr]
        scale = ThreadValues((rows, groups * steps), (Mode(rows, 0, 1), Mode(groups, 1, steps)), Mode(steps, 1, 1))
        return replace(atom, a=_spread(p.a_type, rows, steps), b=_spread(p.b_type, rows, steps), scale=scale)

    def bytes_of(self, p, which: str) -> int:
        """Bytes of a K tile of a row of "a" or "b"."""
        return self.tile_k // FORMATS[p.a_type if which == "a" else p.b_type].per_byte

    def ring_bytes(self, p) -> int:
        """Of the rings of A, B and scales."""
        tiles = self.stages * (self.tile_m * self.bytes_of(p, "a") + self.tile_n * self.bytes_of(p, "b"))
        return tiles + (SLOTS * (self.tile_m + self.tile_n) * self.slot_pitch(p.blocks) if self.staged(p) else 0)

    def staged(self, p) -> bool:
        """Whether scales come through LDS: where rows of them are whole words, and to interleaved tiles."""
        return p.scaling == "block" and (p.blocks % WORD == 0 or self.interleaved)

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

    def slot_pitch(self, blocks: int) -> int:
        """From a row of a slot to the next, rows of scales being so long: with up to 3 bytes before the scales where
        they are no whole words, twice as many, since whole loads by all threads are wanted."""
        return self.slot_bytes if blocks % WORD == 0 else 2 * self.slot_bytes


def _spread(kind: DType, rows: int, steps: int) -> ThreadValues:
    """Bytes of an operand whose block number b along K is the tile's block b * steps (+ the step)."""
    groups, block = gfx950.limits.lanes // rows, BLOCK // FORMATS[kind].per_byte
    lanes: tuple[Mode, ...]
    pieces: tuple[Mode, ...] = ()
    if block == gfx950.vector_bytes:  # a group of lanes holds a block
        lanes = (Mode(groups, 1, block * steps),)
    elif groups == 2:  # both hold 16 bytes of a block, and of the next one
        lanes, pieces = (Mode(2, 1, gfx950.vector_bytes),), (Mode(2, 1, block * steps),)
    else:
        lanes = Mode(2, 1, gfx950.vector_bytes), Mode(2, 1, block * steps)
        pieces = (Mode(2, 1, 2 * block * steps),)
    width = groups * block * steps
    return ThreadValues((rows, width), (Mode(rows, 0, 1), *lanes), Mode(gfx950.vector_bytes, 1, 1), pieces)


@cache
def byte_swizzle(operand: ThreadValues, rows: int, depth: int) -> Swizzle:
    """The swizzle of (rows, depth) bytes, moved 16 at a time, whose reads as `operand` conflict least."""
    best, turns = IDENTITY, _turns(operand, depth, IDENTITY)
    for candidate in _swizzles(rows, depth):
        if turns == 1:
            break
        found = _turns(operand, depth, candidate)
        best, turns = (candidate, found) if found < turns else (best, turns)
    return best


def _swizzles(rows: int, depth: int):
    """Those that look at bits of the row's number, in one place or in two."""
    base, row, end = (x.bit_length() - 1 for x in (gfx950.vector_bytes, depth, depth * rows))
    whole = [
        Swizzle(bits, first, source - first)
        for first in range(base, row)
        for bits in range(1, row - first + 1)
        for source in range(row, row + 4)
        if source + bits <= end
    ]
    yield from whole
    for low, high in product(whole, whole):
        if low.base + low.bits == high.base and low.shift != high.shift:
            yield Swizzle(low.bits, low.base, low.shift, also=high)


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
