"""Layouts: coordinate -> element offset, written shape:stride, and the algebra that makes layouts from layouts.

A coordinate is one number a mode, a nest of numbers, or a single number: the colexicographic index (leftmost mode
fastest). The algebra is CuTe's (NVIDIA CUTLASS documentation, "Layout algebra"); each operation here is defined by what
it does to indices, and `tests/lang/test_layout.py` checks the definition by enumeration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from . import picture

TABLE_ROWS, TABLE_COLUMNS = 64, 64  # what `str` still prints as a table


class LayoutError(ValueError):
    """A layout that does not exist: what was asked, and why there is none."""


def flatten(t) -> list:
    """((2, 3), 4) -> [2, 3, 4]"""
    return [x for part in t for x in flatten(part)] if isinstance(t, (tuple, list)) else [t]


def unflatten(index, sizes) -> list:
    """index -> its digits in mixed radix `sizes`, fastest first. The last digit takes what is left, however large."""
    digits = []
    for i, n in enumerate(sizes):
        last = i == len(sizes) - 1
        digits.append(0 if n == 1 else index if last else index % n)
        if not last and n > 1:
            index = index // n
    return digits


def _alike(a, b) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return not isinstance(a, tuple) and not isinstance(b, tuple)


def _show(t) -> str:
    return "(" + ",".join(map(_show, t)) + ")" if isinstance(t, tuple) else str(t)


@dataclass(frozen=True, repr=False)
class Layout:
    """shape:stride, nested alike. `Layout((4, 8), (8, 1))` is a row-major 4x8 matrix, `(4,8):(8,1)`.

    Sizes are >= 1, strides >= 0 (0: a broadcast); both in elements."""

    shape: tuple
    stride: tuple

    def __post_init__(self):
        if not (isinstance(self.shape, tuple) and self.shape and _alike(self.shape, self.stride)):
            raise LayoutError(f"shape {self.shape} and stride {self.stride} must be tuples nested alike, not empty")

    @staticmethod
    def compact(*shape: int, order: str = "row") -> Layout:
        """Dense layout of a flat `shape`; order "row": the last mode is contiguous, "col": the first."""
        if order not in ("row", "col"):
            raise LayoutError(f'order {order!r} is neither "row" nor "col"')
        sizes = shape if order == "col" else shape[::-1]
        strides = [prod(sizes[:i]) for i in range(len(sizes))]
        return Layout(tuple(shape), tuple(strides if order == "col" else strides[::-1]))

    @staticmethod
    def of(modes) -> Layout:
        """Flat layout of (size, stride) pairs; no pairs: the layout of one element."""
        return Layout(*map(tuple, zip(*(list(modes) or [(1, 0)]))))

    # -- what it is
    @property
    def modes(self) -> list[tuple[int, int]]:
        """All (size, stride), nesting forgotten."""
        return list(zip(flatten(self.shape), flatten(self.stride)))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return prod(flatten(self.shape))

    @property
    def cosize(self) -> int:
        """One more than the largest offset."""
        return 1 + sum((n - 1) * d for n, d in self.modes)

    def __call__(self, *coord):
        """Offset of a coordinate: one number (colexicographic index), or one for each top-level mode (or a nest)."""
        if len(coord) == 1 and isinstance(coord[0], tuple) and len(coord[0]) == self.rank:
            coord = coord[0]
        elif len(coord) == 1 and self.rank != 1:
            coord = coord[0]
            if isinstance(coord, tuple):
                return self(*coord)
            digits = unflatten(coord, flatten(self.shape))
            return sum(c * d for c, (_, d) in zip(digits, self.modes))
        if len(coord) != self.rank:
            raise LayoutError(f"{self!r} has {self.rank} modes; the coordinate {coord} has {len(coord)}")
        return sum(
            Layout(n, d)(c) if isinstance(n, tuple) else c * d for c, n, d in zip(coord, self.shape, self.stride)
        )

    def __getitem__(self, mode: int) -> Layout:
        """One top-level mode as a layout."""
        n, d = self.shape[mode], self.stride[mode]
        return Layout(n, d) if isinstance(n, tuple) else Layout((n,), (d,))

    def __iter__(self) -> Iterator[Layout]:
        return (self[i] for i in range(self.rank))

    def offsets(self) -> list[int]:
        """Offset of each index, in order: the whole function, by enumeration."""
        out = [0]
        for n, d in self.modes:
            out = [o + i * d for i in range(n) for o in out]
        return out

    # -- algebra
    def coalesce(self) -> Layout:
        """The same function of an index with as few modes as possible."""
        out: list[tuple[int, int]] = []
        for n, d in self.modes:
            if n == 1:
                continue
            if out and out[-1][0] * out[-1][1] == d:
                out[-1] = (out[-1][0] * n, out[-1][1])
            else:
                out.append((n, d))
        return Layout.of(out)

    def compose(self, inner: Layout) -> Layout:
        """self after inner: `self.compose(inner)(i) == self(inner(i))`; inner's nesting is kept, and refined.

        The last mode of self goes on for ever. LayoutError where inner steps across self's modes unevenly."""
        outer = self.coalesce().modes
        reach = [0] * len(outer)  # the largest digit of each mode that the steps so far add up to

        def walk(n, d):  # outer at 0, d, 2d, ... (n of them), as (size, stride) pairs
            asked, out = f"{n}:{d}", []
            for i, (size, step) in enumerate(outer):
                last = i == len(outer) - 1
                if not last and d and d % size == 0:
                    d //= size
                    continue
                take = n if last or not d else min(n, max(1, size // d))
                reach[i] += (take - 1) * d
                uneven = n % take or (n > 1 and d and size % d) or reach[i] >= size
                if uneven and not last:
                    raise LayoutError(f"{self!r} cannot be walked {asked}: it steps unevenly over a mode of {size}")
                if take > 1:
                    out.append((take, step * d))
                n, d = n // take, 1
            return out or [(1, 0)]

        def nest(shape, stride):
            if isinstance(shape, tuple):
                parts = [nest(n, d) for n, d in zip(shape, stride)]
                return tuple(p[0] for p in parts), tuple(p[1] for p in parts)
            sizes, steps = zip(*walk(shape, stride))
            return (sizes, steps) if len(sizes) > 1 else (sizes[0], steps[0])

        return Layout(*nest(inner.shape, inner.stride))

    def complement(self, size: int) -> Layout:
        """What to repeat self with to cover 0 .. size-1 once: its offsets plus self's are all different, in order.

        self must not hold an offset twice. Where size is not a whole number of repeats, the last one overhangs."""
        out, at = [], 1
        for n, d in sorted((m for m in self.modes if m[0] > 1), key=lambda m: m[1]):
            if d == 0 or d % at:
                raise LayoutError(f"{self!r} has no complement: it holds offsets twice, or leaves uneven gaps")
            if d > at:
                out.append((d // at, at))
            at = n * d
        if size > at:
            out.append((-(-size // at), at))
        return Layout.of(out)

    def divide(self, tile: Layout) -> Layout:
        """((inside a tile), (which tile)): CuTe's logical_divide by one tiler of the whole index space."""
        inner, outer = self.compose(tile), self.compose(tile.complement(self.size))
        return Layout((inner.shape, outer.shape), (inner.stride, outer.stride))

    def divide_modes(self, *tiles: int | Layout) -> Layout:
        """((in0, in1, ...), (tile0, tile1, ...)): each mode cut by its own tiler (an int: that many neighbours).

        CuTe's zipped_divide. Modes beyond the tilers count as one tile."""
        inner, outer = [], []
        for i, mode in enumerate(self):
            tile = tiles[i] if i < len(tiles) else mode.size
            a, b = mode.divide(Layout((tile,), (1,)) if isinstance(tile, int) else tile)
            inner.append(a)
            outer.append(b)
        return Layout.join(Layout.join(*inner), Layout.join(*outer))

    def product(self, times: Layout) -> Layout:
        """(self, copies): self laid out again wherever `times` says, copies disjoint: CuTe's logical_product."""
        copies = self.complement(self.cosize * times.cosize).compose(times)
        return Layout.join(self, copies)

    def inverse(self) -> Layout:
        """`self(self.inverse()(o)) == o` for every offset o; self must be a permutation of 0 .. size-1."""
        at, out, where = 1, [], {}
        index = 1
        for n, d in self.modes:
            if n > 1:
                where[d] = (n, index)
            index *= n
        while at < self.size:
            if at not in where:
                raise LayoutError(f"{self!r} has no inverse: no mode has stride {at}")
            out.append(where[at])
            at *= where[at][0]
        return Layout.of(out)

    @staticmethod
    def join(*parts: Layout) -> Layout:
        """A layout whose modes are the parts (a part of one flat mode stays flat)."""
        bare = lambda t: t[0] if len(t) == 1 else t
        return Layout(tuple(bare(p.shape) for p in parts), tuple(bare(p.stride) for p in parts))

    # -- to look at
    @property
    def notation(self) -> str:
        return f"{_show(self.shape)}:{_show(self.stride)}"

    def table(self) -> list[list[int]]:
        """The offsets as rows: first mode down, the others (as one index) across; a layout of one mode is one row."""
        rows = self[0].size if self.rank > 1 else 1
        flat = self.offsets()
        return [flat[r::rows] for r in range(rows)]

    def __repr__(self) -> str:
        return self.notation

    def __str__(self) -> str:
        """The notation, and under it the table of offsets where it is not too large."""
        rows = self[0].size if self.rank > 1 else 1
        if rows > TABLE_ROWS or self.size // rows > TABLE_COLUMNS:
            return self.notation
        return self.notation + "\n" + picture.text(self.table())

    def svg(self, elements_per_colour: int = 1) -> str:
        """A picture: the table of offsets, cells coloured by offset // elements_per_colour (e.g. a bank's elements)."""
        cells = {(r, c): o for r, row in enumerate(self.table()) for c, o in enumerate(row)}
        colour = {at: o // elements_per_colour for at, o in cells.items()}
        return picture.svg({at: [str(o)] for at, o in cells.items()}, colour, self.notation)

    def draw(self, path, elements_per_colour: int = 1) -> None:
        """Writes `svg()` to a file."""
        picture.save(path, self.svg(elements_per_colour))
