"""How much a cache holds, and how it gets smaller: what was used longest ago goes first."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .entry import Entry, EntryError
from .store import Store

log = logging.getLogger(__name__)

YOUNG_SECONDS = 3600.0  # a code object without an entry may be one whose entry is still being measured
STALE_SECONDS = 86400.0  # what an import or a writer that was killed has left
LOCK_SECONDS = 0.0  # an entry that is being tuned stays: it is in use
UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


@dataclass
class Pruned:
    """What was removed from the first directory, and what it still holds."""

    entries: int = 0
    objects: int = 0
    damaged: int = 0
    freed: int = 0
    left: int = 0


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    used: float


def size_in_bytes(text: str) -> int:
    """Of "500", "10MB", "1.5GiB"; ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not found or found[2] not in UNITS:
        raise ValueError(f"{text!r} is not a size such as 500MB, 10GB or 2GiB")
    return int(float(found[1]) * UNITS[found[2]])


def prune(
    store: Store, max_bytes: int | None = None, unused_seconds: float | None = None, dry_run: bool = False
) -> Pruned:
    """Removes from the store's first directory: files that cannot be read; entries not used for `unused_seconds`; then,
    until at most `max_bytes` are left, the entries that were used longest ago; and code objects that no entry names.

    Entries of newer formats, and those that a process is tuning, stay. Other layers are never written. Errors of the
    file system leave the file where it is."""
    root, now = store.directories[0], time.time()
    entries = {f.path: f for f in _files(root, "entries/*/*.json")}
    objects = {f.path.stem: f for f in _files(root, "objects/*/*.fko")}
    done = Pruned(left=sum(f.size for f in (*entries.values(), *objects.values())))
    named: dict[Path, set[str]] = {}
    uses = dict.fromkeys(objects, 0)
    for path in list(entries):
        artefacts = _artefacts(path)
        if artefacts is None:
            if _remove(entries.pop(path), done, dry_run):
                done.damaged += 1
            continue
        named[path] = artefacts & uses.keys()
        for digest in named[path]:
            uses[digest] += 1

    def drop(path: Path) -> None:
        if not _remove_entry(store, entries[path], done, dry_run):
            return
        done.entries += 1
        for digest in named[path]:
            uses[digest] -= 1
            if not uses[digest]:
                done.objects += _remove(objects[digest], done, dry_run)

    for digest, count in uses.items():
        if not count and objects[digest].used < now - YOUNG_SECONDS:
            done.objects += _remove(objects[digest], done, dry_run)
    for path in sorted(entries, key=lambda p: entries[p].used):
        too_old = unused_seconds is not None and entries[path].used < now - unused_seconds
        if not too_old and (max_bytes is None or done.left <= max_bytes):
            break
        drop(path)
    if not dry_run:
        _sweep(root, now)
    return done


def _files(root: Path, pattern: str) -> Iterator[_File]:
    for path in root.glob(pattern):
        with contextlib.suppress(OSError):
            found = path.stat()
            yield _File(path, found.st_size, found.st_mtime)


def _artefacts(path: Path) -> set[str] | None:
    """Digests that an entry names; None for a damaged one. A newer format's are not known: it names nothing of ours."""
    from .entry import NewerFormat

    try:
        return {d for t in Entry.from_json(path.read_text()).timings.values() for d in t.artefacts}
    except NewerFormat:
        return set()
    except (UnicodeDecodeError, EntryError):
        return None
    except OSError:
        return set()


def _remove_entry(store: Store, file: _File, done: Pruned, dry_run: bool) -> bool:
    """Under the key's lock, and only if nobody used or wrote it meanwhile."""
    try:
        key = Entry.from_json(file.path.read_text()).key
    except (OSError, UnicodeDecodeError, EntryError):
        return False
    if dry_run:
        return _remove(file, done, True)
    with store.lock(key, LOCK_SECONDS) as held:
        if not held:
            return False
        try:
            if file.path.stat().st_mtime != file.used:
                return False
        except OSError:
            return False
        removed = _remove(file, done, False)
    store.forget(key)
    return removed


def _remove(file: _File, done: Pruned, dry_run: bool) -> bool:
    try:
        if not dry_run:
            file.path.unlink()
    except OSError as e:
        log.warning("%s: cannot be removed: %s", file.path, e.strerror)
        return False
    done.freed += file.size
    done.left -= file.size
    return True


def _sweep(root: Path, now: float) -> None:
    """Removes what killed imports and writers have left."""
    for path in (*root.glob(".staging-*"), *root.glob("entries/*/.*.part"), *root.glob("objects/*/.*.part")):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < now - STALE_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
