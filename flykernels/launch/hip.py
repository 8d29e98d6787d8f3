"""Loads and launches gfx950 code objects through AMD's HIP runtime (libamdhip64): ctypes alone, no MLIR, no compiler.

    kernel = load(code)                               # a CodeObject, on the current device, once
    kernel(a, b, c, m, *strides, stream=stream)       # addresses and numbers, as `code.arguments` lists them
    kernel.grid({"m": m, ...})                        # what it would be launched with

Not run on a GPU by its authors: tests put a recording library in the place of libamdhip64 and check every call and
every argument. Signatures and constants are those of HIP's public header hip_runtime_api.h.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, ClassVar

from ..codeobject import CodeObject
from .driver import HANDLE, INT_OUT, NUMBER, OUT, SIZE_OUT, TEXT, Driver, DriverError, find
from .gpu_kernel import Frame, GpuKernel, Sized, load_function
from .workspace import relaxed

LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")


class HipError(DriverError):
    """A HIP call that failed, with the call, its error's name and what HIP says of it."""


class Hip(Driver):
    """The runtime's functions, each checked. `library` has them as ctypes does: libamdhip64, or a recording one."""

    error: ClassVar[type[HipError]] = HipError  # type: ignore[misc]
    signatures: ClassVar[dict[str, tuple]] = {
        "hipModuleLoadData": (OUT, HANDLE),
        "hipModuleUnload": (HANDLE,),
        "hipModuleGetFunction": (OUT, HANDLE, TEXT),
        "hipModuleLaunchKernel": (HANDLE, *[NUMBER] * 7, HANDLE, HANDLE, HANDLE),
        "hipGetDevice": (INT_OUT,),
        "hipSetDevice": (ctypes.c_int,),
        "hipMalloc": (OUT, ctypes.c_size_t),
        "hipMemsetAsync": (HANDLE, ctypes.c_int, ctypes.c_size_t, HANDLE),
        "hipStreamCreateWithFlags": (OUT, NUMBER),
        "hipStreamSynchronize": (HANDLE,),
        "hipStreamDestroy": (HANDLE,),
        "hipThreadExchangeStreamCaptureMode": (INT_OUT,),
        "hipStreamIsCapturing": (HANDLE, INT_OUT),
        "hipStreamGetCaptureInfo_v2": (HANDLE, INT_OUT, SIZE_OUT, OUT, HANDLE, HANDLE),
        "hipUserObjectCreate": (OUT, HANDLE, HANDLE, NUMBER, NUMBER),
        "hipGraphRetainUserObject": (HANDLE, HANDLE, NUMBER, NUMBER),
    }
    names: ClassVar[dict[str, str]] = {
        "unload": "hipModuleUnload",
        "allocate": "hipMalloc",
        "set_bytes": "hipMemsetAsync",
        "create_stream": "hipStreamCreateWithFlags",
        "wait": "hipStreamSynchronize",
        "destroy_stream": "hipStreamDestroy",
        "exchange_mode": "hipThreadExchangeStreamCaptureMode",
        "is_capturing": "hipStreamIsCapturing",
        "capture_info": "hipStreamGetCaptureInfo_v2",
        "user_object": "hipUserObjectCreate",
        "graph_keeps": "hipGraphRetainUserObject",
    }

    def __init__(self, library: Any):
        super().__init__(library)
        for name in ("hipGetErrorName", "hipGetErrorString"):
            function = getattr(library, name)
            function.argtypes, function.restype = (ctypes.c_int,), TEXT

    def describe(self, status: int) -> tuple[str, str]:
        said = [getattr(self.library, f"hipGetError{x}")(status) or b"" for x in ("Name", "String")]
        return said[0].decode(errors="replace"), said[1].decode(errors="replace")

    def device(self) -> int:
        found = ctypes.c_int()
        self.call("hipGetDevice", ctypes.byref(found), doing="asking for the current device")
        return found.value

    def set_device(self, device: int) -> None:
        self.call("hipSetDevice", device, doing=f"changing to device {device}")


@cache
def runtime() -> Hip:
    """The HIP runtime of this process. HipError if there is none."""
    return find(Hip, LIBRARIES, "amdhip64", "no HIP runtime: install ROCm, or a torch built for it")


class HipKernel(GpuKernel):
    """A loaded gfx950 kernel of one device; see GpuKernel.

    LDS is allocated statically by these kernels, so launches ask for no dynamic shared memory."""

    target, threads_most = "gfx950", 2**32 - 1
    driver: Hip

    def _load(self) -> int:
        code, device = self.code, self.driver.device()
        self._image = ctypes.create_string_buffer(code.binary, len(code.binary))
        doing = f"loading {code.entry} on device {device}"
        load_module = lambda: self.driver.call(
            "hipModuleLoadData", ctypes.byref(self._module), self._image, doing=doing
        )
        with relaxed(self.driver):
            load_function(self, load_module, "hipModuleGetFunction")
        self._frame = Frame("", self.kinds)
        return device

    def _call(self, sized: Sized, stream: int, arguments: tuple) -> tuple:
        base, memory = self._frame(lambda base: (), arguments)
        block = self.code.workgroup_size, 1, 1
        passed = self.function, *sized.grid, *block, 0, stream, base + self._frame.pointers, None
        return passed, sized.grid, memory

    def _launch(self, call: tuple) -> None:
        if (current := self.driver.device()) != self.device:
            raise HipError(f"{self.code.entry} was loaded on device {self.device}, and device {current} is current")
        passed, grid, _ = call
        self.driver.call("hipModuleLaunchKernel", *passed, doing=f"launching {self.code.entry} on a grid of {grid}")


def load(code: CodeObject, hip: Hip | None = None) -> HipKernel:
    """Loads a gfx950 code object on the current device. HipError if it is not one or HIP refuses it."""
    return HipKernel(code, hip or runtime())
