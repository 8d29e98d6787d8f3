"""Puts machine code behind operators of PyTorch, without Python in a call: doors (targets/x86_door.py) and their
tables.

    door = TopkDoor(code, resolve)      # the object that targets/x86_topk_door.py builds
    door.open()                         # from now on the dispatcher calls it; close() puts ATen's kernels back
    door.put(width, k, code, OURS, kernel=launch.host.load(...), parts=..., ...)

`resolve(width, k, code, rows)` is called, with the GIL, for what no slot knows: it puts a slot, or returns a message
that the user's call is to fail with. The library object is PyTorch's own, made and deleted through its C interface.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from ..codeobject import CodeObject
from ..forks import anew_in_children
from . import torch_door
from .elf import ElfError, Image
from .host import C_LIBRARY, HostKernel, LaunchError, thread_pool
from .torch_door import EMPTY, LIBC, OURS, OUTSIDE, PROBES, RAISE, RUNTIME, SHIM, SLOT_WORDS, TABLE, Slot, first_probe

log = logging.getLogger(__name__)

HERE = __file__.encode()  # PyTorch keeps the pointer, and names the place in its errors
LIBRARY = ("aoti_torch_library_init_impl", "aoti_torch_library_impl", "aoti_torch_delete_library_object")
SLOTS = 1 << 12
_registered: list[Image] = []  # with the unwinder, which would look into memory that is gone


def libtorch(name: str = "libtorch_cpu.so") -> ctypes.CDLL:
    """One of torch's libraries. LaunchError if there is none."""
    import torch

    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    except OSError as e:
        raise LaunchError(f"torch {torch.__version__} has no {name}: {e}") from e


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


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


class Door:
    """Entries of one object behind operators of one dispatch key, and the table of slots that they look calls up in.

    Opened and closed by one thread at a time; slots may be put by any.

    operators  ATen's name: the object's entry
    autograd   the same, for the autograd key above
    lasting    the same as `operators`, of what ATen has no kernels for: graphs recorded while the door was open call
               them later, so that they stay when it is closed
    needs      functions of libtorch_cpu that the object calls"""

    operators: ClassVar[Mapping[str, str]]
    autograd: ClassVar[Mapping[str, str]] = {}
    lasting: ClassVar[Mapping[str, str]] = {}
    needs: ClassVar[tuple[str, ...]] = (*SHIM, RAISE)

    def __init__(
        self, code: CodeObject, resolve: Callable[[int, int, int, int], str | None], key: str = "CPU",
        more: Mapping[str, int] | None = None,
    ):  # fmt: skip
        """key: the dispatch key. more: addresses by their names in `torch_door.OUTSIDE`."""
        self.key = key
        self._library = libtorch()
        self._resolve = resolve
        self._lock: threading.Lock
        anew_in_children(self, _lock=threading.Lock)
        self._messages: dict[str, Any] = {}
        self._words: dict[tuple[int, ...], Any] = {}
        self._keep: list[Any] = []  # kernels and outgrown tables: a call may be under way in them
        self._handles: list[ctypes.c_void_p] = []
        self._lasts = False
        self.opened: Callable[[bool], None] = lambda on: None  # called when it has been opened or closed
        self._callback = ctypes.CFUNCTYPE(ctypes.c_void_p, *[ctypes.c_int64] * 4)(self._ask)
        self._table_address = ctypes.c_uint64()
        self._new_table(SLOTS)
        self._load(code, dict(more or {}))

    # -- the object
    def _addresses(self) -> dict[str, int]:
        libc, found = ctypes.CDLL(None), {}
        try:
            for name in (*self.needs, *LIBRARY):
                found[name] = address_of(getattr(self._library, name))
        except AttributeError as e:
            raise LaunchError(f"this torch lacks what the door needs: {e}") from e
        found |= {name: address_of(getattr(libc, name)) for name in LIBC}
        found["resolve"], found["slots"] = address_of(self._callback), ctypes.addressof(self._table_address)
        if "omp_get_max_threads" in thread_pool():
            found["omp_get_max_threads"] = thread_pool()["omp_get_max_threads"]
        return found

    def _load(self, code: CodeObject, more: dict[str, int]) -> None:
        libc, known = ctypes.CDLL(None), {**self._addresses(), **more}

        def outside(name: str) -> int | None:
            if name in C_LIBRARY:
                return address_of(getattr(libc, name))
            library = RUNTIME.get(name)
            return address_of(getattr(ctypes.CDLL(library), name)) if library else None

        try:
            self._image = Image(code.binary, outside)
            self._image.write(TABLE, struct.pack(f"<{len(OUTSIDE)}Q", *(known.get(name, 0) for name in OUTSIDE)))
            self._image.seal()
            entries = lambda operators: {op: self._image.symbols[entry] for op, entry in operators.items()}
            self._entries = [(f"Autograd{self.key}", entries(self.autograd)), (self.key, entries(self.operators))]
            self._lasting = entries(self.lasting)
            if not self._image.unwind:
                raise ElfError("the object has no unwind information")
        except (ElfError, OSError, KeyError) as e:
            raise LaunchError(f"the door for {', '.join(self.operators)} cannot be loaded: {e}") from e
        # Exceptions of ATen pass through the object's frames: the unwinder must know them, for good.
        register = ctypes.CDLL(RUNTIME["_Unwind_Resume"])["__register_frame"]
        register.argtypes, register.restype = (ctypes.c_void_p,), None
        register(self._image.unwind)
        _registered.append(self._image)

    def _ask(self, width: int, k: int, code: int, rows: int) -> int | None:
        try:
            said = self._resolve(width, k, code, rows)
        except Exception:
            log.exception("%s of rows of %d: not decided; ATen serves it", ", ".join(self.operators), width)
            said = None
        if said is None:
            return None
        text = self._messages.setdefault(said, ctypes.create_string_buffer(said.encode()))
        return ctypes.addressof(text)

    # -- registration
    @property
    def is_open(self) -> bool:
        return bool(self._handles)

    def open(self) -> None:
        """Registers the entries; the autograd key's first and, in `close`, last: a kernel below without one above would
        lose gradients. LaunchError if PyTorch refuses."""
        if self._handles:
            return
        _warn_of_overriding()
        try:
            for key, entries in self._entries:
                if entries:
                    self._handles.append(self._library_of(key, entries))
            self.opened(True)
            if self._lasting and not self._lasts:
                self._library_of(self.key, self._lasting)
                self._lasts = True
        except Exception:
            self.close()
            raise

    def _library_of(self, key: str, entries: Mapping[str, int]) -> ctypes.c_void_p:
        """A library object of PyTorch's with these kernels."""
        handle = ctypes.c_void_p()
        if self._library.aoti_torch_library_init_impl(b"aten", key.encode(), HERE, 0, ctypes.byref(handle)):
            raise LaunchError(f"PyTorch made no library object for aten and {key}")
        for op, entry in entries.items():
            if self._library.aoti_torch_library_impl(handle, op.encode(), ctypes.c_void_p(entry)):
                self._library.aoti_torch_delete_library_object(handle)
                raise LaunchError(f"PyTorch refused a kernel for aten::{op} and {key}")
        return handle

    def close(self) -> None:
        """Puts ATen's kernels back, where it has any. Slots stay as they are."""
        if self._handles:
            self.opened(False)
        while self._handles:
            self._library.aoti_torch_delete_library_object(self._handles.pop())

    # -- slots
    def put_words(self, key: tuple[int, int, int], state: int, words: tuple[int, ...] = (), keep: Any = None) -> None:
        """Who serves calls of this key, the slot's first three words behind `state`: ATEN, or OURS with these words."""
        with self._lock:
            if keep is not None:
                self._keep.append(keep)
            at = self._find(*key)
            while at is None:
                self._new_table(2 * self._slots, copy=True)
                at = self._find(*key)
            if words:
                held = self._words.get(words) or self._words.setdefault(words, (ctypes.c_int64 * len(words))(*words))
                self._table[at + Slot.WORDS] = ctypes.addressof(held)
            if self._table[at] == EMPTY:
                self._table[at + Slot.WIDTH : at + Slot.WIDTH + len(key)] = [*key]
            self._table[at] = state

    def forget(self) -> None:
        """Empties the table: every call is asked for again."""
        with self._lock:
            self._new_table(SLOTS)

    def _find(self, width: int, k: int, code: int) -> int | None:
        """The word where the call's slot, or a free one, begins; None if there is none."""
        start = first_probe(width, k, code)
        for n in range(PROBES):
            at = (((start + n) & (self._slots - 1)) + 1) * SLOT_WORDS
            key = tuple(self._table[at + Slot.WIDTH : at + Slot.WIDTH + 3])
            if self._table[at] == EMPTY or key == (width, k, code):
                return at
        return None

    def _new_table(self, slots: int, copy: bool = False) -> None:
        """A table of so many slots, perhaps with what the old one holds; then calls look there."""
        old: Any = getattr(self, "_table", None)
        self._slots = slots
        self._table = (ctypes.c_int64 * ((slots + 1) * SLOT_WORDS))()
        self._table[0] = slots - 1
        for at in range(SLOT_WORDS, len(old), SLOT_WORDS) if copy and old is not None else ():
            to = self._find(*old[at + Slot.WIDTH : at + Slot.WIDTH + 3]) if old[at] != EMPTY else None
            if to is not None:
                self._table[to : to + SLOT_WORDS] = old[at : at + SLOT_WORDS]
        self._keep.append(self._table)
        self._table_address.value = ctypes.addressof(self._table)


class TopkDoor(Door):
    """aten::topk and aten::topk.values on the CPU."""

    operators: ClassVar = {"topk": "topk", "topk.values": "topk_values"}
    needs = (*Door.needs, torch_door.TOPK, torch_door.TOPK_OUT)

    def put(
        self, width: int, k: int, code: int, state: int, kernel: HostKernel | None = None, threads: int = 1,
        parts: int = 0, row_workspace: int = 0,
    ) -> None:  # fmt: skip
        """Who serves calls of this width, k and code (`torch_door.code_of`)."""
        words: tuple[int, ...] = ()
        if kernel is not None:
            words = (address_of(kernel.call), threads, parts, row_workspace, kernel.workspace_bytes)
        self.put_words((width, k, code), state, words, kernel)


class GpuTopkDoor(Door):
    """aten::topk and aten::topk.values below autograd, on a GPU. What a slot leaves to Python is launched by the
    operators `flykernels::_topk` and `_topk_values`, which take the same arguments. (A stand-in for a GPU, in tests, is
    the CPU with a launch of its own.)"""

    operators: ClassVar = {"topk": "topk", "topk.values": "topk_values"}

    def __init__(
        self, code: CodeObject, resolve: Callable, key: str, launch: int, stream: int, original: int,
        original_out: int, more: Mapping[str, int] | None = None,
    ):  # fmt: skip
        """Addresses: of cuLaunchKernel or its like, of `torch_door.STREAM`, of ATen's functions; and, for tests, of
        others by their names in `torch_door.OUTSIDE`."""
        given = {"launch": launch, torch_door.STREAM: stream, torch_door.TOPK: original}
        super().__init__(code, resolve, key, given | {torch_door.TOPK_OUT: original_out} | dict(more or {}))

    def put(
        self, width: int, k: int, code: int, state: int, function: int = 0, workgroup: int = 0, rows: int = 1,
        shared: int = 0, keep: Any = None,
    ) -> None:  # fmt: skip
        """Who serves calls of this width, k and code (`torch_door.code_of`, with the device's number for threads);
        OURS without a function: Python's operators."""
        words = (function, workgroup, rows, shared) if state == OURS else ()
        self.put_words((width, k, code), state, words, keep)


class RmsNormDoor(Door):
    """aten::_fused_rms_norm and its backward below autograd, on a GPU. (A stand-in for one, in tests, is the CPU with
    a launch of its own.)"""

    operators: ClassVar = {"_fused_rms_norm": "rms_norm", "_fused_rms_norm_backward": "rms_norm_backward"}

    def __init__(
        self, code: CodeObject, resolve: Callable, key: str, launch: int, stream: int, original: int,
        original_backward: int, more: Mapping[str, int] | None = None,
    ):  # fmt: skip
        """Addresses: of cuLaunchKernel or its like, of `torch_door.STREAM`, of ATen's functions; and, for tests, of
        others by their names in `torch_door.OUTSIDE`."""
        given = {"launch": launch, torch_door.STREAM: stream, "rms_norm": original}
        super().__init__(code, resolve, key, given | {"rms_norm_backward": original_backward} | dict(more or {}))

    def put(
        self, width: int, rows: int, code: int, state: int, function: int = 0, workgroup: int = 0, tile: int = 1,
        parts_most: int = 0, after: Sequence[tuple[int, int, int]] = (), part_bytes: int = 0, keep: Any = None,
    ) -> None:  # fmt: skip
        """Who serves calls of this width, rows (as the slot has them) and code (`torch_door.rms_code_of`).

        after: handle, threads and workgroups of what is launched after it, at most twice; see `RmsWords.SECOND`."""
        more = [word for launch in (*after, *((0, 0, 0),) * (2 - len(after))) for word in launch]
        words = (function, workgroup, tile, parts_most, *more, part_bytes) if state == OURS else ()
        self.put_words((width, rows, code), state, words, keep)


class HostRmsNormDoor(Door):
    """aten::rms_norm, aten::_fused_rms_norm and its backward on the CPU."""

    operators: ClassVar = {"rms_norm": "rms_norm_composed", "_fused_rms_norm": "rms_norm"}
    lasting: ClassVar = {"_fused_rms_norm_backward": "rms_norm_backward"}
    autograd: ClassVar = {"rms_norm": "rms_norm_autograd"}
    needs = (*Door.needs, *torch_door.ROUTER)

    def put(
        self, width: int, rows: int, code: int, state: int, kernels: Sequence[HostKernel] = (), work: int = 1,
        part_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Who serves calls of this width, rows (as the slot has them) and code (`torch_door.rms_code_of`).

        kernels: one, or two called in turn. work: elements that are worth a part of their own."""
        first, second = (*(address_of(k.call) for k in kernels), 0, 0)[:2]
        words = (first, work, second, part_bytes) if state == OURS else ()
        self.put_words((width, rows, code), state, words, tuple(kernels))
