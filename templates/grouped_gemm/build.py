"""From a problem and a configuration to a code object, called with the arguments that `arguments.py` lists."""

from __future__ import annotations

from flykernels.codeobject import CodeObject
from flykernels.lang import trace
from flykernels.versions import mlir_version
from templates.gemm.config import X86Config

from . import gfx950, sm90a, x86
from .config import GroupedConfig
from .problem import GroupedGemmProblem
from .sm90a_config import GroupedSm90aConfig

KERNELS = {"x86": x86.grouped_gemm, "gfx950": gfx950.grouped_gemm, "sm90a": sm90a.grouped_gemm}
CONFIGS = {"x86": X86Config, "gfx950": GroupedConfig, "sm90a": GroupedSm90aConfig}
WHY_NOT = {"gfx950": gfx950.why_not, "sm90a": sm90a.why_not}  # what one target's kernel does not take


def build(problem: GroupedGemmProblem, config, target) -> CodeObject:
    """Compiles one kernel. ValueError if the problem is not eligible; what the compiler raises otherwise."""
    reason = problem.why_not(target)
    if target.name not in KERNELS:
        reason = reason or f"kernels exist for {', '.join(KERNELS)}"
    elif target.name in WHY_NOT:
        reason = reason or WHY_NOT[target.name](problem)
    if reason is not None:
        raise ValueError(f"no grouped GEMM kernel for {problem} on {target.name}: {reason}")
    source = {"template": "grouped_gemm", "problem": problem.key(), "config": config.key(), "mlir": mlir_version()}
    return target.compile(trace(KERNELS[target.name], target, problem, config), source=source)


def build_from_json(problem: GroupedGemmProblem, config: dict, target: str) -> CodeObject:
    """`build` for a configuration's key() and a target's name, as caches and generated code hold them."""
    from flykernels import targets

    if target not in CONFIGS:
        raise ValueError(f"grouped GEMM kernels for {target!r} are not launched from here; {', '.join(CONFIGS)} are")
    return build(problem, CONFIGS[target](**config), getattr(targets, target))
