"""gfx950's ways to exchange registers between lanes, and its waits: encodings from AMD's CDNA4 ISA manual."""

from __future__ import annotations

from ..dtypes import i1, i32
from ..lang.values import Value, constant, mlir_type
from ..mlir import intrinsic, ir, llvm, rocdl

QUAD = lambda *p: sum(x << 2 * i for i, x in enumerate(p))
ROW_HALF_MIRROR, ROW_ROTATE = 0x141, 0x120
# lane -> lane ^ d as one or two data-parallel-primitive controls
DPP_XOR = {1: [QUAD(1, 0, 3, 2)], 2: [QUAD(2, 3, 0, 1)], 4: [ROW_HALF_MIRROR, QUAD(3, 2, 1, 0)], 8: [ROW_ROTATE + 8]}
MOST_LOADS, MOST_LDS = 63, 15  # the largest counts s_waitcnt can name: do not wait


def exchange(v: Value, distance: int) -> tuple[Value, Value]:
    """(a, b): in some order this lane's value and that of lane ^ distance. All in the vector ALU, none through LDS."""
    bits = v.bitcast(i32)
    if distance >= 16:  # swaps halves of rows between two copies of the register
        pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
        both = intrinsic(f"llvm.amdgcn.permlane{distance}.swap", pair, bits, bits, constant(0, i1), constant(0, i1))
        half = lambda i: Value(llvm.extractvalue(mlir_type(i32), both, [i]), i32).bitcast(v.dtype)
        return half(0), half(1)
    other = bits
    for control in DPP_XOR[distance]:
        other = Value(rocdl.update_dpp(mlir_type(i32), other.ssa, other.ssa, control, 0xF, 0xF, True), i32)
    return v, other.bitcast(v.dtype)


def waitcnt(memory: int = MOST_LOADS, lds: int = MOST_LDS) -> int:
    """s_waitcnt's operand: wait until at most so many operations are in flight.

    More than the counter holds is asked for as one less than its end, which waits a little longer than needed."""
    memory = min(memory, MOST_LOADS - 1) if memory != MOST_LOADS else memory
    return (memory & 15) | 7 << 4 | lds << 8 | (memory >> 4) << 14


def compiler_fence(ordering: str) -> None:
    """Keeps the compiler from moving memory operations across; no instruction comes of it (one wave is in order)."""
    fence(ordering, "wavefront")


def fence(ordering: str, scope: str = "agent") -> None:
    """An "acquire" or "release" fence. "agent": of the whole device; L2 caches are written back or dropped."""
    number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), {"acquire": 4, "release": 5}[ordering])
    llvm.fence(number, syncscope=scope)
