"""A tile spread over the registers of a workgroup's threads."""

from __future__ import annotations

from itertools import product

from ..layout import Layout, ThreadValues
from .errors import TraceError
from .memory import advance
from .values import Value, constant, maximum, select


class Fragment:
    """Values of a tile, held as `layout` says. Arithmetic is element by element, each thread on its own.

    A piece is named by one digit for each mode of layout.pieces. Held pieces are computed once, in program order;
    streamed ones whenever asked for: a streamed Fragment is an expression that the loops of its uses evaluate."""

    def __init__(self, k, layout: ThreadValues, streamed: bool, piece):
        self.k, self.layout, self.streamed, self._piece = k, layout, streamed, piece
        if not streamed:
            self._piece = {d: piece(d) for d in self.names()}.__getitem__

    def names(self):
        return list(product(*map(range, self.layout.piece_sizes)))

    def values(self):
        return [self[d] for d in self.names()]

    def like(self, values) -> Fragment:
        """The same layout with other values, in the order of values()."""
        return Fragment(self.k, self.layout, False, dict(zip(self.names(), values)).__getitem__)

    def __getitem__(self, digits) -> Value:
        """A piece; along a mode that this fragment does not have (reduced away), its only one."""
        return self._piece(tuple(0 if n == 1 else d for d, n in zip(digits, self.layout.piece_sizes)))

    def each(self, visit):
        """visit(digits, piece) for all pieces: unrolled if held; if streamed, a loop over whole ones, then the rest."""
        if not self.streamed:
            for d in self.names():
                visit(d, self[d])
            return
        whole, tail = self._stream()

        @self.k.loop(0, whole)
        def _(i):
            visit((i,), self[i,])

        for i in tail:
            visit((i,), self[i,])

    def _stream(self):
        """(how many pieces lie inside the tile, the numbers of those that do not)"""
        (mode,) = self.layout.pieces
        whole = self.layout.tile[mode.axis] // mode.step
        return whole, range(whole, mode.size)

    # -- arithmetic
    def map(self, f, *others) -> Fragment:
        """f of each piece (and of the same piece of others; a Value is the same for all pieces)."""
        fragments = [x for x in (self, *others) if isinstance(x, Fragment)]
        widest = max((x.layout for x in fragments), key=lambda layout: layout.tile)
        pick = lambda o, d: o[d] if isinstance(o, Fragment) else o
        return Fragment(
            self.k, widest, any(x.streamed for x in fragments), lambda d: f(self[d], *(pick(o, d) for o in others))
        )

    def to(self, dtype) -> Fragment:
        return self.map(lambda v: v.to(dtype))

    def __add__(s, o):
        return s.map(lambda a, b: a + b, o)

    def __sub__(s, o):
        return s.map(lambda a, b: a - b, o)

    def __mul__(s, o):
        return s.map(lambda a, b: a * b, o)

    def __truediv__(s, o):
        return s.map(lambda a, b: a / b, o)

    __radd__, __rmul__ = __add__, __mul__

    def below(self, axis: int, limit, fill=0) -> Fragment:
        """The same values where the coordinate along axis is less than limit (int or Value), else `fill`."""
        first = self.layout.origin(self.k.thread)[axis]
        size, along = self.layout.vector.size, self.layout.vector.axis == axis

        def piece(digits):
            v, at = self[digits], first + self.layout.walk(digits)[axis]
            if not along:
                return select(at < limit, v, fill)
            for i in range(size):
                v = v.insert(i, select(at + i * self.layout.vector.step < limit, v[i], constant(fill, v.dtype)))
            return v

        return Fragment(self.k, self.layout, self.streamed, piece)

    # -- reductions
    def sum(self, axis) -> Fragment:
        return self.reduce(axis, lambda a, b: a + b, 0.0)

    def max(self, axis) -> Fragment:
        return self.reduce(axis, maximum, float("-inf"))

    def reduce(self, axis, combine, identity) -> Fragment:
        """Over pieces, the vector, lanes, waves: whatever of the layout lies along axis. All threads get the result."""
        k, tv = self.k, self.layout
        running: dict = {}  # digits along the other axes -> vector so far

        def take(digits):
            key = tuple(0 if m.axis == axis else d for d, m in zip(digits, tv.pieces))
            v = self._inside(digits, axis, identity)
            running[key] = combine(running[key], v) if key in running else v

        if self.streamed:
            whole, tail = self._stream()
            if whole:
                take((0,))
            if whole > 1:

                @k.loop(1, whole, carry=running[0,])
                def so_far(i, so_far):
                    return combine(so_far, self._inside((i,), axis, identity))

                running[0,] = so_far
            for i in tail:
                take((i,))
        else:
            for d in self.names():
                take(d)
        for key, v in running.items():
            if tv.vector.axis == axis:
                v = v.fold(combine)
            running[key] = across_threads(k, tv.threads, axis, v, combine)
        return Fragment(k, tv.without(axis), False, running.__getitem__)

    def _inside(self, digits, axis, identity) -> Value:
        """A piece whose elements beyond the tile's edge are `identity`."""
        tv, v = self.layout, self[digits]
        walked = tv.walk(digits)[axis]
        if isinstance(walked, Value) or tv.reach(digits, axis) <= tv.edge(axis):
            return v
        first = tv.origin(self.k.thread)[axis] + walked
        if tv.vector.axis != axis or tv.edge(axis) % tv.vector.size == 0:
            return select(first < tv.edge(axis), v, identity)
        for i in range(tv.vector.size):
            v = v.insert(i, select(first + i < tv.edge(axis), v[i], constant(identity, v.dtype)))
        return v


def across_threads(k, modes, axis, value: Value, combine) -> Value:
    """Combine over the thread modes along axis: lanes by exchanging registers, waves through shared memory.

    A vector's elements are combined each with its like."""
    distance, lanes, waves, stride = 1, 1, 1, 0  # stride: waves from one to the next of a group
    for mode in modes:
        if mode.axis == axis and mode.step:
            if mode.size & (mode.size - 1):
                raise TraceError(f"a reduction over the threads {mode}", "let a power of two of them share the axis")
            for d in (distance << i for i in range(mode.size.bit_length() - 1)):
                if d < k.target.lanes:
                    value, lanes = across_lanes(k, value, combine, d), 2 * lanes
                else:
                    stride = stride or d // k.target.lanes
                    if d != stride * waves * k.target.lanes:
                        raise TraceError(
                            f"a reduction along axis {axis} over waves that are not evenly spaced, in {modes}",
                            "give the axis one mode of the threads",
                        )
                    waves *= 2
        distance *= mode.size
    return value if waves == 1 else across_waves(k, value, combine, waves, stride, lanes == k.target.lanes)


def across_lanes(k, value: Value, combine, distance: int) -> Value:
    """Combine with the lane `distance` away."""
    if value.width is None:
        return combine(*k.target.exchange(k, value, distance))
    for i in range(value.width):
        value = value.insert(i, combine(*k.target.exchange(k, value[i], distance)))
    return value


def across_waves(k, value: Value, combine, group: int, stride: int, same: bool) -> Value:
    """Combine over `group` waves, each `stride` from the next: each leaves its value in shared memory, all read theirs.

    same: all lanes of a wave hold the same value, so that one of them leaves it; else each lane leaves its own."""
    lanes, elements = 1 if same else k.target.lanes, value.width or 1
    board = k.shared(value.dtype, Layout((k.workgroup_size // k.target.lanes * lanes * elements,), (1,)))
    own = 0 if same else k.thread % lanes
    slot = lambda wave: advance(board.pointer, (wave * lanes + own) * elements, value.dtype)
    alignment = value.dtype.bytes * elements
    if k.loops:
        k.barrier()  # the last turn's values have been read

    @k.when((k.thread % k.target.lanes).equals(0) if same else True)
    def _():
        board.write(slot(k.subgroup), value, alignment)

    k.barrier()
    first = k.subgroup - k.subgroup // stride % group * stride
    parts = [board.read(slot(first + i * stride), value.width, alignment) for i in range(group)]
    while len(parts) > 1:
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]
