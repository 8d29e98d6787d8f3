"""A gfx950 code object as a function of tensors on a HIP device, launched on torch's current stream.

The checks are `bind_host`'s, and those of what wide loads need: where pointers and strides are multiples of what the
kernel was built for, and where a tile spans less than a buffer may. Where they do not hold, ATen computes. Tested with
a recording library in the place of HIP: there was no AMD GPU to run it on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flykernels.codeobject import CodeObject
from flykernels.launch.current import Launcher
from templates.gemm import arguments
from templates.gemm.problem import GemmProblem

from . import bind_host, kernels

log = logging.getLogger(__name__)
SPAN_MOST = 0xFFFFF000  # bytes that a tile of A or B may span: what a buffer descriptor addresses
TILE_MOST = 256  # rows of a tile


def bind(code: CodeObject, spec: kernels.Spec) -> Callable:
    """callable(a, b, [bias], [residual], out=) for `spec`, running `code` or, where operands do not fit, ATen."""
    names = {
        "launch": Launcher(code),
        "aten": kernels.aten(spec),
        "warn": lambda *x: log.warning(
            "%s %s: operands are not laid out as compiled for; ATen serves this call", spec.op, spec.name
        ),
    }
    exec(compile(bind_host.source_of(spec.problem, conditions(spec.problem)), f"<flykernels {spec.op}>", "exec"), names)
    return names["call"]  # type: ignore[return-value]


def conditions(p: GemmProblem) -> list[str]:
    """Under which the kernel must not run: "in terms of" tensors and strides, as `bind_host.source_of` names them."""
    out = []
    for operand, align in (("a", p.align_a), ("b", p.align_b), ("c", p.align_c), ("residual", p.align_c)):
        if operand not in arguments.pointers(p):
            continue
        dtype = p.input_type if operand in ("a", "b") else p.output_type
        tensor = "out" if operand == "c" else operand
        strides = [s for s in arguments.scalars(p) if s.startswith(f"{operand}_")]
        if align > dtype.bytes:
            out += [f"{tensor}.data_ptr() % {align}", *(f"{s} % {align // dtype.bytes}" for s in strides)]
        if operand in ("a", "b"):
            most = SPAN_MOST // (TILE_MOST * dtype.bytes)
            out += [f"{s} > {most}" for s in strides if not s.endswith("_batch")]
    return out
