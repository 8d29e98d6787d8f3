"""From a problem and a configuration to a code object, called with the arguments that `arguments.py` lists."""

from __future__ import annotations

from flykernels.codeobject import CodeObject
from flykernels.versions import mlir_version

from .config import TopKConfig
from .problem import TopKProblem


def kernel_key(problem: TopKProblem, config: TopKConfig) -> dict:
    """What the code depends on: problems and configurations with the same key share a code object."""
    return {
        "dtype": problem.dtype,
        "largest": problem.largest,
        "layout": problem.layout,
        "wide": problem.wide,
        **config.code_key(),
    }


def build(problem: TopKProblem, config: TopKConfig, target) -> CodeObject:
    """Compiles one kernel. ValueError if problem or configuration do not fit; what the compiler raises otherwise."""
    from flykernels.lang import trace

    from . import gpu, x86

    reason = problem.why_not(target)
    if reason is None and not config.serves(problem.width, problem.k):
        most = config.most_width or "any"
        reason = f"the configuration serves k up to {config.most_k} and width up to {most}"
    if reason is None and (config.family == "scan") != (target.name == "x86"):
        reason = f"the family {config.family!r} is not for this target"
    if reason is not None:
        raise ValueError(f"no top-k kernel for {problem} on {target.name}: {reason}")
    source = {
        "template": "topk",
        "problem": kernel_key(problem, config),
        "config": config.key(),
        "mlir": mlir_version(),
    }
    kernel = x86.KERNEL if target.name == "x86" else gpu.KERNELS[config.family]
    return target.compile(trace(kernel, target, problem, config), source=source)


def build_from_json(problem: TopKProblem, config: dict, target: str) -> CodeObject:
    """`build` for a configuration's key() and a target's name, as caches hold them."""
    from flykernels import targets

    return build(problem, TopKConfig(**config), getattr(targets, target))
