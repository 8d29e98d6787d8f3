"""What a GEMM kernel is called with, in order: the same for every configuration of a problem.

    a, b, [bias], [residual], c     pointers to the first element (with packed_b, b is what `pack_b` returned)
    m                               rows of A and C
    strides of a                    a_row if layout "row", a_col if "col", both if "any"
    strides of b                    the same; none with packed_b
    bias_row, bias_col              with bias "full"
    residual_row                    with a residual
    c_row
    batch, a_batch, b_batch, [bias_batch], [residual_batch], c_batch     if batched

All scalars are i64; strides count elements. bias_batch is there with bias "full" only: a "row" bias serves all batches.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import i64

from .problem import GemmProblem


def pointers(p: GemmProblem) -> tuple[str, ...]:
    """Names of the pointer arguments, in order."""
    return (
        "a",
        "b",
        *(("bias",) if p.bias != "none" else ()),
        *(("residual",) if p.residual else ()),
        "c",
    )


def scalars(p: GemmProblem) -> tuple[str, ...]:
    """Names of the scalar arguments, in order."""
    strides = {"row": ("row",), "col": ("col",), "any": ("row", "col")}
    names = ["m", *(f"a_{s}" for s in strides[p.a])]
    if not p.packed_b:
        names += [f"b_{s}" for s in strides[p.b]]
    if p.bias == "full":
        names += ["bias_row", "bias_col"]
    if p.residual:
        names.append("residual_row")
    names.append("c_row")
    if p.batched:
        names.append("batch")
        names += [f"{x}_batch" for x in pointers(p) if not (x == "bias" and p.bias == "row")]
    return tuple(names)


def declared(p: GemmProblem) -> dict[str, Any]:
    """The kernel's arguments as `Kernel.args` takes them."""
    from flykernels.lang.memory import Global  # needs MLIR; naming arguments does not

    kinds = {"a": p.input_type, "b": p.input_type}
    memory = {x: Global(kinds.get(x, p.output_type), (), alignment=p.input_type.bytes) for x in pointers(p)}
    return memory | dict.fromkeys(scalars(p), i64)


def scalar_values(p: GemmProblem, **tensors) -> tuple[int, ...]:
    """The scalar arguments for these tensors (anything with `shape` and torch's `stride()`), named as in `pointers`.

    a is ([batch,] M, K); b ([batch,] K, N), or what `pack_b` made; c and residual ([batch,] M, N);
    bias (N,) for "row", ([batch,] M, N) in any strides for "full". A dimension of size 1 may have any stride."""

    def value(name: str) -> int:
        if name == "m":
            return tensors["a"].shape[-2]
        if name == "batch":
            return tensors["c"].shape[0]
        operand, _, axis = name.rpartition("_")
        stride = tensors[operand].stride()
        if axis == "batch":
            return stride[0]
        return stride[-2] if axis == "row" else stride[-1]

    return tuple(value(name) for name in scalars(p))
