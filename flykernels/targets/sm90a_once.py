"""sm_90a's accesses to what is read or written but once: "cache streaming", the first to be evicted from every cache
(PTX ISA, cache operators). Written as PTX: LLVM has no such loads and stores for this target."""

from __future__ import annotations

from ..dtypes import DType, i32
from ..lang.values import Value, constant, mlir_type
from ..mlir import ir, llvm

WORD = 4  # bytes
SIZES = (WORD, 2 * WORD, 4 * WORD)  # of an access, bytes


def read(pointer, dtype: DType, width: int) -> Value:
    """`width` elements at a pointer to device memory; together they have one of SIZES, and it is a multiple of that."""
    count = width * dtype.bytes // WORD
    names = ", ".join(f"${i}" for i in range(count))
    kind = mlir_type(i32) if count == 1 else ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    text = f"ld.global.cs{_vector(count)} {_braced(names, count)}, [${count}];"
    got = llvm.inline_asm(kind, [pointer], text, ",".join(["=r"] * count + ["l"]))
    if count == 1:
        return Value(got, i32).bitcast(dtype, width)
    words = constant(0, i32, count)
    for i in range(count):
        words = words.insert(i, Value(llvm.extractvalue(mlir_type(i32), got, [i]), i32))
    return words.bitcast(dtype, width)


def write(pointer, value: Value) -> None:
    """A vector of one of SIZES to a pointer that is a multiple of it."""
    count = value.width * value.dtype.bits // (8 * WORD)
    words = value.bitcast(i32, count)
    names = ", ".join(f"${i + 1}" for i in range(count))
    text = f"st.global.cs{_vector(count)} [$0], {_braced(names, count)};"
    operands = [pointer, *(words[i].ssa for i in range(count))]
    llvm.inline_asm(None, operands, text, ",".join(["l"] + ["r"] * count), has_side_effects=True)


def _vector(count: int) -> str:
    return f".v{count}.b32" if count > 1 else ".b32"


def _braced(names: str, count: int) -> str:
    return f"{{{names}}}" if count > 1 else names
