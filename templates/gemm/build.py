"""From a problem and a configuration to a code object.

A kernel is called with the arguments that `arguments.py` lists: the same for all configurations of a problem.
"""

from __future__ import annotations

from flykernels.codeobject import CodeObject
from flykernels.lang import trace
from flykernels.versions import mlir_version

from . import gfx950, sm90a
from .config import X86Config
from .problem import GemmProblem
from .sm90a_config import Sm90aConfig
from .x86 import gemm as x86_gemm

TEMPLATES = {"gfx950": gfx950, "sm90a": sm90a}  # x86 has a signature of its own
CONFIGS = {"x86": X86Config, "gfx950": gfx950.Gfx950Config, "sm90a": Sm90aConfig}


def build(problem: GemmProblem, config, target) -> CodeObject:
    """Compiles one kernel. ValueError if the problem is not eligible; what the compiler raises otherwise."""
    reason = problem.why_not(target)
    if reason is not None:
        raise ValueError(f"no GEMM kernel for {problem} on {target.name}: {reason}")
    source = {"template": "gemm", "problem": problem.key(), "config": config.key(), "mlir": mlir_version()}
    if target.name == "x86":
        return target.compile(trace(x86_gemm, target, problem, config), source=source)
    template = TEMPLATES[target.name]
    reason = template.why_not(problem)
    if reason is not None:
        raise ValueError(f"no GEMM kernel for {problem} on {target.name}: {reason}")
    return target.compile(trace(template.gemm, target, problem, config), source=source)


def build_from_json(problem: GemmProblem, config: dict, target: str) -> CodeObject:
    """`build` for a configuration's key() and a target's name, as caches and generated code hold them."""
    from flykernels import targets

    if target not in CONFIGS:
        raise ValueError(f"GEMM kernels for {target!r} are not launched from here; {', '.join(CONFIGS)} are")
    return build(problem, CONFIGS[target](**config), getattr(targets, target))
