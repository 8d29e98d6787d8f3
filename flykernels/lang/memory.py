"""Typed memory: a pointer, and the function from coordinates to elements.

A `View` addresses a ThreadValues layout in three parts: the tile's base (64 bits, uniform), this thread's offset in the
tile (computed once), and the piece's distance from it: a constant folded into the instruction where it is one, else a
uniform value. Whether it *is* constant is not assumed: the layout is evaluated for every thread at trace time (numpy).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import gcd, prod
from typing import Any

import numpy as np

from ..dtypes import DType, i16, i32, i64, u32
from ..layout import IDENTITY, Layout, Swizzle, ThreadValues, flatten
from ..mlir import arith, llvm
from .errors import TraceError
from .values import Value, constant, lanes_where, maximum, minimum, mlir_type, select


@dataclass(frozen=True)
class Global:
    """An argument in device memory: element type, shape, strides in elements (default: dense, row-major).

    Each size and stride is an int, the name of an i32 or i64 scalar argument of the same kernel, a kernel Value, or (a
    nested axis) a tuple of ints. Strides are never negative. Offsets inside one tile are computed in the stride's own
    width: an i32 stride serves tiles that span less than 2**31 elements, an i64 stride any.

    alignment        bytes that the pointer is a multiple of: what the launcher guarantees
    stride_multiple  elements that every run-time stride is a multiple of (a stride along which vectors lie excepted)
    """

    dtype: DType
    shape: tuple
    stride: tuple | None = None
    alignment: int = 16
    stride_multiple: int = 1

    def view(self, pointer, scalars=None) -> View:
        """The argument as a View; `scalars` maps the names that shape and stride use to Values."""

        def known(x):
            if not isinstance(x, str):
                return x
            if x not in (scalars or {}):
                raise TraceError(
                    f"size or stride {x!r} of a Global is not among the scalar arguments {sorted(scalars or {})}",
                    f"declare it: k.args(..., {x}=i32)",
                )
            return scalars[x]

        shape = tuple(map(known, self.shape))
        stride = tuple(map(known, self.stride)) if self.stride is not None else dense(shape)
        if len(shape) != len(stride):
            raise TraceError(
                f"{len(shape)} sizes {self.shape} but {len(stride)} strides {self.stride}", "give one each"
            )
        return View(pointer, self.dtype, shape, stride, alignment=self.alignment, stride_multiple=self.stride_multiple)


def dense(shape) -> tuple:
    """Row-major strides of a shape whose sizes may be Values."""
    out = [1]
    for n in shape[:0:-1]:
        out.append(out[-1] * (prod(flatten(n)) if isinstance(n, tuple) else n))
    return tuple(out[: len(shape)][::-1])


@dataclass(frozen=True)
class View:
    """Memory seen as a tile: coordinate -> element.

    shape     what may be touched from here on: ints, Values, or tuples of ints for nested axes
    stride    elements, nested like shape; ints or Values
    multiple  for each axis, what its size is known to be a multiple of (default: the size itself, or 1 if a Value)
    zeros     what a load gives outside; False: anything, for tiles whose rows and columns outside nobody looks at
    skipped   for each axis, how many of its first coordinates are not to be touched either (default: none)
    once      each element is moved but once: caches should give it up first, where the target has such accesses
    kept      written piece by piece: caches should give it up last, where the target has such stores
    """

    pointer: object  # of coordinate (0, 0, ...); an LLVM pointer
    dtype: Any
    shape: tuple
    stride: tuple
    swizzle: Swizzle = IDENTITY  # of the element offset
    alignment: int = 16  # of the pointer, bytes
    tags: tuple = ()  # MLIR attributes put on loads: (name, attribute)
    stride_multiple: int = 1  # of strides that are Values, elements
    multiple: tuple = ()
    zeros: bool = True
    skipped: tuple = ()
    once: bool = False
    kept: bool = False

    def __str__(self):
        return f"{self.dtype}{list(self.shape)}:{list(self.stride)} {self.swizzle}"

    def known_multiple(self, axis) -> int:
        """What the size along axis is certainly a multiple of."""
        n = self.shape[axis]
        if isinstance(n, Value):
            return self.multiple[axis] if self.multiple else 1
        return prod(flatten(n))

    # -- choosing a part
    def tile(self, size, *at) -> View:
        """The tile number `at` along each leading axis, cut off where the view ends.

        An axis without an `at` keeps its first `size` elements; one without a size stays whole."""
        size = tuple(size) + tuple(self.shape[len(size) :])
        pointer, alignment, axes = self.pointer, self.alignment, []  # axes: (size, stride, multiple)
        for axis, (whole, step) in enumerate(zip(self.shape, self.stride)):
            n, known = size[axis], self.known_multiple(axis)
            if axis >= len(at):
                axes.append((n, step, n if isinstance(n, int) else known))
            elif isinstance(whole, tuple):
                inner, outer = split(whole, step, n)
                pointer = self._step(pointer, outer(at[axis]), 1)
                alignment = gcd(alignment, *(s * self.dtype.bytes for s in flatten(outer.stride)))
                axes.append((inner.shape[0], inner.stride[0], n))
            else:
                pointer, alignment = self._step(pointer, at[axis] * n, step), self._aligned(alignment, n, step)
                divides = isinstance(whole, int) and whole % n == 0
                axes.append((n if divides else cut(whole - at[axis] * n, n), step, gcd(known, n)))
        shape, stride, multiple = map(tuple, zip(*axes))
        left = zip(self.skipped, size, (*at, *(0 for _ in size[len(at) :])))
        skipped = tuple(s - i * n if isinstance(s, Value) and isinstance(n, int) else s for s, n, i in left)
        return replace(
            self, pointer=pointer, shape=shape, stride=stride, multiple=multiple, alignment=alignment, skipped=skipped
        )

    def __getitem__(self, index) -> View:
        """view[i]: fix the first coordinate."""
        step = self.stride[0]
        if self.swizzle and (not isinstance(step, int) or step % self.swizzle.period):
            raise TraceError(
                f"{self} is not indexed along its swizzle",
                f"let the first axis step by a multiple of {self.swizzle.period} elements",
            )
        if isinstance(step, tuple):
            pointer, alignment = self._step(self.pointer, offset_along(self.shape[0], step, index), 1), 0
            alignment = gcd(self.alignment, *(s * self.dtype.bytes for s in flatten(step)))
        else:
            pointer, alignment = self._step(self.pointer, index, step), self._aligned(self.alignment, 1, step)
        return replace(
            self,
            pointer=pointer,
            alignment=alignment,
            shape=self.shape[1:],
            stride=self.stride[1:],
            multiple=self.multiple[1:],
            skipped=self.skipped[1:],
        )

    def transposed(self, *axes) -> View:
        """The same memory with its axes in another order (default: reversed)."""
        order = axes or tuple(range(len(self.shape)))[::-1]
        pick = lambda t: tuple(t[a] for a in order)
        return replace(
            self,
            shape=pick(self.shape),
            stride=pick(self.stride),
            multiple=pick(self.multiple) if self.multiple else (),
            skipped=pick(self.skipped) if self.skipped else (),
        )

    def tagged(self, **attributes) -> View:
        """The same view whose loads carry MLIR attributes (alias scopes)."""
        return replace(self, tags=tuple(attributes.items()))

    def _step(self, pointer, c, stride):
        wide = isinstance(c, Value) and not is_shared(pointer)
        return advance(pointer, (c.to(i64) if wide else c) * stride, self.dtype)

    def _aligned(self, alignment, n, stride):
        """Alignment in bytes after steps of n along an axis of this stride."""
        if isinstance(n, Value):
            return gcd(alignment, self.dtype.bytes)
        known = stride if isinstance(stride, int) else self.stride_multiple
        return gcd(alignment, n * known * self.dtype.bytes)

    # -- moving one piece of a ThreadValues layout
    def load(self, k, tv: ThreadValues, digits, elementwise=False) -> Value:
        """One piece; zeros where it lies outside. No branch: what lies outside reads the view's first element instead.

        elementwise: each element of the vector has its own address (a strided or transposed operand)."""
        view, n, bits = self._like(tv), tv.vector.size, _plain(self.dtype)
        checks, plain = view._checks(k, tv, digits), replace(view, dtype=bits)
        once = view._own(k, tv, "once")

        def fetch(pointer, width, alignment):
            return once.read(pointer, bits, n) if once and width == n else plain.read(pointer, width, alignment)

        def read(inside, pointer, width, alignment):
            if inside is True:
                return fetch(pointer, width, alignment)
            zero = constant(0, bits, width)
            if inside is False:
                return zero
            found = fetch(arith.select(inside.ssa, pointer, view.pointer), width, alignment)
            return select(inside, found, zero) if view.zeros else found

        element = view._elements(k, tv, digits, elementwise)
        if not elementwise and _whole(checks):
            return read(_within(checks, 0), element(0), n, view._alignment(tv)).bitcast(self.dtype, n)
        out = constant(0, bits, n)  # strided, or the edge cuts a vector
        for i in range(n):
            out = out.insert(i, read(_within(checks, i), element(i), None, self.dtype.bytes))
        return out.bitcast(self.dtype, n)

    def store(self, k, tv: ThreadValues, digits, value: Value, elementwise=False):
        """One piece; nothing where it lies outside."""
        view, bits = self._like(tv), value.bitcast(_plain(self.dtype), tv.vector.size)
        checks = view._checks(k, tv, digits)
        element = view._elements(k, tv, digits, elementwise)
        if not elementwise and _whole(checks):
            own = view._own(k, tv, "once") or view._own(k, tv, "kept")

            @k.when(_within(checks, 0))
            def _():
                own.write(element(0), bits) if own else view.write(element(0), bits, view._alignment(tv))
        else:
            for i in range(tv.vector.size):

                @k.when(_within(checks, i))
                def _():
                    view.write(element(i), bits[i], self.dtype.bytes)

    # -- one element or a run of neighbours, on targets where a thread walks memory by itself
    def at(self, *coord) -> View:
        """The same view with its origin moved to `coord` (ints or Values of any integer type); all axes remain."""
        whole = (*coord, *(0 for _ in self.stride[len(coord) :]))
        offset = sum((_wide(c) * _wide(s) for c, s in zip(whole, self.stride)), 0)
        alignment = gcd(self.alignment, self.dtype.bytes)
        return replace(self, pointer=advance(self.pointer, offset, self.dtype), alignment=alignment)

    def recast(self, dtype: DType) -> View:
        """What lies at the view's origin as a row of another type: LLVM loads an i32 better than a pair of bf16."""
        return replace(self, dtype=dtype, shape=(1,), stride=(1,), multiple=())

    def get(self, *coord, width=None, count=None) -> Value:
        """The element at coord, or `width` neighbours along the last axis, whose stride is 1.

        count: only the first `count` (an int) of them may be touched; the others are zeros."""
        at = self.at(*coord)
        if count is None or count == width:
            return self.read(at.pointer, width, at.alignment)
        bits = _plain(self.dtype)
        kind, zeros = mlir_type(bits, width), constant(0, bits, width).ssa
        found = llvm.intr_masked_load(kind, at.pointer, _first(count, width), at.alignment, pass_thru=zeros)
        return Value(found, bits, width).bitcast(self.dtype, width)

    def put(self, value: Value, *coord, count=None, past_caches=False):
        """Writes one element or a vector at coord; count: only its first `count` (an int) elements.

        past_caches: to memory, without reading the line first; the address is a multiple of the vector's size."""
        at, bits = self.at(*coord), value.bitcast(_plain(self.dtype), value.width)
        if past_caches:
            size = self.dtype.bytes * (value.width or 1)
            llvm.StoreOp(bits.ssa, at.pointer, alignment=size, nontemporal=True)
        elif count is None or count == value.width:
            self.write(at.pointer, bits, at.alignment)
        else:
            llvm.intr_masked_store(bits.ssa, at.pointer, _first(count, value.width), at.alignment)

    def read(self, pointer, width, alignment) -> Value:
        """A load of `width` elements (None: one scalar) at an LLVM pointer; alignment in bytes."""
        loaded = llvm.LoadOp(mlir_type(self.dtype, width), pointer, alignment=alignment, **dict(self.tags))
        return Value(loaded.result, self.dtype, width)

    def write(self, pointer, value: Value, alignment):
        """A store at an LLVM pointer; alignment in bytes."""
        llvm.StoreOp(value.ssa, pointer, alignment=alignment)

    # -- where, how far, how well aligned
    def _own(self, k, tv: ThreadValues, wish: str):
        """The target's own accesses for what is `once` or `kept`, where it has those for the layout's vectors."""
        own, size = getattr(k.target, wish, None), tv.vector.size * self.dtype.bytes
        return own if getattr(self, wish) and own and size in own.SIZES and self._alignment(tv) % size == 0 else None

    def index(self, coord):
        """Element offset of a coordinate (ints, arrays or Values)."""
        parts = (offset_along(n, s, c) for c, n, s in zip(coord, self.shape, self.stride))
        return self.swizzle(sum(parts, 0))

    def _elements(self, k, tv: ThreadValues, digits, elementwise):
        """i -> pointer to element i of this thread's piece `digits`."""
        base = self._address(k, tv, digits, elementwise)
        if not elementwise:
            return lambda i: advance(base, i, self.dtype)
        if self.swizzle or isinstance(self.stride[tv.vector.axis], tuple):
            raise TraceError(
                f"{self} is swizzled, or nested along the vectors' axis, and is not moved element by element",
                "use vectors along its contiguous axis",
            )
        step = self.stride[tv.vector.axis]
        return lambda i: advance(base, step * (i * tv.vector.step), self.dtype)

    def _address(self, k, tv: ThreadValues, digits, elementwise):
        """Pointer to this thread's piece `digits`."""
        zero = (0,) * len(digits)
        nested = any(isinstance(s, tuple) for s in self.stride)
        runtime = tuple(s for s in flatten(self.stride) if isinstance(s, Value))
        key = ("offset", self.shape if nested else None, self.stride, self.swizzle, tv)
        offset = lambda d: k.once((*key, d), lambda: place(self, tv, k.thread, d), runtime)
        streamed = any(isinstance(d, Value) for d in digits)
        if streamed and (self.swizzle or nested):
            raise TraceError(
                f"{self} is swizzled or nested, and is not streamed", "hold it: fragment(layout, streamed=False)"
            )
        if not runtime:
            distance = constant_distance(
                self.shape if nested else None, self.stride, self.swizzle, tv, zero if streamed else digits, elementwise
            )
            if distance is None:  # the swizzle moves it otherwise: as near as can be to a piece of its like
                base, distance = nearest_piece(self.shape if nested else None, self.stride, self.swizzle, tv, digits)
                return advance(advance(self.pointer, offset(base), self.dtype), distance, self.dtype)
        elif not elementwise and tv.vector.size > 1 and self.stride[tv.vector.axis] * tv.vector.step != 1:
            raise not_contiguous(tv, self.stride)
        if runtime or streamed:  # linear: the distance is the same for every thread
            distance = self.index(tv.walk(digits))
        return advance(advance(self.pointer, offset(zero), self.dtype), distance, self.dtype)

    def _checks(self, k, tv: ThreadValues, digits):
        """Coordinates that may lie outside: [(this thread's first, how many there are, elements of the vector along it,
        what the number is a multiple of)]."""
        out = []
        for axis, room in enumerate(self.shape):
            if isinstance(self.stride[axis], int) and self.stride[axis] == 0:
                continue  # a broadcast has no edge
            known = self.known_multiple(axis)
            room = prod(flatten(room)) if isinstance(room, tuple) else room
            skipped = self.skipped[axis] if self.skipped else 0
            streamed = isinstance(tv.walk(digits)[axis], Value)  # streamed pieces are whole; see Fragment.each
            overhangs = not streamed and tv.reach(digits, axis) > tv.edge(axis)
            if isinstance(room, int):
                room = min(room, tv.edge(axis))
                if (streamed or tv.reach(digits, axis) <= room) and not isinstance(skipped, Value):
                    continue
                known = room
            elif overhangs:
                room, known = minimum(room, tv.edge(axis)), gcd(known, tv.edge(axis))
            first = tv.origin(k.thread)[axis] + tv.walk(digits)[axis]
            if isinstance(skipped, Value):  # below it the difference is a large unsigned number
                first, room = (first - skipped).to(u32), (maximum(skipped, room) - skipped).to(u32)
            out.append((first, room, tv.vector.size if tv.vector.axis == axis else 1, known))
        return out

    def _like(self, tv) -> View:
        """A view with fewer axes than the tile repeats along the missing leading ones."""
        missing = len(tv.tile) - len(self.shape)
        if missing < 0:
            raise TraceError(
                f"{self} has {len(self.shape)} axes, the tile of {tv!r} only {len(tv.tile)}",
                "fix some axes with view[i]",
            )
        if not missing:
            return self
        shape, stride = tv.tile[:missing] + self.shape, (0,) * missing + self.stride
        return replace(
            self, shape=shape, stride=stride, multiple=tv.tile[:missing] + self.multiple if self.multiple else ()
        )

    def _alignment(self, tv):
        """Bytes that every piece's address is a multiple of; back ends split what this is too small for."""
        if self.swizzle:
            return gcd(self.alignment, self.swizzle.chunk * self.dtype.bytes)
        if any(isinstance(s, tuple) for s in self.stride):
            return gcd(self.alignment, common_multiple(self.shape, self.stride, tv) * self.dtype.bytes)
        alignment = self.alignment
        for axis, stride in enumerate(self.stride):
            steps = (m.step for m in (*tv.threads, *tv.pieces) if m.axis == axis and m.size > 1)
            start = tv.start[axis] if tv.start else 0
            alignment = self._aligned(alignment, gcd(start, *steps), stride)
        return alignment


def cut(left, n: int):
    """What is left of an axis, at most n: 32 bits hold it."""
    return minimum(left, n).to(i32) if isinstance(left, Value) else min(left, n)


def offset_along(size, stride, c):
    """Element offset of coordinate c along one axis: c * stride, digit by digit where the axis is nested."""
    return Layout((size,), (stride,))(c) if isinstance(stride, tuple) else c * stride


def split(size, stride, n):
    """A nested axis cut into tiles of n: (layout inside a tile, layout of the tiles)."""
    axis = Layout((size,), (stride,))
    parts = axis.divide(Layout((n,), (1,)))
    if axis.size % n:
        raise TraceError(
            f"the nested axis {axis!r} is not cut into whole tiles of {n}", "choose a tile that divides it"
        )
    inner, outer = zip(parts.shape, parts.stride)
    return Layout(*inner), Layout(*outer)


def place(view, tv: ThreadValues, thread, digits, element=0):
    """Element offset in view (anything with `index`) of one element of thread's piece `digits`."""
    along = lambda axis: element * tv.vector.step if axis == tv.vector.axis else 0
    return view.index([o + w + along(a) for a, (o, w) in enumerate(zip(tv.origin(thread), tv.walk(digits)))])


@cache
def constant_distance(shape, stride, swizzle, tv: ThreadValues, digits, elementwise):
    """How far piece `digits` lies from piece 0, if that is the same for every thread (None: it is not).

    Elements past the tile's edge are never touched and may lie anywhere."""
    view, everyone = View(None, None, shape or (1,) * len(stride), stride, swizzle), np.arange(tv.thread_count)
    vector = np.stack([place(view, tv, everyone, digits, v) + 0 * everyone for v in range(tv.vector.size)])
    if not elementwise and (np.diff(vector, axis=0) != 1).any():
        raise not_contiguous(tv, stride)
    distance = np.unique(vector[0] - place(view, tv, everyone, (0,) * len(digits)))
    return int(distance[0]) if len(distance) == 1 else None


@cache
def nearest_piece(shape, stride, swizzle, tv: ThreadValues, digits):
    """(base, distance): a piece that `digits` follows at a distance that is the same for every thread; of those the one
    with the most digits 0, so that few addresses are computed."""
    view, everyone = View(None, None, shape or (1,) * len(stride), stride, swizzle), np.arange(tv.thread_count)
    here = place(view, tv, everyone, digits) + 0 * everyone
    bases = list(product(*({0, d} for d in digits)))
    for base in sorted(bases, key=lambda b: (sum(map(bool, b)), b)):
        distance = np.unique(here - place(view, tv, everyone, base))
        if len(distance) == 1 and distance[0] >= 0:
            return base, int(distance[0])
    raise AssertionError("a piece is at distance 0 from itself")


@cache
def common_multiple(shape, stride, tv: ThreadValues) -> int:
    """What the element offsets of all vectors of a tile are a multiple of (nested axes: by enumeration)."""
    view, everyone, out = View(None, None, shape, stride), np.arange(tv.thread_count), 0
    for digits in np.ndindex(*tv.piece_sizes):
        out = gcd(out, int(np.gcd.reduce(np.atleast_1d(place(view, tv, everyone, digits)))))
    return out


def not_contiguous(tv, stride) -> TraceError:
    return TraceError(
        f"the vectors of {tv!r} are not contiguous in strides {stride}",
        "put the vector along the axis of stride 1, or move element by element: fragment(layout, elementwise=True)",
    )


def advance(pointer, elements, dtype):
    """pointer + elements * sizeof(dtype). An int becomes an immediate; 32-bit offsets are never negative."""
    if isinstance(elements, (int, np.integer)):
        elements = int(elements)
        return llvm.getelementptr(pointer.type, pointer, [], [elements], mlir_type(dtype), 0) if elements else pointer
    ssa = elements.ssa
    if not is_shared(pointer) and elements.dtype.bits < 64:
        ssa = arith.extui(mlir_type(i64), ssa)  # lets a 32-bit register be the address's offset
    operand_follows = -2147483648  # LLVM's mark among the constant indices
    return llvm.getelementptr(pointer.type, pointer, [ssa], [operand_follows], mlir_type(dtype), 0)


def _wide(x):
    """A coordinate or stride for address arithmetic: 64 bits; an int stays an int."""
    return x.to(i64) if isinstance(x, Value) else x


def _plain(dtype):
    """What moves: under a mask LLVM takes vectors of 16-bit floats apart by way of f32, and needs a library for it."""
    return i16 if dtype.is_float and dtype.bits == 16 else dtype


def _first(count, width):
    """A mask of `width` lanes with the first `count` set."""
    return lanes_where([i < count for i in range(width)]).ssa


def is_shared(pointer):
    return str(pointer.type).endswith("<3>")


def _whole(checks):
    """Whether a vector is always inside or outside as a whole."""
    return all(width == 1 or known % width == 0 for _, _, width, known in checks)


def _within(checks, element):
    """Condition that a vector's `element` lies inside: True and False where Python knows."""
    out: Any = True
    for first, room, width, _ in checks:
        c = first + (element if width > 1 else 0) < room
        if isinstance(c, Value):
            out = c if out is True else out & c
        elif not c:
            return False
    return out
