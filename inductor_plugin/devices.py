"""Which device gets which target, and what of the machine decides speed there. CUDA and HIP devices plug in here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """A device type that candidates are offered for.

    target       name of the target in flykernels.targets (whose import needs a compiler, so it is a name here)
    description  JSON values that identify it in a tuning key: arch, product, CU count or threads
    bind         (code object, Spec) -> callable(a, b, [bias], [residual], out) on tensors of the device
    """

    target: str
    description: Callable[[], dict]
    bind: Callable[[Any, Any], Callable]

    @property
    def name(self) -> str:
        """The target's name: what templates ask to say whether a problem is eligible."""
        return self.target

    def candidates(self, problem: Any) -> Any:
        """The template's search space for a problem on this machine. Needs MLIR."""
        from flykernels import targets
        from templates.gemm.space import candidates

        return candidates(problem, getattr(targets, self.target), self.description().get("threads", 1))


@functools.cache
def _cpu_description(threads: int) -> dict:
    from flykernels import cpu

    return {"arch": cpu.level(), "product": cpu.product(), "threads": threads}


def _describe_cpu() -> dict:
    import torch

    return _cpu_description(torch.get_num_threads())


def _bind_cpu(code: Any, spec: Any) -> Callable:
    from . import bind_host

    return bind_host.bind(code, spec)


DEVICES = {"cpu": Device("x86", _describe_cpu, _bind_cpu)}


def device_for(device: Any) -> Device:
    """The Device of a torch.device. NotEligible where there are no templates for it."""
    from .requests import NotEligible

    try:
        return DEVICES[device.type]
    except KeyError:
        raise NotEligible(f"device {device}: templates are registered for {', '.join(DEVICES)}") from None
