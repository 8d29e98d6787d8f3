"""sm_90a's stores of what is written piece by piece: the last to be evicted from L2 (PTX ISA, "createpolicy",
L2::evict_last), so that a sector of memory leaves when all of it has been written. One that leaves before costs DRAM
more than a whole one (`docs/microscaling.md` has the measurements)."""

from __future__ import annotations

from ..dtypes import i16, i32, i64
from ..lang.values import Value, constant
from ..mlir import llvm
from .sm90a_tma import POLICIES

SIZES = (1, 2, 4, 8, 16)  # of an access, bytes
WORD = 4  # bytes


def write(pointer, value: Value) -> None:
    """A vector of one of SIZES to a pointer to device memory that is a multiple of it."""
    size = value.width * value.dtype.bits // 8
    kind, count = (f"b{8 * size}", 1) if size < WORD else ("b32", size // WORD)
    if size == 1:
        parts, register = [value[0].to(i16)], "h"
    else:
        element = i16 if size < WORD else i32
        words = value.bitcast(element, count)
        parts, register = [words[i] for i in range(count)], "h" if size < WORD else "r"
    names = ", ".join(f"${i + 1}" for i in range(count))
    data, vector = (f"{{{names}}}", f".v{count}") if count > 1 else (names, "")
    text = f"st.global.L2::cache_hint{vector}.{kind} [$0], {data}, ${count + 1};"
    operands = [pointer, *(p.ssa for p in parts), constant(POLICIES["evict_last"], i64).ssa]
    llvm.inline_asm(None, operands, text, ",".join(["l", *[register] * count, "l"]), has_side_effects=True)
