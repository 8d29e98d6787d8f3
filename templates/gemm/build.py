"""From a problem and a configuration to a code object.

A kernel is called with the arguments that `arguments.py` lists: the same for all configurations of a problem.
"""

from __future__ import annotations

from flykernels.codeobject import CodeObject
from flykernels.lang import trace
from flykernels.versions import mlir_version

from . import gfx950
from .config import X86Config
from .problem import GemmProblem
from .x86 import gemm as x86_gemm


def build(problem: GemmProblem, config, target) -> CodeObject:
    """Compiles one kernel. ValueError if the problem is not eligible; what the compiler raises otherwise."""
    reason = problem.why_not(target)
    if reason is not None:
        raise ValueError(f"no GEMM kernel for {problem} on {target.name}: {reason}")
    source = {"template": "gemm", "problem": problem.key(), "config": config.key(), "mlir": mlir_version()}
    if target.name == "x86":
        return target.compile(trace(x86_gemm, target, problem, config), source=source)
    reason = gfx950.why_not(problem)
    if reason is not None:
        raise ValueError(f"no GEMM kernel for {problem} on {target.name}: {reason}")
    return target.compile(trace(gfx950.gemm, target, problem, config), source=source)


def build_from_json(problem: GemmProblem, config: dict, target: str) -> CodeObject:
    """`build` for a configuration's key() and a target's name, as caches and generated code hold them."""
    from flykernels import targets

    kinds = {"x86": X86Config}
    if target not in kinds:
        raise ValueError(f"GEMM kernels for {target!r} are not launched from here; {', '.join(kinds)} are")
    return build(problem, kinds[target](**config), getattr(targets, target))
