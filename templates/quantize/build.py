"""From a problem and a configuration to a code object, called with the arguments that `arguments.py` lists."""

from __future__ import annotations

from flykernels.codeobject import CodeObject
from flykernels.lang import trace
from flykernels.versions import mlir_version

from . import gpu, sm90a, x86
from .problem import QuantizeProblem

KERNELS = {"x86": x86, "gfx950": gpu, "sm90a": gpu}
CONFIGS = {"x86": x86.X86Config, "gfx950": gpu.GpuConfig, "sm90a": gpu.GpuConfig}


def build(problem: QuantizeProblem, config, target) -> CodeObject:
    """Compiles one kernel. ValueError if the problem is not eligible; what the compiler raises otherwise."""
    reason = problem.why_not(target)
    if reason is None and target.name not in KERNELS:
        reason = f"kernels exist for {', '.join(KERNELS)}"
    if reason is not None:
        raise ValueError(f"no quantiser for {problem} on {target.name}: {reason}")
    source = {"template": "quantize", "problem": problem.key(), "config": config.key(), "mlir": mlir_version()}
    kernel = (sm90a if isinstance(config, sm90a.RingConfig) else KERNELS[target.name]).quantize
    return target.compile(trace(kernel, target, problem, config), source=source)


def default(problem: QuantizeProblem, target):
    """The configuration that serves all sizes well on a target."""
    if target.name == "x86":
        return x86.X86Config()
    return gpu.default(problem, target)


def build_from_json(problem: QuantizeProblem, config: dict, target: str) -> CodeObject:
    """`build` for a configuration's key() and a target's name, as caches and generated code hold them."""
    from flykernels import targets

    if target not in CONFIGS:
        raise ValueError(f"quantisers for {target!r} are not launched from here; {', '.join(CONFIGS)} are")
    kind = sm90a.RingConfig if target == "sm90a" and "stages" in config else CONFIGS[target]
    return build(problem, kind(**config), getattr(targets, target))
