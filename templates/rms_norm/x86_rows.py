"""How a CPU goes along a row: vectors of f32, whatever the elements' types, and the ends of rows.

Elements come in units. Where all operands are bf16, a unit is twice as many as a vector holds, taken apart into those
at even and at odd places: that is one shift or mask each way, where neighbours would need shuffles. Otherwise a unit is
a vector's elements in order.

A row is whole turns of several units, then units, then what is left: a last unit that reaches back over elements that
have been visited already. Rows shorter than a unit go one element at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flykernels.codeobject import Extent
from flykernels.dtypes import DType, bf16, f32, i32, i64, u32
from flykernels.lang import Global, Kernel, View, select
from flykernels.lang.values import Value, constant, mlir_type
from flykernels.mlir import arith, ir

from .arguments import pointers, scalar_types
from .problem import RMSNormProblem

HALF = 16  # bits of a bf16; an f32 has as many more
UPPER = 0xFFFF0000 - 2**32  # as a signed 32-bit number
BELOW_HALF = 0x7FFF  # added to the bits of an f32, rounds ties in bf16 down


class Units:
    """The units of one kernel's rows.

    dtypes  of all operands that are read or written along rows
    clean   no operand can hold a NaN with bits that bf16 has not: rounding then needs no thought of NaN"""

    def __init__(self, k: Kernel, dtypes: Sequence[DType], clean: bool = True):
        self.k, self.lanes, self.clean = k, k.target.vector_bytes // f32.bytes, clean
        self.paired = all(t == bf16 for t in dtypes)
        self.vectors = 2 if self.paired else 1
        self.size = self.vectors * self.lanes

    # -- a unit to and from memory
    def read(self, row: View, at) -> list[Value]:
        """The unit of a row (one axis, stride 1) that begins at element `at`, in f32."""
        if not self.paired or row.dtype != bf16:
            return [row.get(at, width=self.lanes).to(f32)]
        words = row.at(at).recast(u32).get(0, width=self.lanes)
        return [(words << HALF).bitcast(f32, self.lanes), _upper(words).bitcast(f32, self.lanes)]

    def write(self, row: View, at, unit: list[Value]):
        """Rounds a unit to the row's type and stores it at element `at`."""
        if not self.paired or row.dtype != bf16:
            row.put(unit[0].to(row.dtype), at)
            return
        even, odd = (self._rounded(v) for v in unit)
        row.at(at).recast(u32).put((even >> HALF) | _upper(odd), 0)

    def round(self, unit: list[Value], dtype: DType) -> list[Value]:
        """What a unit becomes when it is stored in `dtype` and read again."""
        if dtype == f32:
            return unit
        if not self.paired:
            return [v.to(dtype).to(f32) for v in unit]
        return [_upper(self._rounded(v)).bitcast(f32, v.width) for v in unit]

    def _rounded(self, v: Value) -> Value:
        """Bits whose upper half is v in bf16, to nearest even. A NaN keeps its upper half."""
        bits = v.bitcast(u32, v.width)
        out = bits + ((bits >> HALF) & 1) + BELOW_HALF
        return out if self.clean else select(v.equals(v), out, bits | 1 << (HALF + bf16.mantissa - 1))

    # -- along a row
    def visit(self, width: Value, unroll: int, body: Callable, one: Callable, carry=()):
        """Calls body(at, carry, keep) for all units of a row of `width` (i64) elements, `unroll` of them a turn.

        body adds to the carried values and returns them; keep(unit) puts zeros where an element was visited before.
        carry: a tuple of f32 vectors. unroll: units a turn; body is called with the unit's number in it too.
        one: one(at, carry) does the same for one element; carried values are then vectors with one element in use."""
        k, size, turn = self.k, self.size, self.size * unroll
        whole, units = width // turn * turn, width // size * size
        short = width < size
        keep_all = lambda unit: unit

        @k.loop(constant(0, i64), whole, turn, carry=carry)
        def most(at, *now):
            now = now[0] if now else ()
            for n in range(unroll):
                now = body(at + n * size, now, keep_all, n)
            return now

        @k.loop(whole, units, size, carry=most)
        def nearly(at, *now):
            return body(at, now[0] if now else (), keep_all, 0)

        fresh = size - (width - units).to(i32)  # places of a unit from here on have not been visited

        def keep(unit):
            places = [range(h, size, self.vectors) for h in range(self.vectors)]
            return [select(fresh <= _numbers(p), v, 0.0) for p, v in zip(places, unit)]

        @k.loop(select(short, width, units), width, size, carry=nearly)
        def all_units(_, *now):
            return body(width - size, now[0] if now else (), keep, 0)

        @k.loop(select(short, constant(0, i64), width), width, carry=all_units)
        def all_of_it(at, *now):
            return one(at, now[0] if now else ())

        return all_of_it


def _upper(words: Value) -> Value:
    return words & UPPER


def _numbers(values) -> Value:
    kind = mlir_type(i32, len(values))
    text = ", ".join(map(str, values))
    return Value(arith.constant(kind, ir.Attribute.parse(f"dense<[{text}]> : {kind}")), i32, len(values))


# -- what the kernels share
def arguments(k: Kernel, p: RMSNormProblem, *more: str) -> dict:
    """The arguments by name, memory as rows of neighbours; more: names of further pointers to f32."""
    kinds = {"weight": p.weight_type, "dweight": p.weight_type, "rstd": f32} | dict.fromkeys(more, f32)
    row = lambda name: kinds.get(name, p.type)
    memory = {n: Global(row(n), (1,), (1,), alignment=row(n).bytes) for n in (*pointers(p), *more)}
    order = {n: memory[n] for n in pointers(p)} | scalar_types(p) | {n: memory[n] for n in more}
    k.grid = ((Extent("parts"),),)
    return dict(zip(order, k.args(**order)))


def share(k: Kernel, given: dict, of: str = "rows"):
    """(first, end): this part's run of rows (or of what `of` counts)."""
    part, parts, all_of_them = k.workgroup_id().to(i64), given["parts"], given[of]
    return part * all_of_them // parts, (part + 1) * all_of_them // parts


def line(memory: View, row: Value, stride: Value) -> View:
    """One row."""
    return replace(replace(memory, stride=(stride,)).at(row), stride=(1,))


def spread(sums: tuple, n: int, unit: list[Value]) -> tuple:
    """Adds unit number n of a turn to its own sums."""
    first = n * len(unit)
    return tuple(s + unit[i - first] if first <= i < first + len(unit) else s for i, s in enumerate(sums))


def together(sums) -> Value:
    """The sum of all elements of some vectors, by halves."""
    sums = list(sums)
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2])] + (sums[-1:] if len(sums) % 2 else [])
    return sums[0].fold(lambda a, b: a + b)
