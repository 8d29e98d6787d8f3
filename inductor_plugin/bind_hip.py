"""A gfx950 code object as a function of tensors on a HIP device; see bind_gpu.

Tested with a recording library in the place of HIP: there was no AMD GPU to run it on.
"""

from __future__ import annotations

from collections.abc import Callable

from flykernels.codeobject import CodeObject
from templates.gemm.problem import GemmProblem

from . import bind_gpu, kernels

SPAN_MOST = 0xFFFFF000  # bytes that a tile of A or B may span: what a buffer descriptor addresses
TILE_MOST = 256  # rows of a tile


def bind(code: CodeObject, spec: kernels.Spec) -> Callable:
    """callable(a, b, [bias], [residual], out=) for `spec`, running `code` or, where operands do not fit, ATen."""
    return bind_gpu.bind(code, spec, spans(spec.problem))


def spans(p: GemmProblem) -> list[str]:
    """Conditions under which a tile of A or B spans more than a buffer may."""
    most = SPAN_MOST // (TILE_MOST * p.input_type.bytes)
    operands = bind_gpu.operands_of(p)
    return [f"{s} > {most}" for x in "ab" for s in operands[x][1] if not s.endswith("_batch")]
