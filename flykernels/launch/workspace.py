"""Workspace of GPU kernels: zeroed device memory that a kernel leaves zeroed where it counts, and that nobody else has.

Launches on one stream follow one another and share a piece. A graph that is being captured may later run on any
stream, beside anything, so each gets pieces of its own, one a stream; when the last copy of the graph is gone they
serve another. The memory is the driver's, not torch's: torch would take it from the graph's own pool, and reuse it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .driver import HANDLE, Driver

RELAXED = 2  # a thread's capture mode in which calls that allocate are allowed (CU_STREAM_CAPTURE_MODE_RELAXED)
CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
NON_BLOCKING = 1  # a stream that does not wait for the legacy one (CU_STREAM_NON_BLOCKING)
MOVE = 1  # the graph takes over the caller's reference (CU_GRAPH_USER_OBJECT_MOVE)
NO_SYNC = 1  # the one flag that user objects have, and must have (CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
SEMAPHORE_BYTES = 32  # sem_t of glibc and musl on 64-bit systems


@contextlib.contextmanager
def relaxed(driver: Driver) -> Iterator[None]:
    """Within it this thread may load and allocate although a stream is being captured; nothing of it is captured."""
    mode = ctypes.c_int(RELAXED)
    exchange = lambda: driver.shared_call("exchange_mode", ctypes.byref(mode), doing="changing the capture mode")
    exchange()
    try:
        yield
    finally:
        exchange()


def captured(driver: Driver, stream: int) -> tuple[int, int] | None:
    """(id, graph) of the capture that `stream` takes part in; None if there is none."""
    status, doing = ctypes.c_int(), "asking whether the stream is being captured"
    driver.shared_call("is_capturing", stream, ctypes.byref(status), doing=doing)
    if status.value != CAPTURING:
        return None
    number, graph = ctypes.c_uint64(), HANDLE()
    driver.shared_call(
        "capture_info", stream, ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None, doing=doing
    )
    return number.value, graph.value or 0


class _Graph:
    """Says when a graph is gone: its destruction posts a semaphore.

    libc's sem_post is the destructor, because the driver calls that on a thread of its own, perhaps while Python is
    shutting down; and the semaphore is kept until then, whatever becomes of the kernel."""

    libc = ctypes.CDLL(None)
    waiting: ClassVar[dict[int, Any]] = {}  # address -> semaphore that may still be posted

    def __init__(self, driver: Driver, graph: int, owner: str):
        semaphore, made = ctypes.create_string_buffer(SEMAPHORE_BYTES), HANDLE()
        self.libc.sem_init(semaphore, 0, 0)
        self.at = ctypes.addressof(semaphore)
        self.waiting[self.at] = semaphore
        destructor, doing = ctypes.cast(self.libc.sem_post, HANDLE), f"{owner}: tying workspace to a graph"
        driver.shared_call("user_object", ctypes.byref(made), semaphore, destructor, 1, NO_SYNC, doing=doing)
        driver.shared_call("graph_keeps", graph, made, 1, MOVE, doing=doing)

    @property
    def gone(self) -> bool:
        semaphore = self.waiting.get(self.at)
        if semaphore is not None and self.libc.sem_trywait(semaphore) == 0:
            del self.waiting[self.at]
        return self.at not in self.waiting


@dataclass
class _Piece:
    """address and bytes; graph: the one that it belongs to (None: a stream)."""

    address: int
    bytes: int
    graph: _Graph | None = None

    @property
    def free(self) -> bool:
        """Whether the graph that it belonged to is gone."""
        return self.graph is not None and self.graph.gone


class Workspaces:
    """Of one kernel on one device. Safe to use from several threads."""

    def __init__(self, driver: Driver, owner: str):
        self.driver, self.owner = driver, owner
        self._pieces: dict[tuple[int, int], _Piece] = {}  # (capture or 0, stream)
        self._kept: list[_Piece] = []  # outgrown: launches under way and graphs may still use them
        self._lock = threading.Lock()

    def address(self, size: int, stream: int, capture: tuple[int, int] | None) -> int:
        """Of at least `size` bytes for a launch on `stream` (as part of `capture`). The driver's error if it has no
        memory left."""
        key = (capture[0] if capture else 0, stream)
        with self._lock, relaxed(self.driver):
            held = self._pieces.get(key)
            if held is not None and held.bytes >= size:
                return held.address
            self._retire()
            # First all that may fail: a piece stands in one place at a time, or it would be given away twice.
            graph = _Graph(self.driver, capture[1], self.owner) if capture else None
            made = next((p for p in self._kept if p.free and p.bytes >= size), None) if capture else None
            if made is not None:
                self._kept.remove(made)
            else:
                made = self._zeros(max(size, 2 * held.bytes if held else 0))
            if held is not None:
                self._kept.append(held)
            made.graph = graph
            self._pieces[key] = made
            return made.address

    def _retire(self) -> None:
        """Pieces whose graph is gone may serve another."""
        for key, piece in [*self._pieces.items()]:
            if piece.free:
                self._kept.append(self._pieces.pop(key))

    def _zeros(self, size: int) -> _Piece:
        """New memory, zeroed before this returns, on a stream of its own: no captured stream sees it."""
        call, address, stream = self.driver.shared_call, HANDLE(), HANDLE()
        doing = f"{self.owner}: {size} bytes of workspace"
        call("allocate", ctypes.byref(address), size, doing=doing)
        call("create_stream", ctypes.byref(stream), NON_BLOCKING, doing=doing)
        try:
            call("set_bytes", address, 0, size, stream, doing=doing)
            call("wait", stream, doing=doing)
        finally:
            call("destroy_stream", stream, doing=doing)
        return _Piece(address.value or 0, size)
