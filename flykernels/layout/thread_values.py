"""Who holds what: (thread, register) -> coordinate in a tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from . import picture
from .algebra import TABLE_COLUMNS, TABLE_ROWS, unflatten


class Mode(NamedTuple):
    """`size` steps of `step` along tile axis `axis`. step 0: all of them hold the same (a broadcast)."""

    size: int
    axis: int
    step: int

    def __str__(self):
        return f"{self.size}:{self.step}@{self.axis}"


@dataclass(frozen=True, repr=False)
class ThreadValues:
    """Which thread's which register holds which coordinate of `tile`: CuTe's TV layout with one stride per axis.

    tile     extents in elements, one for each axis
    threads  digits of the thread index, fastest first (lanes, then waves)
    vector   the elements that move together: one register vector, one memory access
    pieces   the vectors a thread holds
    start    coordinate where the tile begins (default: all zeros)

    A tile smaller than the modes reach is overhung: the elements outside are never read, written or counted.
    """

    tile: tuple
    threads: tuple
    vector: Mode
    pieces: tuple = ()
    start: tuple = ()

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
        """More threads: for each (n, axis), n copies of the threads side by side along axis (None: all the same)."""
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
        start = tuple(0 if a == axis else s for a, s in enumerate(self.start))
        return ThreadValues(tile, tuple(map(drop, self.threads)), one(self.vector), tuple(map(one, self.pieces)), start)

    # -- to look at
    @property
    def notation(self) -> str:
        part = lambda ms: "(" + ", ".join(map(str, ms)) + ")"
        start = f"  start {self.start}" if any(self.start) else ""
        return f"{self.tile}  threads {part(self.threads)}  vector {self.vector}  pieces {part(self.pieces)}{start}"

    def __repr__(self) -> str:
        return self.notation

    def holders(self) -> dict[tuple, list[tuple[int, int]]]:
        """Coordinate in the tile -> the (thread, register) pairs that hold it, by enumeration."""
        out: dict[tuple, list[tuple[int, int]]] = {}
        for thread in range(self.thread_count):
            origin = self.origin(thread)
            for piece in range(prod(self.piece_sizes)):
                walked = self.walk(unflatten(piece, self.piece_sizes) if self.pieces else ())
                for v in range(self.vector.size):
                    at = [a + b for a, b in zip(origin, walked)]
                    at[self.vector.axis] += v * self.vector.step
                    if all(c < self.edge(axis) for axis, c in enumerate(at)):
                        out.setdefault(tuple(at), []).append((thread, piece * self.vector.size + v))
        return out

    def table(self, each: int = 1) -> list[list[str]]:
        """The first two axes as rows of "thread.register" of the first holder ("-": nobody); `each` columns a cell."""
        held = self.holders()
        columns = self.tile[1] if len(self.tile) > 1 else 1
        at = lambda r, c: (r, c)[: len(self.tile)]
        cell = lambda h: "{}.{}".format(*h[0]) if h else "-"
        return [[cell(held.get(at(r, c))) for c in range(0, columns, each)] for r in range(self.tile[0])]

    def __str__(self) -> str:
        """The notation, and under it the table of who holds what where it is not too large."""
        if len(self.tile) > 2 or self.tile[0] > TABLE_ROWS or self.tile[-1] > TABLE_COLUMNS:
            return self.notation
        return self.notation + "\n" + picture.text(self.table())

    def svg(self) -> str:
        """A picture of the first two axes: cells coloured by thread, saying thread and register."""
        held = {(*at, 0)[:2]: h for at, h in self.holders().items()}
        lines = {at: [f"T{h[0][0]}", f"V{h[0][1]}" + ("+" if len(h) > 1 else "")] for at, h in held.items()}
        return picture.svg(lines, {at: h[0][0] for at, h in held.items()}, self.notation)

    def draw(self, path) -> None:
        """Writes `svg()` to a file."""
        picture.save(path, self.svg())
