"""From a problem and a configuration to a code object, called with the arguments that `arguments.py` lists."""

from __future__ import annotations

from flykernels.codeobject import CodeObject
from flykernels.lang import trace
from flykernels.versions import mlir_version
from templates.gemm.config import X86Config

from . import gfx950, x86
from .config import ScaledGroupedConfig
from .problem import ScaledGroupedProblem

KERNELS = {"x86": x86.scaled_grouped_gemm, "gfx950": gfx950.scaled_grouped_gemm}
CONFIGS = {"x86": X86Config, "gfx950": ScaledGroupedConfig}


def build(problem: ScaledGroupedProblem, config, target) -> CodeObject:
    """Compiles one kernel. ValueError if the problem is not eligible; what the compiler raises otherwise."""
    reason = problem.why_not(target)
    if target.name not in KERNELS:
        reason = reason or f"kernels exist for {', '.join(KERNELS)}"
    elif target.name == "gfx950":
        reason = reason or gfx950.why_not(problem)
    if reason is not None:
        raise ValueError(f"no scaled grouped GEMM kernel for {problem} on {target.name}: {reason}")
    source = {"template": "grouped_gemm.scaled", "problem": problem.key(), "config": config.key()}
    code = trace(KERNELS[target.name], target, problem, config)
    return target.compile(code, source=source | {"mlir": mlir_version()})


def build_from_json(problem: ScaledGroupedProblem, config: dict, target: str) -> CodeObject:
    """`build` for a configuration's key() and a target's name, as caches and generated code hold them."""
    from flykernels import targets

    if target not in CONFIGS:
        raise ValueError(
            f"scaled grouped GEMM kernels for {target!r} are not launched from here; {', '.join(CONFIGS)} are"
        )
    return build(problem, CONFIGS[target](**config), getattr(targets, target))
