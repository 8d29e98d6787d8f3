"""Typed SSA values with Python's operators.

Ints that Python knows stay Python ints as long as they can; a `Value` is what only the running kernel knows.
Integers are coordinates and counts, never negative: `//`, `%`, `>>` and comparisons are unsigned.
A float `a * b + c` may fuse into one rounding (the `contract` flag is on); nothing else is relaxed.
"""

from __future__ import annotations

from ..dtypes import DType, i1, i32
from ..mlir import arith, ir, llvm, math


def mlir_type(dtype: DType, width=None):
    """MLIR's type of a scalar (width None) or vector of `dtype`."""
    scalar = ir.Type.parse(dtype.name)
    return scalar if width is None else ir.VectorType.get([width], scalar)


def constant(x, dtype: DType, width=None) -> Value:
    """A number as a Value; with a width, a vector of that many copies."""
    attr = (
        ir.FloatAttr.get(mlir_type(dtype), float(x)) if dtype.is_float else ir.IntegerAttr.get(mlir_type(dtype), int(x))
    )
    if width is not None:
        attr = ir.DenseElementsAttr.get_splat(mlir_type(dtype, width), attr)
    return Value(arith.constant(mlir_type(dtype, width), attr), dtype, width)


def lanes_where(flags) -> Value:
    """A constant vector of conditions, one a lane."""
    kind = mlir_type(i1, len(flags))
    lanes = ", ".join("true" if f else "false" for f in flags)
    return Value(arith.constant(kind, ir.Attribute.parse(f"dense<[{lanes}]> : {kind}")), i1, len(flags))


class Value:
    """One SSA value: a scalar (width None) or a vector of `width` elements of `dtype`."""

    def __init__(self, ssa, dtype: DType, width=None):
        self.ssa, self.dtype, self.width = ssa, dtype, width

    def __repr__(self):
        return f"<{self.dtype}{'' if self.width is None else f'x{self.width}'}>"

    def __bool__(self):
        raise TypeError("a kernel value has no truth while tracing: use select(...) or k.when(...)")

    def map(self, f, *others):
        return f(self, *others)  # as Fragment.map

    # -- shape
    def splat(self, width) -> Value:
        """A scalar copied into every element; a vector of that width as it is."""
        if width is None or self.width == width:
            return self
        if self.width is not None:
            raise TypeError(f"{self} is not {width} wide")
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
        """Numeric conversion; float to narrower float rounds to nearest even."""
        a, b, out = self.dtype, dtype, mlir_type(dtype, self.width)
        if a == b:
            return self
        if a.is_float and b.is_float:
            op = arith.extf if b.bits > a.bits else arith.truncf
        elif a.is_float or b.is_float:
            op = arith.fptoui if a.is_float else arith.uitofp
        else:
            op = arith.extui if b.bits > a.bits else arith.trunci
        return Value(op(out, self.ssa), b, self.width)

    def bitcast(self, dtype: DType, width=None) -> Value:
        return Value(llvm.bitcast(mlir_type(dtype, width), self.ssa), dtype, width)

    # -- arithmetic
    def _with(self, other):
        """self and other as values of one type; a Python number takes self's type, a scalar is splat."""
        if isinstance(other, (int, float)):
            return self, constant(other, self.dtype, self.width)
        if not isinstance(other, Value):
            return NotImplemented, NotImplemented
        if self.dtype != other.dtype:
            raise TypeError(f"{self} and {other} differ in type: convert one with .to(...)")
        width = self.width if self.width is not None else other.width
        return self.splat(width), other.splat(width)

    def _op(self, other, on_float, on_int, swap=False):
        a, b = self._with(other)
        if a is NotImplemented:
            return NotImplemented
        if swap:
            a, b = b, a
        if not self.dtype.is_float:
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
        return s if _is(o, 1) else s._op(o, None, arith.divui)

    def __mod__(s, o):
        return 0 if _is(o, 1) else s._op(o, None, arith.remui)

    def __rshift__(s, o):
        return s if _is(o, 0) else s._op(o, None, arith.shrui)

    def __lshift__(s, o):
        return s if _is(o, 0) else s._op(o, None, arith.shli)

    def __and__(s, o):
        return s._op(o, None, arith.andi)

    def __or__(s, o):
        return s._op(o, None, arith.ori)

    def __xor__(s, o):
        return s._op(o, None, arith.xori)

    __rand__, __rxor__ = __and__, __xor__

    def __neg__(s):
        return 0 - s

    def _compare(self, other, on_float, on_int):
        a, b = self._with(other)
        kind = arith.CmpFPredicate if self.dtype.is_float else arith.CmpIPredicate
        cmp = arith.cmpf if self.dtype.is_float else arith.cmpi
        return Value(cmp(getattr(kind, on_float if self.dtype.is_float else on_int), a.ssa, b.ssa), i1, a.width)

    def __lt__(s, o):
        return s._compare(o, "OLT", "ult")

    def __le__(s, o):
        return s._compare(o, "OLE", "ule")

    def __gt__(s, o):
        return s._compare(o, "OGT", "ugt")

    def __ge__(s, o):
        return s._compare(o, "OGE", "uge")

    def equals(s, o):
        return s._compare(o, "OEQ", "eq")  # == stays Python's identity, so values can be dict keys


def _is(x, n):
    return isinstance(x, int) and x == n


def select(condition, yes, no):
    """yes where condition holds, else no; a condition that Python knows chooses now."""
    if isinstance(condition, bool):
        return yes if condition else no
    model = yes if isinstance(yes, Value) else no
    yes, no = (x if isinstance(x, Value) else constant(x, model.dtype, model.width) for x in (yes, no))
    width = next((x.width for x in (yes, no, condition) if x.width is not None), None)
    yes, no = yes.splat(width), no.splat(width)
    return Value(arith.select(condition.ssa, yes.ssa, no.ssa), yes.dtype, width)


def _pairwise(on_numbers, on_float, on_int):
    def f(a, b):
        if not isinstance(a, Value):
            a, b = b, a
        return a._op(b, on_float, on_int) if isinstance(a, Value) else on_numbers(a, b)

    return f


maximum = _pairwise(max, arith.maxnumf, arith.maxui)  # of a number and a NaN: the number
minimum = _pairwise(min, arith.minnumf, arith.minui)


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


rsqrt = _unary(lambda v: math.rsqrt(v.ssa, fastmath=FAST))
sqrt = _unary(lambda v: math.sqrt(v.ssa, fastmath=FAST))
exp2 = _unary(lambda v: math.exp2(v.ssa, fastmath=FAST))
reciprocal = _unary(
    lambda v: arith.divf(constant(1, v.dtype, v.width).ssa, v.ssa, fastmath=FAST)
)  # `/` is exact, and long
