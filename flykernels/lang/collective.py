"""What threads do together: atomic updates of memory, and reductions over a wave or a workgroup."""

from __future__ import annotations

from ..layout import Layout
from ..mlir import llvm
from .errors import TraceError
from .memory import View, is_shared
from .values import Value, constant, maximum, minimum, select

TALLY_WORDS = 3  # of shared memory
_COMBINE = {"add": lambda a, b: a + b, "max": maximum, "min": minimum}


def atomic(k, kind: str, view: View, value: Value, *coord) -> Value:
    """view[coord] becomes view[coord] + value, or the greater or lesser of the two; what was there before.

    kind: "add", "max" or "min"; view: u32 or i32. One update after the other, among the threads of the workgroup if
    the view is shared memory, else of the whole device. Orders nothing else: a barrier or `publish` does."""
    if value.dtype != view.dtype or value.dtype.is_float or value.dtype.bits != 32:
        raise TraceError(f"an atomic {kind} of {value} on {view.dtype}", "views and values of u32 or i32")
    name = kind if kind == "add" or value.dtype.signed else f"u{kind}"
    at = view.at(*coord)
    scope = k.target.scopes["workgroup" if is_shared(at.pointer) else "device"]
    operation = getattr(llvm.AtomicBinOp, "_and" if name == "and" else name)
    got = llvm.atomicrmw(operation, at.pointer, value.ssa, llvm.AtomicOrdering.monotonic, syncscope=scope)
    return Value(got, value.dtype)


def over_lanes(k, kind: str, value: Value, lanes: int, first: int = 1) -> Value:
    """The sum, greatest or least of `lanes` lanes' values, in all of them: those whose numbers differ in the bits from
    `first` on (powers of two). kind: "add", "max" or "min"."""
    own = getattr(k.target, "over_lanes", None)
    if own is not None and first == 1 and lanes > 1 and value.dtype.bits == 32 and not value.dtype.is_float:
        return own(k, kind, value, lanes)
    distance = first
    while distance < first * lanes:
        value = _COMBINE[kind](*k.target.exchange(k, value, distance))
        distance *= 2
    return value


def scan_lanes(k, kind: str, value: Value, start: Value) -> tuple[Value, Value]:
    """(start and all lower lanes' values taken together, start and all lanes' taken together), of an i32 a lane.

    kind: "add" or "max"; all lanes of the wave must be on."""
    combine, before, total, lane = _COMBINE[kind], start, value, k.thread % k.target.lanes
    distance = 1
    while distance < k.target.lanes:
        a, b = k.target.exchange(k, total, distance)
        other = a + b - total  # which of the two is mine is not said
        before = select((lane & distance) > 0, combine(before, other), before)
        total = combine(total, other)
        distance *= 2
    return before, combine(start, total)


def arrive(k, view: View, *coord) -> Value:
    """Publishes what the workgroup has stored in device memory, then adds 1 to the u32 there; what was there before, in
    all threads. Who finds all others arrived may read what they stored."""
    alone = getattr(k.target, "publishes_alone", False)  # whether one thread's fence, after a barrier, is enough
    board = k.shared(view.dtype, Layout((1,), (1,)))
    if not alone:
        k.target.publish()
    k.barrier()

    @k.when(k.thread.equals(0))
    def _():
        if alone:
            k.target.publish()
        board.put(atomic(k, "add", view, constant(1, view.dtype), *coord), 0)
        if alone:
            k.target.observe()

    k.barrier()
    if not alone:
        k.target.observe()
    return board.get(0)


class Tally:
    """Sums over the workgroup, one a turn: a word of shared memory each for this turn, the last and the next.

    `clear()` before the first, and a barrier after it. Then turns 0, 1, 2, ...: `slot` begins as 0 and goes on as
    `next_slot`, and every turn ends in one barrier. Between the last turn and the next `clear` lies another barrier.

    words: the shared memory to use, if it is the caller's to give and to clear; where the target counts conditions as
    it synchronises, `count` needs none."""

    def __init__(self, k, dtype, words: View | None = None):
        self.k, self.dtype = k, dtype
        self.words = words if words is not None else k.shared(dtype, Layout((TALLY_WORDS,), (1,)))

    def clear(self):
        zero = constant(0, self.dtype)

        @self.k.when(self.k.thread < TALLY_WORDS)
        def _():
            self.words.put(zero, self.k.thread)

    def next_slot(self, slot: Value) -> Value:
        return (slot + 1) * (slot < 2).to(slot.dtype)

    def sum(self, value: Value, slot: Value) -> Value:
        """The sum of all threads' values, in all of them."""
        k = self.k
        mine = over_lanes(k, "add", value, k.target.lanes)

        @k.when((k.thread % k.target.lanes).equals(0))
        def _():
            atomic(k, "add", self.words, mine, slot)

        @k.when(k.thread.equals(0))
        def _():
            self.words.put(constant(0, self.dtype), self.next_slot(slot))

        k.barrier()
        return self.words.get(slot)

    def count(self, condition: Value, slot: Value) -> Value:
        """The number of threads where condition holds."""
        own = getattr(self.k.target, "barrier_count", None)
        if own is not None:
            return own(condition).to(self.dtype)
        return self.sum(select(condition, constant(1, self.dtype), constant(0, self.dtype)), slot)
