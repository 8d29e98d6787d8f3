"""A library in the place of libamdhip64: ctypes functions that write down each call and read what its pointers say."""

from __future__ import annotations

import ctypes
from typing import Any

NAMES = {2: "hipErrorOutOfMemory", 98: "hipErrorInvalidDeviceFunction", 209: "hipErrorNoBinaryForGpu"}
MODULE, FUNCTION = 0x1000, 0x2000


class RecordingHip:
    """calls: (name, plain arguments) in order. fail: {function: status it returns}. kinds: of a launch's arguments."""

    def __init__(self, kinds=(), binary_bytes: int = 0):
        self.calls: list[tuple[str, tuple]] = []
        self.fail: dict[str, int] = {}
        self.current, self.kinds, self.binary_bytes = 0, list(kinds), binary_bytes
        self.binary = b""
        number, handle, text = ctypes.c_uint, ctypes.c_void_p, ctypes.c_char_p
        out = ctypes.POINTER(handle)
        self._keep: list[Any] = []
        make = lambda name, body, *types, result=ctypes.c_int: self._function(name, body, types, result)
        make("hipModuleLoadData", self._load, out, handle)
        make("hipModuleUnload", lambda m: (m,), handle)
        make("hipModuleGetFunction", self._get, out, handle, text)
        make("hipModuleLaunchKernel", self._launch, handle, *[number] * 7, handle, out, out)
        make("hipGetDevice", self._device, ctypes.POINTER(ctypes.c_int))
        make("hipSetDevice", self._set_device, ctypes.c_int)
        self.hipGetErrorName = lambda status: NAMES[status].encode()
        self.hipGetErrorString = lambda status: b"as told to"

    def _function(self, name, body, types, result):
        """A C function pointer: arguments cross the C boundary as they would into the real library."""

        def called(*arguments):
            if status := self.fail.get(name, 0):
                self.calls.append((name, ("failed",)))
                return status
            self.calls.append((name, body(*arguments)))
            return 0

        function = ctypes.CFUNCTYPE(result, *types)(called)
        self._keep.append(function)
        setattr(self, name, function)

    def _load(self, out, image):
        self.binary = ctypes.string_at(image, self.binary_bytes)
        out[0] = MODULE
        return ()

    def _get(self, out, module, name):
        out[0] = FUNCTION
        return module, name.decode()

    def _launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):
        values = [k.from_address(arguments[i]).value for i, k in enumerate(self.kinds)]
        return function, (gx, gy, gz), (bx, by, bz), shared, stream or 0, values, bool(extra)

    def _device(self, out):
        out[0] = self.current
        return (self.current,)

    def _set_device(self, device):
        self.current = device
        return (device,)

    def named(self, name: str) -> list[tuple]:
        return [arguments for called, arguments in self.calls if called == name]
