"""Rings of LDS stages that hold the K tiles of a matrix operand, and the fragments read from them (gfx950).

An operand is a 2-D view whose last axis is the contiguous one (or none is: `CopiedRing`). Its K axis, along which tiles
follow one another, is either axis: `along=1` where rows are K long, `along=0` where columns are. A stage's image in LDS
has the view's own orientation; `read` gives (rows, k) fragments of either, the second through transposing LDS reads.

Outside the operand lie zeros, also where K ends within a tile: a row's tail never reads the next row's data.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import Any

from ..dtypes import DType, i32, i64
from ..layout import IDENTITY, Layout, Mode, Swizzle, ThreadValues
from .errors import TraceError
from .fragment import Fragment
from .kernel import Kernel
from .memory import View, advance
from .values import Value, constant, minimum, select

OUTSIDE = 0xFFFFF000  # a byte offset that lies outside every buffer


class _Stages:
    """What both rings share: the LDS stages, who fetches which part of a tile, and how fragments are read.

    tile    extents of a stage, axes as the source's
    stages  K tiles held at once
    chunk   bytes that a thread moves at a time
    along   the axis that is K
    last    (i32 Value, int): elements of K in the last tile where only the run knows (0: none, up to all), and what
            they are a multiple of; default: as many as the source's size leaves

    The source's K may be an i32 Value. Then `tile_count` is the number of tiles, and any tile may be asked for: past
    K's end it is zeros."""

    word: int  # bytes that the hardware's range check takes together

    def __init__(
        self, k: Kernel, source: View, tile: tuple, stages: int, swizzle: Swizzle, chunk: int, along: int, last=None
    ):  # fmt: skip
        self.k, self.source, self.extent, self.stages, self.along = k, source, tile, stages, along
        self.dtype: DType = source.dtype
        length: Any = source.shape[along]
        self.depth: Any = tile[along]
        self.run_time = isinstance(length, Value)
        self.tiles: Any = inf if self.run_time else ceil(length / self.depth)  # past the last one there are zeros
        self.tile_count: Any = (length + (self.depth - 1)) // self.depth if self.run_time else self.tiles
        whole: Any = self.depth if self.run_time else length - (self.tiles - 1) * self.depth
        self.last, self.last_multiple = last or (whole, whole)  # elements of K in the last tile
        self.swizzle, self.chunk = swizzle, chunk // self.dtype.bytes
        if swizzle and swizzle.chunk < self.chunk:
            raise TraceError(f"the swizzle {swizzle!r} tears apart {chunk} bytes that move as one", "raise its base")
        loads, over = divmod(tile[0] * tile[1], self.chunk * k.workgroup_size)
        if over:
            raise TraceError(
                f"a tile of {tile} {self.dtype} is not whole loads of {chunk} bytes by {k.workgroup_size} threads",
                "choose a larger tile or fewer waves",
            )
        self.lds = k.shared(self.dtype, Layout.compact(stages, *tile), swizzle)
        self.lds_bytes = stages * tile[0] * tile[1] * self.dtype.bytes
        self.wave_elements = self.chunk * k.target.lanes
        self._address(loads)
        self.scope = k.target.alias_scope(k)

    @property
    def ragged(self) -> bool:
        """Whether K ends, or may end, within the last tile."""
        return self.run_time or isinstance(self.last, Value) or self.last < self.depth

    # -- memory side: a thread's chunk number `load` of a tile
    def chunk_at(self, thread, load):
        """Coordinate in the tile of the first element; its bytes land in LDS one lane after the other."""
        e = self.swizzle((thread + load * self.k.workgroup_size) * self.chunk)
        return e // self.extent[1], e % self.extent[1]

    def _address(self, loads: int):
        """Where this thread's loads lie: bytes of each from a tile's origin, and how far a tile's origin and end are.

        Every tile has a buffer of its own that ends where the operand does. Nothing is left to a scalar offset: whether
        the hardware's range check counts it is said differently in different places."""
        k, source, size = self.k, self.source, self.dtype.bytes
        narrow = lambda s: self._once(("i32", s), lambda: s.to(i32), s) if isinstance(s, Value) else s
        self.stride = tuple(map(narrow, source.stride))
        key = ("ring", type(self), self.extent, self.swizzle, self.chunk, k.workgroup_size, self.stride, size)
        self.lane_bytes = [
            self._once((*key, i), lambda: self._offset(i), *(s for s in self.stride if isinstance(s, Value)))
            for i in range(loads)
        ]
        self.step = source.stride[self.along] * self.depth  # elements from tile to tile
        if not self.run_time:
            self.span, self.last_span = self._span(self.depth), self._span(self.last)

    def _offset(self, load: int):
        """Bytes from a tile's origin to this thread's chunk number `load` in memory."""
        return sum((c * s for c, s in zip(self.chunk_at(self.k.thread, load), self.stride)), 0) * self.dtype.bytes

    def _once(self, key, make, *uses):
        return self.k.once(key, make, uses)

    def _span(self, depth: int):
        """Bytes from a tile's origin to the end of its last element, if K has `depth` left: the buffer's size.

        Chunks are checked word by word (LLVM, "User Guide for AMDGPU Backend", buffer resources), so the size is in
        whole words: the aligned word that holds the last element may be read, since memory is mapped in pages."""
        counts = [
            depth if a == self.along else minimum(n, t) for a, (n, t) in enumerate(zip(self.source.shape, self.extent))
        ]
        wide = lambda x: x.to(i64) if isinstance(x, Value) else x
        far = sum(((wide(n) - 1) * wide(s) for n, s in zip(counts, self.source.stride)), 0)
        whole = self.word
        span = ((far + 1) * self.dtype.bytes + (whole - 1)) // whole * whole
        for n in counts:  # nothing at all where the tile lies beyond the operand
            if isinstance(n, Value):
                span = select(n > 0, span, constant(0, i64))
        return span

    def _buffer(self, t):
        """(the buffer of K tile t, how many elements of K it has if K may end within it, else False)"""
        if self.run_time:
            left = self._left(t)
            return self._buffer_at(t, self._span(left)), self.along == 1 and left
        last = isinstance(t, int) and t == self.tiles - 1
        return self._buffer_at(t, self.last_span if last else self.span), last and self.ragged and self.last

    def _left(self, t):
        """Elements of K in tile t, where only the run knows; 0 or less past the last one."""
        return minimum(self.source.shape[self.along] - t * self.depth, self.depth)

    def _buffer_at(self, t, span):
        origin = advance(self.source.pointer, self.step * (t.to(i64) if isinstance(t, Value) else t), self.dtype)
        return self.k.target.buffer(origin, span)

    def _inside(self, load: int, element: int, lane_bytes, left):
        """Byte offset of an element of a tile with `left` elements of K: outside the buffer where K has ended."""
        at = self.chunk_at(self.k.thread, load)[self.along]
        return select(at + (element if self.along == 1 else 0) < left, lane_bytes, constant(OUTSIDE - 2**32, i32))

    # -- LDS side
    def stage(self, t) -> View:
        """The LDS tile that K tile `t` lives in."""
        return self.lds[t % self.stages]

    def read(self, operand: ThreadValues, t, step: int) -> Fragment:
        """(rows, k) operand fragment: K step `step` of tile `t`, zeros past K's end."""
        width = operand.tile[1]
        stage = self.stage(t).tagged(noalias_scopes=self.scope)
        if self.along == 1:
            got = self.k.fragment(operand.shifted(0, step * width)).load(stage)
        else:
            got = self._read_transposed(operand, stage, step * width)
        return self._masked(got, t, step * width)

    def steps(self, t, width: int) -> int:
        """How many K steps of `width` tile `t` needs."""
        known = isinstance(t, int) and t == self.tiles - 1 and isinstance(self.last, int)
        return ceil((self.last if known else self.depth) / width)

    def _read_transposed(self, operand: ThreadValues, stage: View, first: int) -> Fragment:
        """Each vector of 8 consecutive k in two reads of 4."""
        image = transposing(operand).shifted(first, 0)

        def piece(digits):
            halves = [
                self.k.target.read_transposed(
                    stage._address(self.k, image, (*digits, half), False), self.dtype, self.scope
                )
                for half in range(image.piece_sizes[-1])
            ]
            return halves[0].shuffle(range(2 * halves[0].width), halves[1])

        return Fragment(self.k, operand.shifted(0, first), False, piece)

    def _masked(self, fragment: Fragment, t, first: int) -> Fragment:
        """Zeros where a chunk of the last tile reached past K's end (it holds what follows in memory)."""
        torn = self.along == 1 and self.last_multiple % self.chunk and isinstance(t, int) and t == self.tiles - 1
        if not torn or (isinstance(self.last, int) and first + fragment.layout.tile[1] <= self.last):
            return fragment
        return fragment.below(1, self.last)


class Ring(_Stages):
    """Stages fed from memory without registers, by direct-to-LDS loads; the kernel's Plan says when to wait.

    Direct loads write LDS lane after lane, `chunk` (4 or 16) bytes each: they cannot permute. So the permutation is
    done on the memory side: the thread whose bytes land at element e fetches the coordinate that belongs there,
    unflatten(swizzle(e)); a swizzle is its own inverse. The source's last axis has stride 1, its rows start at
    multiples of `chunk` bytes."""

    word = 4

    def __init__(
        self, k, source: View, tile, stages: int, swizzle=IDENTITY, chunk: int = 16, along: int = 1, last=None
    ):  # fmt: skip
        if source.stride[1] != 1:
            raise TraceError(f"{source} has no contiguous last axis", "transpose the view, or use a CopiedRing")
        super().__init__(k, source, tuple(tile), stages, swizzle, chunk, along, last)

    @property
    def loads(self) -> int:
        """Instructions a thread and a tile: what wait_loads counts."""
        return len(self.lane_bytes)

    def prefetch(self, t):
        """Start bringing in K tile `t`: `loads` instructions, counted by wait_loads."""
        k, into, (buffer, cut) = self.k, self.stage(t), self._buffer(t)
        waves, size = k.workgroup_size // k.target.lanes, self.chunk * self.dtype.bytes
        for i, lane in enumerate(self.lane_bytes):
            to = advance(into.pointer, (k.subgroup + i * waves) * self.wave_elements, self.dtype)
            lane = self._inside(i, 0, lane, cut) if cut is not False else lane
            k.target.load_to_shared(buffer, to, lane, 0, self.scope, size)


class CopiedRing(_Stages):
    """Stages fed through registers, element by element: for operands without alignment or without a contiguous axis.

    16 bytes of LDS are gathered by 8 loads and written at once. `fetch` starts a tile's loads and returns their
    registers, `put` writes them to the tile's stage; the compiler waits in between."""

    word = 1

    def __init__(self, k, source: View, tile, stages: int, swizzle=IDENTITY, along: int = 1, last=None):
        super().__init__(k, source, tuple(tile), stages, swizzle, k.target.vector_bytes, along, last)

    def fetch(self, t) -> tuple[Value, ...]:
        """The registers that tile `t` comes into: one vector a chunk."""
        buffer, cut = self._buffer(t)
        return tuple(self._gather(i, buffer, cut) for i in range(len(self.lane_bytes)))

    def _gather(self, load: int, buffer, cut) -> Value:
        out = constant(0, self.dtype, self.chunk)
        for e in range(self.chunk):
            mine = self.lane_bytes[load] + self.stride[1] * (e * self.dtype.bytes)
            mine = self._inside(load, e, mine, cut) if cut is not False else mine
            out = out.insert(e, self.k.target.load_buffer(buffer, mine, 0, self.dtype))
        return out

    def put(self, t, vectors):
        """Writes what `fetch` returned to tile t's stage; a barrier must follow before it is read."""
        k, into = self.k, self.stage(t)
        for i, v in enumerate(vectors):
            to = advance(into.pointer, (k.thread + i * k.workgroup_size) * self.chunk, self.dtype)
            into.write(to, v, self.chunk * self.dtype.bytes)

    def _masked(self, fragment, t, first):
        return fragment  # each element was fetched by itself


def transposing(operand: ThreadValues) -> ThreadValues:
    """Who addresses what of the (k, rows) image of a (rows, k) operand, for `read_transposed`.

    Groups of 16 lanes own 16 rows and 8 consecutive k, in two reads of a 4 x 16 tile each (the last piece mode). There
    lane i addresses k row i // 4 and four neighbours from row 4 * (i % 4)."""
    first, *others = operand.threads
    if first.axis != 0 or first.step != 1 or first.size % 16 or operand.vector != Mode(8, 1, 1):
        raise TraceError(
            f"{operand!r} has no transposing read", "it needs 16 rows or a multiple, one a lane, of 8 k each"
        )
    swap = lambda m: m._replace(axis=1 - m.axis)
    more = (Mode(first.size // 16, 1, 16),) if first.size > 16 else ()
    return replace(
        operand,
        tile=operand.tile[::-1],
        threads=(Mode(4, 1, 4), Mode(4, 0, 1), *more, *map(swap, others)),
        vector=Mode(4, 1, 1),
        pieces=(*map(swap, operand.pieces), Mode(2, 0, 4)),
        start=operand.start[::-1],
    )
