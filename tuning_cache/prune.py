"""How much a cache holds, and how it gets smaller: what was used longest ago goes first."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .entry import Entry, EntryError, NewerFormat
from .fold import without
from .layer import Found
from .segment import ROW, Segment
from .store import Store

log = logging.getLogger(__name__)

YOUNG_SECONDS = 3600.0  # a code object without an entry may be one whose entry is still being measured
STALE_SECONDS = 86400.0  # what an import or a writer that was killed has left
LOCK_SECONDS = 0.0  # an entry that is being tuned stays: it is in use
DIGITS_MOST = 30  # of a size
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


def size_in_bytes(text: str) -> int:
    """Of "500", "10MB", "1.5GiB"; ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not found or found[2] not in UNITS or len(found[1]) > DIGITS_MOST:
        raise ValueError(f"{text!r} is not a size such as 500MB, 10GB or 2GiB")
    return int(float(found[1]) * UNITS[found[2]])


@dataclass(slots=True)
class _Item:
    """What lies under an address in the first directory: a file of its own, or a row of a segment."""

    address: str
    size: int
    used: float
    path: Path
    segment: Segment | None = None
    row: int = 0
    named: tuple[str, ...] = ()


def prune(
    store: Store, max_bytes: int | None = None, unused_seconds: float | None = None, dry_run: bool = False
) -> Pruned:
    """Removes from the store's first directory: what cannot be read, or is hidden by something newer; entries not used
    for `unused_seconds`; then, until at most `max_bytes` are left, the entries that were used longest ago; and code
    objects that no entry names.

    Entries of newer formats, and those that a process is tuning, stay. Other layers are never written. Errors of the
    file system leave things where they are."""
    with store.folding(0.0) as alone:
        work = _Pruning(store, dry_run, alone)
        work.go(max_bytes, unused_seconds)
    if not dry_run:
        _sweep(store.directories[0], work.now)
    return work.done


class _Pruning:
    def __init__(self, store: Store, dry_run: bool, alone: bool):
        self.store, self.dry_run, self.alone = store, dry_run, alone
        self.layer, self.now, self.done = store.layers[0], time.time(), Pruned()
        self.dropped: dict[Path, tuple[Segment, set[int]]] = {}
        self.objects = {item.address: item for item in self._items("objects")}
        self.uses = dict.fromkeys(self.objects, 0)
        self.entries = list(self._items("entries"))
        for item in self.entries:
            for digest in item.named:
                self.uses[digest] += 1

    def go(self, max_bytes: int | None, unused_seconds: float | None) -> None:
        done = self.done
        for digest, count in self.uses.items():
            if not count and self.objects[digest].used < self.now - YOUNG_SECONDS:
                done.objects += self._drop(self.objects[digest])
        for item in sorted(self.entries, key=lambda item: item.used):
            too_old = unused_seconds is not None and item.used < self.now - unused_seconds
            if not too_old and (max_bytes is None or done.left <= max_bytes):
                break
            if self._drop_entry(item):
                done.entries += 1
                for digest in item.named:
                    self.uses[digest] -= 1
                    if not self.uses[digest]:
                        done.objects += self._drop(self.objects[digest])
        if self.alone:
            done.damaged += sum(map(self._drop_segment, self.layer.damaged))
        if not self.dry_run:
            self._rewrite()

    def _items(self, kind: str) -> Iterator[_Item]:
        """What counts under each address; what it hides, and what is damaged, is dropped on the way."""
        used: dict[Path, list[float]] = {}
        for _, group in itertools.groupby(self.layer.every(kind), key=lambda item: item[0]):
            hidden = False
            for address, _, found in group:
                item = self._item(address, found, used)
                self.done.left += item.size
                if hidden:
                    self._drop(item)
                    continue
                named = self._named(found) if kind == "entries" else set()
                if named is None:
                    self.done.damaged += (found.segment is not None or found.is_there) and self._drop(item)
                    continue
                hidden = True
                item.named = tuple(named)
                yield item

    def _item(self, address: str, found: Found, used: dict[Path, list[float]]) -> _Item:
        if found.segment is not None and found.record is not None:
            row = found.record.row
            if found.path not in used:
                used[found.path] = found.segment.used()
            size = found.record.size + ROW.size
            return _Item(address, size, used[found.path][row], found.path, found.segment, row)
        changed = 0.0
        with contextlib.suppress(OSError):
            changed = found.path.stat().st_mtime
        return _Item(address, len(found.content), changed, found.path)

    def _named(self, found: Found) -> set[str] | None:
        """Code objects here that an entry names; None for a damaged one. A newer format's names are not known."""
        try:
            timings = Entry.from_json(found.content).timings.values()
        except NewerFormat:
            return set()
        except (UnicodeDecodeError, EntryError):
            return None
        return {d for t in timings for d in t.artefacts} & self.uses.keys()

    def _drop_entry(self, item: _Item) -> bool:
        """Under the entry's lock, and only if nobody used or wrote it meanwhile; a newer format's not at all."""
        found = next(self.layer.found("entries", item.address), None)
        try:
            Entry.from_json(found.content if found is not None else b"")
        except (UnicodeDecodeError, EntryError):
            return False
        if self.dry_run:
            return self._drop(item)
        if item.segment is not None:
            return not self.store.is_locked(item.address) and self._drop(item)
        with self.store.lock_of(item.address, LOCK_SECONDS) as held:
            try:
                if not held or item.path.stat().st_mtime != item.used:
                    return False
            except OSError:
                return False
            removed = self._drop(item)
        self.store.forget_address(item.address)
        return removed

    def _drop(self, item: _Item) -> bool:
        if item.segment is not None:
            if not self.alone:
                return False
            self.dropped.setdefault(item.path, (item.segment, set()))[1].add(item.row)
        else:
            try:
                if not self.dry_run:
                    item.path.unlink()
            except OSError as e:
                log.warning("%s: cannot be removed: %s", item.path, e.strerror)
                return False
        self.done.freed += item.size
        self.done.left -= item.size
        return True

    def _drop_segment(self, path: Path) -> bool:
        try:
            self.done.freed += path.stat().st_size
            if not self.dry_run:
                path.unlink()
                path.with_name(f"{path.name}.used").unlink(missing_ok=True)
        except OSError as e:
            log.warning("%s: cannot be removed: %s", path, e.strerror)
            return False
        return True

    def _rewrite(self) -> None:
        for path, (part, rows) in self.dropped.items():
            try:
                without(self.layer, part, rows)
            except OSError as e:
                log.warning("%s: cannot be written anew: %s", path, e.strerror)
        if self.dropped:
            self.store.forget_all()


def _sweep(root: Path, now: float) -> None:
    """Removes what killed imports and writers have left."""
    left = (".staging-*", "entries/*/.*.part", "objects/*/.*.part", "segments/.*.part")
    for path in itertools.chain.from_iterable(map(root.glob, left)):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < now - STALE_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
