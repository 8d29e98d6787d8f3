"""A GPU's code object as a function of tensors, launched on torch's current device and stream.

The checks are `bind_host`'s, and those of what wide loads and TMA need: pointers and strides that are multiples of what
the kernel was built for. Where they do not hold, or the device has no memory left for a workspace, ATen computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from flykernels.codeobject import CodeObject
from flykernels.launch.current import Launcher
from flykernels.launch.driver import DriverError
from flykernels.launch.tensor_map import ADDRESS_ALIGN, STRIDE_ALIGN
from templates.gemm import arguments
from templates.gemm.problem import GemmProblem

from . import bind_host, kernels

log = logging.getLogger(__name__)

OF_ROWS = ("a_row", "residual_row", "c_row")  # strides from one of M's rows to the next


def bind(code: CodeObject, spec: kernels.Spec, more: Sequence[str] = ()) -> Callable:
    """callable(a, b, [bias], [residual], out=) for `spec`, running `code` or, where operands do not fit, ATen.

    more: conditions of one target under which ATen computes, as `bind_host.source_of` takes them."""
    p, aten = spec.problem, kernels.aten(spec)
    names: dict[str, Any] = {
        "launch": Launcher(code),
        "aten": aten,
        "warn": kernels.misplaced(spec),
    }
    source = bind_host.source_of(p, [*conditions(p, code), *more])
    exec(compile(source, f"<flykernels {spec.op}>", "exec"), names)
    call: Callable = names["call"]
    if not code.workspace:
        return call

    def or_aten(*inputs, out):
        try:
            return call(*inputs, out=out)
        except DriverError as e:
            if not e.out_of_memory:
                raise
            log.warning("%s %s: %s; ATen serves this call", spec.op, spec.name, e)
            return aten(*inputs, out=out)

    return or_aten


def operands_of(p: GemmProblem) -> dict[str, tuple[str, list[str]]]:
    """operand -> (tensor, names of its strides that a kernel is told), as `bind_host.source_of` names them."""
    named = lambda operand: "out" if operand == "c" else operand
    strides = lambda operand: [s for s in arguments.scalars(p) if s.startswith(f"{operand}_")]
    return {x: (named(x), strides(x)) for x in arguments.pointers(p)}


def conditions(p: GemmProblem, code: CodeObject) -> list[str]:
    """Under which the kernel must not run: what it was built for, and what its tensor maps can describe. Of one row it
    does not matter how far the next would be."""
    out = []
    seen_by_tma = {t.of for t in code.tensor_maps}
    aligned = {"a": p.align_a, "b": p.align_b, "c": p.align_c, "residual": p.align_c}
    aligned |= {"bias": p.align_c} if p.bias == "row" else {}
    told = lambda stride, wrong: f"(m > 1 and {wrong})" if stride in OF_ROWS else wrong
    for operand, (tensor, strides) in operands_of(p).items():
        size = (p.input_type if operand in ("a", "b") else p.output_type).bytes
        align = aligned.get(operand, size)
        address, step = (ADDRESS_ALIGN, STRIDE_ALIGN) if operand in seen_by_tma else (0, 0)
        address, step = max(align, address), max(align, step)
        if address > size:
            out.append(f"{tensor}.data_ptr() % {address}")
        if step > size:
            out += [told(s, f"{s} % {step // size}") for s in strides]
        if operand in seen_by_tma:  # a tensor map has no axis of repeated rows; a batch that is repeated is one matrix
            out += [told(s, f"{s} == 0") for s in strides if not s.endswith("_batch")]
    return out
