"""A scaled gfx950 GEMM's operands: rings of bytes, and the scales that go with what is read from them.

A ring's `read` gives what the matrix multiply takes: the fragment, and with block scaling a fragment of its scales.
"""

from __future__ import annotations

from dataclasses import replace

from flykernels.dtypes import i32, i64, u8
from flykernels.lang import Kernel, Mode, ThreadValues, View
from flykernels.lang.fragment import Fragment
from flykernels.lang.matrix import TiledMma
from flykernels.lang.memory import advance
from flykernels.lang.ring import Ring
from flykernels.lang.values import Value, minimum
from flykernels.microscaling import BLOCK

from .gfx950_config import SLOTS, WORD, ScaledConfig, byte_swizzle
from .problem import ScaledGemmProblem

PAIR = 8  # scales of two words, which one instruction picks bytes from


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

    def __init__(self, k: Kernel, source: View, rows: int, depth: int, stages: int, swizzle, scales, first: int):
        super().__init__(k, source, (rows, depth), stages, swizzle)
        self.scales, self.first = scales, first

    def read(self, operand: ThreadValues, t, step: int):
        got = super().read(operand, t, step)
        return got if self.scales is None else (got, self.scales.read(self.first, t, step))


class SlotScales(Ring):
    """Scales of one operand in LDS: each slot holds those of `per` K tiles, for all rows of the workgroup's tile."""

    def __init__(self, k: Kernel, cfg: ScaledConfig, mma: TiledMma, source: View, which: str):
        rows = cfg.tile_m if which == "a" else cfg.tile_n
        super().__init__(k, source, (rows, cfg.slot_bytes), SLOTS, chunk=WORD)
        self.per, self.tile_scales = cfg.tiles_a_slot, cfg.tile_k // BLOCK
        self.words = lambda bytes: scale_words(mma, which, bytes)
        self.k_waves = mma.k_waves
        self.groups = mma.atom.scale.tile[1]  # of lanes, each with the scale of another block of a step
        self.end = self._span(source.shape[1])

    def prefetch(self, t):
        """As any ring's, but where a lane's bytes lie is computed anew each time, seldom as that is: the main loop needs
        the registers."""
        me = self.k.target.opaque(self.k.thread, here=True)
        places = (self.chunk_at(me, i) for i in range(len(self.lane_bytes)))
        self.lane_bytes = [sum((c * s for c, s in zip(at, self.stride)), 0) for at in places]
        super().prefetch(t)

    def _buffer(self, t):
        """The last slot may reach past the end of its rows, and reads what is never used; but nothing past the end of
        the last row."""
        step = self.step * t if isinstance(t, int) else (t * self.step).to(i64)
        size = minimum(self.span, self.end - step)
        return self.k.target.buffer(advance(self.source.pointer, step, u8), size), False

    def read(self, first: int, t, step: int) -> Scales:  # type: ignore[override]
        """Of K step `step` of tile t, for rows from `first` on. A lane reads the words that hold its row's scales, of
        8 blocks where the tile has as many, and picks its group's of each step: one instruction for 8 blocks."""
        if self.k_waves > 1:  # each wave has words of its own
            pair, place, each, count = step, 0, WORD * self.k_waves, WORD
        else:
            pair, place = divmod(step, PAIR // self.groups)
            each, count = PAIR, min(PAIR, self.tile_scales - pair * PAIR)
        view = self.stage(t // self.per).tagged(noalias_scopes=self.scope)
        view = replace(view, pointer=advance(view.pointer, t % self.per * self.tile_scales, u8))
        got = self.k.fragment(self.words(count).shifted(first, pair * each)).load(view)
        steps = [i * self.groups << 8 * i for i in range(PAIR // self.groups)]
        group = lambda: self.k.thread % self.k.target.lanes // (self.k.target.lanes // self.groups)
        selector = self.k.once(("scales of steps", self.groups), lambda: group() * 0x01010101 + sum(steps))

        def picked(v: Value) -> Value:
            words = v.bitcast(i32, count // WORD)
            return self.k.target.pick_bytes(words[count // WORD - 1], words[0], selector)

        return Scales.of(got.map(picked), place)


class LoadedScales:
    """Scales of one operand straight from memory, a byte a lane, step by step: for rows of scales of any length."""

    def __init__(self, k: Kernel, cfg: ScaledConfig, mma: TiledMma, source: View, which: str):
        self.k, self.source, self.tile_scales = k, source, cfg.tile_k // BLOCK
        layout = mma.scale_a if which == "a" else mma.scale_b
        self.layout = layout.spread((mma.k_waves, 1)) if mma.k_waves > 1 else layout

    def read(self, first: int, t, step: int) -> Scales:
        """Of K step `step` of tile t, for rows from `first` on; zeros past the end of K."""
        rows, blocks = self.source.shape
        done = t * self.tile_scales
        rest = replace(self.source, pointer=advance(self.source.pointer, done, u8), shape=(rows, blocks - done))
        return Scales.of(self.k.fragment(self.layout.shifted(first, step * self.layout.tile[1])).load(rest), 0)


def scale_words(mma: TiledMma, which: str, width: int) -> ThreadValues:
    """Who reads which `width` bytes of an image of scales: all groups of lanes of a row the same ones."""
    rows, groups = mma.atom.scale.tile
    one = ThreadValues((rows, width), (Mode(rows, 0, 1), Mode(groups, 1, 0)), Mode(width, 1, 1))
    (wm, wn), (rm, rn) = mma.waves, mma.repeat
    tv = (
        one.repeat(rm, 1).spread((wm, 0), (wn, None)) if which == "a" else one.repeat(rn, 1).spread((wm, None), (wn, 0))
    )
    return tv.spread((mma.k_waves, 1)) if mma.k_waves > 1 else tv


class Slots:
    """The slots of both operands, as the interleaved loop asks for them."""

    def __init__(self, a: SlotScales, b: SlotScales):
        self.rings, self.per = (a, b), a.per

    def of(self, half: str) -> SlotScales:
        return self.rings["AB".index(half[0])]


def ring_of(
    k: Kernel, p: ScaledGemmProblem, cfg: ScaledConfig, which: str, source: View, rows: int, scales, first: int
):
    """The ring of `rows` rows of an operand, the first of which is row `first` of the workgroup's tile."""
    atom, depth = cfg.atom(p), cfg.bytes_of(p, which)
    moved = byte_swizzle(atom.a if which == "a" else atom.b, rows, depth)
    return ScaledRing(k, source, rows, depth, cfg.stages, moved, scales, first)
