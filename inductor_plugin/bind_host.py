"""An x86 code object as a function of CPU tensors: what compiled code calls on every step, so it does little.

The function is written out as Python source for one problem (nothing is looked up or looped over in a call) and checks,
before the kernel sees an address, that the operands lie as the kernel was built for; where they do not, ATen computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from flykernels.launch import host
from templates.gemm import arguments
from templates.gemm.problem import GemmProblem

from . import kernels

log = logging.getLogger(__name__)


def bind(code: Any, spec: kernels.Spec) -> Callable:
    """callable(a, b, [bias], [residual], out=) for `spec`, running `code` or, where operands do not fit, ATen."""
    kernel = host.load(code)
    source = source_of(spec.problem)
    names: dict[str, Any] = {
        "launch": kernel.launcher(),
        "aten": kernels.aten(spec),
        "warn": kernels.misplaced(spec),
    }
    exec(compile(source, f"<flykernels {spec.op}>", "exec"), names)
    return names["call"]


def source_of(p: GemmProblem, more: Sequence[str] = ()) -> str:
    """Python source of `call`. Sizes that may vary are read off A; A's K and every unit stride are checked.

    The other operands' sizes follow from A's in the graph that was compiled, and Inductor has checked its inputs; each
    question to a tensor costs as much as the call itself.
    more: further conditions under which ATen computes, in terms of the tensors and of their strides' names."""
    operands = [*arguments.pointers(p)]
    tensors = ["out" if x == "c" else x for x in operands]
    inputs = ", ".join(t for t in tensors if t != "out")
    lines = [f"def call({inputs}, *, out):", f"    {'batch, ' if p.batched else ''}m, k = a.shape"]
    checks = [f"k != {p.k}"]
    for tensor, operand in zip(tensors, operands, strict=True):
        if (operand == "b" and p.packed_b) or (operand == "bias" and p.bias == "row"):
            continue
        lines.append(f"    {_stride_names(operand, p.batched)} = {tensor}.stride()")
        layout = {"a": p.a, "b": p.b, "bias": "any", "residual": "row", "c": "row"}[operand]
        if layout == "row" and _columns(operand, p) > 1:
            checks.append(f"{operand}_col != 1")
        if layout == "col" and not (operand == "b" and p.k == 1):
            checks.append(f"{operand}_row != 1" if operand == "b" else f"({operand}_row != 1 and m > 1)")
    checks += more
    pointers = ", ".join(f"{t}.data_ptr()" for t in tensors)
    scalars = ", ".join(arguments.scalars(p))
    lines += [
        f"    if {' or '.join(checks)}:",
        "        warn()",
        f"        return aten({inputs}, out=out)",
        f"    launch({pointers}, {scalars})",
        "    return out",
    ]
    return "\n".join(lines) + "\n"


def _stride_names(operand: str, batched: bool) -> str:
    return f"{operand}_batch, {operand}_row, {operand}_col" if batched else f"{operand}_row, {operand}_col"


def _columns(operand: str, p: GemmProblem) -> int:
    return p.k if operand == "a" else p.n
