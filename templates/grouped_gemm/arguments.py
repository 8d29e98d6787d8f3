"""What a grouped GEMM kernel is called with, in order: the same for every configuration of a problem.

    a, b          pointers to the first element
    offs          pointer to G values of i32, neighbours in memory; absent in form "batch"
    c             pointer to the first element
    tokens        T: all groups' together; in form "batch" each group's
    strides of a  a_row if layout "row", a_col if "col", both if "any"
    strides of b  the same
    c_row         (c_col if c is "col")
    a_group, b_group, c_group    from group to group, of those that have an axis of groups

All scalars are i64; strides count elements. Pointers are on the device that the kernel runs on, `offs` too.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import dtype, i32, i64

from .problem import GroupedGemmProblem

NAMES = {"row": ("row",), "col": ("col",), "any": ("row", "col")}  # of the strides that are arguments
ALIGN = 16  # bytes: what one lane moves at most


def pointers(p: GroupedGemmProblem) -> tuple[str, ...]:
    """Names of the pointer arguments, in order."""
    return ("a", "b", *(("offs",) if p.ragged else ()), "c")


def scalars(p: GroupedGemmProblem) -> tuple[str, ...]:
    """Names of the scalar arguments, in order."""
    strides = [f"{x}_{s}" for x, layout in (("a", p.a), ("b", p.b), ("c", p.c)) for s in NAMES[layout]]
    return ("tokens", *strides, *(f"{x}_group" for x in ("a", "b", "c") if p.has_groups(x)))


def declared(p: GroupedGemmProblem) -> dict[str, Any]:
    """The kernel's arguments as `Kernel.args` takes them."""
    from flykernels.lang.memory import Global  # needs MLIR; naming arguments does not

    kinds = {"a": p.input_type, "b": p.input_type, "offs": i32, "c": p.output_type}
    memory = {x: Global(kinds[x], (p.groups,) if x == "offs" else (), alignment=kinds[x].bytes) for x in pointers(p)}
    return memory | dict.fromkeys(scalars(p), i64)


def scalar_values(p: GroupedGemmProblem, a, b, c) -> tuple[int, ...]:
    """The scalar arguments for these tensors (anything with `shape` and torch's `stride()`), shaped as the form says.

    A dimension of size 1 may have any stride."""
    tensors = {"a": a, "b": b, "c": c}

    def value(name: str) -> int:
        if name == "tokens":
            return tokens_of(p.form, a, b)
        operand, _, axis = name.rpartition("_")
        return tensors[operand].stride()[{"row": -2, "col": -1, "group": 0}[axis]]

    return tuple(value(name) for name in scalars(p))


def problem_of(a, b, offs=None, out_dtype=None, tokens_hint: int | None = None) -> GroupedGemmProblem:
    """The problem that these tensors pose (torch tensors, or anything with shape, dtype, device, stride() and
    data_ptr()); a, b 2-D or 3-D as F.grouped_mm takes them, offs 1-D int32 with one value a group, on their device.

    C is taken to be fresh: dense rows, padded to 16 bytes as ATen does. ValueError that says what is wrong."""
    ranks = len(a.shape), len(b.shape)
    if not set(ranks) <= {2, 3}:
        raise ValueError(f"A has {ranks[0]} dimensions and B {ranks[1]}: each has 2 or 3")
    form = {(2, 3): "m", (3, 2): "n", (2, 2): "k", (3, 3): "batch"}[ranks]
    if dtype(str(a.dtype)) != dtype(str(b.dtype)):
        raise ValueError(f"A is {a.dtype} and B {b.dtype}: both must have one type")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"A is {tuple(a.shape)} and B {tuple(b.shape)}: A's last size and B's last but one are K")
    counts = [x.shape[0] for x, rank in ((a, ranks[0]), (b, ranks[1])) if rank == 3]
    if form == "batch":
        if offs is not None:
            raise ValueError("offs divide a 2-D operand into groups; here both are 3-D: pass none")
    else:
        counts.append(groups_of(offs, a))
    if len(set(counts)) != 1:
        raise ValueError(f"the operands and offs have {' and '.join(map(str, counts))} groups: the same number for all")
    tokens = tokens_of(form, a, b)
    sizes = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}
    sizes["m" if form == "batch" else form] = 0
    kind = dtype(str(a.dtype))
    out = kind if out_dtype is None else dtype(str(out_dtype))
    return GroupedGemmProblem(
        form, counts[0], **sizes, dtype=kind.name, out_dtype=out.name, a=layout_of(a), b=layout_of(b),
        tokens_hint=tokens_hint or max(1, tokens), align_a=alignment(a), align_b=alignment(b),
    )  # fmt: skip


def groups_of(offs, a) -> int:
    """How many groups offs name. ValueError if they are none, or not what kernels read."""
    if offs is None:
        raise ValueError("offs are missing: where an operand is 2-D they say which part of it a group has")
    if dtype(str(offs.dtype)) != i32:
        raise ValueError(f"offs are {offs.dtype}: they must be int32. Do: offs.to(torch.int32)")
    if len(offs.shape) != 1:
        raise ValueError(f"offs are {tuple(offs.shape)}: one value a group, in one dimension")
    if offs.device != a.device:
        raise ValueError(f"offs are on {offs.device} and A on {a.device}: kernels read offs where they run")
    if offs.shape[0] > 1 and offs.stride()[0] != 1:
        raise ValueError(
            f"offs have stride {offs.stride()[0]}: they must be neighbours in memory. Do: offs.contiguous()"
        )
    return offs.shape[0]


def tokens_of(form: str, a, b) -> int:
    """T of these operands."""
    return {"m": a.shape[0], "n": b.shape[-1], "k": b.shape[0], "batch": a.shape[-2]}[form]


def layout_of(x) -> str:
    """Where a tensor's unit stride is, of its last two axes: "row", "col" or "any". An axis of one element fits all."""
    (rows, columns), (by_row, by_column) = x.shape[-2:], x.stride()[-2:]
    if by_column == 1 or columns == 1:
        return "row"
    return "col" if by_row == 1 or rows == 1 else "any"


def alignment(x) -> int:
    """The largest power of two up to 16 that pointer and strides (but one of 1) are multiples of, in bytes."""
    size = dtype(str(x.dtype)).bytes
    at = x.data_ptr() | ALIGN
    for n, stride in zip(x.shape, x.stride()):
        if n > 1 and stride != 1:
            at |= stride * size
    return at & -at
