"""A kernel on one GPU, whoever made it: arguments packed once, grids checked, calls prepared and kept.

What a launch passes to the driver is prepared on its first call with the same arguments and stream, and never changed
afterwards: a later call packs its arguments, finds the prepared call and makes it. Several threads may do so at a time.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

from ..codeobject import CodeObject
from .driver import GROUPS_MOST, Driver, DriverError
from .workspace import Workspaces, captured

KINDS = {"pointer": "Q", "i32": "i", "i64": "q", "f32": "f"}  # struct's letters, natural alignment
PREPARED_MOST = 1024  # calls kept; a program with more addresses than that starts over


class GpuKernel:
    """A loaded kernel of one device.

    code      what it was loaded from
    device    the device it was loaded on; launches must be made while it is the current one
    function  the driver's handle"""

    target: str  # of the code objects that it loads
    threads_most: int  # along one axis of a grid, counted in threads

    def __init__(self, code: CodeObject, driver: Driver):
        if code.target != self.target:
            raise driver.error(f"{code.entry} is code for {code.target}, and this is the loader for {self.target}")
        unknown = sorted({a.kind for a in code.arguments} - set(KINDS))
        if unknown:
            raise driver.error(f"{code.entry} has arguments of kind {', '.join(unknown)}; known: {', '.join(KINDS)}")
        self.code, self.driver = code, driver
        self._module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.device = self._load()
        kinds = "".join(KINDS[a.kind] for a in code.arguments)
        self._struct = struct.Struct("@" + kinds)
        self._offsets = [struct.calcsize(f"@{kinds[: i + 1]}") - struct.calcsize(k) for i, k in enumerate(kinds)]
        # The caller passes no workspace: it is the last argument, and ours.
        self._passed = len(kinds) - bool(code.workspace)
        self._caller = struct.Struct("@" + kinds[: self._passed])
        self._workspaces = Workspaces(driver, code.entry) if code.workspace else None
        self._prepared: dict[tuple, tuple | None] = {}

    def grid(self, arguments: Mapping[str, int]) -> tuple[int, int, int]:
        """Workgroups along x, y, z for these scalar arguments. DriverError if so many cannot be launched."""
        x, y, z, *_ = (*self.code.grid_for(arguments), 1, 1)
        found = x, y, z
        size = self.code.workgroup_size
        if any(n > most for n, most in zip(found, GROUPS_MOST)) or found[0] * size > self.threads_most:
            raise self.driver.error(
                f"{self.code.entry}: a grid of {found} workgroups of {size} threads; at most {GROUPS_MOST} workgroups "
                f"can be launched, and {self.threads_most} threads along x"
            )
        return found

    def __call__(self, *arguments: int | float, stream: int = 0) -> None:
        """Launches on `stream` (a handle as int; 0: the default stream); returns at once.

        arguments: addresses (ints) and numbers, as `code.arguments` lists them, without workspace. An empty grid
        launches nothing. TypeError for another number or other kinds of arguments; DriverError as the driver says."""
        try:
            packed = self._caller.pack(*arguments)
        except struct.error as e:
            raise TypeError(f"{self.code.entry} takes {self._passed} arguments, {self._signature()}: {e}") from e
        capture = captured(self.driver, stream) if self._workspaces is not None else None
        key = (packed, stream, capture)
        try:
            call = self._prepared[key]
        except KeyError:
            call = self._prepare(arguments, packed, stream, capture)
            if len(self._prepared) >= PREPARED_MOST:
                self._prepared.clear()
            self._prepared[key] = call
        if call is not None:
            self._launch(call)

    def unload(self) -> None:
        """Gives the module back; the kernel cannot be launched afterwards."""
        if self._module:
            module, self._module = self._module, ctypes.c_void_p()
            self._prepared.clear()
            self.driver.shared_call("unload", module, doing=f"unloading {self.code.entry}")

    # -- a maker's own
    def _load(self) -> int:
        """Fills in _module and function; the device."""
        raise NotImplementedError

    def _call_for(self, grid: tuple[int, int, int], stream: int, values: Any, named: Mapping[str, Any]) -> tuple:
        """What `_launch` takes. values: a buffer with the arguments, at self._offsets."""
        raise NotImplementedError

    def _launch(self, call: tuple) -> None:
        raise NotImplementedError

    # -- preparing
    def _prepare(self, arguments: tuple, packed: bytes, stream: int, capture: tuple[int, int] | None) -> tuple | None:
        named = dict(zip((a.name for a in self.code.arguments), arguments))
        grid = self.grid(named)
        if 0 in grid:
            return None
        if self._workspaces is not None:
            space = self._workspaces.address(self.code.workspace_for(named), stream, capture)
            packed = self._struct.pack(*arguments, space)
        return self._call_for(grid, stream, ctypes.create_string_buffer(packed, max(1, len(packed))), named)

    def _signature(self) -> str:
        return ", ".join(f"{a.name}: {a.kind}" for a in self.code.arguments[: self._passed])


def load_function(kernel: GpuKernel, load: Any, get: str) -> None:
    """`load()` fills kernel._module; then `get` asks for the entry. What was loaded is unloaded if there is none."""
    load()
    entry, doing = kernel.code.entry, f"loading {kernel.code.entry}"
    try:
        kernel.driver.call(get, ctypes.byref(kernel.function), kernel._module, entry.encode(), doing=doing)
    except DriverError:
        module, kernel._module = kernel._module, ctypes.c_void_p()
        kernel.driver.shared_call("unload", module, doing=doing)
        raise
