"""Where things are. Pure Python: no MLIR, no target.

Two kinds of map, both printable, both callable on ints, numpy arrays and kernel `Value`s alike. So the checks (who
conflicts with whom, what is contiguous) run at trace time on the very functions that address memory at run time.

* `Layout`        coordinate -> element offset in memory. CuTe's shape:stride, leftmost mode fastest.
* `ThreadValues`  (thread, register) -> coordinate in a tile. Who holds what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple


def flatten(t):
    """((2, 3), 4) -> [2, 3, 4]"""
    return [x for part in t for x in flatten(part)] if isinstance(t, (tuple, list)) else [t]


def _show(t):
    return "(" + ",".join(_show(x) for x in t) + ")" if isinstance(t, tuple) else str(t)


@dataclass(frozen=True)
class Layout:
    """shape:stride, nested alike. `Layout((4, 8), (8, 1))` is a row-major 4x8 matrix, printed `(4,8):(8,1)`."""

    shape: tuple
    stride: tuple

    @staticmethod
    def compact(*shape, order="row") -> Layout:
        """Dense layout of a flat `shape`; order "row": the last mode is contiguous, "col": the first."""
        sizes = shape if order == "col" else shape[::-1]
        strides = [prod(sizes[:i]) for i in range(len(sizes))]
        return Layout(tuple(shape), tuple(strides if order == "col" else strides[::-1]))

    @property
    def modes(self):
        return list(zip(flatten(self.shape), flatten(self.stride)))

    @property
    def size(self):
        return prod(flatten(self.shape))

    @property
    def cosize(self):
        """One more than the largest offset."""
        return 1 + sum((n - 1) * d for n, d in self.modes)

    def __call__(self, *coord):
        """Offset of a coordinate: one number (colexicographic index), or one for each top-level mode."""
        if len(coord) == 1 and len(self.shape) != 1:
            coord = unflatten(coord[0], flatten(self.shape))
            return sum(c * d for c, (_, d) in zip(coord, self.modes))
        return sum(
            Layout(*sub)(c) if isinstance(sub[0], tuple) else c * sub[1]
            for c, sub in zip(coord, zip(self.shape, self.stride))
        )

    def coalesce(self) -> Layout:
        """The same function of an index with as few modes as possible."""
        out = []
        for n, d in self.modes:
            if n == 1:
                continue
            if out and out[-1][0] * out[-1][1] == d:
                out[-1] = (out[-1][0] * n, out[-1][1])
            else:
                out.append((n, d))
        return Layout(*map(tuple, zip(*(out or [(1, 0)]))))

    def compose(self, inner: Layout) -> Layout:
        """self after inner: `self.compose(inner)(i) == self(inner(i))`; inner's shape is kept."""

        def one(n, d):  # self at 0, d, 2d, ... (n of them), as shape and stride
            out = []
            for i, (size, step) in enumerate(self.modes):
                last = i == len(self.modes) - 1  # the last mode goes on for ever
                if not last and d and d % size == 0:
                    d //= size
                    continue
                take = n if last else min(n, max(1, size // d) if d else n)
                if n % take or (not last and d and size % d):
                    raise ValueError(f"{self} cannot be walked {n}:{d}")
                if take > 1:
                    out.append((take, step * d))
                n, d = n // take, 1
            return tuple(map(tuple, zip(*out))) if len(out) > 1 else (out or [(1, 0)])[0]

        parts = [one(n, d) for n, d in inner.modes]
        return Layout(tuple(p[0] for p in parts), tuple(p[1] for p in parts))

    def complement(self, size: int) -> Layout:
        """What to repeat self with to cover 0..size-1 once."""
        out, at = [], 1
        for n, d in sorted((m for m in self.modes if m[0] > 1 and m[1]), key=lambda m: m[1]):
            if d > at:
                out.append((d // at, at))
            at = n * d
        if size > at:
            out.append((size // at, at))
        return Layout(*map(tuple, zip(*(out or [(1, 0)]))))

    def divide(self, tile: Layout) -> Layout:
        """((inside a tile), (which tile)): CuTe's logical_divide of a flat layout."""
        rest = tile.complement(self.size)
        inner, outer = self.compose(tile), self.compose(rest)
        return Layout((inner.shape, outer.shape), (inner.stride, outer.stride))

    def __str__(self):
        return f"{_show(self.shape)}:{_show(self.stride)}"


def unflatten(index, sizes):
    """index -> its digits in mixed radix `sizes`, fastest first."""
    digits = []
    for i, n in enumerate(sizes):
        last = i == len(sizes) - 1
        digits.append(0 if n == 1 else index if last else index % n)
        if not last and n > 1:
            index = index // n
    return digits


@dataclass(frozen=True)
class Swizzle:
    """offset -> offset, its own inverse: bits [base, base+bits) are xor-ed with those `shift` above. CuTe's <b,m,s>."""

    bits: int = 0
    base: int = 0
    shift: int = 0

    def __call__(self, offset):
        if not self.bits:
            return offset
        mask = ((1 << self.bits) - 1) << self.base
        return offset ^ ((offset >> self.shift) & mask)

    @property
    def period(self):
        """Offsets that differ by a multiple of this are moved alike."""
        return 1 << (self.base + self.bits + self.shift) if self.bits else 1

    def __str__(self):
        return f"Sw<{self.bits},{self.base},{self.shift}>" if self.bits else "identity"


class Mode(NamedTuple):
    """`size` steps of `step` along tile axis `axis`. step 0: all of them hold the same (a broadcast)."""

    size: int
    axis: int
    step: int

    def __str__(self):
        return f"{self.size}:{self.step}@{self.axis}"


@dataclass(frozen=True)
class ThreadValues:
    """Which thread's which register holds which coordinate of `tile`: CuTe's TV layout with one stride per axis.

    threads  digits of the thread index, fastest first (lanes, then waves)
    vector   the elements that move together: one register vector, one memory access
    pieces   the vectors a thread holds
    A tile smaller than the modes reach is overhung: the elements outside are never read, written or counted.
    """

    tile: tuple
    threads: tuple
    vector: Mode
    pieces: tuple = ()
    start: tuple = ()  # coordinate where the tile begins (default: all zeros)

    @property
    def thread_count(self):
        return prod(m.size for m in self.threads)

    @property
    def piece_sizes(self):
        return tuple(m.size for m in self.pieces)

    def repeat(self, *times) -> ThreadValues:
        """The same threads hold `times[axis]` tiles along each axis: more registers."""
        new = tuple(Mode(n, axis, self.tile[axis]) for axis, n in enumerate(times))
        return replace(self, tile=tuple(t * n for t, n in zip(self.tile, times)), pieces=self.pieces + new)

    def spread(self, *times_axis) -> ThreadValues:
        """More threads: for each (n, axis), n copies of the threads side by side along axis (None: they hold the same)."""
        tv = self
        for n, axis in times_axis:
            mode = Mode(n, 0, 0) if axis is None else Mode(n, axis, tv.tile[axis])
            tile = tuple(t * (n if a == axis else 1) for a, t in enumerate(tv.tile))
            tv = replace(tv, tile=tile, threads=tv.threads + (mode,))
        return tv

    def shifted(self, *by) -> ThreadValues:
        """The same threads, looking `by` further along each axis."""
        return replace(self, start=tuple(a + b for a, b in zip(self.start or (0,) * len(by), by)))

    def origin(self, thread):
        """Coordinate of the thread's first element, one number per axis."""
        at = list(self.start or (0,) * len(self.tile))
        for digit, m in zip(unflatten(thread, [m.size for m in self.threads]), self.threads):
            if m.step:
                at[m.axis] = at[m.axis] + digit * m.step
        return at

    def walk(self, digits):
        """How far piece `digits` lies from the origin, one number per axis."""
        at = [0] * len(self.tile)
        for digit, m in zip(digits, self.pieces):
            at[m.axis] = at[m.axis] + digit * m.step
        return at

    def reach(self, digits, axis):
        """One past the furthest coordinate along axis that any thread holds in piece `digits`."""
        extent = sum((m.size - 1) * m.step for m in (*self.threads, self.vector) if m.axis == axis)
        return (self.start or (0,) * len(self.tile))[axis] + extent + self.walk(digits)[axis] + 1

    def edge(self, axis):
        """Where the tile ends along axis."""
        return (self.start or (0,) * len(self.tile))[axis] + self.tile[axis]

    def without(self, axis) -> ThreadValues:
        """Who holds what once `axis` has been reduced: every thread along it has the result."""
        drop = lambda m: m._replace(step=0) if m.axis == axis else m
        one = lambda m: Mode(1, axis, 0) if m.axis == axis else m
        tile = tuple(1 if a == axis else t for a, t in enumerate(self.tile))
        return ThreadValues(tile, tuple(map(drop, self.threads)), one(self.vector), tuple(map(one, self.pieces)))

    def __str__(self):
        part = lambda ms: "(" + ", ".join(map(str, ms)) + ")"
        return f"{self.tile}  threads {part(self.threads)}  vector {self.vector}  pieces {part(self.pieces)}"

    def draw(self, each=1):
        """Text picture: cell = thread/first register; `each` columns a cell."""
        cells = {}
        for t in range(self.thread_count):
            for p in range(prod(self.piece_sizes)):
                o, w = self.origin(t), self.walk(unflatten(p, self.piece_sizes) if self.pieces else ())
                for v in range(self.vector.size):
                    at = [a + b for a, b in zip(o, w)]
                    at[self.vector.axis] += v * self.vector.step
                    cells.setdefault(tuple(at), f"{t}.{p * self.vector.size + v}")
        return "\n".join(
            " ".join(f"{cells.get((r, c), '-'):>6}" for c in range(0, self.tile[1], each)) for r in range(self.tile[0])
        )


def bank_conflicts(addresses, phases, bytes_per_lane=16, banks=64):
    """Worst number of turns any phase takes (1 = free of conflicts).

    addresses: byte address of each lane; phases: groups of lanes that the LDS serves together."""
    worst = 1
    for lanes in phases:
        words = {}
        for lane in lanes:
            for w in range(bytes_per_lane // 4):
                word = int(addresses[lane]) // 4 + w
                words.setdefault(word % banks, set()).add(word)
        worst = max(worst, max(map(len, words.values())))
    return worst
