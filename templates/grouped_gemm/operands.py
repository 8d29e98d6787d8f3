"""One group's operands as matrices: the views that the dense kernels' parts take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flykernels.dtypes import i32, i64
from flykernels.lang import Kernel, Layout, Value, View
from flykernels.lang.memory import advance
from flykernels.lang.values import mlir_type, vector_of
from flykernels.mlir import llvm

from .arguments import declared
from .problem import RUN_TIME, GroupedGemmProblem

AXES = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}


def arguments(k, p: GroupedGemmProblem, **more) -> tuple[GroupedGemmProblem, dict]:
    """Declares a kernel's arguments (and `more`): (the problem that the kernel does, its arguments by name).

    That is p itself, or for form "n" the same product turned round, whose A is the argument b."""
    names = declared(p) | more
    given = dict(zip(names, k.args(**names)))
    if p.form != "n":
        return p, given
    renamed = {"a": "b", "b": "a"}
    turned = {"row": "col", "col": "row"}

    def name(x: str) -> str:
        operand, _, axis = x.rpartition("_")
        if x in renamed:
            return renamed[x]
        return f"{renamed.get(operand, operand)}_{turned.get(axis, axis)}" if operand in ("a", "b", "c") else x

    return p.flipped, {name(x): v for x, v in given.items()}


def matrix(p: GroupedGemmProblem, given: dict, name: str, group, first, size) -> View:
    """A group's (M, K) of "a", (K, N) of "b" or (M, N) of "c". p: not of form "n".

    group: its number; first, size: which of T it has (ints or Values)."""
    d, wide = p.dense, lambda x: x.to(i64) if isinstance(x, Value) else x
    run_time = RUN_TIME[p.form]
    sizes = {"m": p.m, "n": p.n, "k": p.k, run_time: size}
    stride = (given.get(f"{name}_row", 1), given.get(f"{name}_col", 1))
    view = given[name]
    if p.has_groups(name):
        view = replace(view, pointer=advance(view.pointer, wide(group) * given[f"{name}_group"], view.dtype))
    else:
        along = stride[AXES[name].index(run_time)]
        view = replace(view, pointer=advance(view.pointer, wide(first) * along, view.dtype))
    align = {"a": d.align_a, "b": d.align_b, "c": d.align_c}[name]
    return replace(
        view, shape=tuple(sizes[x] for x in AXES[name]), stride=stride, alignment=align,
        stride_multiple=max(1, align // view.dtype.bytes), multiple=(),
    )  # fmt: skip


def operand_of(name: str) -> str:
    """Whose pointer or stride an argument is."""
    for what in ("_row", "_col", "_group"):
        name = name.removesuffix(what)
    return name


class Parked:
    """The operands' pointers and strides, put down in shared memory when a kernel starts and taken up where they are
    needed: a kernel that stays would otherwise hold them in scalar registers all through its main loops, which need
    those. All threads make it; ends in a barrier."""

    def __init__(self, k: Kernel, given: dict, operands: Iterable[str] = AXES):
        self.k, self.given = k, given
        self.names = [x for x in given if operand_of(x) in operands]
        self.table = k.shared(i64, Layout((len(self.names),), (1,)))

        @k.when(k.thread.equals(0))
        def _():
            for i, name in enumerate(self.names):
                value = given[name]
                number = Value(llvm.ptrtoint(mlir_type(i64), value.pointer), i64) if isinstance(value, View) else value
                self.table.put(number, i)

        k.barrier()

    def take(self, *operands: str) -> dict:
        """The arguments of these operands ("a", "b", "c"), as `matrix` wants them."""
        return {name: self._taken(i, name) for i, name in enumerate(self.names) if operand_of(name) in operands}

    def _taken(self, i: int, name: str):
        halves = self.table.get(i).bitcast(i32, 2)
        number = vector_of([self.k.target.uniform(halves[h]) for h in range(2)]).bitcast(i64)
        value = self.given[name]
        if not isinstance(value, View):
            return number
        pointer: Any = value.pointer
        return replace(value, pointer=llvm.inttoptr(pointer.type, number.ssa))
