"""Puts x86 top-k kernels behind aten::topk and aten::topk.values for CPU tensors, without Python in a call.

    door = TopkDoor(code, resolve)      # the object that targets/x86_topk_door.py builds
    door.open()                         # from now on the dispatcher calls it; close() puts ATen's kernels back
    door.put(width, k, code, OURS, kernel=launch.host.load(...), parts=..., ...)

`resolve(width, k, code, rows)` is called, with the GIL, for what no slot knows: it puts a slot, or returns a message that
the user's call is to fail with. The library object is PyTorch's own, made and deleted through its C interface.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ..codeobject import CodeObject
from .elf import ElfError, Image
from .host import C_LIBRARY, HostKernel, LaunchError, thread_pool
from .torch_door import (
    EMPTY,
    LIBC,
    OUTSIDE,
    PROBES,
    RAISE,
    RUNTIME,
    SHIM,
    SLOT_WORDS,
    TABLE,
    TOPK,
    TOPK_OUT,
    Slot,
    first_probe,
)

log = logging.getLogger(__name__)

LIBRARY = ("aoti_torch_library_init_impl", "aoti_torch_library_impl", "aoti_torch_delete_library_object")
OPERATORS = {"topk": "topk", "topk.values": "topk_values"}  # ATen's name: the object's entry
SLOTS = 1 << 12
WORD = 8


def libtorch() -> ctypes.CDLL:
    """The library that torch's CPU side is in. LaunchError if it lacks what the door needs."""
    import torch

    file = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(file))
        for name in (*SHIM, *LIBRARY, RAISE, TOPK, TOPK_OUT):
            getattr(library, name)
    except (OSError, AttributeError) as e:
        raise LaunchError(f"torch {torch.__version__} has no door for top-k kernels: {e}") from e
    return library


@cache
def _warn_of_overriding() -> None:
    """PyTorch warns once a process, of the first override of any kernel, on standard error if no Python called it. So
    let it be one that Python made, where the warning can be kept quiet."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        atens = torch.library.get_kernel("aten::topk", "CPU").call_boxed  # another thread may call it meanwhile
        library = torch.library.Library("aten", "IMPL")
        library.impl("topk", atens, "CPU", with_keyset=True)
        library._destroy()


class TopkDoor:
    """See the module. Opened and closed by one thread at a time; slots may be put by any."""

    def __init__(self, code: CodeObject, resolve: Callable[[int, int, int, int], str | None]):
        self._library = libtorch()
        self._resolve, self._lock = resolve, threading.Lock()
        self._messages: dict[str, Any] = {}
        self._keep: list[Any] = []  # kernels and outgrown tables: a call may be under way in them
        self._handle = ctypes.c_void_p()
        self._callback = ctypes.CFUNCTYPE(ctypes.c_void_p, *[ctypes.c_int64] * 4)(self._ask)
        self._table_address = ctypes.c_uint64()
        self._new_table(SLOTS)
        self._load(code)

    # -- the object
    def _load(self, code: CodeObject) -> None:
        pool, libc = thread_pool(), ctypes.CDLL(None)
        if "omp_get_max_threads" not in pool:
            raise LaunchError("the door for top-k kernels needs the OpenMP library of torch, and found none")

        def address(name: str) -> int:
            if name == "resolve":
                return ctypes.cast(self._callback, ctypes.c_void_p).value or 0
            if name == "slots":
                return ctypes.addressof(self._table_address)
            if name == "omp_get_max_threads":
                return pool[name]
            return ctypes.cast(getattr(libc if name in LIBC else self._library, name), ctypes.c_void_p).value or 0

        def outside(name: str) -> int | None:
            if name in C_LIBRARY:
                return ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
            library = RUNTIME.get(name)
            return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value if library else None

        try:
            self._image = Image(code.binary, outside)
            self._image.write(TABLE, struct.pack(f"<{len(OUTSIDE)}Q", *map(address, OUTSIDE)))
            self._image.seal()
            self._entries = {op: self._image.symbols[entry] for op, entry in OPERATORS.items()}
            if not self._image.unwind:
                raise ElfError("the object has no unwind information")
        except (ElfError, OSError, KeyError) as e:
            raise LaunchError(f"the door for top-k kernels cannot be loaded: {e}") from e
        # Exceptions of ATen pass through the object's frames: the unwinder must know them, for good.
        register = ctypes.CDLL(RUNTIME["_Unwind_Resume"])["__register_frame"]
        register.argtypes, register.restype = (ctypes.c_void_p,), None
        register(self._image.unwind)

    def _ask(self, width: int, k: int, code: int, rows: int) -> int | None:
        try:
            said = self._resolve(width, k, code, rows)
        except Exception:
            log.exception("no kernel for top %d of %d elements: ATen serves it", k, width)
            said = None
        if said is None:
            return None
        text = self._messages.setdefault(said, ctypes.create_string_buffer(said.encode()))
        return ctypes.addressof(text)

    # -- registration
    @property
    def is_open(self) -> bool:
        return bool(self._handle)

    def open(self) -> None:
        """Registers the entries for CPU tensors. LaunchError if PyTorch refuses."""
        if self._handle:
            return
        _warn_of_overriding()
        where, handle = __file__.encode(), ctypes.c_void_p()
        if self._library.aoti_torch_library_init_impl(b"aten", b"CPU", where, 0, ctypes.byref(handle)):
            raise LaunchError("PyTorch made no library object for aten on the CPU")
        for op, entry in self._entries.items():
            if self._library.aoti_torch_library_impl(handle, op.encode(), ctypes.c_void_p(entry)):
                self._library.aoti_torch_delete_library_object(handle)
                raise LaunchError(f"PyTorch refused a kernel for aten::{op} on the CPU")
        self._handle = handle

    def close(self) -> None:
        """Puts ATen's kernels back. Slots stay as they are."""
        if self._handle:
            handle, self._handle = self._handle, ctypes.c_void_p()
            self._library.aoti_torch_delete_library_object(handle)

    # -- slots
    def put(
        self, width: int, k: int, code: int, state: int, kernel: HostKernel | None = None, threads: int = 1,
        parts: int = 0, row_workspace: int = 0,
    ) -> None:  # fmt: skip
        """Who serves calls of this width, k and code (`torch_door.code_of`): ATEN or OURS; a later word replaces it.

        A slot that a call may be reading keeps its kernel: another kernel for the same call gets a table of its own."""
        with self._lock:
            entry = 0
            if kernel is not None:
                self._keep.append(kernel)
                entry = ctypes.cast(kernel.call, ctypes.c_void_p).value or 0
            private = kernel.workspace_bytes if kernel is not None else 0
            words = [width, k, code, entry, threads, parts, row_workspace, private]
            at = self._find(width, k, code)
            known = at is not None and self._table[at] != EMPTY
            if known and (state != Slot.STATE and self._same(at, words) or not entry):
                self._table[at] = state
                return
            if at is None or known:
                self._new_table(2 * self._slots if at is None else self._slots, without=(width, k, code))
                at = self._find(width, k, code)
            if at is None:
                raise LaunchError("no free slot in a new table")
            self._table[at + Slot.WIDTH : at + Slot.WIDTH + len(words)] = words
            self._table[at] = state

    def forget(self) -> None:
        """Empties the table: every call is asked for again."""
        with self._lock:
            self._new_table(SLOTS)

    def _same(self, at: int, words: list[int]) -> bool:
        return list(self._table[at + Slot.WIDTH : at + Slot.WIDTH + len(words)]) == words

    def _find(self, width: int, k: int, code: int) -> int | None:
        """The word where the call's slot, or a free one, begins; None if there is none."""
        start = first_probe(width, k, code)
        for n in range(PROBES):
            at = (((start + n) & (self._slots - 1)) + 1) * SLOT_WORDS
            key = tuple(self._table[at + Slot.WIDTH : at + Slot.WIDTH + 3])
            if self._table[at] == EMPTY or key == (width, k, code):
                return at
        return None

    def _new_table(self, slots: int, without: tuple | None = None) -> None:
        """A table of so many slots with what the old one holds, but for one; then calls look there."""
        old, self._slots = getattr(self, "_table", None), slots
        self._table = (ctypes.c_int64 * ((slots + 1) * SLOT_WORDS))()
        self._table[0] = slots - 1
        if without is not None and old is not None:
            for at in range(SLOT_WORDS, len(old), SLOT_WORDS):
                key = tuple(old[at + Slot.WIDTH : at + Slot.WIDTH + 3])
                to = self._find(*key) if old[at] != EMPTY and key != without else None
                if to is not None:
                    self._table[to : to + SLOT_WORDS] = old[at : at + SLOT_WORDS]
        self._keep.append(self._table)
        self._table_address.value = ctypes.addressof(self._table)
