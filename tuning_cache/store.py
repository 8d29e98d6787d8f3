"""Entries by key and code objects by content, over several directories (see layer.py for what lies in one).

The first directory is written to, all are read in order, and an entry that has a winner hides one that has none in
another. A directory that cannot be written costs one warning: the process goes on with what it has in memory. Behind
the directories there may be a remote store (remote.py), asked for what they do not know.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import filelock

from flykernels.codeobject import CodeObject, CodeObjectError
from flykernels.forks import anew_in_children

from .entry import Entry, EntryError, Key, NewerFormat, Timing, canonical, entry_of, is_digest
from .layer import Found, Layer, grouped
from .merge import merge
from .remote import Remote

log = logging.getLogger(__name__)

LOCK_SECONDS = 300.0  # how long to wait for another process that tunes the same key before tuning as well
CHECKS = 16  # how often the size is looked at while as much is written as the limit allows


def default_directories() -> list[Path]:
    """FLYKERNELS_CACHE_DIR (os.pathsep between several), else flykernels/ under the user's cache directory. Of where
    the process is now, should it go elsewhere."""
    named = [part for part in os.environ.get("FLYKERNELS_CACHE_DIR", "").split(os.pathsep) if part.strip()]
    return [_absolute(part) for part in named or [f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/flykernels"]]


def _absolute(text: str) -> Path:
    """A place that nothing can lie in, and a warning, for the home of a user who has none (as in some containers)."""
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as e:
        log.warning("%s: %s Nothing is kept; FLYKERNELS_CACHE_DIR may name another place", text, e)
        return Path(os.devnull) / text


class Store:
    """Entries by key and code objects by content. Safe to use from several threads and processes.

    No method raises for a damaged, missing, unreadable or unwritable file: reading skips it, writing keeps the value in
    memory; either is logged once a file and reason.

    remote     asked for what no directory knows, and told what is found out here
    max_bytes  what the first directory may hold: beyond it, what was used longest ago is removed (None: no limit)
    """

    def __init__(
        self, directories: Sequence[str | os.PathLike] | None = None, max_bytes: int | None = None,
        remote: Remote | None = None,
    ):  # fmt: skip
        self.directories = [Path(d) for d in directories] if directories is not None else default_directories()
        self._entries: dict[str, Entry] = {}
        self._objects: dict[str, CodeObject] = {}
        self._mutex: threading.RLock
        anew_in_children(self, _mutex=threading.RLock)
        self._said: set[str] = set()
        warn = lambda message: self._say(logging.WARNING, message)
        self.layers = [Layer(d, warn, notes=n == 0) for n, d in enumerate(self.directories)]
        self.remote = remote
        self.max_bytes = max_bytes
        self.unwritten = 0  # files that could not be written to the first directory
        self._unchecked = max_bytes or 0  # bytes written since the size was looked at; at first: look at once

    # -- entries
    def lookup(self, key: Key) -> Entry | None:
        """The entry for `key`, or None. Memory first, then the directories in order."""
        with self._mutex:
            known = self._entries.get(key.digest)
        return known if known is not None and key.agrees(known.key) else self._read(key)

    def _read(self, key: Key) -> Entry | None:
        """What the directories say, which this process then remembers."""
        found, place, n = self._find(key)
        if place is not None and n == 0:  # a layer that is only read stays as it is
            place.use()
        if self.remote is not None and (found is None or not found.winner):
            found = self._from_remote(key, found)
        if found is not None:
            with self._mutex:
                self._entries[key.digest] = found
        return found

    def _from_remote(self, key: Key, here: Entry | None) -> Entry | None:
        """What is known here and there; kept here, unless another process is at it."""
        assert self.remote is not None
        there = self.remote.entry(key)
        if there is None:
            return here
        both = merge(here, there) if here is not None else there
        if both != here:
            with self._lock(key.digest, 0.0, quiet=True) as held:
                if held:
                    self._write("entries", key.digest, both.to_json().encode())
        return both

    def _find(self, key: Key, any_compiler: bool = False) -> tuple[Entry | None, Found | None, int]:
        """The first layer's entry that has a winner, else the first there is; where it was, and in which layer."""
        first: tuple[Entry | None, Found | None, int] = None, None, 0
        for n, layer in enumerate(self.layers):
            for found in layer.found("entries", key.digest):
                entry = entry_of(found.content, key) or self._parsed(found)
                if entry is None:
                    continue
                if not key.same_address(entry.key) or not (any_compiler or key.agrees(entry.key)):
                    versions = f"{entry.key.versions}, not {key.versions}"
                    self._say(logging.INFO, f"{found}: skipped: it was made for {versions}")
                    continue
                if entry.winner:
                    return entry, found, n
                first = first if first[0] is not None else (entry, found, n)
                break  # within a layer the newest counts
        return first

    def _parsed(self, found: Found) -> Entry | None:
        """None for what cannot be read."""
        try:
            return Entry.from_json(found.content)
        except NewerFormat as e:
            self._say(logging.INFO, f"{found}: left alone: {e}")
        except (UnicodeDecodeError, EntryError) as e:
            self._say(logging.WARNING, f"{found}: skipped: {e}")
        return None

    def newest(self, key: Key, any_compiler: bool = False) -> Entry | None:
        """What the files say of a key now, passing over what this process remembers, and not counted as a use.

        any_compiler: also an entry that another compiler's artefacts are in"""
        return self._find(key, any_compiler)[0]

    def place(self, key: Key) -> Path | None:
        """The file that `newest` is from."""
        found = self._find(key)[1]
        return found.path if found is not None else None

    def newest_in_first(self, key: Key) -> Entry | None:
        """`newest` of the first directory alone, whatever compiler it is of."""
        places = self.layers[0].found("entries", key.digest)
        return next((e for e in map(self._parsed, places) if e is not None and key.same_address(e.key)), None)

    def forget_all(self) -> None:
        """Makes all look-ups read the directories."""
        with self._mutex:
            self._entries.clear()

    def forget(self, key: Key) -> None:
        """Makes the next look-up read the directories."""
        self.forget_address(key.digest)

    def forget_address(self, address: str) -> None:
        with self._mutex:
            self._entries.pop(address, None)

    def timed(self, key: Key, name: str, measure: Callable[[], Timing], seconds: float = LOCK_SECONDS) -> Timing:
        """The candidate's timing: what another process found, or what `measure()` returns, which is then published.

        One process measures, others wait (`seconds` at most, then they measure as well) and take what it found; when it
        dies, the next one measures."""
        with self.lock(key, seconds):
            entry = self._read(key) or self._memory(key)
            known = entry.timings.get(name) if entry else None
            if known is None or known.microseconds is None:
                known = measure()
                self.update(key, lambda e: e.with_timing(known), seconds)
        return known

    def update(self, key: Key, change: Callable[[Entry], Entry], seconds: float = LOCK_SECONDS) -> Entry:
        """Apply `change` to the newest entry for `key` (an empty one if there is none) and publish the result."""
        with self.lock(key, seconds):
            entry = change(self._read(key) or self._memory(key) or Entry(key))
            with self._mutex:
                self._entries[key.digest] = entry
            self._write("entries", key.digest, entry.to_json().encode())
        if self.remote is not None:
            self.remote.keep_entry(entry)
        return entry

    def _memory(self, key: Key) -> Entry | None:
        with self._mutex:
            known = self._entries.get(key.digest)
        return known if known is not None and key.agrees(known.key) else None

    def content_digest(self) -> str:
        """SHA-256 over the addresses and winners of all readable entries, in hex: what a pinned cache decides."""
        winners = {address: entry.winner for address, entry in self.entries()}
        return hashlib.sha256(canonical(winners).encode()).hexdigest()

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """(address, entry) of all readable entries of all layers, in the order of addresses; each once: the one that
        `newest` would give to whoever has no compiler."""
        for address, entry, _ in self.chosen():
            yield address, entry

    def chosen(self) -> Iterator[tuple[str, Entry, Found]]:
        """`entries`, with where each was found."""
        for address, places in grouped(self.layers, "entries"):
            first, done = None, -1
            for n, found in places:
                entry = self._parsed(found) if n != done else None
                if entry is None or entry.key.digest != address:
                    continue
                done = n
                if entry.winner or first is None:
                    first = entry, found
                if entry.winner:
                    break
            if first is not None:
                yield address, *first

    def all_keys(self) -> Iterator[Key]:
        """The keys of all readable entries of all layers, each once."""
        for _, entry in self.entries():
            yield entry.key

    # -- code objects
    def add(self, code: CodeObject) -> str:
        """Keep a code object; its digest, under which `load` finds it."""
        digest = code.digest
        with self._mutex:
            self._objects[digest] = code
        if not self.layers[0].has("objects", digest):
            self._write("objects", digest, code.to_bytes())
        if self.remote is not None:
            self.remote.keep_object(digest, code.to_bytes())
        return digest

    def has(self, digest: str) -> bool:
        """Whether some layer holds a file for that code object; it is checked when it is loaded."""
        return is_digest(digest) and any(layer.has("objects", digest) for layer in self.layers)

    def content(self, digest: str) -> bytes | None:
        """A code object's file, from the first layer where it is whole; None if there is none."""
        return self._object(digest)[0]

    def _object(self, digest: str) -> tuple[bytes | None, Found | None, int]:
        for n, layer in enumerate(self.layers if is_digest(digest) else ()):
            for found in layer.found("objects", digest):
                if hashlib.sha256(found.content).hexdigest() == digest:
                    return found.content, found, n
                self._say(logging.WARNING, f"{found}: skipped: its content has another digest")
        return None, None, 0

    def load(self, digest: str) -> CodeObject | None:
        """The code object of that digest, or None. Its content is checked against the digest."""
        with self._mutex:
            if digest in self._objects:
                return self._objects[digest]
        data, found, n = self._object(digest)
        if data is None and self.remote is not None and is_digest(digest):
            data = self.remote.object(digest)
            if data is not None:
                self._write("objects", digest, data)
        if data is None:
            return None
        try:
            code = CodeObject.from_bytes(data)
        except CodeObjectError as e:
            self._say(logging.WARNING, f"{found or digest}: skipped: {e}")
            return None
        if n == 0 and found is not None:
            found.use()
        with self._mutex:
            self._objects[digest] = code
        return code

    # -- one process at a time
    @contextlib.contextmanager
    def lock(self, key: Key, seconds: float = LOCK_SECONDS) -> Iterator[bool]:
        """Hold the key's lock while others wait; True if it is held. False (and no waiting any longer) after `seconds`,
        or where no lock file can be made: the work is then done twice, which loses time, not entries.

        Re-entrant in a thread; released by the operating system when the process dies."""
        with self._lock(key.digest, seconds) as held:
            yield held

    def lock_of(self, address: str, seconds: float) -> contextlib.AbstractContextManager[bool]:
        """`lock`, of an entry's address; who does not wait leaves what is held alone."""
        return self._lock(address, seconds, quiet=not seconds)

    def folding(self, seconds: float = LOCK_SECONDS) -> contextlib.AbstractContextManager[bool]:
        """As `lock`, for who writes or removes segments: one process at a time."""
        return self._lock("segments", seconds)

    def is_locked(self, address: str) -> bool:
        """Whether a process holds an entry's lock now."""
        if not (self.directories[0] / "locks" / f"{address}.lock").exists():
            return False
        with self._lock(address, 0.0, quiet=True) as held:
            return not held

    @contextlib.contextmanager
    def _lock(self, name: str, seconds: float, quiet: bool = False) -> Iterator[bool]:
        path = self.directories[0] / "locks" / f"{name}.lock"
        held = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held = filelock.FileLock(path, is_singleton=True)  # one a path: that makes it re-entrant
            held.acquire(timeout=seconds)
        except filelock.Timeout:
            held = None
            if not quiet:
                message = f"{path}: another process has held it for {seconds:.0f} s; going on without"
                self._say(logging.WARNING, message)
        except (OSError, NotImplementedError) as e:  # the latter: a file system without flock
            held = None
            self._say(logging.WARNING, f"{path}: cannot lock: {e}")
        try:
            yield held is not None
        finally:
            if held is not None:
                held.release()

    # -- files
    def _write(self, kind: str, address: str, data: bytes) -> None:
        layer = self.layers[0]
        try:
            layer.write(kind, address, data)
        except OSError as e:
            folder = layer.file(kind, address).parent
            self._say(logging.WARNING, f"{folder}: cannot be written ({e.strerror}); kept in memory only")
            with self._mutex:
                self.unwritten += 1
        self._watch_size(len(data))

    def _watch_size(self, written: int) -> None:
        """Prunes once enough has been written since it was looked at last."""
        if self.max_bytes is None:
            return
        with self._mutex:
            self._unchecked += written
            if self._unchecked < self.max_bytes / CHECKS:
                return
            self._unchecked = 0
        from .prune import prune

        prune(self, self.max_bytes)

    def _say(self, level: int, message: str) -> None:
        with self._mutex:
            if message in self._said:
                return
            self._said.add(message)
        log.log(level, "%s", message)
