"""Functions that the CPU has no instruction for, as vector arithmetic: a libm call would go element by element."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..mlir import arith, ir, math

# f32: the fraction bits, and the exponent's bias twice (once for each half of the scale)
MANTISSA, BIAS = 23, 127
LEAST, MOST = -150.0, 129.0  # 2^x is 0 below and infinite above
DEGREE = 6  # of the polynomial for 2^f, |f| <= 1/2: relative error 2e-9, below half a step of f32


@cache
def _coefficients() -> tuple[float, ...]:
    """Of the polynomial through 2^f at Chebyshev's points, lowest power first."""
    points = np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1)) / 2
    return tuple(float(c) for c in np.polynomial.polynomial.polyfit(points, np.exp2(points), DEGREE))


def expand(module) -> None:
    """Replaces every f32 `math.exp2` in the module."""
    found = []

    def visit(op):
        if op.name == "math.exp2":
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for op in found:
        with ir.InsertionPoint(op):
            op.result.replace_all_uses_with(_exp2(op.operands[0]))
        op.erase()


def _exp2(x):
    """2^x to about one step of f32; NaN stays NaN, what is too large becomes infinite, too small subnormal or 0.

    x = n + f with n whole. 2^n is made in two halves from exponent bits: n reaches beyond what one scale holds."""
    kind = x.type
    vector = isinstance(kind, ir.VectorType)
    i32 = ir.IntegerType.get_signless(32)
    whole_type = ir.VectorType.get(list(kind.shape), i32) if vector else i32

    def const(value, of=kind):
        scalar = of.element_type if isinstance(of, ir.VectorType) else of
        attr = ir.FloatAttr.get(scalar, value) if isinstance(value, float) else ir.IntegerAttr.get(scalar, value)
        return arith.constant(of, ir.DenseElementsAttr.get_splat(of, attr) if isinstance(of, ir.VectorType) else attr)

    held = arith.minnumf(arith.maxnumf(x, const(LEAST)), const(MOST))
    nearest = math.roundeven(held)
    f = arith.subf(held, nearest)
    *rest, top = _coefficients()
    power = const(top)
    for c in reversed(rest):
        power = math.fma(power, f, const(c))
    n = arith.addi(arith.fptosi(whole_type, nearest), const(2 * BIAS, whole_type))  # positive
    half = arith.shrui(n, const(1, whole_type))
    bits = const(MANTISSA, whole_type)
    for part in (half, arith.subi(n, half)):
        power = arith.mulf(power, arith.bitcast(kind, arith.shli(part, bits)))
    return arith.select(arith.cmpf(arith.CmpFPredicate.UNO, x, x), x, power)
