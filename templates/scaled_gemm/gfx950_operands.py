"""A scaled gfx950 GEMM's operands: rings of bytes, and the scales that go with what is read from them.

A ring's `read` gives what the matrix multiply takes: the fragment, and with block scaling a fragment of its scales.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from flykernels.dtypes import i16, i32, i64, u8
from flykernels.lang import Kernel, ThreadValues, View
from flykernels.lang.fragment import Fragment
from flykernels.lang.matrix import TiledMma
from flykernels.lang.memory import advance
from flykernels.lang.ring import Ring
from flykernels.microscaling import BLOCK, FORMATS

from .gfx950_config import SLOTS, WORD, ScaledConfig, byte_swizzle
from .problem import ScaledGemmProblem


class Scales(Fragment):
    """Scales of an operand's rows for one step of K, in byte `place` of a register each."""

    place = 0

    @classmethod
    def of(cls, f: Fragment, place: int) -> Scales:
        made = cls(f.k, f.layout, f.streamed, f.__getitem__)
        made.place = place
        return made

    def like(self, values) -> Scales:
        return Scales.of(super().like(values), self.place)


class ScaledMma(TiledMma):
    """acc = mma(a, b, acc) where a and b are fragments, or pairs (fragment, Scales)."""

    def __call__(self, a, b, acc, *_):
        if isinstance(a, Fragment):
            return super().__call__(a, b, acc)
        return super().__call__(a[0], b[0], acc, a[1], b[1], a[1].place)


class ScaledRing(Ring):
    """A ring of an operand's bytes whose fragments come with their scales. scales: `read(first row, t, step)`."""

    def __init__(
        self, k: Kernel, p: ScaledGemmProblem, cfg: ScaledConfig, which: str, source: View, rows: int, scales, first
    ):
        atom, depth = cfg.spread_atom(p), cfg.bytes_of(p, which)
        operand, kind = (atom.a, p.a_type) if which == "a" else (atom.b, p.b_type)
        super().__init__(k, source, (rows, depth), cfg.stages, byte_swizzle(operand, rows, depth))
        # `_inside` cuts rows where K ends. Rows past the operand's last begin beyond a whole tile's span if rows are
        # further apart than a tile is long: no second size to remember. Not so where all of K lies within one tile.
        if not self.run_time and self.tiles > 1:
            self.last_span = self.span
        self.scales, self.first, self.count = scales, first, cfg.steps()
        self.block = BLOCK // FORMATS[kind].per_byte  # bytes

    def steps(self, t, width: int) -> int:
        """All; fewer where a cut tile has not a block for each. (A cut tile's other blocks are zeros.)"""
        cut = isinstance(t, int) and t == self.tiles - 1
        return min(self.count, ceil(self.last / self.block)) if cut else self.count

    def read(self, operand: ThreadValues, t, step: int):
        """(rows, k) operand of K step `step` of tile t, with its scales."""
        view = self.stage(t).tagged(noalias_scopes=self.scope)
        got = self.k.fragment(operand.shifted(0, step * self.block)).load(view)
        return got if self.scales is None else (got, self.scales.read(self.first, t, step))


class SlotScales(Ring):
    """Scales of one operand in LDS: each slot holds those of `per` K tiles, for all rows of the workgroup's tile."""

    def __init__(self, k: Kernel, cfg: ScaledConfig, mma: TiledMma, source: View, which: str):
        rows, self.blocks = cfg.tile_m if which == "a" else cfg.tile_n, source.shape[1]
        super().__init__(k, source, (rows, cfg.slot_pitch(self.blocks)), SLOTS, chunk=WORD)
        self.per, self.tile_scales = cfg.tiles_a_slot, cfg.tile_k // BLOCK
        self.layout = scale_layout(mma, which)
        self.end = self._span(source.shape[1])

    def _buffer(self, t):
        """The last slot may reach past the end of its rows: then it holds scales of the next row, which `read` leaves
        out. Nothing past the end of the last row is read."""
        step = self.step * t if isinstance(t, int) else (t * self.step).to(i64)
        size = self.end - step
        return self.k.target.buffer(advance(self.source.pointer, step, u8), size), False

    def read(self, first: int, t, step: int) -> Scales:  # type: ignore[override]
        """Of K step `step` of tile t, for rows from `first` on."""
        view = self.stage(t // self.per).tagged(noalias_scopes=self.scope)
        pointer = advance(view.pointer, t % self.per * self.tile_scales, u8)
        return self._scales(replace(view, pointer=pointer), first, t, step)

    def _scales(self, view: View, first: int, t, step: int) -> Scales:
        """view: LDS from where the tile's scales begin."""
        got = self.k.fragment(self.layout.shifted(first, 0)).load(view)
        left = self.blocks - t * self.tile_scales if isinstance(t, int) else self.tile_scales
        return scales_of(got if left >= self.tile_scales else got.below(1, left), step)


class ShiftedScales(SlotScales):
    """SlotScales where rows of scales are no whole words: of each row the words are fetched in which a slot's scales
    lie, from the one that holds the first. So a row's scales stand 0 to 3 bytes further on in LDS, by its number."""

    def __init__(self, k: Kernel, cfg: ScaledConfig, mma: TiledMma, source: View, which: str):
        super().__init__(k, cfg, mma, source, which)
        self.step, self.tiles = cfg.slot_bytes, ceil(self.blocks / cfg.slot_bytes)

    def _offset(self, load: int):
        row, column = self.chunk_at(self.k.thread, load)
        return (row * self.stride[0] & -WORD) + column

    def read(self, first: int, t, step: int) -> Scales:  # type: ignore[override]
        row = self.layout.shifted(first, 0).origin(self.k.thread)[0]  # those of other pieces are whole words away
        at = row * (self.blocks % WORD) & (WORD - 1)
        view = self.stage(t // self.per).tagged(noalias_scopes=self.scope)
        pointer = advance(advance(view.pointer, at, u8), t % self.per * self.tile_scales, u8)
        return self._scales(replace(view, pointer=pointer, alignment=1), first, t, step)


class LoadedScales:
    """Scales of one operand straight from memory: for rows of scales of any length."""

    def __init__(self, k: Kernel, cfg: ScaledConfig, mma: TiledMma, source: View, which: str):
        self.k, self.source, self.tile_scales = k, source, cfg.tile_k // BLOCK
        self.layout = scale_layout(mma, which)

    def read(self, first: int, t, step: int) -> Scales:
        """Of K step `step` of tile t, for rows from `first` on; zeros past the end of K."""
        rows, blocks = self.source.shape
        done = t * self.tile_scales
        rest = replace(
            self.source, pointer=advance(self.source.pointer, done, u8), shape=(rows, blocks - done), multiple=(1, 1)
        )
        return scales_of(self.k.fragment(self.layout.shifted(first, 0)).load(rest), step)


def scales_of(read: Fragment, step: int) -> Scales:
    """The scales of one step, from fragments of those of all steps of a tile: bytes of a register, or of several."""
    word, place = divmod(step, WORD)
    size = read.layout.vector.size
    if size >= WORD:
        return Scales.of(read.map(lambda v: v.bitcast(i32, size // WORD)[word]), place)
    return Scales.of(read.map(lambda v: (v.bitcast(i16)[0] if size == 2 else v[0]).to(i32)), place)


def scale_layout(mma: TiledMma, which: str) -> ThreadValues:
    """Who reads which scales of a K tile: all those of a lane's row and group."""
    tv = mma.scale_a if which == "a" else mma.scale_b
    return tv.spread((mma.k_waves, 1)) if mma.k_waves > 1 else tv


class Slots:
    """The slots of both operands, as the interleaved loop asks for them."""

    def __init__(self, a: SlotScales, b: SlotScales):
        self.rings, self.per = (a, b), a.per

    def of(self, half: str) -> SlotScales:
        return self.rings["AB".index(half[0])]
