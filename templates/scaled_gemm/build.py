"""From a problem and a configuration to a code object, called with the arguments that `arguments.py` lists."""

from __future__ import annotations

from flykernels.codeobject import CodeObject
from flykernels.lang import trace
from flykernels.versions import mlir_version
from templates.gemm.config import X86Config

from .problem import ScaledGemmProblem
from .x86 import scaled_gemm as x86_kernel


def build(problem: ScaledGemmProblem, config, target) -> CodeObject:
    """Compiles one kernel. ValueError if the problem is not eligible; what the compiler raises otherwise."""
    reason = problem.why_not(target)
    if reason is not None:
        raise ValueError(f"no scaled GEMM kernel for {problem} on {target.name}: {reason}")
    source = {"template": "scaled_gemm", "problem": problem.key(), "config": config.key(), "mlir": mlir_version()}
    kernels = {"x86": x86_kernel}
    if target.name not in kernels:
        raise ValueError(f"scaled GEMM kernels exist for {', '.join(kernels)}, not for {target.name}")
    return target.compile(trace(kernels[target.name], target, problem, config), source=source)


def build_from_json(problem: ScaledGemmProblem, config: dict, target: str) -> CodeObject:
    """`build` for a configuration's key() and a target's name, as caches and generated code hold them."""
    from flykernels import targets

    kinds = {"x86": X86Config}
    if target not in kinds:
        raise ValueError(f"scaled GEMM kernels for {target!r} are not launched from here; {', '.join(kinds)} are")
    return build(problem, kinds[target](**config), getattr(targets, target))
