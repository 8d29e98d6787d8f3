"""Where entries and code objects lie: a directory, one file each, written whole or not at all.

    DIR/entries/ab/<digest of key>.json     DIR/objects/ab/<digest of content>.fko     DIR/locks/<digest of key>.lock

Several directories may be given, as layers: the first is written to, all are read in order, and an entry that has a
winner hides one that has none, wherever they lie. A directory that cannot be written costs one warning: the process
goes on with what it has in memory. A file's time of change says when it was used last (to the hour): see `prune.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import filelock

from flykernels.codeobject import CodeObject, CodeObjectError

from .entry import Entry, EntryError, Key, NewerFormat, Timing, canonical, is_digest

log = logging.getLogger(__name__)

LOCK_SECONDS = 300.0  # how long to wait for another process that tunes the same key before tuning as well
USED_SECONDS = 3600.0  # how exactly the time of last use is kept
CHECKS = 16  # how often the size is looked at while as much is written as the limit allows


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

    max_bytes  what the first directory may hold: beyond it, what was used longest ago is removed (None: no limit)
    """

    def __init__(self, directories: Sequence[str | os.PathLike] | None = None, max_bytes: int | None = None):
        self.directories = [Path(d) for d in directories] if directories is not None else default_directories()
        self._entries: dict[str, Entry] = {}
        self._objects: dict[str, CodeObject] = {}
        self._mutex = threading.RLock()
        self._said: set[str] = set()
        self.max_bytes = max_bytes
        self._unchecked = max_bytes or 0  # bytes written since the size was looked at; at first: look at once

    # -- entries
    def lookup(self, key: Key) -> Entry | None:
        """The entry for `key`, or None. Memory first, then the directories in order."""
        with self._mutex:
            known = self._entries.get(key.digest)
        return known if known is not None and key.agrees(known.key) else self._read(key)

    def _read(self, key: Key) -> Entry | None:
        """What the files say, which this process then remembers."""
        found, path = self._find(key)
        if found is not None and path is not None:
            self._used(path)
            with self._mutex:
                self._entries[key.digest] = found
        return found

    def _find(self, key: Key, any_compiler: bool = False) -> tuple[Entry | None, Path | None]:
        """The first layer's entry that has a winner, else the first there is; and its file."""
        found: tuple[Entry | None, Path | None] = None, None
        for path in self._paths("entries", key.digest, ".json"):
            entry = self.read(path)
            if entry is None:
                continue
            if entry.key.digest != key.digest or not (any_compiler or key.agrees(entry.key)):
                self._say(logging.INFO, f"{path}: skipped: it was made for {entry.key.versions}, not {key.versions}")
                continue
            if entry.winner:
                return entry, path
            found = found if found[0] is not None else (entry, path)
        return found

    def read(self, path: Path) -> Entry | None:
        """One file's entry; None where there is none, or none that can be read."""
        try:
            return Entry.from_json(path.read_text())
        except FileNotFoundError:
            return None
        except NewerFormat as e:
            self._say(logging.INFO, f"{path}: left alone: {e}")
        except (OSError, UnicodeDecodeError, EntryError) as e:
            self._say(logging.WARNING, f"{path}: skipped: {e}")
        return None

    def newest(self, key: Key, any_compiler: bool = False) -> Entry | None:
        """What the files say of a key now, passing over what this process remembers, and not counted as a use.

        any_compiler: also an entry that another compiler's artefacts are in"""
        return self._find(key, any_compiler)[0]

    def forget(self, key: Key) -> None:
        """Makes the next look-up read the files."""
        with self._mutex:
            self._entries.pop(key.digest, None)

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
            self._write(self._paths("entries", key.digest, ".json")[0], entry.to_json().encode())
        return entry

    def _memory(self, key: Key) -> Entry | None:
        with self._mutex:
            known = self._entries.get(key.digest)
        return known if known is not None and key.agrees(known.key) else None

    def content_digest(self) -> str:
        """SHA-256 over the addresses and winners of all readable entries, in hex: what a pinned cache decides."""
        seen: dict[str, str | None] = {}
        for path in self.entry_files():
            try:
                winner = Entry.from_json(path.read_text()).winner
            except (OSError, UnicodeDecodeError, EntryError):
                continue
            seen[path.stem] = seen.get(path.stem) or winner
        return hashlib.sha256(canonical(seen).encode()).hexdigest()

    def entry_files(self) -> Iterator[Path]:
        """All entries' files, layer by layer."""
        for directory in self.directories:
            yield from sorted(directory.glob("entries/*/*.json"))

    def all_keys(self) -> Iterator[Key]:
        """The keys of all readable entries of all layers, each once."""
        seen = set()
        for path in self.entry_files():
            entry = self.read(path) if path.stem not in seen else None
            if entry is not None and entry.key.digest == path.stem:
                seen.add(path.stem)
                yield entry.key

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

    def has(self, digest: str) -> bool:
        """Whether some layer holds a file for that code object; it is checked when it is loaded."""
        return is_digest(digest) and any(path.is_file() for path in self._paths("objects", digest, ".fko"))

    def content(self, digest: str) -> bytes | None:
        """A code object's file, from the first layer where it is whole; None if there is none."""
        for path in self._paths("objects", digest, ".fko") if is_digest(digest) else ():
            try:
                data = path.read_bytes()
            except OSError:
                continue
            if hashlib.sha256(data).hexdigest() == digest:
                return data
        return None

    def load(self, digest: str) -> CodeObject | None:
        """The code object of that digest, or None. Its content is checked against the digest."""
        with self._mutex:
            if digest in self._objects:
                return self._objects[digest]
        if not is_digest(digest):
            return None
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
            self._used(path)
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
            held = filelock.FileLock(path, is_singleton=True)  # one a path: that makes it re-entrant
            held.acquire(timeout=seconds)
        except filelock.Timeout:
            held = None
            self._say(logging.WARNING, f"{path}: another process has held it for {seconds:.0f} s; going on without")
        except (OSError, NotImplementedError) as e:  # the latter: a file system without flock
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

    def _used(self, path: Path) -> None:
        """Notes in the file's time of change that it is in use; not where it lies in a layer that is only read."""
        with contextlib.suppress(OSError, ValueError):
            if path.is_relative_to(self.directories[0]) and path.stat().st_mtime < time.time() - USED_SECONDS:
                os.utime(path)

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
