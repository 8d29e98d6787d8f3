"""Where entries and code objects lie: a directory, one file each, written whole or not at all.

    DIR/entries/ab/<digest of key>.json     DIR/objects/ab/<digest of content>.fko     DIR/locks/<digest of key>.lock

Several directories may be given; the first is written to, all are read in order. A directory that cannot be written
costs one warning: the process goes on with what it has in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import filelock

from flykernels.codeobject import CodeObject, CodeObjectError

from .entry import Entry, EntryError, Key, NewerFormat, canonical

log = logging.getLogger(__name__)

LOCK_SECONDS = 300.0  # how long to wait for another process that tunes the same key before tuning as well


def default_directories() -> list[Path]:
    """FLYKERNELS_CACHE_DIR (os.pathsep between several), else flykernels/ under the user's cache directory."""
    named = os.environ.get("FLYKERNELS_CACHE_DIR")
    if named:
        return [Path(part).expanduser() for part in named.split(os.pathsep) if part]
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [Path(base).expanduser() / "flykernels"]


class Store:
    """Entries by key and code objects by content. Safe to use from several threads and processes.

    No method raises for a damaged, missing, unreadable or unwritable file: reading skips it, writing keeps the value in
    memory; either is logged once a file and reason.
    """

    def __init__(self, directories: Sequence[str | os.PathLike] | None = None):
        self.directories = [Path(d) for d in directories] if directories is not None else default_directories()
        self._entries: dict[str, Entry] = {}
        self._objects: dict[str, CodeObject] = {}
        self._mutex = threading.RLock()
        self._said: set[str] = set()

    # -- entries
    def lookup(self, key: Key) -> Entry | None:
        """The entry for `key`, or None. Memory first, then the directories in order."""
        with self._mutex:
            known = self._entries.get(key.digest)
        return known if known is not None and key.agrees(known.key) else self._read(key)

    def _read(self, key: Key) -> Entry | None:
        for path in self._paths("entries", key.digest, ".json"):
            try:
                entry = Entry.from_json(path.read_text())
            except FileNotFoundError:
                continue
            except NewerFormat as e:
                self._say(logging.INFO, f"{path}: left alone: {e}")
                continue
            except (OSError, UnicodeDecodeError, EntryError) as e:
                self._say(logging.WARNING, f"{path}: skipped: {e}")
                continue
            if entry.key.digest != key.digest or not key.agrees(entry.key):
                self._say(logging.INFO, f"{path}: skipped: it was made for {entry.key.versions}, not {key.versions}")
                continue
            with self._mutex:
                self._entries[key.digest] = entry
            return entry
        return None

    def update(self, key: Key, change: Callable[[Entry], Entry]) -> Entry:
        """Apply `change` to the newest entry for `key` (an empty one if there is none) and publish the result."""
        with self.lock(key):
            entry = change(self._read(key) or self._memory(key) or Entry(key))
            with self._mutex:
                self._entries[key.digest] = entry
            self._write(self._paths("entries", key.digest, ".json")[0], entry.to_json().encode())
        return entry

    def _memory(self, key: Key) -> Entry | None:
        with self._mutex:
            known = self._entries.get(key.digest)
        return known if known is not None and key.agrees(known.key) else None

    def content_digest(self) -> str:
        """SHA-256 over the addresses and winners of all readable entries, in hex: what a pinned cache decides."""
        seen: dict[str, str | None] = {}
        for directory in self.directories:
            for path in sorted(directory.glob("entries/*/*.json")):
                try:
                    seen.setdefault(path.stem, Entry.from_json(path.read_text()).winner)
                except (OSError, UnicodeDecodeError, EntryError):
                    continue
        return hashlib.sha256(canonical(seen).encode()).hexdigest()

    # -- code objects
    def add(self, code: CodeObject) -> str:
        """Keep a code object; its digest, under which `load` finds it."""
        digest = code.digest
        with self._mutex:
            self._objects[digest] = code
        path = self._paths("objects", digest, ".fko")[0]
        if not path.exists():
            self._write(path, code.to_bytes())
        return digest

    def load(self, digest: str) -> CodeObject | None:
        """The code object of that digest, or None. Its content is checked against the digest."""
        with self._mutex:
            if digest in self._objects:
                return self._objects[digest]
        for path in self._paths("objects", digest, ".fko"):
            try:
                code = CodeObject.load(path)
                if code.digest != digest:
                    raise CodeObjectError(f"its content has the digest {code.digest}")
            except FileNotFoundError:
                continue
            except (OSError, CodeObjectError) as e:
                self._say(logging.WARNING, f"{path}: skipped: {e}")
                continue
            with self._mutex:
                self._objects[digest] = code
            return code
        return None

    # -- one process at a time
    @contextlib.contextmanager
    def lock(self, key: Key, seconds: float = LOCK_SECONDS) -> Iterator[bool]:
        """Hold the key's lock while others wait; True if it is held. False (and no waiting any longer) after `seconds`,
        or where no lock file can be made: the work is then done twice, which loses time, not entries.

        Re-entrant in a thread; released by the operating system when the process dies."""
        path = self.directories[0] / "locks" / f"{key.digest}.lock"
        held = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held = filelock.FileLock(path, timeout=seconds, is_singleton=True)
            held.acquire()
        except filelock.Timeout:
            held = None
            self._say(logging.WARNING, f"{path}: another process has held it for {seconds:.0f} s; going on without")
        except OSError as e:
            held = None
            self._say(logging.WARNING, f"{path}: cannot lock: {e}")
        try:
            yield held is not None
        finally:
            if held is not None:
                held.release()

    # -- files
    def _paths(self, kind: str, digest: str, suffix: str) -> list[Path]:
        return [d / kind / digest[:2] / (digest + suffix) for d in self.directories]

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
            try:
                with os.fdopen(fd, "wb") as f:
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
                os.replace(part, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        except OSError as e:
            self._say(logging.WARNING, f"{path.parent}: cannot be written ({e.strerror}); kept in memory only")

    def _say(self, level: int, message: str) -> None:
        with self._mutex:
            if message in self._said:
                return
            self._said.add(message)
        log.log(level, "%s", message)
