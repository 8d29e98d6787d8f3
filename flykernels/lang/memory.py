"""Typed memory: a pointer, and the function from coordinates to elements.

A `View` addresses a ThreadValues layout in three parts: the tile's base (64 bits, uniform), this thread's offset in the
tile (32 bits, computed once), and the piece's distance from it, a constant folded into the instruction. Whether the
distance *is* a constant is not assumed: the layout is evaluated for every thread at trace time (numpy).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd

import numpy as np

from ..dtypes import DType, i16, i64
from ..layout import Layout, Swizzle, ThreadValues
from ..mlir import arith, llvm
from .values import Value, constant, lanes_where, mlir_type, select


@dataclass(frozen=True)
class Global:
    """An argument in device memory: element type, shape, strides in elements (default: dense, row-major).

    alignment: what the launcher guarantees of the pointer, in bytes."""

    dtype: DType
    shape: tuple
    stride: tuple | None = None
    alignment: int = 16

    def view(self, pointer) -> View:
        stride = self.stride or Layout.compact(*self.shape).stride
        return View(pointer, self.dtype, tuple(self.shape), tuple(stride), alignment=self.alignment)


@dataclass(frozen=True)
class View:
    """Memory seen as a tile: coordinate -> element. `shape` counts what may be touched from here on (ints or Values)."""

    pointer: object  # of coordinate (0, 0, ...); an LLVM pointer
    dtype: DType
    shape: tuple
    stride: tuple  # elements
    swizzle: Swizzle = Swizzle()  # of the element offset
    alignment: int = 16  # of the pointer, bytes
    tags: tuple = ()  # MLIR attributes put on loads: (name, attribute)

    def __str__(self):
        return f"{self.dtype}{list(self.shape)}:{list(self.stride)} {self.swizzle}"

    # -- choosing a part
    def tile(self, size, *at) -> View:
        """The tile number `at` along each leading axis, cut off where the view ends."""
        size = tuple(size) + tuple(self.shape[len(size) :])
        origin = [a * n for a, n in zip(at, size)]
        divides = lambda i: isinstance(self.shape[i], int) and self.shape[i] % size[i] == 0
        left = tuple(n if i >= len(at) or divides(i) else self.shape[i] - origin[i] for i, n in enumerate(size))
        return replace(self, pointer=self._moved(origin), shape=left, alignment=self._aligned(size[: len(at)]))

    def __getitem__(self, index) -> View:
        """view[i]: fix the first coordinate."""
        if self.stride[0] % self.swizzle.period:
            raise ValueError(f"{self} is not indexed along its swizzle")
        return replace(
            self,
            pointer=self._moved([index]),
            shape=self.shape[1:],
            stride=self.stride[1:],
            alignment=self._aligned([1]),
        )

    def tagged(self, **attributes) -> View:
        """The same view whose loads carry MLIR attributes (alias scopes)."""
        return replace(self, tags=tuple(attributes.items()))

    def _moved(self, coord):
        pointer = self.pointer
        for c, s in zip(coord, self.stride):
            wide = isinstance(c, Value) and not is_shared(pointer)
            pointer = advance(pointer, (c.to(i64) if wide else c) * s, self.dtype)
        return pointer

    def _aligned(self, steps):
        return gcd(self.alignment, *(n * s * self.dtype.bytes for n, s in zip(steps, self.stride)))

    # -- moving one piece of a ThreadValues layout
    def load(self, k, tv: ThreadValues, digits) -> Value:
        """One piece; zeros where it lies outside. No branch: what lies outside reads the view's first element instead."""
        view, n = self._like(tv), tv.vector.size
        checks, pointer, alignment = view._checks(k, tv, digits), view._address(k, tv, digits), view._alignment(tv)

        def read(inside, pointer, width, alignment):
            if inside is True:
                return view.read(pointer, width, alignment)
            zero = constant(0, self.dtype, width)
            if inside is False:
                return zero
            return select(inside, view.read(arith.select(inside.ssa, pointer, view.pointer), width, alignment), zero)

        if _whole(checks):
            return read(_within(checks, 0), pointer, n, alignment)
        out = constant(0, self.dtype, n)  # the edge cuts a vector: element by element
        for i in range(n):
            one = read(_within(checks, i), advance(pointer, i, self.dtype), None, self.dtype.bytes)
            out = out.insert(i, one)
        return out

    def store(self, k, tv: ThreadValues, digits, value: Value):
        """One piece; nothing where it lies outside."""
        view = self._like(tv)
        checks, pointer, alignment = view._checks(k, tv, digits), view._address(k, tv, digits), view._alignment(tv)
        if _whole(checks):

            @k.when(_within(checks, 0))
            def _():
                view.write(pointer, value, alignment)
        else:
            for i in range(tv.vector.size):

                @k.when(_within(checks, i))
                def _():
                    view.write(advance(pointer, i, self.dtype), value[i], self.dtype.bytes)

    # -- one element or a run of neighbours, on targets where a thread walks memory by itself
    def at(self, *coord) -> View:
        """The same view with its origin moved to `coord` (ints or Values of any integer type); all axes remain."""
        whole = (*coord, *(0 for _ in self.stride[len(coord) :]))
        offset = sum((_wide(c) * _wide(s) for c, s in zip(whole, self.stride)), 0)
        return replace(self, pointer=advance(self.pointer, offset, self.dtype), alignment=self.dtype.bytes)

    def transposed(self) -> View:
        """The same memory with its axes in reverse order."""
        return replace(self, shape=self.shape[::-1], stride=self.stride[::-1])

    def get(self, *coord, width=None, count=None) -> Value:
        """The element at coord, or `width` neighbours along the last axis, whose stride is 1.

        count: only the first `count` (an int) of them may be touched; the others are zeros."""
        pointer = self.at(*coord).pointer
        if count is None or count == width:
            return self.read(pointer, width, self.dtype.bytes)
        bits = _plain(self.dtype)
        zeros = constant(0, bits, width).ssa
        found = llvm.intr_masked_load(
            mlir_type(bits, width), pointer, _first(count, width), self.dtype.bytes, pass_thru=zeros
        )
        return Value(found, bits, width).bitcast(self.dtype, width)

    def put(self, value: Value, *coord, count=None):
        """Writes one element or a vector at coord; count: only its first `count` (an int) elements."""
        pointer = self.at(*coord).pointer
        if count is None or count == value.width:
            self.write(pointer, value, self.dtype.bytes)
        else:
            bits = value.bitcast(_plain(self.dtype), value.width)
            llvm.intr_masked_store(bits.ssa, pointer, _first(count, value.width), self.dtype.bytes)

    def read(self, pointer, width, alignment) -> Value:
        return Value(
            llvm.LoadOp(mlir_type(self.dtype, width), pointer, alignment=alignment, **dict(self.tags)).result,
            self.dtype,
            width,
        )

    def write(self, pointer, value: Value, alignment):
        llvm.StoreOp(value.ssa, pointer, alignment=alignment)

    # -- where, how far, how well aligned
    def index(self, coord):
        """Element offset of a coordinate (ints, arrays or Values)."""
        return self.swizzle(sum((c * s for c, s in zip(coord, self.stride)), 0))

    def _address(self, k, tv: ThreadValues, digits):
        """Pointer to this thread's piece `digits`."""
        zero = (0,) * len(digits)
        offset = lambda d: k.once(("offset", self.stride, self.swizzle, tv, d), lambda: place(self, tv, k.thread, d))
        if any(isinstance(d, Value) for d in digits):  # streamed: the distance is the loop's
            if self.swizzle.bits:
                raise ValueError("streaming through a swizzle")
            return advance(advance(self.pointer, offset(zero), self.dtype), self.index(tv.walk(digits)), self.dtype)
        distance = constant_distance(self.stride, self.swizzle, tv, digits)
        if distance is None:
            return advance(self.pointer, offset(digits), self.dtype)
        return advance(advance(self.pointer, offset(zero), self.dtype), distance, self.dtype)

    def _checks(self, k, tv: ThreadValues, digits):
        """Coordinates that may lie outside: [(this thread's first, how many there are, elements of the vector along it)]."""
        out = []
        for axis, room in enumerate(self.shape):
            if self.stride[axis] == 0:
                continue  # a broadcast has no edge
            streamed = isinstance(tv.walk(digits)[axis], Value)  # streamed pieces are whole; see Fragment.each
            if isinstance(room, int):
                room = min(room, tv.edge(axis))
                if streamed or tv.reach(digits, axis) <= room:
                    continue
            out.append(
                (
                    tv.origin(k.thread)[axis] + tv.walk(digits)[axis],
                    room,
                    tv.vector.size if tv.vector.axis == axis else 1,
                )
            )
        return out

    def _like(self, tv) -> View:
        """A view with fewer axes than the tile repeats along the missing leading ones."""
        missing = len(tv.tile) - len(self.shape)
        return (
            replace(self, shape=tv.tile[:missing] + self.shape, stride=(0,) * missing + self.stride)
            if missing
            else self
        )

    def _alignment(self, tv):
        """Bytes that every piece's address is a multiple of; back ends split what this is too small for."""
        if self.swizzle.bits:
            return gcd(self.alignment, (1 << self.swizzle.base) * self.dtype.bytes)
        steps = [
            gcd(0, *(m.step for m in (*tv.threads, *tv.pieces) if m.axis == a and m.size > 1))
            for a in range(len(tv.tile))
        ]
        return self._aligned([gcd(a, b) for a, b in zip(steps, tv.start or steps)])


def place(view, tv: ThreadValues, thread, digits, element=0):
    """Element offset in view (anything with `index`) of one element of thread's piece `digits`."""
    along = lambda axis: element * tv.vector.step if axis == tv.vector.axis else 0
    return view.index([o + w + along(a) for a, (o, w) in enumerate(zip(tv.origin(thread), tv.walk(digits)))])


@cache
def constant_distance(stride, swizzle, tv: ThreadValues, digits):
    """How far piece `digits` lies from piece 0, if that is the same for every thread (None: it is not)."""
    view, everyone = View(None, None, (), stride, swizzle), np.arange(tv.thread_count)
    vector = np.stack([place(view, tv, everyone, digits, v) + 0 * everyone for v in range(tv.vector.size)])
    if (np.diff(vector, axis=0) != 1).any():
        raise ValueError(f"the vectors of {tv} are not contiguous in strides {stride}")
    distance = np.unique(vector[0] - place(view, tv, everyone, (0,) * len(digits)))
    return int(distance[0]) if len(distance) == 1 else None


def advance(pointer, elements, dtype):
    """pointer + elements * sizeof(dtype). An int becomes an immediate; 32-bit offsets count as unsigned."""
    if isinstance(elements, int):
        return llvm.getelementptr(pointer.type, pointer, [], [elements], mlir_type(dtype), 0) if elements else pointer
    if not is_shared(pointer):
        elements = elements.to(i64)
    operand_follows = -2147483648  # LLVM's mark among the constant indices
    return llvm.getelementptr(pointer.type, pointer, [elements.ssa], [operand_follows], mlir_type(dtype), 0)


def _wide(x):
    """A coordinate or stride for address arithmetic: 64 bits; an int stays an int."""
    return x.to(i64) if isinstance(x, Value) else x


def _plain(dtype):
    """What moves under a mask: LLVM takes vectors of 16-bit floats apart by way of f32, and wants a library for that."""
    return i16 if dtype.is_float and dtype.bits == 16 else dtype


def _first(count, width):
    """A mask of `width` lanes with the first `count` set."""
    return lanes_where([i < count for i in range(width)]).ssa


def is_shared(pointer):
    return str(pointer.type).endswith("<3>")


def _whole(checks):
    """Whether a vector is always inside or outside as a whole."""
    return all(width == 1 or (isinstance(room, int) and room % width == 0) for _, room, width in checks)


def _within(checks, element):
    """Condition that a vector's `element` lies inside: True and False where Python knows."""
    out = True
    for first, room, width in checks:
        c = first + (element if width > 1 else 0) < room
        if isinstance(c, Value):
            out = c if out is True else out & c
        elif not c:
            return False
    return out
