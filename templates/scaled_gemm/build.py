"""From a problem and a configuration to a code object, called with the arguments that `arguments.py` lists."""

from __future__ import annotations

from flykernels.codeobject import CodeObject
from flykernels.lang import trace
from flykernels.versions import mlir_version
from templates.gemm.config import X86Config
from templates.gemm.sm90a_config import Sm90aConfig

from . import gfx950, sm90a, x86
from .gfx950_config import ScaledConfig
from .problem import ScaledGemmProblem

KERNELS = {"x86": x86.scaled_gemm, "gfx950": gfx950.scaled_gemm, "sm90a": sm90a.scaled_gemm}
TEMPLATES = {"gfx950": gfx950, "sm90a": sm90a}  # x86 takes every problem
CONFIGS = {"x86": X86Config, "gfx950": ScaledConfig, "sm90a": Sm90aConfig}


def build(problem: ScaledGemmProblem, config, target) -> CodeObject:
    """Compiles one kernel. ValueError if the problem is not eligible; what the compiler raises otherwise."""
    reason = problem.why_not(target)
    if target.name not in KERNELS:
        reason = reason or f"kernels exist for {', '.join(KERNELS)}"
    elif target.name in TEMPLATES:
        reason = reason or TEMPLATES[target.name].why_not(problem)
    if reason is not None:
        raise ValueError(f"no scaled GEMM kernel for {problem} on {target.name}: {reason}")
    source = {"template": "scaled_gemm", "problem": problem.key(), "config": config.key(), "mlir": mlir_version()}
    return target.compile(trace(KERNELS[target.name], target, problem, config), source=source)


def build_from_json(problem: ScaledGemmProblem, config: dict, target: str) -> CodeObject:
    """`build` for a configuration's key() and a target's name, as caches and generated code hold them."""
    from flykernels import targets

    if target not in CONFIGS:
        raise ValueError(f"scaled GEMM kernels for {target!r} are not launched from here; {', '.join(CONFIGS)} are")
    return build(problem, CONFIGS[target](**config), getattr(targets, target))
