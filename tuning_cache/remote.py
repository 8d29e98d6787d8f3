"""A store behind the directories, by URL: s3://, gs://, file://, memory://, whatever fsspec has a driver for.

    URL/entries/ab/<digest of key>.json     URL/objects/ab/<digest of content>.fko       as in a directory

What the directories do not know is asked for there and kept here; what is found out here is written there in the
background, merged with what is there. Nothing of it is relied on: a call that fails or takes longer than `timeout` is a
miss, and the remote is then left alone for RETRY_SECONDS, so that an offline machine waits once and not each time. What
comes is checked as what lies in a directory is. Who may write there can run code here: see docs/cache.md.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from flykernels.forks import anew_in_children

from .archive import Limits
from .entry import Entry, EntryError, Key
from .merge import merge

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT_SECONDS = 2.0
OPEN_SECONDS = 10.0  # that importing the driver may take, on a busy machine
RETRY_SECONDS = 30.0  # how long a remote is left alone after a failure
MISSED_SECONDS = 60.0  # how long a miss is believed
EXIT_SECONDS = 10.0  # how long a process that ends waits for what is still to be written
PATIENCE = 10  # times as long may a write take, which nobody waits for
WRITES_MOST = 10_000  # that wait; beyond, the oldest are given up
HANGING_MOST = 2  # calls that never came back, after which no further one is made
LIMITS = Limits()


class Remote:
    """Never raises, and nobody waits for a call much longer than `timeout` seconds.

    url      as fsspec takes it
    timeout  seconds for one read
    write    whether what is found out here is written there"""

    def __init__(self, url: str, timeout: float = TIMEOUT_SECONDS, write: bool = True):
        self.url, self.timeout, self.writes = url, timeout, write
        self._system: tuple[Any, str] | None = None
        self._mutex: threading.Lock
        self._down_until = 0.0
        self.failures = 0  # calls that failed, or were not made because of that
        self._hanging = 0
        self._missed: dict[str, float] = {}
        self._waiting: queue.Queue[tuple[str, Callable[[], None]]]
        self._writer: threading.Thread | None
        none = lambda: None
        anew_in_children(self, _mutex=threading.Lock, _waiting=queue.Queue, _writer=none)  # what waits is the parent's
        self._said: set[str] = set()

    # -- reading
    def entry(self, key: Key) -> Entry | None:
        """The remote's entry for a key, if it is whole and for this key."""
        data = self._read(_entry_name(key.digest), LIMITS.entry)
        found = _entry(data)
        if found is not None and key.same_address(found.key) and key.agrees(found.key):
            return found
        if data is not None and found is None:
            self._say(f"{self.url}/{_entry_name(key.digest)}: passed over: it is damaged, or of a newer format")
        return None

    def object(self, digest: str) -> bytes | None:
        """A code object's file, if its content has that digest."""
        data = self._read(_object_name(digest), LIMITS.object)
        if data is not None and hashlib.sha256(data).hexdigest() != digest:
            self._say(f"{self.url}/{_object_name(digest)}: passed over: its content has another digest")
            return None
        return data

    def _read(self, name: str, most: int) -> bytes | None:
        if self._missed.get(name, 0.0) > time.monotonic():
            return None
        if self._system is None and self._call(self._opened, "opening it", OPEN_SECONDS) is None:
            return None
        data = self._call(lambda: self._fetch(name, most), f"reading {name}", self.timeout)
        if data is None:
            self._missed[name] = time.monotonic() + MISSED_SECONDS
        return data

    def _fetch(self, name: str, most: int) -> bytes | None:
        system, root = self._opened()
        try:
            data = system.cat_file(f"{root}/{name}", start=0, end=most + 1)
        except FileNotFoundError:
            return None
        return data if 0 < len(data) <= most else None

    # -- writing
    def keep_entry(self, entry: Entry) -> None:
        """Writes an entry there, in the background, merged with what is there by then."""
        name = _entry_name(entry.key.digest)

        def write() -> None:
            there = _entry(self._fetch(name, LIMITS.entry))
            both = merge(entry, there) if there is not None else entry
            if both != there:
                self._put(name, both.to_json().encode())

        self._later(name, write)

    def keep_object(self, digest: str, data: bytes) -> None:
        """Writes a code object there, in the background, if it is not there."""
        name = _object_name(digest)

        def write() -> None:
            if self._size(name) != len(data):  # shorter, where a store does not write whole or not at all
                self._put(name, data)

        self._later(name, write)

    def _size(self, name: str) -> int | None:
        """Bytes of what lies there; None where nothing does."""
        system, root = self._opened()
        try:
            return system.size(f"{root}/{name}")
        except FileNotFoundError:
            return None

    def _put(self, name: str, data: bytes) -> None:
        """Whole or not at all: object stores do so; in a file system it is renamed into its place."""
        system, root = self._opened()
        final = f"{root}/{name}"
        protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
        if "file" not in protocols:
            system.pipe_file(final, data)
            return
        system.makedirs(final.rpartition("/")[0], exist_ok=True)
        part = f"{final.rpartition('/')[0]}/.{secrets.token_hex(8)}.part"
        try:
            system.pipe_file(part, data)
            system.mv(part, final)
        except BaseException:
            with contextlib.suppress(Exception):
                system.rm_file(part)
            raise

    def _later(self, name: str, write: Callable[[], None]) -> None:
        if not self.writes:
            return
        self._missed.pop(name, None)
        with self._mutex:
            if self._writer is None or not self._writer.is_alive():
                if self._writer is None:
                    atexit.register(self.flush, EXIT_SECONDS)
                self._writer = threading.Thread(target=self._write_all, name="flykernels remote", daemon=True)
                self._writer.start()
        if self._waiting.qsize() >= WRITES_MOST:
            self._say(f"{self.url}: too slow: what was found out first is not written there")
            try:
                self._waiting.get_nowait()
                self._waiting.task_done()
            except queue.Empty:
                pass
        self._waiting.put((name, write))

    def _write_all(self) -> None:
        while True:
            name, write = self._waiting.get()
            try:
                self._call(write, f"writing {name}", self.timeout * PATIENCE)
            finally:
                self._waiting.task_done()

    def flush(self, seconds: float) -> bool:
        """Waits until what is to be written is, or was given up; False if that takes longer."""
        end = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)
        return not self._waiting.unfinished_tasks

    # -- calls
    def _opened(self) -> tuple[Any, str]:
        if self._system is None:
            from fsspec.core import url_to_fs

            system, root = url_to_fs(self.url)
            if "s3" in system.protocol:
                system.connect()  # reads its description of S3, which takes as long as many calls; asks nobody
            self._system = system, root.rstrip("/")
        return self._system

    def _call(self, function: Callable[[], T], what: str, seconds: float) -> T | None:
        """Its result; None if it fails, takes too long, or the remote is to be left alone. It runs in a thread of its
        own, since drivers may hang whatever they are told; one that never comes back is left behind."""
        if time.monotonic() < self._down_until or self._hanging >= HANGING_MOST:
            self.failures += 1
            return None
        result: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                result.put((function(), None))
            except BaseException as e:
                result.put((None, e))

        thread = threading.Thread(target=run, name="flykernels remote call", daemon=True)
        thread.start()
        try:
            found, error = result.get(timeout=seconds)
        except queue.Empty:
            self._failed(f"{what} took longer than {seconds:g} s")
            threading.Thread(target=self._watch, args=(thread,), daemon=True).start()
            return None
        if error is not None:
            self._failed(f"{what}: {type(error).__name__}: {error}")
        return found

    def _watch(self, thread: threading.Thread) -> None:
        with self._mutex:
            self._hanging += 1
        thread.join()
        with self._mutex:
            self._hanging -= 1

    def _failed(self, why: str) -> None:
        self.failures += 1
        self._down_until = time.monotonic() + RETRY_SECONDS
        self._say(f"{self.url}: left alone for {RETRY_SECONDS:g} s: {why}")

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning("%s", message)


def _entry(data: bytes | None) -> Entry | None:
    try:
        return Entry.from_json(data) if data is not None else None
    except (UnicodeDecodeError, EntryError):
        return None


def _entry_name(digest: str) -> str:
    return f"entries/{digest[:2]}/{digest}.json"


def _object_name(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}.fko"
