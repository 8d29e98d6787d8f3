"""From a problem and a configuration to a code object, and B's packing ahead of time.

A kernel is called with the arguments that `arguments.py` lists: the same for all configurations of a problem.
"""

from __future__ import annotations

from typing import Any

from flykernels import mlir
from flykernels.codeobject import CodeObject
from flykernels.lang import trace

from . import gfx950
from .problem import GemmProblem
from .x86 import gemm as x86_gemm
from .x86_panel import packed_shape


def build(problem: GemmProblem, config, target) -> CodeObject:
    """Compiles one kernel. ValueError if the problem is not eligible; what the compiler raises otherwise."""
    reason = problem.why_not(target)
    if reason is not None:
        raise ValueError(f"no GEMM kernel for {problem} on {target.name}: {reason}")
    source = {"template": "gemm", "problem": problem.key(), "config": config.key(), "mlir": mlir.version()}
    if target.name == "x86":
        return target.compile(trace(x86_gemm, target, problem, config), source=source)
    reason = gfx950.why_not(problem)
    if reason is not None:
        raise ValueError(f"no GEMM kernel for {problem} on {target.name}: {reason}")
    return target.compile(trace(gfx950.gemm, target, problem, config), source=source)


def pack_b(problem: GemmProblem, config, b) -> Any:
    """A constant B as the kernel of a problem with `packed_b` wants it.

    b: a torch tensor (K, N), any strides. The result: a new contiguous tensor of b's type and device, the shape that
    x86_panel.packed_shape gives; K and N are filled up with zeros. Packing depends on config.columns and config.unroll
    only. ValueError if b has another shape."""
    if tuple(b.shape) != (problem.k, problem.n):
        raise ValueError(f"B is {tuple(b.shape)}, but the problem has (K, N) = {(problem.k, problem.n)}")
    shape = packed_shape(problem, config)
    panels, columns = shape[0], config.columns
    steps = -(-problem.k // config.unroll) * config.unroll
    filled = b.new_zeros((steps, panels * columns))
    filled[: problem.k, : problem.n] = b
    if len(shape) == 4:
        return filled.reshape(steps // 2, 2, panels, columns).permute(2, 0, 3, 1).contiguous()
    return filled.reshape(steps, panels, columns).permute(1, 0, 2).contiguous()
