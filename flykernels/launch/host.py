"""Runs x86 code objects in this process: no MLIR, no compiler, no linker.

    kernel = load(code)                       # a CodeObject, once
    kernel(a, b, c, m, *strides)              # pointers and scalars as `code.arguments` lists them
    call = kernel.bind(*strides)              # the trailing scalars fixed: call(a, b, c, m)
    call = kernel.launcher()                  # the fastest: call(a, b, c, m, *strides) without ctypes

Threads are libgomp's: those of the library that torch has loaded, so there is one pool. The GIL is released during a
call, and no two Python threads share workspace, so that several may run one kernel at a time.
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
from .outside import DOOR, OUTSIDE_SYMBOL, POOL

METH_FASTCALL = 0x0080  # CPython's Include/methodobject.h
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
            return {name: _address(loaded, name) for name in (*POOL, "omp_get_max_threads")}
        except (OSError, AttributeError):
            continue
    return {}


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


@cache
def _outside() -> bytes:
    """The table of addresses of POOL and DOOR; 0 for what this process does not have."""
    pool, libc = thread_pool(), ctypes.CDLL(None)

    def known(name: str) -> int:
        if name.startswith(("GOMP", "omp")):
            return pool.get(name, 0)
        return _address(ctypes.pythonapi if name.startswith("Py") else libc, name)

    return struct.pack(f"<{len(POOL) + len(DOOR)}Q", *map(known, (*POOL, *DOOR)))


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


class _Workspace(threading.local):
    """One buffer a Python thread, as large as the largest kernel it has run needed."""

    def __init__(self):
        self.bytes, self.pointer = 0, 0
        self.buffer = None

    def grow(self, size: int) -> int:
        self.buffer = ctypes.create_string_buffer(size + LINE)
        self.pointer = -(-ctypes.addressof(self.buffer) // LINE) * LINE
        self.bytes = size
        return self.pointer


_workspace = _Workspace()


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef (Include/methodobject.h)."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_free = ctypes.CDLL(None).free
_free.restype, _free.argtypes = None, (ctypes.c_void_p,)


class _Frame(int):
    """Address of the two words that the door keeps; a built-in function holds on to it, and so to all it needs."""

    keeps: tuple

    def __del__(self, free=_free):  # an argument: at exit the module's names are gone before the last frame
        _, words, _ = self.keeps
        free(words[0])  # the spare workspace


class HostKernel:
    """A loaded kernel.

    code     what it was loaded from
    call     the entry as a ctypes function: arguments as in `code.arguments`, then workspace (address or None), then
             the most threads to use. No checks: the caller answers for every address
    threads  used where the caller says nothing; 1 where this process has no OpenMP library
    """

    def __init__(self, code: CodeObject, image: Image, threads: int):
        self.code, self.image, self.threads = code, image, threads
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

    def launcher(self, threads: int = 0) -> Callable[..., int | None]:
        """A built-in function of ints, one for each argument: the fastest way in. Keeps the code alive.

        Checks count and type (TypeError), not addresses.

        threads: the most to use; 0: as many as OpenMP (so torch.get_num_threads()) says at each call. Each Python
        thread in it has a workspace of its own. Without OpenMP, or with floats among the arguments, it is `bind()`."""
        door = self.image.symbols.get(self.code.entry.replace("_mlir_", "python_", 1))
        if not door or not thread_pool():
            return self.bind(threads=threads or None)
        words = (ctypes.c_uint64 * 2)(0, threads)
        method = _MethodDef(self.code.entry.encode(), door, METH_FASTCALL, None)
        frame = _Frame(ctypes.addressof(words))
        frame.keeps = (self.call, words, method)
        new = ctypes.pythonapi.PyCFunction_NewEx
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
        return new(ctypes.addressof(method), frame, None)

    def bind(self, *trailing, threads: int | None = None) -> Callable[..., None]:
        """A function of the leading arguments: the last len(trailing) ones are fixed. Checks no addresses.

        TypeError for too many arguments."""
        if len(trailing) > len(self.code.arguments):
            raise TypeError(f"{self.code.entry} takes {len(self.code.arguments)} arguments, not {len(trailing)}")
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

    def _threads(self, wanted: int | None) -> int:
        return min(self.threads, max(1, wanted)) if wanted is not None and not thread_pool() else wanted or self.threads


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
        image.write(OUTSIDE_SYMBOL, _outside())
        if code.entry not in image.symbols:
            raise ElfError(f"the object has no symbol {code.entry!r}")
        image.seal()
    except (ElfError, OSError) as e:
        raise LaunchError(f"{code.entry} cannot be loaded: {e}") from e
    return HostKernel(code, image, default_threads() if pool else 1)
