"""A bundle's way into a store: all of it, or nothing.

It is unpacked beside the cache and checked whole. Where the store knows nothing of what it holds, its segments are then
moved in as they are. Otherwise new ones are written of what is new or was learned; what is here is never lowered (see
merge.py). Code objects go first, so that at no moment an entry names what is not there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import segment
from .archive import BundleError, Limits
from .bundle import ANYTHING, STAGING, USUAL, Checked, Unpacked, remove, unpack
from .checking import WANTED
from .entry import Entry
from .layer import Layer
from .manifest import Accept
from .merge import merge
from .segment import Segment
from .store import Store

SEGMENTS_MOST = 16  # of a kind in a directory: beyond, they are folded into one, since a look-up asks each


@dataclass
class Imported(Checked):
    """What became of a bundle's entries and objects in the store."""

    added: int = 0
    merged: int = 0
    kept: int = 0  # entries that were here and had nothing to learn
    objects: int = 0


def import_(
    store: Store, path: Path, accept: Accept = ANYTHING, trusted: Sequence[str] = (), limits: Limits = USUAL,
    leave_out: bool = False,
) -> Imported:  # fmt: skip
    """Takes a bundle into the store's first directory. Entries that are there already are merged: see merge.py.

    Nothing is written before all of it has been checked and lies beside the cache, on the same file system; then it is
    moved in. BundleError, with nothing written, for what `verify` refuses, and where the directory cannot be
    written."""
    first = store.directories[0]
    try:
        first.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=first))
    except OSError as e:
        raise BundleError(f"{first} cannot be written: {e.strerror}") from None
    try:
        held = unpack(Path(path), staging, accept, trusted, limits, leave_out)
        done = Imported(**vars(held.checked))
        with store.folding() as alone:
            if not alone:
                raise BundleError(f"{first} is being written by another process, or cannot be locked")
            _bring(store, held, staging, done)
        store.forget_all()
        return done
    except OSError as e:
        raise BundleError(f"{first} cannot be written: {e.strerror}") from None
    finally:
        remove(staging)


def _bring(store: Store, held: Unpacked, staging: Path, done: Imported) -> None:
    layer = store.layers[0]
    objects = _objects(layer, held, staging, done)
    entries = _entries(store, held, staging, done)
    layer.publish("objects", objects)
    moved = layer.publish("entries", entries)
    _into_files(store, [Segment(path) for path in moved])
    if max(len(layer.segments(kind)) for kind in ("entries", "objects")) > SEGMENTS_MOST:
        from .fold import fold_segments

        fold_segments(store)


def _objects(layer: Layer, held: Unpacked, staging: Path, done: Imported) -> list[tuple[Path, str]]:
    """Segments of the code objects that are wanted and not here."""
    wanted = lambda part, address, row: held.named[part.path][row] & WANTED and not layer.whole_object(address.hex())
    rows = {part.path: {r.row for a, r in part.rows() if wanted(part, a, r.row)} for part in held.objects}
    done.objects = sum(map(len, rows.values()))
    if all(len(rows[part.path]) == part.count for part in held.objects):
        return [(part.path, _digest(part)) for part in held.objects]

    def kept() -> Iterator[tuple[bytes, bytes]]:
        for part in held.objects:
            for address, record, content in part.records():
                if record.row in rows[part.path]:
                    yield address, content

    return segment.write(staging, "objects", kept())


def _entries(store: Store, held: Unpacked, staging: Path, done: Imported) -> list[tuple[Path, str]]:
    """Segments of the entries that are let in and are new, or from which the one here learns."""
    known = _Known(store)
    if not known.anything and not done.left_out:
        done.added = sum(part.count for part in held.entries)
        return [(part.path, _digest(part)) for part in held.entries]

    def kept() -> Iterator[tuple[bytes, bytes]]:
        for part in held.entries:
            for address, record, content in part.records():
                if not held.let_in[part.path][record.row]:
                    continue
                if not known.something(address):
                    done.added += 1
                    yield address, content
                elif known.same(address, content):
                    done.kept += 1
                else:
                    theirs = Entry.from_json(content)
                    here = store.newest(theirs.key, any_compiler=True)
                    both = merge(here, theirs) if here is not None else theirs
                    done.added += here is None
                    done.merged += here not in (None, both)
                    done.kept += here == both
                    if here != both:
                        yield address, both.to_line()

    return segment.write(staging, "entries", kept())


class _Known:
    """What a store knows of addresses, asked for a million times: files are listed once."""

    def __init__(self, store: Store):
        self._store = store
        self._files = {path.name.partition(".")[0] for layer in store.layers for path in layer.files("entries")}
        self._parts = [part for layer in store.layers for part in layer.segments("entries")]
        self.anything = bool(self._files or self._parts)

    def something(self, address: bytes) -> bool:
        """Whether something lies under an address, whole or not."""
        return address.hex() in self._files or any(part.find(address) for part in self._parts)

    def same(self, address: bytes, content: bytes) -> bool:
        """Whether the first directory has it byte for byte."""
        found = next(self._store.layers[0].found("entries", address.hex()), None)
        return found is not None and found.content == content


def _into_files(store: Store, published: list[Segment]) -> None:
    """An entry's own file hides what was brought in: there it is merged in, also if it was written meanwhile."""
    for path in list(store.layers[0].files("entries")):
        address = path.name.partition(".")[0]
        for part in published:
            record = part.find(bytes.fromhex(address))
            if record is None:
                continue
            theirs = Entry.from_json(part.read(record))
            with store.lock(theirs.key):
                here = store.newest_in_first(theirs.key)
                if here is not None and (both := merge(here, theirs)) != here:
                    store.layers[0].write("entries", address, both.to_json().encode())


def _digest(part: Segment) -> str:
    return part.path.stem.rpartition("-")[2]
