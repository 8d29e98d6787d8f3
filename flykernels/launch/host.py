"""Runs x86 code objects in this process: no MLIR, no compiler, no linker.

    kernel = load(code)                       # a CodeObject, once
    kernel(a, b, c, m, *strides)              # pointers and scalars as `code.arguments` lists them
    call = kernel.bind(*strides)              # the trailing scalars fixed: call(a, b, c, m)
    call = kernel.bind(m, *strides, keep_gil=True)    # for a call of some microseconds: call(a, b, c)

Threads are libgomp's: those of the library that torch has loaded, so there is one pool. The GIL is released during a
call, and workspace belongs to the calling Python thread, so that several may run one kernel at a time; not so with
`keep_gil`, which goes without ctypes and takes a fraction of its time.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

from .. import cpu
from ..codeobject import CodeObject
from .elf import ElfError, Image

POOL = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")  # in the order of the object's table
POOL_SYMBOL, PYTHON_SYMBOL = "flykernels_pool", "flykernels_python"
PYTHON = ("PyLong_AsLongLong", "PyErr_Occurred", "PyErr_BadArgument", "Py_IncRef")  # then None itself
KINDS = {"pointer": ctypes.c_void_p, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
C_LIBRARY = ("memcpy", "memset", "memmove")  # what LLVM may call of its own accord
LINE = 64  # bytes: alignment of workspace


class LaunchError(RuntimeError):
    """A code object that cannot run here; says what it needs and what is missing."""


@cache
def thread_pool() -> dict[str, int]:
    """Addresses of POOL's functions: torch's OpenMP if torch is loaded, else the system's; empty if there is none."""
    for library in _openmp_libraries():
        try:
            loaded = ctypes.CDLL(library)
            return {name: ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in POOL}
        except (OSError, AttributeError):
            continue
    return {}


def _openmp_libraries():
    """Where to look, best first. A lookup through libtorch_cpu finds the very library that torch itself calls."""
    torch = sys.modules.get("torch")
    file = getattr(torch, "__file__", None)
    if file:
        yield str(Path(file).parent / "lib" / "libtorch_cpu.so")
    yield from ("libgomp.so.1", "libiomp5.so", "libomp.so.5")


def default_threads() -> int:
    """As many as torch uses, or the cores this process may run on."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else len(os.sched_getaffinity(0))


class _Workspace:
    """A buffer for the hungriest kernel so far. An outgrown one lives while someone holds it."""

    def __init__(self):
        self.bytes, self.pointer, self.buffer = 0, 0, None

    def grow(self, size: int) -> int:
        self.buffer = ctypes.create_string_buffer(size + LINE)
        self.pointer = -(-ctypes.addressof(self.buffer) // LINE) * LINE
        self.bytes = size
        return self.pointer


class _ThreadsWorkspace(threading.local, _Workspace):
    """One for each Python thread."""


_workspace, _under_gil = _ThreadsWorkspace(), _Workspace()  # the second serves calls that keep the GIL, one at a time


class _Method(ctypes.Structure):
    """CPython's PyMethodDef, of its stable ABI."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


METH_FASTCALL = 0x80
_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.argtypes = (ctypes.POINTER(_Method), ctypes.py_object, ctypes.c_void_p)
_new_function.restype = ctypes.py_object


class _Bound(int):
    """Address of a block of scalars; what a bound function holds on to, and through it all that it needs."""

    keeps: tuple


class HostKernel:
    """A loaded kernel.

    code     what it was loaded from
    call     the entry as a ctypes function: arguments as in `code.arguments`, then workspace (address or None), then
             the most threads to use. No checks: the caller answers for every address
    threads  used where the caller says nothing
    pooled   whether there is an OpenMP library; without one all calls are serial
    """

    def __init__(self, code: CodeObject, image: Image, pooled: bool):
        self.code, self.image, self.pooled = code, image, pooled
        self.threads = default_threads() if pooled else 1
        self.workspace_bytes = code.workspace_for({})  # for each thread
        kinds = [KINDS[a.kind] for a in code.arguments]
        self.call = ctypes.CFUNCTYPE(None, *kinds, ctypes.c_void_p, ctypes.c_int32)(image.symbols[code.entry])
        self.call.image = image  # type: ignore[attr-defined]  # the code lives as long as anyone can call it

    def __call__(self, *arguments, threads: int | None = None) -> None:
        """Runs the kernel on `arguments`: addresses (ints) and numbers, as `code.arguments` lists them."""
        if len(arguments) != len(self.code.arguments):
            raise TypeError(f"{self.code.entry} takes {len(self.code.arguments)} arguments, not {len(arguments)}")
        threads = self._threads(threads)
        self.call(*arguments, self.workspace(threads), threads)

    def workspace(self, threads: int) -> int | None:
        """Address of this Python thread's workspace, large enough for as many threads; None if none is needed."""
        size = self.workspace_bytes * threads
        if not size:
            return None
        return _workspace.pointer if _workspace.bytes >= size else _workspace.grow(size)

    def bind(self, *trailing, threads: int | None = None, keep_gil: bool = False) -> Callable[..., None]:
        """A function of the leading arguments: the last len(trailing) ones are fixed. Checks no addresses.

        keep_gil: other Python threads wait during the call; for calls far below sys.getswitchinterval(). The function
        then takes all pointers and, if it is an i64 and not fixed, the first scalar. Where that is impossible (scalars
        before pointers, a free-threaded Python) the function is an ordinary one. TypeError for too many arguments."""
        if len(trailing) > len(self.code.arguments):
            raise TypeError(f"{self.code.entry} takes {len(self.code.arguments)} arguments, not {len(trailing)}")
        if keep_gil:
            quick = self._quick(trailing, self._threads(threads))
            if quick is not None:
                return quick
        threads, call, space = self._threads(threads), self.call, _workspace
        size = self.workspace_bytes * threads
        fixed = (
            tuple(KINDS[a.kind](v) for a, v in zip(self.code.arguments[-len(trailing) :], trailing)) if trailing else ()
        )
        if not size:
            last = (*fixed, None, ctypes.c_int32(threads))
            return lambda *leading: call(*leading, *last)

        def bound(*leading):
            call(*leading, *fixed, space.pointer if space.bytes >= size else space.grow(size), threads)

        return bound

    def _quick(self, trailing, threads: int) -> Callable[..., None] | None:
        """The object's own Python function, bound to a block of its scalars; None where it does not fit."""
        kinds = [a.kind for a in self.code.arguments]
        pointers = kinds.count("pointer")
        missing = len(kinds) - pointers - len(trailing)
        fits = kinds[:pointers] == ["pointer"] * pointers and (
            missing == 0 or (missing == 1 and kinds[pointers] == "i64")
        )
        address = self.image.symbols.get(self.code.entry.replace("_mlir_", "_python_", 1))
        if not fits or address is None or not getattr(sys, "_is_gil_enabled", lambda: True)():
            return None
        formats = {"i32": "<i4x", "i64": "<q", "f32": "<f4x"}
        slots = [struct.pack(formats[k], v) for k, v in zip(kinds[pointers:], (0,) * missing + trailing, strict=True)]
        size = self.workspace_bytes * threads
        space = _under_gil.pointer if _under_gil.bytes >= size else _under_gil.grow(size)
        block = ctypes.create_string_buffer(b"".join((*slots, struct.pack("<Qi4x", space, threads))))
        method = _Method(self.code.entry.encode(), address, METH_FASTCALL, None)
        bound = _Bound(ctypes.addressof(block))
        bound.keeps = (self.call, block, _under_gil.buffer, method)
        return _new_function(ctypes.byref(method), bound, None)

    def _threads(self, wanted: int | None) -> int:
        return self.threads if wanted is None or not self.pooled else max(1, wanted)


def load(code: CodeObject) -> HostKernel:
    """Loads an x86 code object. LaunchError if it is not one, or if this machine lacks an instruction set it needs."""
    if code.target != "x86":
        raise LaunchError(f"{code.entry} is code for {code.target}, and this is the loader for x86")
    missing = sorted(set(code.features.split(",")) - {""} - cpu.features())
    if missing:
        raise LaunchError(f"{code.entry} needs a processor with {', '.join(missing)}, which this one has not")
    unknown = sorted({a.kind for a in code.arguments} - set(KINDS))
    if unknown:
        raise LaunchError(f"{code.entry} has arguments of kind {', '.join(unknown)}; known: {', '.join(KINDS)}")
    libc = ctypes.CDLL(None)
    address = lambda name: ctypes.cast(getattr(libc, name), ctypes.c_void_p).value if name in C_LIBRARY else None
    pool = thread_pool()
    try:
        image = Image(code.binary, address)
        image.write(POOL_SYMBOL, struct.pack(f"<{len(POOL)}Q", *(pool.get(name, 0) for name in POOL)))
        python = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in PYTHON]
        image.write(PYTHON_SYMBOL, struct.pack(f"<{len(PYTHON) + 1}Q", *python, id(None)))
        if code.entry not in image.symbols:
            raise ElfError(f"the object has no symbol {code.entry!r}")
        image.seal()
    except (ElfError, OSError) as e:
        raise LaunchError(f"{code.entry} cannot be loaded: {e}") from e
    return HostKernel(code, image, bool(pool))
