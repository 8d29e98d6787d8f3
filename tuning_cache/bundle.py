"""The cache as one file: written from a store, checked whole, and taken into a store whole or not at all.

    manifest.json                              what follows, with sizes and SHA-256 (see manifest.py)
    manifest.sig                               optional: see signature.py
    segments/entries-00000000-<SHA-256>.fks    as in a store (see segment.py), numbered in the order of addresses
    segments/objects-00000000-<SHA-256>.fks    every code object that the entries name

A digest says that a bundle is as it was written; only a signature says by whom. Code objects are programs: import
unsigned bundles from people whose programs you would run.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import segment
from .archive import MANIFEST, SEGMENT, SIGNATURE, BundleError, Limits, Writer, members
from .checking import Answer, look_at_all
from .entry import HEAD, Entry, EntryError, check_line
from .layer import SEGMENTS
from .manifest import Accept, Manifest, each_once
from .segment import Segment, SegmentError
from .signature import check as check_signature
from .signature import sign
from .store import Store

log = logging.getLogger(__name__)

ANYTHING, USUAL = Accept(), Limits()
STAGING = ".staging-"  # folders of imports and exports that are under way, or were killed


@dataclass
class Checked:
    """A bundle that has been read to its end and is whole."""

    manifest: Manifest
    signer: str | None
    left_out: int = 0  # entries that are for other targets or versions, where leaving them out was asked for
    missing: int = 0  # artefacts that entries name and the bundle does not hold: they will be compiled again


@dataclass
class Exported:
    """What went into a bundle."""

    path: Path
    manifest: Manifest = field(repr=False, default_factory=Manifest)
    missing: int = 0  # artefacts that entries name and the store does not have


# -- out


def export(
    store: Store,
    path: Path,
    *,
    wanted: Callable[[Entry], bool] = lambda entry: True,
    winners_only: bool = False,
    key_file: Path | None = None,
    made_by: str = "",
) -> Exported:
    """Writes the store's entries (all layers) that are `wanted`, with their code objects, to one file, whole or not at
    all. A name that ends in "gz" is compressed. The same content gives the same bytes.

    winners_only  leave out the code objects of candidates that lost
    key_file      sign with this private key (PEM)

    BundleError if the file cannot be written, or the key is of no use."""
    named: set[str] = set()
    targets: dict[str, dict] = {}
    versions: dict[str, dict] = {}
    missing = 0
    counts = {"entries": 0, "objects": 0}

    def entries() -> Iterator[tuple[bytes, bytes]]:
        for address, entry, found in store.chosen():
            if not wanted(entry):
                continue
            shaped = _without_losers(entry) if winners_only else entry
            as_it_is = shaped is entry and found.content.startswith(HEAD)
            line = found.content if as_it_is else shaped.to_line()
            try:
                _, key, artefacts, _ = check_line(line)
            except EntryError as e:  # its timings are not right: somebody wrote it so
                log.warning("%s: left out: %s", found, e)
                continue
            named.update(artefacts)
            targets[repr(key.target)], versions[repr(key.versions)] = key.target, key.versions
            counts["entries"] += 1
            yield bytes.fromhex(address), line

    def objects() -> Iterator[tuple[bytes, bytes]]:
        nonlocal missing
        for digest in sorted(named):
            content = store.content(digest)
            if content is None:
                missing += 1
                continue
            counts["objects"] += 1
            yield bytes.fromhex(digest), content

    try:
        with tempfile.TemporaryDirectory(prefix=STAGING, dir=path.parent) as folder:
            files, held = {}, {}
            for kind, records in (("entries", entries), ("objects", objects)):
                for n, (part, digest) in enumerate(segment.write(Path(folder), kind, records())):
                    name = f"{SEGMENTS}/{segment.name_of(kind, n, digest)}"
                    files[name], held[name] = (part.stat().st_size, digest), part
            manifest = Manifest(
                files, **counts, targets=each_once(targets.values()), versions=each_once(versions.values()),
                made_by=made_by,
            )  # fmt: skip
            _write(path, Path(folder) / "bundle", manifest, held, key_file)
    except OSError as e:
        raise BundleError(f"{path} cannot be written: {e.strerror}") from None
    return Exported(path, manifest, missing)


def _without_losers(entry: Entry) -> Entry:
    if not entry.winner:
        return entry
    lost = {n: replace(t, artefact=None) for n, t in entry.timings.items() if n != entry.winner}
    return replace(entry, timings={**entry.timings, **lost})


def _write(path: Path, part: Path, manifest: Manifest, held: dict[str, Path], key_file: Path | None) -> None:
    head = manifest.to_bytes()
    signature = sign(head, key_file) if key_file is not None else None
    with part.open("wb") as file:
        writer = Writer(file, path.name.endswith("gz"))
        writer.add(MANIFEST, len(head), [head])
        if signature is not None:
            writer.add(SIGNATURE, len(signature), [signature])
        for name, source in held.items():
            with source.open("rb") as content:
                writer.add(name, manifest.files[name][0], iter(lambda: content.read(segment.BLOCK), b""))
        writer.close()
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


# -- checked


def verify(
    path: Path,
    accept: Accept = ANYTHING,
    trusted: Sequence[str] = (),
    limits: Limits = USUAL,
    leave_out: bool = False,
) -> Checked:
    """Reads a bundle to its end; writes nothing but temporary files. BundleError with the first reason to refuse it.

    accept     targets and versions that are let in
    trusted    public keys (hex), one of which must have signed; none: a signature must fit if there is one
    leave_out  pass over entries that are not let in, instead of refusing the bundle for them"""
    try:
        with tempfile.TemporaryDirectory(prefix="flykernels-") as folder:
            return unpack(Path(path), Path(folder), accept, trusted, limits, leave_out).checked
    except OSError as e:
        raise BundleError(f"it cannot be unpacked to be checked: {e.strerror}") from None


@dataclass
class Unpacked:
    """A bundle that has been checked, its segments lying in a folder.

    let_in  a mark for each row of an entries' segment: whether it is let in
    named   marks of the rows of an objects' segment: see checking.py"""

    checked: Checked
    entries: list[Segment] = field(default_factory=list)
    objects: list[Segment] = field(default_factory=list)
    let_in: dict[Path, bytearray] = field(default_factory=dict)
    named: dict[Path, bytearray] = field(default_factory=dict)


def unpack(
    path: Path, folder: Path, accept: Accept, trusted: Sequence[str], limits: Limits, leave_out: bool
) -> Unpacked:
    """Checks all of a bundle, as `verify` does, and leaves its segments in the folder."""
    found = members(path, limits)
    with contextlib.closing(found):
        name, size, pieces = next(found, ("", 0, iter(())))
        if name != MANIFEST:
            raise BundleError(f"a bundle begins with {MANIFEST}, and this with {name!r}")
        head = b"".join(pieces)
        manifest = Manifest.from_bytes(head)
        if manifest.total_bytes > limits.total:
            raise BundleError(f"it says that it holds {manifest.total_bytes} bytes; at most {limits.total} are taken")
        expected, signature, count = list(manifest.files), None, 0
        done = Unpacked(Checked(manifest, None))
        name, size, pieces = next(found, ("", 0, iter(())))
        if name == SIGNATURE:
            signature = b"".join(pieces)
            name, size, pieces = next(found, ("", 0, iter(())))
        done.checked.signer = check_signature(head, signature, trusted)
        while name:
            if count >= len(expected) or name != expected[count]:
                there = expected[count] if count < len(expected) else "the end"
                raise BundleError(f"{name} is where the manifest has {there}")
            part = _part(folder, name, size, pieces, manifest.files[name])
            (done.entries if part.kind == "entries" else done.objects).append(part)
            count += 1
            name, size, pieces = next(found, ("", 0, iter(())))
        if count != len(expected):
            raise BundleError(f"it holds {count} segments, and its manifest names {len(expected)}")
    _check(done, accept, limits, leave_out)
    return done


def _part(folder: Path, name: str, size: int, pieces: Iterator[bytes], said: tuple[int, str]) -> Segment:
    """One segment, written to the folder and opened."""
    if size != said[0]:
        raise BundleError(f"{name} has {size} bytes, and the manifest says {said[0]}")
    path, digest = folder / name.rpartition("/")[2], hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
    if digest.hexdigest() != said[1]:
        raise BundleError(f"{name} does not match the SHA-256 that the manifest says")
    try:
        part = Segment(path)
        part.check_form()
    except SegmentError as e:
        raise BundleError(f"{name}: {e}") from None
    named = SEGMENT.fullmatch(name)
    if named is None or part.kind != named[1]:
        raise BundleError(f"{name} holds {part.kind}")
    return part


def _check(done: Unpacked, accept: Accept, limits: Limits, leave_out: bool) -> None:
    """What the segments hold, and that the manifest says so."""
    manifest = done.checked.manifest
    kinds = [part.kind for part in (*done.entries, *done.objects)]
    if [m[1] for m in map(SEGMENT.fullmatch, manifest.files) if m] != kinds:
        raise BundleError("code objects come before entries")
    for parts in (done.entries, done.objects):
        if any(not p.count for p in parts) or any(a.last() >= b.first() for a, b in itertools.pairwise(parts)):
            raise BundleError("its segments are empty, or not in the order of addresses")
    counts = sum(p.count for p in done.entries), sum(p.count for p in done.objects)
    if counts != (manifest.entries, manifest.objects):
        raise BundleError(f"it holds {counts[0]} entries and {counts[1]} code objects, and its manifest says otherwise")
    named = [bytearray(part.count) for part in done.objects]
    seen: dict[str, dict[str, None]] = {"targets": {}, "versions": {}}
    done.let_in = {part.path: bytearray() for part in done.entries}
    for part, answer in look_at_all([*done.entries, *done.objects], done.objects, accept, limits, leave_out):
        if answer.reason is not None:
            raise BundleError(answer.reason)
        if part.kind == "entries":
            done.let_in[part.path] += answer.let_in
            _add(answer, named, seen)
            done.checked.left_out += answer.left_out
            done.checked.missing += answer.missing
    for part, marks in zip(done.objects, named):
        if 0 in marks:
            address = next(a for a, record in part.rows() if not marks[record.row])
            raise BundleError(f"no entry of the bundle names the code object {address.hex()[:12]}")
        done.named[part.path] = marks
    for name, found in seen.items():
        if each_once(json.loads(text) for text in found) != getattr(manifest, name):
            raise BundleError("the manifest's targets or versions are not those of the entries")


def _add(answer: Answer, named: list[bytearray], seen: dict[str, dict[str, None]]) -> None:
    for marks, more in zip(named, answer.named):
        whole = int.from_bytes(marks, "little") | int.from_bytes(more, "little")
        marks[:] = whole.to_bytes(len(marks), "little")
    for name, found in seen.items():
        found.update(dict.fromkeys(getattr(answer, name)))


# -- several to one


def join(paths: Sequence[Path], path: Path, *, trusted: Sequence[str] = (), key_file: Path | None = None,
         limits: Limits = USUAL, made_by: str = "") -> Exported:  # fmt: skip
    """Makes one bundle of several; where they know the same key, the one named first goes before (see merge.py)."""
    from .bringing import import_

    with tempfile.TemporaryDirectory(prefix="flykernels-") as folder:
        store = Store([folder])
        for p in paths:
            try:
                import_(store, p, trusted=trusted, limits=limits)
            except BundleError as e:
                raise BundleError(f"{p}: {e}") from None
        return export(store, path, key_file=key_file, made_by=made_by)


def remove(folder: Path) -> None:
    """A staging folder, whatever is in it."""
    shutil.rmtree(folder, ignore_errors=True)
