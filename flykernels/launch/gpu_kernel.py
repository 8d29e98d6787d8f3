"""A kernel on one GPU, whoever made it: arguments packed once, grids checked, calls prepared and kept.

What a launch passes to the driver is prepared on its first call with the same arguments and stream, and never changed
afterwards: a later call packs its arguments, finds the prepared call and makes it. What depends on sizes alone (the
grid, the shapes of tensor maps) is kept for calls that differ in addresses. Several threads may launch at a time.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..codeobject import CodeObject
from .driver import GROUPS_MOST, INVALID_CONTEXT, Driver, DriverError
from .workspace import Workspaces, captured

KINDS = {"pointer": "Q", "i32": "i", "i64": "q", "f32": "f"}  # struct's letters, natural alignment
PREPARED_MOST = 1024  # calls, and sizes, that are kept; a program with more starts over
NOTHING: tuple = ()  # the call of an empty grid


@dataclass(frozen=True)
class Sized:
    """What a launch needs that depends on the scalar arguments alone.

    named  the scalar arguments
    grid   workgroups along x, y, z
    more   the maker's own"""

    named: dict[str, Any]
    grid: tuple[int, int, int]
    more: Any = None


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
        self.kinds = "".join(KINDS[a.kind] for a in code.arguments)
        self._module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.device = self._load()
        # The caller passes no workspace: it is the last argument, and ours.
        self._passed = len(self.kinds) - bool(code.workspace)
        self._pack = struct.Struct("@" + self.kinds[: self._passed]).pack
        self._scalars = [i for i, a in enumerate(code.arguments) if a.kind != "pointer"]
        self._workspaces = Workspaces(driver, code.entry) if code.workspace else None
        self._prepared: dict[tuple, tuple] = {}
        self._sized: dict[tuple, Sized] = {}

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
            packed = self._pack(*arguments)
        except struct.error as e:
            raise TypeError(f"{self.code.entry} takes {self._passed} arguments, {self._signature()}: {e}") from e
        capture = None if self._workspaces is None else self._capture(stream)
        key = packed, stream, capture
        call = self._prepared.get(key)
        if call is None:
            call = self._prepared[key] = self._prepare(arguments, stream, capture)
        if call:
            self._launch(call)

    def unload(self) -> None:
        """Gives the module back; the kernel cannot be launched afterwards."""
        if self._module:
            module, self._module = self._module, ctypes.c_void_p()
            self.function = ctypes.c_void_p()
            self._prepared.clear()
            self.driver.shared_call("unload", module, doing=f"unloading {self.code.entry}")

    # -- a maker's own
    def _load(self) -> int:
        """Fills in _module and function; the device."""
        raise NotImplementedError

    def _size(self, named: dict[str, Any], grid: tuple[int, int, int]) -> Sized:
        return Sized(named, grid)

    def _call(self, sized: Sized, stream: int, arguments: tuple) -> tuple:
        """What `_launch` takes. arguments: all, with workspace."""
        raise NotImplementedError

    def _launch(self, call: tuple) -> None:
        raise NotImplementedError

    def _capture(self, stream: int) -> tuple[int, int] | None:
        """See `captured`; a thread that has not met the driver yet gets the device's context."""
        try:
            return captured(self.driver, stream)
        except DriverError as e:
            if e.status != INVALID_CONTEXT:
                raise
        self.driver.use(self.device)
        return captured(self.driver, stream)

    # -- preparing
    def _prepare(self, arguments: tuple, stream: int, capture: tuple[int, int] | None) -> tuple:
        if not self.function:
            raise self.driver.error(f"{self.code.entry} was unloaded from device {self.device}: load it again")
        for kept in (self._prepared, self._sized):
            if len(kept) >= PREPARED_MOST:
                kept.clear()
        scalars = tuple(map(arguments.__getitem__, self._scalars))
        sized = self._sized.get(scalars)
        if sized is None:
            named = {self.code.arguments[i].name: value for i, value in zip(self._scalars, scalars)}
            grid = self.grid(named)
            sized = self._sized[scalars] = Sized(named, grid) if 0 in grid else self._size(named, grid)
        if 0 in sized.grid:
            return NOTHING
        if self._workspaces is not None:
            size = self.code.workspace_for(sized.named)
            arguments = *arguments, self._workspaces.address(size, stream, capture)
        return self._call(sized, stream, arguments)

    def _signature(self) -> str:
        return ", ".join(f"{a.name}: {a.kind}" for a in self.code.arguments[: self._passed])


class Frame:
    """Memory that holds a launch's arguments and pointers to each, with what the maker puts in front, packed at once.

    before: struct's letters of that; more: how many pointers follow those to the arguments"""

    def __init__(self, before: str, kinds: str, more: int = 0):
        start = "@" + before + "0P"
        count = len(kinds) + more
        self._pack = struct.Struct(f"{start}{count}P0q{kinds}")
        self.pointers = struct.calcsize(start)
        values = f"{start}{count}P0q"
        ends = [struct.calcsize(values + kinds[: i + 1]) for i in range(len(kinds))]
        self._offsets = [end - struct.calcsize(kind) for end, kind in zip(ends, kinds)]
        self._memory = ctypes.c_char * max(1, self._pack.size)

    def __call__(self) -> tuple[int, Any]:
        """(address, memory) of a new one."""
        memory = self._memory()
        return ctypes.addressof(memory), memory

    def fill(self, base: int, memory: Any, before: tuple, arguments: tuple, more: Sequence[int] = ()) -> None:
        self._pack.pack_into(memory, 0, *before, *[base + x for x in self._offsets], *more, *arguments)


def load_function(kernel: GpuKernel, load: Any, get: str, then: Callable[[], None] | None = None) -> None:
    """`load()` fills kernel._module; then `get` asks for the entry, and `then` may set it up. What was loaded is
    unloaded if one of these fails."""
    load()
    entry, doing = kernel.code.entry, f"loading {kernel.code.entry}"
    try:
        kernel.driver.call(get, ctypes.byref(kernel.function), kernel._module, entry.encode(), doing=doing)
        if then is not None:
            then()
    except DriverError:
        module, kernel._module = kernel._module, ctypes.c_void_p()
        kernel.driver.shared_call("unload", module, doing=doing)
        raise
