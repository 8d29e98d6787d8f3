"""Launches on torch's current device and stream: the way in for compiled graphs and eager operators alike.

launch = Launcher(code)
launch(a.data_ptr(), b.data_ptr(), c.data_ptr(), m, *strides)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from ..codeobject import CodeObject
from .gpu_kernel import GpuKernel


def load(code: CodeObject) -> GpuKernel:
    """Loads a GPU's code object on the current device, through the driver that its target needs."""
    from . import cuda, hip

    return cuda.load(code) if code.target == cuda.CudaKernel.target else hip.load(code)


@cache
def _stream_of() -> Callable[[int], int]:
    """torch's current stream of a device as a number: the way that compiled graphs ask, or else the public one."""
    import torch

    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


class Launcher:
    """Addresses and numbers, as `code.arguments` lists them without workspace -> a launch on the current device and
    stream. The code is loaded once a device, when first needed there (also while a graph is being captured).

    The driver's error if the code cannot be loaded or launched; TypeError for other arguments than it takes."""

    def __init__(self, code: CodeObject, load: Callable[[CodeObject], GpuKernel] = load):
        import torch

        self.code = code
        self.kernels: dict[int, GpuKernel] = {}
        self._load, self._lock = load, threading.Lock()
        self._device, self._stream = torch.cuda.current_device, _stream_of()

    def __call__(self, *arguments: Any) -> None:
        device = self._device()
        kernel = self.kernels.get(device) or self.on(device)
        kernel(*arguments, stream=self._stream(device))

    def on(self, device: int) -> GpuKernel:
        """The kernel on `device`, which is the current one."""
        with self._lock:
            if device not in self.kernels:
                self.kernels[device] = self._load(self.code)
            return self.kernels[device]
