"""What the two GPU drivers have in common: a library found by name, functions with checked results, one error type."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Sequence
from typing import Any, ClassVar

HANDLE, NUMBER, TEXT = ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p
OUT = ctypes.POINTER(HANDLE)
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY and hipErrorOutOfMemory
INT_OUT = ctypes.POINTER(ctypes.c_int)
SIZE_OUT = ctypes.POINTER(ctypes.c_uint64)
# Threads along one axis of a grid, and workgroups along each (CUDA C Programming Guide, compute capabilities; HIP
# programming guide, kernel launch limits).
GROUPS_MOST = (2**31 - 1, 65535, 65535)


class DriverError(RuntimeError):
    """A driver call that failed: what for, which, and what the driver says of it.

    status  the number it returned (0 where nothing was called)"""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status

    @property
    def out_of_memory(self) -> bool:
        return self.status == OUT_OF_MEMORY


class Driver:
    """A GPU's runtime or driver: a library's functions, each checked.

    library  has the functions as ctypes does: the real library, or a recording one
    names    of what both makers have, by the name used here; the meanings and argument orders are the same"""

    error: ClassVar[type[DriverError]] = DriverError
    success: ClassVar[int] = 0
    signatures: ClassVar[dict[str, tuple]]
    names: ClassVar[dict[str, str]]

    def __init__(self, library: Any):
        self.library = library
        for name, arguments in self.signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int

    def call(self, name: str, *arguments: Any, doing: str) -> None:
        """Calls one function; `error` if it does not return success. doing: what for, in words."""
        status = getattr(self.library, name)(*arguments)
        if status != self.success:
            raise self.failure(name, status, doing)

    def failure(self, name: str, status: int, doing: str) -> DriverError:
        """The error of a call that returned `status`."""
        which, why = self.describe(status)
        hint = self.hint(status)
        return self.error(
            f"{doing}: {name} returned {which or status} ({why or 'no description'}){hint and '. ' + hint}", status
        )

    def describe(self, status: int) -> tuple[str, str]:
        """(name, description) of a status, as the library gives them; "" where it knows none."""
        raise NotImplementedError

    def hint(self, status: int) -> str:
        """What to do about a status, in a sentence; "" where nothing more is known."""
        return ""

    # -- what workspaces and loading need of both makers; every name through `names`
    def shared_call(self, name: str, *arguments: Any, doing: str) -> None:
        self.call(self.names[name], *arguments, doing=doing)

    def device(self) -> int:
        """The current device of this thread."""
        raise NotImplementedError


def find(kind: type[Driver], libraries: Sequence[str], short: str, advice: str) -> Any:
    """The first of these libraries that is there and has what `kind` calls. `kind.error` with `advice` if none has.

    Looked for by name, so that the one that torch has loaded is found and there is one in a process."""
    tried = []
    for name in (*libraries, ctypes.util.find_library(short) or ""):
        if not name:
            continue
        try:
            return kind(ctypes.CDLL(name))
        except (OSError, AttributeError) as e:
            tried.append(f"{name}: {e}")
    raise kind.error(f"{advice}. {'; '.join(tried)}")
