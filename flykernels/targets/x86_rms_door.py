"""The doors from PyTorch's dispatcher into RMSNorm kernels: of a GPU, and of the CPU.

    void NAME(StableIValue *stack, uint64_t arguments, uint64_t results)

A call whose elements lie as kernels want them is looked up by width, rows (by powers of two) and what `rms_code_of`
packs; the slot says who serves it: a kernel, launched right here (on a GPU on torch's current stream), ATen, or for
gradients Python. What no slot knows is asked of `resolve` (Python) once. Everything else, and what the driver refuses
to launch, is ATen's own function.

Kernels that a slot may name are launched once or twice, the first with as many workgroups as the argument `parts`
says, and take no clusters, tensor maps or dynamic memory: that is what x86_rms_launch.py can launch.
"""

from __future__ import annotations

from ..codeobject import CodeObject
from . import x86_rms_tensors as tensors
from .x86_door import compile_door, find, module
from .x86_door_axes import collapse
from .x86_rms_backward import backward, names
from .x86_rms_forward import forward
from .x86_rms_launch import gpu, host

FORWARD, BACKWARD, COMPOSED, AUTOGRAD = "rms_norm", "rms_norm_backward", "rms_norm_composed", "rms_norm_autograd"
_TENSORS = (tensors.rows, tensors.weight, tensors.statistics, tensors.same, tensors.sound)


def build(device_type: int) -> CodeObject:
    """The door for a GPU's tensors, of a device type by DeviceType's number (c10/core/DeviceType.h)."""
    functions = [names(), find(), collapse(), *(f() for f in _TENSORS), gpu(device_type)]
    functions += [forward(FORWARD, "fused", device_type, gpu=True), backward(BACKWARD, device_type, gpu=True)]
    return compile_door("rms_norm", module("rms_norm", *functions), FORWARD)


def build_host(device_type: int) -> CodeObject:
    """The door for the CPU's tensors."""
    functions = [names(), find(), collapse(), *(f() for f in _TENSORS), host()]
    for entry, level in ((FORWARD, "fused"), (COMPOSED, "composed"), (AUTOGRAD, "autograd")):
        functions.append(forward(entry, level, device_type, gpu=False))
    functions.append(backward(BACKWARD, device_type, gpu=False))
    return compile_door("rms_norm", module("rms_norm", *functions), FORWARD)
