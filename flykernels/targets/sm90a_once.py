"""sm_90a's accesses to what is read or written but once: "cache streaming", the first to be evicted from every cache
(PTX ISA, cache operators). Written as PTX: LLVM has no such loads and stores for this target."""

from __future__ import annotations

from ..dtypes import DType, i32
from ..lang.values import Value, constant, mlir_type
from ..mlir import ir, llvm

BYTES = 16  # of an access: the widest
SIZES = (BYTES,)
WORDS = BYTES // 4


def read(pointer, dtype: DType, width: int) -> Value:
    """`width` elements at a pointer to device memory that is a multiple of BYTES; together they have so many."""
    four = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * WORDS)})>")
    text = "ld.global.cs.v4.b32 {$0, $1, $2, $3}, [$4];"
    got = llvm.inline_asm(four, [pointer], text, "=r,=r,=r,=r,l")
    words = constant(0, i32, WORDS)
    for i in range(WORDS):
        words = words.insert(i, Value(llvm.extractvalue(mlir_type(i32), got, [i]), i32))
    return words.bitcast(dtype, width)


def write(pointer, value: Value) -> None:
    """A vector of BYTES to a pointer that is a multiple of it."""
    words = value.bitcast(i32, WORDS)
    operands = [pointer, *(words[i].ssa for i in range(WORDS))]
    llvm.inline_asm(None, operands, "st.global.cs.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", has_side_effects=True)
