"""One directory of the cache: what lies under an address there, in files of its own and in segments.

    DIR/entries/ab/<digest of key>.json       what this machine found out: one file each, written whole or not at all
    DIR/objects/ab/<digest of content>.fko    code objects, likewise
    DIR/segments/...fks                       what was imported or folded, many in a file: see segment.py
    DIR/locks/

A file of its own is newer than every segment, and a segment with a higher number than one with a lower.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from flykernels.forks import anew_in_children

from . import segment
from .entry import Entry, EntryError, is_digest
from .segment import NewerSegment, Record, Segment, SegmentError

SUFFIX = {"entries": ".json", "objects": ".fko"}
SEGMENTS = "segments"
USED_SECONDS = 3600.0  # how exactly a file's time of last use is kept
SETTLED_SECONDS = 2.0  # after which a folder's time of change tells the next change from the last, on any file system


Stamp = tuple[int, int, int]


def stamp_of(held: os.stat_result) -> Stamp:
    """Tells a file from the one that takes its place, also where times are coarse."""
    return held.st_ino, held.st_size, held.st_mtime_ns


class Found(NamedTuple):
    """What one file or record holds: unchecked. stamp: the file's, when it was read from end to end with others."""

    content: bytes
    path: Path
    segment: Segment | None = None
    record: Record | None = None
    stamp: Stamp | None = None

    @property
    def is_there(self) -> bool:
        """Whether the file that was read is still the one of its name."""
        try:
            return stamp_of(self.path.stat()) == self.stamp
        except OSError:
            return False

    def __str__(self) -> str:
        return f"{self.path}" if self.record is None else f"{self.path}, row {self.record.row}"

    def use(self) -> None:
        """Notes that it is in use: a file's time of change, a row's hour. Not where that cannot be written."""
        if self.segment is not None and self.record is not None:
            self.segment.use(self.record)
            return
        with contextlib.suppress(OSError):
            if self.path.stat().st_mtime < time.time() - USED_SECONDS:
                os.utime(self.path)


class Layer:
    """say    told of what cannot be read, once or more often
    notes  whether last use is noted: not in a layer that is only read"""

    def __init__(self, root: Path, say: Callable[[str], None], notes: bool = True):
        self.root, self._say, self._notes = root, say, notes
        self._mutex: threading.Lock
        anew_in_children(self, _mutex=threading.Lock)
        self._listed: int | None = None  # time of change of the folder when it was listed, if that says what it holds
        self._open: dict[str, Segment] = {}
        self.damaged: list[Path] = []  # segments' files that are none
        self._order: dict[str, list[Segment]] = {"entries": [], "objects": []}
        self._folders = {kind: f"{root}/{kind}/" for kind in SUFFIX}
        self._segments = f"{root}/{SEGMENTS}"
        self.segments("entries")  # opened now, so that the first look-up need not wait for it

    def file(self, kind: str, address: str) -> Path:
        """Where its file lies, or would lie."""
        return self.root / kind / address[:2] / (address + SUFFIX[kind])

    def found(self, kind: str, address: str) -> Iterator[Found]:
        """What lies under an address (64 hex digits), the newest first."""
        name = f"{self._folders[kind]}{address[:2]}/{address}{SUFFIX[kind]}"
        some = os.access(name, os.F_OK)  # a third of what an exception costs, and most entries have no file
        if some:
            try:
                with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC), "rb", buffering=0) as held:
                    yield Found(held.read(), Path(name))
            except OSError as e:
                self._unread(name, e)
        wanted = bytes.fromhex(address)
        for part in self.segments(kind):
            try:
                record = part.find(wanted)
                if record is not None:
                    some = True
                    yield Found(part.read(record), part.path, part, record)
            except OSError as e:
                self._unread(part.path, e)
        if not some:
            try:
                os.stat(name)
            except OSError as e:
                self._unread(name, e)

    def _unread(self, path: Path | str, why: OSError) -> None:
        if not isinstance(why, (FileNotFoundError, NotADirectoryError)):
            self._say(f"{path}: skipped: {why}")

    def has(self, kind: str, address: str) -> bool:
        """Whether something lies there; it is checked when it is read."""
        if os.path.isfile(f"{self._folders[kind]}{address[:2]}/{address}{SUFFIX[kind]}"):
            return True
        with contextlib.suppress(OSError):
            return any(part.find(bytes.fromhex(address)) for part in self.segments(kind))
        return False

    def whole_object(self, digest: str) -> bool:
        """Whether a code object lies there unaltered."""
        return any(hashlib.sha256(found.content).hexdigest() == digest for found in self.found("objects", digest))

    # -- segments
    def segments(self, kind: str) -> list[Segment]:
        """The open segments, the newest first. The folder is looked at each time, and listed when it has changed."""
        try:
            changed = os.stat(self._segments).st_mtime_ns
        except OSError:
            changed = -1
        if changed != self._listed:
            with self._mutex:
                self._list()
                self._listed = changed if time.time() - changed * 1e-9 > SETTLED_SECONDS else None
        return self._order[kind]

    def _list(self) -> None:
        names = []
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(self._segments) if segment.NAME.fullmatch(name)]
        held: dict[str, Segment] = {}
        damaged: list[Path] = []
        for name in names:
            try:
                held[name] = self._open.get(name) or Segment(f"{self._segments}/{name}", self._notes)
                if not name.startswith(held[name].kind + "-"):
                    raise SegmentError(f"it holds {held.pop(name).kind}")
            except FileNotFoundError:  # folded meanwhile
                continue
            except (OSError, SegmentError) as e:
                self._say(f"{self._segments}/{name}: skipped: {e}")
                if isinstance(e, SegmentError) and not isinstance(e, NewerSegment):
                    damaged.append(Path(self._segments, name))
        self._open, self.damaged = held, damaged
        newest_first = sorted(held, key=lambda name: name.partition("-")[2], reverse=True)
        self._order = {kind: [held[n] for n in newest_first if n.startswith(kind)] for kind in SUFFIX}

    def publish(self, kind: str, staged: list[tuple[Path, str]], number: int | None = None) -> list[Path]:
        """Moves whole segments (path, SHA-256) in, above those that are there, or in the place of one with that
        number. The caller holds `Store.folding`."""
        folder = Path(self._segments)
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(found[2]) for name in os.listdir(folder) if (found := segment.NAME.fullmatch(name))]
        number = max(numbers, default=0) + 1 if number is None else number
        done = []
        for path, _ in staged:
            _sync(path)
        for path, digest in staged:
            done.append(folder / segment.name_of(kind, number, digest))
            os.replace(path, done[-1])
        _sync(folder)
        self._listed = None
        return done

    def discard(self, parts: list[Segment]) -> None:
        """Removes segments. Readers that have them open go on reading."""
        for part in parts:
            for name in (str(part.path), f"{part.path}.used"):
                with contextlib.suppress(OSError):
                    os.unlink(name)
        self._listed = None

    # -- all of it
    def files(self, kind: str) -> Iterator[Path]:
        """The files of their own, in the order of their addresses."""
        folder = self.root / kind
        with contextlib.suppress(OSError):
            for part in sorted(os.listdir(folder)):
                with contextlib.suppress(OSError):
                    for name in sorted(os.listdir(folder / part)):
                        address, dot, end = name.partition(".")
                        if dot + end == SUFFIX[kind] and is_digest(address):
                            yield folder / part / name

    def every(self, kind: str) -> Iterator[tuple[str, int, Found]]:
        """(address, place in the order of age, what lies there), in the order of addresses, the newest first."""
        streams = [self._of_files(kind), *(self._of(n, part) for n, part in enumerate(self.segments(kind), 1))]
        return heapq.merge(*streams, key=lambda item: item[:2])

    def _of_files(self, kind: str) -> Iterator[tuple[str, int, Found]]:
        for path in self.files(kind):
            try:
                with path.open("rb") as held:
                    stamp = stamp_of(os.fstat(held.fileno()))
                    found = Found(held.read(), path, stamp=stamp)
                yield path.name.partition(".")[0], 0, found
            except FileNotFoundError:
                continue
            except OSError as e:
                self._say(f"{path}: skipped: {e}")

    def _of(self, order: int, part: Segment) -> Iterator[tuple[str, int, Found]]:
        try:
            for address, record, content in part.records():
                yield address.hex(), order, Found(content, part.path, part, record)
        except OSError as e:
            self._say(f"{part.path}: skipped: {e}")

    # -- writing
    def write(self, kind: str, address: str, data: bytes) -> None:
        """A file of its own, whole or not at all: beside its place, to the disk, renamed. OSError if that fails."""
        path = self.file(kind, address)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, part = segment.temporary(path.parent, ".")
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


def damage(kind: str, address: str, content: bytes) -> str | None:
    """Why what lies under an address is not to be read, or None. A newer format's entry counts as damaged here."""
    if kind == "objects":
        whole = hashlib.sha256(content).hexdigest() == address
        return None if whole else "its content does not match its name"
    try:
        entry = Entry.from_json(content)
    except (UnicodeDecodeError, EntryError) as e:
        return str(e)
    return None if entry.key.digest == address else "it lies under another key's name"


def _sync(path: Path) -> None:
    """So that a file's content, or the names in a folder, outlive a loss of power, where the file system can."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # a file system that cannot
            raise
    finally:
        os.close(fd)


def grouped(layers: list[Layer], kind: str) -> Iterator[tuple[str, list[tuple[int, Found]]]]:
    """(address, [(layer, what lies there)]) over several layers, in the order of addresses; within, as they hide each
    other: layer by layer, the newest first."""

    def of(n: int, layer: Layer) -> Iterator[tuple[str, int, int, Found]]:
        return ((address, n, order, found) for address, order, found in layer.every(kind))

    merged = heapq.merge(*(of(n, layer) for n, layer in enumerate(layers)), key=lambda item: item[:3])
    for address, group in itertools.groupby(merged, key=lambda item: item[0]):
        yield address, [(n, found) for _, n, _, found in group]
