"""One entry and its code objects as bytes, for where they travel without a bundle: between the ranks of a job, the
machines of a fleet, and in torch's cache artifacts. Each part is checked as what lies in a directory is."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

from flykernels.codeobject import CodeObject, CodeObjectError

from .entry import Entry, EntryError, Key
from .merge import merge
from .store import Store


class ParcelError(ValueError):
    """Bytes that are not a whole parcel, or one for another key."""


def pack(store: Store, entry: Entry | None, winner_only: bool = True, objects: tuple[str, ...] = ()) -> bytes:
    """An entry (or none) and the code objects that the store has: the winner's, or all candidates', and `objects`."""
    best = entry.best() if entry is not None else None
    timings = [best] if winner_only else list(entry.timings.values()) if entry is not None else []
    named = [*objects, *(digest for t in timings if t is not None for digest in t.artefacts)]
    held = {digest: store.content(digest) for digest in named}
    texts = {digest: base64.b64encode(data).decode() for digest, data in held.items() if data is not None}
    line = entry.to_line().decode() if entry is not None else None
    return json.dumps({"entry": line, "objects": texts}).encode()


def unpack(
    store: Store,
    data: bytes,
    key: Key | None = None,
    keep: bool = True,
    change: Callable[[Entry, Entry], Entry] = lambda here, theirs: merge(here, theirs),
) -> Entry | None:
    """Puts a parcel into a store; its entry. ParcelError if it is none.

    key     whose entry it must be
    keep    whether the entry is kept (code objects are)
    change  (entry here, theirs) -> what is kept"""
    try:
        held = json.loads(data)
        theirs = Entry.from_json(held["entry"].encode()) if held["entry"] is not None else None
        if key is not None and (theirs is None or not key.same_address(theirs.key) or not key.agrees(theirs.key)):
            raise ParcelError("it is for another key")
        codes = [CodeObject.from_bytes(base64.b64decode(text)) for text in held["objects"].values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, EntryError, CodeObjectError) as e:
        raise e if isinstance(e, ParcelError) else ParcelError(f"not a parcel: {type(e).__name__}: {e}") from None
    for code in codes:
        store.add(code)
    if theirs is not None and keep:
        entry = theirs
        store.update(entry.key, lambda here: change(here, entry))
    return theirs
