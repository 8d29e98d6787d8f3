"""Segments written anew: many files into few, and without what is to go.

A new segment is moved in before what it replaces is removed, so that a reader finds everything at any moment, and a
process that dies halfway leaves things there twice, not less."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import segment
from .entry import HEAD, Entry
from .layer import Found, Layer, damage
from .segment import Segment
from .store import Store

STAGING = ".staging-"


@dataclass
class Folded:
    """What lies in the new segments, and files that went into them."""

    entries: int = 0
    objects: int = 0
    files: int = 0


def fold(store: Store, files: bool = True) -> Folded:
    """Writes the first directory's segments, and (`files`) what has a file of its own and is not being tuned, to as few
    segments as can be. Nothing is lost: what is damaged or of a newer format stays where it is. OSError where the
    directory cannot be written; nothing happens where another process is writing segments."""
    done = Folded()
    with store.folding(0.0) as alone:
        if alone:
            for kind in ("entries", "objects"):
                _fold(store, kind, files, done)
    return done


def fold_segments(store: Store) -> None:
    """`fold` of segments alone, for a caller who holds `Store.folding`."""
    for kind in ("entries", "objects"):
        _fold(store, kind, False, Folded())


def _fold(store: Store, kind: str, files: bool, done: Folded) -> None:
    layer = store.layers[0]
    old = layer.segments(kind)
    if len(old) < 2 and not files:
        return
    used_of: dict[Path, list[float]] = {}
    folded: list[tuple[str, Found]] = []
    used: list[float] = []

    def kept() -> Iterator[tuple[bytes, bytes]]:
        for address, group in itertools.groupby(layer.every(kind), key=lambda item: item[0]):
            for _, _, found in group:
                own = found.segment is None
                if own and (not files or (kind == "entries" and store.is_locked(address))):
                    continue
                if damage(kind, address, found.content):
                    continue
                line = kind == "objects" or found.content.startswith(HEAD)
                content = found.content if line else Entry.from_json(found.content).to_line()
                if own:
                    time = _changed(found.path)
                    folded.append((address, found._replace(content=b"")))
                elif found.segment is not None and found.record is not None:
                    if found.path not in used_of:
                        used_of[found.path] = found.segment.used()
                    time = used_of[found.path][found.record.row]
                used.append(time)
                yield bytes.fromhex(address), content
                break

    with tempfile.TemporaryDirectory(prefix=STAGING, dir=layer.root) as folder:
        moved = layer.publish(kind, segment.write(Path(folder), kind, kept()))
    times = iter(used)
    for path in moved:
        segment.note_used(path, itertools.islice(times, Segment(path).count))
    for address, found in folded:
        with store.lock_of(address, 0.0) as held:
            if held and found.is_there:
                with contextlib.suppress(OSError):
                    found.path.unlink()
                    done.files += 1
    layer.discard([part for part in old if part.path not in moved])
    setattr(done, kind, len(used))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def without(layer: Layer, part: Segment, rows: set[int]) -> None:
    """Writes a segment anew, in its place, without some rows. The caller holds `Store.folding`."""
    if len(rows) < part.count:
        used = [time for row, time in enumerate(part.used()) if row not in rows]
        records = ((address, content) for address, record, content in part.records() if record.row not in rows)
        with tempfile.TemporaryDirectory(prefix=STAGING, dir=layer.root) as folder:
            moved = layer.publish(part.kind, segment.write(Path(folder), part.kind, records), part.number)
        for path in moved:
            segment.note_used(path, used)
    layer.discard([part])
