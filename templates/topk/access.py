"""Where a kernel's rows lie: addresses from the run-time strides of `arguments.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flykernels.dtypes import i64
from flykernels.lang import Kernel, Value, View, u32
from flykernels.lang.memory import advance
from flykernels.lang.values import mlir_type
from flykernels.layout import Layout
from flykernels.mlir import llvm

from .arguments import declared
from .config import TopKConfig
from .order import Order, key_of, position_of
from .problem import WIDEST, TopKProblem


def vector_of(p: TopKProblem) -> int:
    """Elements of one load: as many as each row's alignment allows."""
    return min(p.align, WIDEST) // p.element.bytes if p.layout == "last" else 1


@dataclass
class Given:
    """A kernel's arguments by name."""

    p: TopKProblem
    named: dict

    @staticmethod
    def declare(k: Kernel, p: TopKProblem, config: TopKConfig) -> Given:
        kinds = declared(p, config)
        return Given(p, dict(zip(kinds, k.args(**kinds))))

    def __getitem__(self, name: str):
        return self.named[name]

    def row(self, name: str, number: Value) -> Row:
        """One row of x, values or indices."""
        view, p = self.named[name], self.p
        if p.layout == "last":
            aligned = min(p.align, WIDEST) if name == "x" else view.dtype.bytes
            start, along = number.to(i64) * self.named[f"{name}_row"], 1
        else:
            inner = self.named["inner"].to(u32)
            outer, at = number.to(u32) // inner, number.to(u32) % inner
            start = outer.to(i64) * self.named[f"{name}_outer"] + at.to(i64) * self.named[f"{name}_inner"]
            aligned, along = view.dtype.bytes, self.named[f"{name}_along"]
        return Row(replace(view, pointer=advance(view.pointer, start, view.dtype)), along, aligned)


@dataclass
class Row:
    """The elements of a row. along: 1, or an i64 Value: elements from one to the next."""

    view: View
    along: int | Value
    alignment: int

    def pointer(self, position):
        """Of the element there: position is an unsigned Value, or an int."""
        if isinstance(self.along, int):
            return advance(self.view.pointer, position, self.view.dtype)
        return advance(self.view.pointer, position.to(u32).to(i64) * self.along, self.view.dtype)

    def read(self, position, width: int | None = None) -> Value:
        """One element, or `width` neighbours that begin at a multiple of `width`."""
        aligned = self.view.dtype.bytes if width is None else self.alignment
        return self.view.read(self.pointer(position), width, aligned)

    def write(self, value: Value, position) -> None:
        self.view.write(self.pointer(position), value, self.view.dtype.bytes)


class Kept:
    """Where rows begin that are not needed before the end: in shared memory meanwhile, so that no register holds it. A
    barrier must lie between this and `back`."""

    def __init__(self, k: Kernel, rows: Sequence[Row]):
        self.rows, self.words = rows, k.shared(i64, Layout((len(rows),), (1,)))

        @k.when(k.thread.equals(0))
        def _():
            for n, row in enumerate(rows):
                self.words.put(Value(llvm.ptrtoint(mlir_type(i64), row.view.pointer), i64), n)

    def back(self) -> list[Row]:
        """The rows, in order."""
        pointer = lambda n, row: llvm.inttoptr(row.view.pointer.type, self.words.get(n).ssa)
        return [replace(row, view=replace(row.view, pointer=pointer(n, row))) for n, row in enumerate(self.rows)]


def write_result(k: Kernel, order: Order, x: Row, values: Row, indices: Row, rank: Value, entry: Value) -> None:
    """Puts a candidate (key and position) in place `rank` of the results."""
    put_result(k, order, x, values, indices, rank, key_of(entry), position_of(entry))


def put_result(
    k: Kernel, order: Order, x: Row, values: Row, indices: Row, rank: Value, key: Value, position: Value
) -> None:
    """The same of a candidate in two parts."""
    value, lost = order.value(key).to(values.view.dtype), order.lost(key)

    if lost is not False:

        @k.when(lost, carry=value)
        def value(_):
            return x.read(position)

    values.write(value, rank)
    indices.write(position.to(i64), rank)
