"""Typed SSA values with Python's operators.

Ints that Python knows stay Python ints as long as they can; a `Value` is what only the running kernel knows.

Integers behave as Python's, within their width: `//` rounds down, `%` has the divisor's sign, `>>` of a negative number
rounds down, comparisons know the sign; overflow wraps. The unsigned types (`u8`, `u32`, `u64`, `i1`) are never
negative. Two integers of different width meet in the wider type; integer and float, or signed and unsigned, do not
meet without `.to(...)`. Dividing by a power of two that Python knows is a shift, so is its remainder a mask.
Division by zero is undefined, as in LLVM.

A float `a * b + c` may fuse into one rounding (the `contract` flag is on); nothing else is relaxed.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from ..dtypes import DType, f32, i1, i32, u32
from ..mlir import arith, ir, llvm, math
from .errors import TraceError

TARGET: ContextVar[Any] = ContextVar("TARGET")  # the target that is being traced for


def mlir_type(dtype: DType, width=None):
    """MLIR's type of a scalar (width None) or vector of `dtype`."""
    scalar = ir.Type.parse(dtype.mlir)
    return scalar if width is None else ir.VectorType.get([width], scalar)


def constant(x, dtype: DType, width=None) -> Value:
    """A number as a Value; with a width, a vector of that many copies."""
    if dtype.is_float:
        attr = ir.FloatAttr.get(mlir_type(dtype), float(x))
    else:  # MLIR's 64 bits have a sign
        attr = ir.IntegerAttr.get(mlir_type(dtype), int(x) - (1 << 64) if int(x) >> 63 == 1 else int(x))
    if width is not None:
        attr = ir.DenseElementsAttr.get_splat(mlir_type(dtype, width), attr)
    return Value(arith.constant(mlir_type(dtype, width), attr), dtype, width)


def lanes_where(flags) -> Value:
    """A constant vector of conditions, one a lane."""
    kind = mlir_type(i1, len(flags))
    lanes = ", ".join("true" if f else "false" for f in flags)
    return Value(arith.constant(kind, ir.Attribute.parse(f"dense<[{lanes}]> : {kind}")), i1, len(flags))


def vector_of(scalars) -> Value:
    """Scalars of one type as a vector."""
    first = scalars[0]
    out = Value(llvm.mlir_undef(mlir_type(first.dtype, len(scalars))), first.dtype, len(scalars))
    for i, x in enumerate(scalars):
        out = out.insert(i, x)
    return out


class Value:
    """One SSA value: a scalar (width None) or a vector of `width` elements of `dtype`."""

    def __init__(self, ssa, dtype: DType, width=None):
        self.ssa, self.dtype, self.width = ssa, dtype, width

    def __repr__(self):
        return f"<{self.dtype}{'' if self.width is None else f'x{self.width}'}>"

    def __bool__(self):
        raise TraceError(
            "a kernel value has no truth while tracing",
            "choose with select(condition, a, b), or branch with k.when(...)",
        )

    def map(self, f, *others):
        return f(self, *others)  # as Fragment.map

    # -- shape
    def splat(self, width) -> Value:
        """A scalar copied into every element; a vector of that width as it is."""
        if width is None or self.width == width:
            return self
        if self.width is not None:
            raise TraceError(f"{self} is not {width} wide", "widths of vectors must agree; a scalar fits any")
        v = Value(llvm.mlir_undef(mlir_type(self.dtype, width)), self.dtype, width).insert(0, self)
        return v.shuffle([0] * width)

    def shuffle(self, lanes, other: Value | None = None) -> Value:
        """The elements named by `lanes`, as a new vector; `other`'s (of the same type) are numbered from width on."""
        n = len(lanes)
        second = (self if other is None else other).ssa
        return Value(llvm.shufflevector(mlir_type(self.dtype, n), self.ssa, second, lanes), self.dtype, n)

    def __getitem__(self, i) -> Value:
        if self.width is None:
            return self  # a scalar is its own only element
        return Value(llvm.extractelement(self.ssa, constant(i, i32).ssa), self.dtype)

    def insert(self, i, scalar) -> Value:
        return Value(llvm.insertelement(self.ssa, scalar.ssa, constant(i, i32).ssa), self.dtype, self.width)

    def fold(self, combine) -> Value:
        """Vector -> scalar, by halves: the same order on every target."""
        if self.width is None:
            return self
        n, left = self.width, []
        v = self
        while n > 1:
            if n % 2:
                left.append(v[n - 1])
            n //= 2
            v = combine(v.shuffle(range(n)), v.shuffle(range(n, 2 * n)))
        out = v[0]
        for x in left:
            out = combine(out, x)
        return out

    # -- types
    def to(self, dtype: DType) -> Value:
        """Numeric conversion. To a narrower float: rounds to nearest even. Float to integer: towards zero, and
        undefined if the integer cannot hold it. To a narrower integer, or between signed and unsigned: the low bits."""
        a, b, out = self.dtype, dtype, mlir_type(dtype, self.width)
        if a == b:
            return self
        if a.is_float and b.is_float:
            if a.bits == b.bits:  # bf16 and f16 hold different numbers
                return self.to(f32).to(b)
            op = arith.extf if b.bits > a.bits else arith.truncf
        elif a.is_float:
            op = arith.fptosi if b.signed else arith.fptoui
        elif b.is_float:
            op = arith.sitofp if a.signed else arith.uitofp
        elif a.bits == b.bits:
            return Value(self.ssa, b, self.width)
        else:
            op = arith.trunci if b.bits < a.bits else arith.extsi if a.signed else arith.extui
        return Value(op(out, self.ssa), b, self.width)

    def bitcast(self, dtype: DType, width=None) -> Value:
        return Value(llvm.bitcast(mlir_type(dtype, width), self.ssa), dtype, width)

    # -- arithmetic
    def _with(self, other):
        """self and other as values of one type; a Python number takes self's type, a scalar is splat."""
        if isinstance(other, (int, float)):
            if isinstance(other, float) and not self.dtype.is_float:
                raise TraceError(f"{self} meets the float {other}", "convert the value with .to(f32) first")
            return self, constant(other, self.dtype, self.width)
        if not isinstance(other, Value):
            return NotImplemented, NotImplemented
        if self.dtype != other.dtype:
            a, b = self.dtype, other.dtype
            if a.is_float or b.is_float or a.signed != b.signed:
                raise TraceError(f"{self} and {other} differ in type", "convert one with .to(...)")
            wider = a if a.bits > b.bits else b
            return self.to(wider)._with(other.to(wider))
        width = self.width if self.width is not None else other.width
        return self.splat(width), other.splat(width)

    def _op(self, other, on_float, on_int, swap=False):
        a, b = self._with(other)
        if a is NotImplemented:
            return NotImplemented
        if swap:
            a, b = b, a
        if (on_float if a.dtype.is_float else on_int) is None:
            raise TraceError(f"this operation is not defined for {a}", "convert with .to(...)")
        if not a.dtype.is_float:
            return Value(on_int(a.ssa, b.ssa), a.dtype, a.width)
        return Value(on_float(a.ssa, b.ssa, fastmath=arith.FastMathFlags.contract), a.dtype, a.width)

    def __add__(s, o):
        return s if _is(o, 0) else s._op(o, arith.addf, arith.addi)

    def __radd__(s, o):
        return s + o

    def __sub__(s, o):
        return s if _is(o, 0) else s._op(o, arith.subf, arith.subi)

    def __rsub__(s, o):
        return s._op(o, arith.subf, arith.subi, swap=True)

    def __mul__(s, o):
        return s if _is(o, 1) else 0 if _is(o, 0) and not s.dtype.is_float else s._op(o, arith.mulf, arith.muli)

    def __rmul__(s, o):
        return s * o

    def __truediv__(s, o):
        return s * (1.0 / o) if isinstance(o, (int, float)) else s._op(o, arith.divf, None)

    def __rtruediv__(s, o):
        return s._op(o, arith.divf, None, swap=True)

    def __floordiv__(s, o):
        if _is(o, 1):
            return s
        if _power_of_two(o) and not s.dtype.is_float:
            return s >> (o.bit_length() - 1)
        return s._divide(o)[0]

    def __mod__(s, o):
        if _is(o, 1):
            return 0
        if _power_of_two(o) and not s.dtype.is_float:
            return s & (o - 1)
        return s._divide(o)[1]

    def __rfloordiv__(s, o):
        return s._with(o)[1]._divide(s)[0]

    def __rmod__(s, o):
        return s._with(o)[1]._divide(s)[1]

    def _divide(s, o):
        """(quotient rounded down, remainder with the divisor's sign), of integers."""
        if s.dtype.is_float:
            raise TraceError(f"// and % are for integers, not {s}", "divide with /, or convert with .to(i32)")
        a, b = s._with(o)
        if not a.dtype.signed:
            return s._op(o, None, arith.divui), s._op(o, None, arith.remui)
        q, r = s._op(o, None, arith.divsi), s._op(o, None, arith.remsi)  # towards zero, sign of a
        off = r < 0 if isinstance(o, int) and o > 0 else ((r ^ b) < 0) & (r.equals(0) ^ 1)
        return select(off, q - 1, q), select(off, r + b, r)

    def __rshift__(s, o):
        return s if _is(o, 0) else s._op(o, None, arith.shrsi if s.dtype.signed else arith.shrui)

    def __lshift__(s, o):
        return s if _is(o, 0) else s._op(o, None, arith.shli)

    def __and__(s, o):
        return s._op(o, None, arith.andi)

    def __or__(s, o):
        return s._op(o, None, arith.ori)

    def __xor__(s, o):
        return s._op(o, None, arith.xori)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __neg__(s):
        return 0 - s

    def _compare(self, other, on_float, on_int):
        a, b = self._with(other)
        kind = arith.CmpFPredicate if self.dtype.is_float else arith.CmpIPredicate
        cmp = arith.cmpf if self.dtype.is_float else arith.cmpi
        name = on_float if self.dtype.is_float else on_int if on_int == "eq" else "us"[a.dtype.signed] + on_int
        return Value(cmp(getattr(kind, name), a.ssa, b.ssa), i1, a.width)

    def __lt__(s, o):
        return s._compare(o, "OLT", "lt")

    def __le__(s, o):
        return s._compare(o, "OLE", "le")

    def __gt__(s, o):
        return s._compare(o, "OGT", "gt")

    def __ge__(s, o):
        return s._compare(o, "OGE", "ge")

    def equals(s, o):
        return s._compare(o, "OEQ", "eq")  # == stays Python's identity, so values can be dict keys


def _is(x, n):
    return isinstance(x, int) and x == n


def _power_of_two(x):
    return isinstance(x, int) and x > 0 and x & (x - 1) == 0


def select(condition, yes, no):
    """yes where condition holds, else no; a condition that Python knows chooses now."""
    if isinstance(condition, bool):
        return yes if condition else no
    model = yes if isinstance(yes, Value) else no
    if not isinstance(model, Value):
        raise TraceError(f"select between the numbers {yes} and {no}", "give one a type: constant(number, dtype)")
    yes, no = (x if isinstance(x, Value) else constant(x, model.dtype, model.width) for x in (yes, no))
    width = next((x.width for x in (yes, no, condition) if x.width is not None), None)
    yes, no = yes.splat(width), no.splat(width)
    return Value(arith.select(condition.ssa, yes.ssa, no.ssa), yes.dtype, width)


def _pairwise(on_numbers, on_float, on_int):
    def f(a, b):
        if not isinstance(a, Value):
            a, b = b, a
        if not isinstance(a, Value):
            return on_numbers(a, b)
        return a._op(b, on_float, on_int[a.dtype.signed])

    return f


maximum = _pairwise(max, arith.maxnumf, (arith.maxui, arith.maxsi))  # of a number and a NaN: the number
minimum = _pairwise(min, arith.minnumf, (arith.minui, arith.minsi))


def maximum_or_nan(a: Value, b: Value) -> Value:
    """The greater of two floats; NaN if one of them is."""
    a, b = a._with(b)
    return Value(arith.maximumf(a.ssa, b.ssa), a.dtype, a.width)


def popcount(x: Value) -> Value:
    """How many bits of an integer are set, as an integer of its type."""
    return Value(math.ctpop(x.ssa), x.dtype, x.width)


def trailing_zeros(x: Value) -> Value:
    """The number of the lowest bit set of an integer, as an integer of its type; its width if none is."""
    return Value(math.cttz(x.ssa), x.dtype, x.width)


def lanes_mask(condition: Value) -> Value:
    """A vector of up to 32 conditions as the bits of a u32, the first lane's lowest."""
    return condition.bitcast(DType(f"u{condition.width}", condition.width, False)).to(u32)


def fma(a, b, c) -> Value:
    """a * b + c with one rounding. Float Values; a scalar or a number among them is splat."""
    values = [x for x in (a, b, c) if isinstance(x, Value)]
    dtype, width = values[0].dtype, next((v.width for v in values if v.width is not None), None)
    a, b, c = ((x if isinstance(x, Value) else constant(x, dtype)).splat(width) for x in (a, b, c))
    return Value(math.fma(a.ssa, b.ssa, c.ssa), dtype, width)


def transpose(rows) -> list[Value]:
    """n vectors n wide (n a power of two, >= 4) -> the n columns.

    Blocks of 4 and more change places between pairs of rows; what is left are 4x4 blocks inside 128-bit lanes, where
    two interleavings do it: 3 shuffles an element of the diagonal for n = 8 on AVX."""
    rows, n = list(rows), len(rows)
    span = n // 2
    while span >= 4:
        low = [i if not i & span else i - span + n for i in range(n)]
        high = [i + span if not i & span else i + n for i in range(n)]
        for i in (i for i in range(n) if not i & span):
            a, b = rows[i], rows[i + span]
            rows[i], rows[i + span] = a.shuffle(low, b), a.shuffle(high, b)
        span //= 2
    by_lane = lambda quad: [(i & ~3) + (q & 3) + (n if q >= 4 else 0) for i in range(0, n, 4) for q in quad]
    ones = by_lane((0, 4, 1, 5)), by_lane((2, 6, 3, 7))
    pairs = by_lane((0, 1, 4, 5)), by_lane((2, 3, 6, 7))
    for i in range(0, n, 4):
        a, b, c, d = rows[i : i + 4]
        (ab, ab_), (cd, cd_) = (([x.shuffle(o, y) for o in ones]) for x, y in ((a, b), (c, d)))
        rows[i : i + 4] = [x.shuffle(p, y) for x, y in ((ab, cd), (ab_, cd_)) for p in pairs]
    return rows


def sums(vectors) -> Value:
    """Of 4 float vectors (width a multiple of 4) the 4 sums of their elements, as one vector."""
    n = vectors[0].width
    by_lane = lambda quad: [i + (q & 3) + (n if q >= 4 else 0) for i in range(0, n, 4) for q in quad]
    even, odd = by_lane((0, 2, 4, 6)), by_lane((1, 3, 5, 7))
    fold = lambda a, b: a.shuffle(even, b) + a.shuffle(odd, b)
    a, b, c, d = vectors
    out = fold(fold(a, b), fold(c, d))
    while out.width > 4:
        half = out.width // 2
        out = out.shuffle(range(half)) + out.shuffle(range(half, 2 * half))
    return out


FAST = arith.FastMathFlags.afn | arith.FastMathFlags.arcp | arith.FastMathFlags.contract


def _unary(op):
    """A function of a Value or a Fragment, to the accuracy of the target's own instruction."""
    return lambda x: x.map(lambda v: Value(op(v), v.dtype, v.width))


def _roots():
    """How freely roots may be computed: a target whose estimates fail for 0 and infinity has them exact."""
    return arith.FastMathFlags.none if getattr(TARGET.get(None), "exact_roots", False) else FAST


rsqrt = _unary(lambda v: math.rsqrt(v.ssa, fastmath=_roots()))
sqrt = _unary(lambda v: math.sqrt(v.ssa, fastmath=_roots()))
absolute = _unary(lambda v: math.absf(v.ssa))


def exp2(x):
    """2^x of a float Value or Fragment, by the target's own instruction where it has one (results below 2^-126: 0)."""
    own = getattr(TARGET.get(None), "exp2", None)
    return x.map(own or (lambda v: Value(math.exp2(v.ssa, fastmath=FAST), v.dtype, v.width)))


reciprocal = _unary(
    lambda v: arith.divf(constant(1, v.dtype, v.width).ssa, v.ssa, fastmath=FAST)
)  # `/` is exact, and long
