"""What warps of sm_90a do by themselves: cp.async into shared memory, ldmatrix out of it, mma.sync on registers.

Semantics: PTX ISA 8.4, "cp.async", "ldmatrix", "Matrix Fragments for mma.m16n8k16"."""

from __future__ import annotations

from ..dtypes import DType, f16, f32, i32
from ..lang.values import Value, mlir_type
from ..mlir import llvm
from .sm90a_nvvm import nvvm, struct

MATRIX = 8  # rows of one of ldmatrix's matrices, and 16-bit elements of a row
ASYNC_BYTES = (16, 8, 4)  # what one thread's cp.async can move; addresses are multiples of it


def copy_async(to, source, size: int, valid: Value | None = None) -> None:
    """Starts to copy `size` (4, 8 or 16) bytes from device to shared memory; of them only the first `valid` (an i32)
    are read, the others become zeros. `commit_copies`."""
    cache = "cg" if size == 16 else "ca"  # past L1 where the hardware offers it
    more = [] if valid is None else [valid]
    nvvm(
        "cp.async.shared.global", to, source, *more,
        size=f"{size} : i32", modifier=f"#nvvm<load_cache_modifier {cache}>",
    )  # fmt: skip


def commit_copies() -> None:
    """The copies that this thread has started since the last time are one group."""
    nvvm("cp.async.commit.group")


def wait_copies(in_flight: int) -> None:
    """Until all but this thread's `in_flight` youngest groups have landed. A barrier must follow for others' copies."""
    nvvm("cp.async.wait.group", n=f"{in_flight} : i32")


def load_matrices(pointer, dtype: DType, transposed: bool) -> list[Value]:
    """Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l // 8, and gets two
    neighbours of row l // 4 of each (transposed: of column l // 4)."""
    layout = "col" if transposed else "row"
    got = nvvm(
        "ldmatrix", pointer, result=struct(i32, 4), num="4 : i32", layout=f"#nvvm.mma_layout<{layout}>",
        shape=f"#nvvm.ld_st_matrix_shape<m = {MATRIX}, n = {MATRIX}>", eltType="#nvvm.ld_st_matrix_elt_type<b16>",
    )  # fmt: skip
    return [Value(llvm.extractvalue(mlir_type(i32), got, [i]), i32).bitcast(dtype, 2) for i in range(4)]


def multiply(a: list[Value], b: list[Value], sums: list[Value]) -> list[Value]:
    """sums + A B^T of 16 x 8 x 16 by one warp; lane = 4 * row + pair of columns.

    a     four pairs along K: rows 0-7 and 8-15 at k 0-7, then both at k 8-15
    b     two pairs along K, of 8 columns: k 0-7, 8-15
    sums  two pairs along the columns: rows 0-7, rows 8-15"""
    dtype = a[0].dtype
    registers = [v if dtype == f16 else v.bitcast(i32) for v in a + b]
    scalars = [v[i] for v in sums for i in (0, 1)]
    kind = f"#nvvm.mma_type<{dtype.name}>"
    out = nvvm(
        "mma.sync", *registers, *scalars, result=struct(f32, 4), segments=(len(a), len(b), len(scalars)),
        shape="#nvvm.shape<m = 16, n = 8, k = 16>", layoutA="#nvvm.mma_layout<row>", layoutB="#nvvm.mma_layout<col>",
        multiplicandAPtxType=kind, multiplicandBPtxType=kind,
    )  # fmt: skip
    one = lambda i: Value(llvm.extractvalue(mlir_type(f32), out, [i]), f32)
    return [one(2 * i).splat(2).insert(1, one(2 * i + 1)) for i in (0, 1)]
