"""Which device gets which target, and what of the machine decides speed there; what a measurement needs to know of one.

CUDA and HIP devices plug in here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """A device type that candidates are offered for.

    target       name of the target in flykernels.targets (whose import needs a compiler, so it is a name here)
    description  (torch.device or None: the current one) -> JSON values that identify it in a tuning key: arch, product,
                 CU count or threads
    bind         (code object, Spec) -> callable(a, b, [bias], [residual], out) on tensors of the device
    packs_constants  its templates read a constant B that was packed ahead
    """

    target: str
    description: Callable[..., dict]
    bind: Callable[[Any, Any], Callable]
    packs_constants: bool = False

    @property
    def name(self) -> str:
        """The target's name: what templates ask to say whether a problem is eligible."""
        return self.target

    def candidates(self, problem: Any) -> Any:
        """The template's search space for a problem on this machine. Needs MLIR."""
        from flykernels import targets
        from templates.gemm import space as dense
        from templates.grouped_gemm import space as grouped
        from templates.grouped_gemm.problem import GroupedGemmProblem
        from templates.grouped_gemm.scaled import space as scaled_grouped
        from templates.grouped_gemm.scaled.problem import ScaledGroupedProblem
        from templates.scaled_gemm import space as scaled
        from templates.scaled_gemm.problem import ScaledGemmProblem

        spaces = {ScaledGemmProblem: scaled, GroupedGemmProblem: grouped, ScaledGroupedProblem: scaled_grouped}
        space: Any = spaces.get(type(problem), dense)
        threads = self.description()["threads"] if self.target == "x86" else 1
        return space.candidates(problem, getattr(targets, self.target), threads)


@functools.cache
def _cpu_description(threads: int) -> dict:
    from flykernels import cpu

    return {"arch": cpu.level(), "product": cpu.product(), "threads": threads}


def _describe_cpu(device: Any = None) -> dict:
    import torch

    return _cpu_description(torch.get_num_threads())


def _bind_cpu(code: Any, spec: Any) -> Callable:
    from . import bind_host

    return bind_host.bind(code, spec)


def _properties(device: Any = None) -> Any:
    """torch's description of a GPU."""
    import torch

    named = device is not None and device.index is not None
    return torch.cuda.get_device_properties(device if named else torch.cuda.current_device())


def _describe_gpu(device: Any = None) -> dict:
    found = _properties(device)
    return {"arch": _arch(found), "product": found.name, "compute_units": found.multi_processor_count}


def _arch(found: Any) -> str:
    """Such as "gfx950" or "sm_90"."""
    import torch

    return found.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{found.major}{found.minor}"


def _bind_cuda(code: Any, spec: Any) -> Callable:
    from . import bind_gpu

    return bind_gpu.bind(code, spec)


def _bind_hip(code: Any, spec: Any) -> Callable:
    from . import bind_hip

    return bind_hip.bind(code, spec)


DEVICES = {
    "cpu": Device("x86", _describe_cpu, _bind_cpu, True),
    "cuda": Device("sm90a", _describe_gpu, _bind_cuda),
    "hip": Device("gfx950", _describe_gpu, _bind_hip),
}
ARCHITECTURES = {"cuda": "sm_90", "hip": "gfx950"}  # the one that each kind's code runs on: sm_90a's on no other


def kind_of(device: Any) -> str:
    """The key in DEVICES of a torch.device, or why there is none: torch calls AMD's GPUs "cuda" too."""
    if device.type != "cuda":
        return str(device.type)
    import torch

    kind, arch = "hip" if torch.version.hip else "cuda", _arch(_properties(device))
    return kind if arch == ARCHITECTURES[kind] else f"{kind} ({arch})"


def here(target: str) -> Device | None:
    """The Device of a target that this process can run; None if there is none, or no torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    kinds = {"cpu"}
    if torch.cuda.is_available():
        kinds.add(kind_of(torch.device("cuda", torch.cuda.current_device())))
    return next((d for kind, d in DEVICES.items() if kind in kinds and d.target == target), None)


def device_for(device: Any) -> Device:
    """The Device of a torch.device. NotEligible where there are no templates for it."""
    from .requests import NotEligible

    try:
        return DEVICES[kind_of(device)]
    except KeyError:
        there = ", ".join(f"{kind} ({ARCHITECTURES[kind]})" if kind in ARCHITECTURES else kind for kind in DEVICES)
        raise NotEligible(f"device {device} is {kind_of(device)}: templates are registered for {there}") from None


# -- while candidates are measured
def on_device(device: Any) -> Any:
    """A context in which a GPU is the current one."""
    import torch

    return torch.cuda.device(device)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device has no memory left: torch's own, or a driver's of ours."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(getattr(error, "out_of_memory", False))


def free_memory() -> None:
    """Gives back what torch keeps of devices' memory, so that it can be had again."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.empty_cache()


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph: nothing may be measured meanwhile."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
