"""A GPU's driver for the doors' tests, with the CPU in the place of the GPU."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod

import torch

from flykernels.launch import torch_door
from flykernels.launch.torch_library import address_of

FUNCTION, STREAM, GUARD = 0x1234, 0x77, 0x55
CPU = 0  # DeviceType's number


def memory(address: int, n: int, kind: torch.dtype) -> torch.Tensor:
    """n elements at an address that a kernel was given."""
    return torch.frombuffer((ctypes.c_char * (n * kind.itemsize)).from_address(address), dtype=kind)


class Driver(ABC):
    """cuLaunchKernel, torch's current stream and its device guards, as a door calls them. They write down what they
    were given; a test's own `compute` does what the kernel would.

    asked     what `resolve` was asked
    launches  ((function, stream), grid, workgroup, shared bytes, the launch's last argument, what compute returned)
    guards    devices made current, and the guards given back
    current   the device that is current; -1 is what a CPU tensor says its device's number is
    status    what the next launches return: not 0 refuses them
    state     who serves what the door asks about; "error": `resolve` fails"""

    def __init__(self):
        self.launches, self.asked, self.status, self.state = [], [], 0, torch_door.OURS
        self.guards, self.current = [], -1
        number, handle = ctypes.c_uint, ctypes.c_void_p
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, handle, *[number] * 7, handle, handle, handle)(self.launch)
        self._stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(handle))(self.stream)
        self._device = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int32))(self.device)
        self._guard = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(handle))(self.guard)
        self._unguard = ctypes.CFUNCTYPE(ctypes.c_int, handle)(self.unguard)
        guards = {
            torch_door.CURRENT: self._device, "aoti_torch_create_device_guard": self._guard,
            "aoti_torch_delete_device_guard": self._unguard,
        }  # fmt: skip
        named = {name: address_of(function) for name, function in guards.items()}
        self.door = self.make_door(address_of(self._launch), address_of(self._stream), named)

    @abstractmethod
    def make_door(self, launch: int, stream: int, guards: dict[str, int]):
        """The door under test, which calls these addresses."""

    @abstractmethod
    def compute(self, at, function: int, grid: int):
        """Does a kernel's work; what is to be noted of its arguments. at: the addresses of those."""

    def stream(self, device, out):
        out[0] = STREAM
        return 0

    def device(self, out):
        out[0] = self.current
        return 0

    def guard(self, device, out):
        self.guards.append(device)
        out[0] = GUARD
        return 0

    def unguard(self, guard):
        self.guards.append(guard)
        return 0

    def launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, places, extra):
        if self.status:
            return self.status
        at = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))
        noted = (function, stream), (gx, gy, gz), (bx, by, bz), shared, extra
        self.launches.append((*noted, self.compute(at, function, gx)))
        return 0
