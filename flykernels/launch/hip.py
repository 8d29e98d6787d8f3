"""Loads and launches gfx950 code objects through AMD's HIP runtime (libamdhip64): ctypes alone, no MLIR, no compiler.

    kernel = load(code)                               # a CodeObject, on the current device, once
    kernel(a, b, c, m, *strides, stream=stream)       # addresses and numbers, as `code.arguments` lists them
    kernel.grid({"m": m, ...})                        # what it would be launched with

Not run on a GPU by its authors: tests put a recording library in the place of libamdhip64 and check every call and
every argument. Signatures and constants are those of HIP's public header hip_runtime_api.h.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Mapping
from functools import cache
from typing import Any

from ..codeobject import CodeObject

LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
KINDS: dict[str, Any] = {
    "pointer": ctypes.c_void_p,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
SUCCESS = 0
THREADS_MOST = 2**32 - 1  # along one axis of a grid, counted in threads (HIP programming guide, kernel launch limits)
GROUPS_MOST = (2**31 - 1, 65535, 65535)  # workgroups along each axis


class HipError(RuntimeError):
    """A HIP call that failed, with the call, its error's name and what HIP says of it."""


class Hip:
    """The runtime's functions, each checked. `library` has them as ctypes does: libamdhip64, or a recording one."""

    def __init__(self, library: Any):
        self.library = library
        handle, number = ctypes.c_void_p, ctypes.c_uint
        out, names = ctypes.POINTER(handle), ctypes.c_char_p
        signatures = {
            "hipModuleLoadData": (out, handle),
            "hipModuleUnload": (handle,),
            "hipModuleGetFunction": (out, handle, names),
            "hipModuleLaunchKernel": (handle, *[number] * 7, handle, out, out),
            "hipGetDevice": (ctypes.POINTER(ctypes.c_int),),
            "hipSetDevice": (ctypes.c_int,),
        }
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        for name in ("hipGetErrorName", "hipGetErrorString"):
            function = getattr(library, name)
            function.argtypes, function.restype = (ctypes.c_int,), ctypes.c_char_p

    def call(self, name: str, *arguments: Any, doing: str) -> None:
        """Calls one function; HipError if it does not return hipSuccess. doing: what for, in words."""
        status = getattr(self.library, name)(*arguments)
        if status != SUCCESS:
            said = [getattr(self.library, f"hipGetError{x}")(status) or b"" for x in ("Name", "String")]
            which, why = (text.decode(errors="replace") for text in said)
            raise HipError(f"{doing}: {name} returned {which or status} ({why or 'no description'})")

    def device(self) -> int:
        """The current device of this thread."""
        found = ctypes.c_int()
        self.call("hipGetDevice", ctypes.byref(found), doing="asking for the current device")
        return found.value

    def set_device(self, device: int) -> None:
        self.call("hipSetDevice", device, doing=f"changing to device {device}")


@cache
def runtime() -> Hip:
    """The HIP runtime of this process. HipError if there is none.

    Looked for by name, so that the one that torch has loaded is found and there is one runtime in a process."""
    tried = []
    for name in (*LIBRARIES, ctypes.util.find_library("amdhip64") or ""):
        if not name:
            continue
        try:
            return Hip(ctypes.CDLL(name))
        except (OSError, AttributeError) as e:
            tried.append(f"{name}: {e}")
    raise HipError("no HIP runtime: install ROCm, or a torch built for it. " + "; ".join(tried))


class HipKernel:
    """A loaded kernel of one device.

    code      what it was loaded from
    device    the device it was loaded on; launches must be made while it is the current one
    function  HIP's handle"""

    def __init__(self, code: CodeObject, hip: Hip):
        self.code, self.hip, self.device = code, hip, hip.device()
        self._binary = ctypes.create_string_buffer(code.binary, len(code.binary))
        self._module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        doing = f"loading {code.entry} on device {self.device}"
        hip.call("hipModuleLoadData", ctypes.byref(self._module), self._binary, doing=doing)
        try:
            hip.call(
                "hipModuleGetFunction", ctypes.byref(self.function), self._module, code.entry.encode(), doing=doing
            )
        except HipError:
            self.unload()
            raise
        self._kinds = [KINDS[a.kind] for a in code.arguments]
        self._names = [a.name for a in code.arguments]

    def grid(self, arguments: Mapping[str, int]) -> tuple[int, int, int]:
        """Workgroups along x, y, z for these scalar arguments. HipError if HIP cannot launch so many."""
        x, y, z, *_ = (*self.code.grid_for(arguments), 1, 1)
        found = x, y, z
        size = self.code.workgroup_size
        if any(n > most for n, most in zip(found, GROUPS_MOST)) or found[0] * size > THREADS_MOST:
            raise HipError(
                f"{self.code.entry}: a grid of {found} workgroups of {size} threads; HIP launches {GROUPS_MOST} "
                f"workgroups at most, and {THREADS_MOST} threads along x"
            )
        return found

    def __call__(self, *arguments: int | float, stream: int = 0) -> None:
        """Launches on `stream` (a hipStream_t as int; 0: the default stream); returns at once.

        arguments: addresses (ints) and numbers, as `code.arguments` lists them. An empty grid launches nothing.
        TypeError for another number of arguments; HipError as HIP reports, or where another device is current."""
        if len(arguments) != len(self._kinds):
            raise TypeError(f"{self.code.entry} takes {len(self._kinds)} arguments, not {len(arguments)}")
        grid = self.grid(dict(zip(self._names, arguments)))  # type: ignore[arg-type]
        if 0 in grid:
            return
        if (current := self.hip.device()) != self.device:
            raise HipError(f"{self.code.entry} was loaded on device {self.device}, and device {current} is current")
        values = [kind(value) for kind, value in zip(self._kinds, arguments)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self.hip.call(
            "hipModuleLaunchKernel", self.function, *grid, self.code.workgroup_size, 1, 1, 0, stream, pointers, None,
            doing=f"launching {self.code.entry} on a grid of {grid}",
        )  # fmt: skip

    def unload(self) -> None:
        """Gives the module back; the kernel cannot be launched afterwards."""
        if self._module:
            module, self._module = self._module, ctypes.c_void_p()
            self.hip.call("hipModuleUnload", module, doing=f"unloading {self.code.entry}")


def load(code: CodeObject, hip: Hip | None = None) -> HipKernel:
    """Loads a gfx950 code object on the current device. HipError if it is not one or HIP refuses it.

    LDS is allocated statically by these kernels, so launches ask for no dynamic shared memory."""
    if code.target != "gfx950":
        raise HipError(f"{code.entry} is code for {code.target}, and this is the loader for gfx950")
    unknown = sorted({a.kind for a in code.arguments} - set(KINDS))
    if unknown:
        raise HipError(f"{code.entry} has arguments of kind {', '.join(unknown)}; known: {', '.join(KINDS)}")
    return HipKernel(code, hip or runtime())
