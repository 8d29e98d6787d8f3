"""From a problem and a configuration to code objects.

Launch all of them, in order, with the same arguments: those that `arguments.py` lists.
"""

from __future__ import annotations

from flykernels.codeobject import CodeObject
from flykernels.lang import trace
from flykernels.versions import mlir_version

from .config import config_from_key
from .problem import RMSNormProblem


def build(problem: RMSNormProblem, config, target) -> tuple[CodeObject, ...]:
    """Compiles one kernel: one code object, or several that are launched one after the other.

    ValueError if the problem is not eligible; what the compiler raises otherwise."""
    reason = problem.why_not(target)
    if reason is not None:
        raise ValueError(f"no RMSNorm kernel for {problem} on {target.name}: {reason}")
    source = {"template": "rms_norm", "problem": problem.key(), "config": config.key(), "mlir": mlir_version()}
    if target.name == "x86":
        from .x86 import steps
    else:
        from .gpu import steps
    return tuple(target.compile(trace(s, target, problem, config), source=source) for s in steps(problem, config))


def build_from_json(problem: RMSNormProblem, config: dict, target: str) -> tuple[CodeObject, ...]:
    """`build` for a configuration's key() and a target's name, as caches hold them."""
    from flykernels import targets

    return build(problem, config_from_key(target, config), getattr(targets, target))
