"""The cache as one file: written from a store, checked whole, and taken into a store whole or not at all.

    manifest.json                     what follows, with sizes and SHA-256 (see manifest.py)
    manifest.sig                      optional: see signature.py
    entries/ab/<digest of key>.json   as in a store
    objects/ab/<digest>.fko           as in a store: every code object that the entries name

A digest says that a bundle is as it was written; only a signature says by whom. Code objects are programs: import
unsigned bundles from people whose programs you would run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flykernels.codeobject import CodeObject, CodeObjectError

from .archive import ENTRY, MANIFEST, OBJECT, SIGNATURE, BundleError, Limits, Writer, members
from .entry import Entry, EntryError, Key
from .manifest import Accept, Manifest, each_once
from .merge import merge
from .signature import check as check_signature
from .signature import sign
from .store import Store

log = logging.getLogger(__name__)

ANYTHING, USUAL = Accept(), Limits()
STAGING = ".staging-"  # folders of imports that are under way, or were killed


@dataclass
class Checked:
    """A bundle that has been read to its end and is whole."""

    manifest: Manifest
    signer: str | None
    left_out: int = 0  # entries that are for other targets or versions, where leaving them out was asked for
    missing: int = 0  # artefacts that entries name and the bundle does not hold: they will be compiled again


@dataclass
class Imported(Checked):
    """What became of a bundle's entries and objects in the store."""

    added: int = 0
    merged: int = 0
    kept: int = 0  # entries that were here and had nothing to learn
    objects: int = 0


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

    def shaped(key: Key) -> Entry | None:
        entry = store.newest(key)
        if entry is None or not winners_only or not entry.winner:
            return entry
        lost = {n: replace(t, artefact=None) for n, t in entry.timings.items() if n != entry.winner}
        return replace(entry, timings={**entry.timings, **lost})

    keys: dict[str, Key] = {}
    named: set[str] = set()
    for key in store.all_keys():
        entry = shaped(key)
        if entry is not None and wanted(entry):
            keys[key.digest] = key
            named.update(digest for t in entry.timings.values() for digest in t.artefacts)
    there = {digest for digest in named if store.content(digest) is not None}

    def content(name: str) -> bytes:
        digest = name.rpartition("/")[2].partition(".")[0]
        if ENTRY.fullmatch(name):
            entry = shaped(keys[digest])
            return entry.to_json().encode() if entry is not None else b""
        return store.content(digest) or b""

    names = [f"entries/{d[:2]}/{d}.json" for d in sorted(keys)]
    names += [f"objects/{d[:2]}/{d}.fko" for d in sorted(there)]
    manifest = _write(path, names, content, list(keys.values()), key_file, made_by)
    return Exported(path, manifest, len(named) - len(there))


def _write(
    path: Path, names: Sequence[str], content: Callable[[str], bytes], keys: Sequence[Key], key_file: Path | None,
    made_by: str,
) -> Manifest:  # fmt: skip
    """Two passes over the files: their digests come first. What changes in between is an error, not a bad file."""
    files = {}
    for name in names:
        data = content(name)
        files[name] = len(data), hashlib.sha256(data).hexdigest()
    manifest = Manifest(files, each_once(k.target for k in keys), each_once(k.versions for k in keys), made_by)
    head = manifest.to_bytes()
    signature = sign(head, key_file) if key_file is not None else None
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            writer = Writer(file, path.name.endswith("gz"))
            writer.add(MANIFEST, head)
            if signature is not None:
                writer.add(SIGNATURE, signature)
            for name, (_, digest) in files.items():
                data = content(name)
                if hashlib.sha256(data).hexdigest() != digest:
                    raise BundleError(f"{name} changed while it was written: export once more")
                writer.add(name, data)
            writer.close()
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as e:
        raise BundleError(f"{path} cannot be written: {e.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return manifest


# -- checked


def verify(
    path: Path,
    accept: Accept = ANYTHING,
    trusted: Sequence[str] = (),
    limits: Limits = USUAL,
    leave_out: bool = False,
) -> Checked:
    """Reads a bundle to its end; writes nothing. BundleError with the first reason to refuse it.

    accept     targets and versions that are let in
    trusted    public keys (hex), one of which must have signed; none: a signature must fit if there is one
    leave_out  pass over entries that are not let in, instead of refusing the bundle for them"""
    return _read(Path(path), accept, trusted, limits, leave_out, lambda name, data, entry: None)


def _read(
    path: Path, accept: Accept, trusted: Sequence[str], limits: Limits, leave_out: bool,
    take: Callable[[str, bytes, Entry | None], None],
) -> Checked:  # fmt: skip
    """`verify`; what has been checked and is let in is handed to take(name, content, entry or None)."""
    found = members(path, limits)
    with contextlib.closing(found):
        name, data = next(found, ("", b""))
        if name != MANIFEST:
            raise BundleError(f"a bundle begins with {MANIFEST}, and this with {name!r}")
        manifest = Manifest.from_bytes(data)
        if manifest.total_bytes > limits.total:
            raise BundleError(f"it says that it holds {manifest.total_bytes} bytes; at most {limits.total} are taken")
        expected = list(manifest.files)
        name, content = next(found, ("", b""))
        signature = content if name == SIGNATURE else None
        checked = Checked(manifest, check_signature(data, signature, trusted))
        rest = found if signature is not None else _again(name, content, found)
        keys: list[Key] = []
        needed: dict[str, bool] = {}  # artefact -> whether an entry that is let in names it
        count = 0
        for count, (name, content) in enumerate(rest, 1):
            if count > len(expected) or name != expected[count - 1]:
                there = expected[count - 1] if count <= len(expected) else "the end"
                raise BundleError(f"{name} is where the manifest has {there}")
            size, digest = manifest.files[name]
            if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
                raise BundleError(f"{name} does not match the SHA-256 that the manifest says")
            if named := ENTRY.fullmatch(name):
                entry = _entry(name, named[2], content)
                keys.append(entry.key)
                reason = accept.why_not(entry.key)
                if reason and not leave_out:
                    raise BundleError(f"{name} ({entry.key.op}): {reason}")
                checked.left_out += reason is not None
                for t in entry.timings.values():
                    for artefact in t.artefacts:
                        needed[artefact] = needed.get(artefact, False) or reason is None
                if reason is None:
                    take(name, content, entry)
                continue
            artefact = _object(name, content)
            if artefact not in needed:
                raise BundleError(f"no entry of the bundle names {name}")
            if needed[artefact]:
                take(name, content, None)
            del needed[artefact]
        if count != len(expected):
            raise BundleError(f"it holds {count} files, and its manifest names {len(expected)}")
    checked.missing = len(needed)
    targets, versions = each_once(k.target for k in keys), each_once(k.versions for k in keys)
    if (targets, versions) != (manifest.targets, manifest.versions):
        raise BundleError("the manifest's targets or versions are not those of the entries")
    return checked


def _again(name: str, content: bytes, rest: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    if name:
        yield name, content
    yield from rest


def _entry(name: str, digest: str, content: bytes) -> Entry:
    try:
        entry = Entry.from_json(content.decode())
    except (UnicodeDecodeError, EntryError) as e:
        raise BundleError(f"{name}: {e}") from None
    if entry.key.digest != digest:
        raise BundleError(f"{name} holds the entry of another key, {entry.key.digest}")
    return entry


def _object(name: str, content: bytes) -> str:
    named = OBJECT.fullmatch(name)
    try:
        digest = CodeObject.from_bytes(content).digest
    except CodeObjectError as e:
        raise BundleError(f"{name}: {e}") from None
    if named is None or digest != named[2]:
        raise BundleError(f"{name} holds a code object of the digest {digest}")
    return digest


# -- in


def import_(
    store: Store, path: Path, accept: Accept = ANYTHING, trusted: Sequence[str] = (), limits: Limits = USUAL,
    leave_out: bool = False,
) -> Imported:  # fmt: skip
    """Takes a bundle into the store's first directory. Entries that are there already are merged: see merge.py.

    Nothing is written before all of it has been checked and lies beside the cache, on the same file system; then it is
    moved in, code objects first, so that at no moment an entry names what is not there. BundleError, with nothing
    written, for what `verify` refuses, and where the directory cannot be written."""
    first = store.directories[0]
    try:
        first.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=first))
    except OSError as e:
        raise BundleError(f"{first} cannot be written: {e.strerror}") from None
    objects: list[str] = []
    keys: list[tuple[str, Key, bool]] = []

    def take(name: str, content: bytes, entry: Entry | None) -> None:
        if entry is None:
            objects.append(name)
        else:
            here = store.newest(entry.key, any_compiler=True)
            both = merge(here, entry) if here is not None else entry
            content = both.to_json().encode()
            keys.append((name, entry.key, here is None))
            _stage(staging / "theirs" / name, entry.to_json().encode())
        _stage(staging / name, content)

    try:
        checked = _read(Path(path), accept, trusted, limits, leave_out, take)
        done = Imported(**vars(checked))
        for name in (*objects, *(name for name, *_ in keys)):  # what needs room comes before the first move
            (first / name).parent.mkdir(parents=True, exist_ok=True)
        for name in objects:
            os.replace(staging / name, first / name)
            done.objects += 1
        for name, key, new in keys:
            _publish(store, key, staging, name, new, done)
        os.sync()
        return done
    except OSError as e:
        raise BundleError(f"{first} cannot be written: {e.strerror}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _stage(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _publish(store: Store, key: Key, staging: Path, name: str, new: bool, done: Imported) -> None:
    """Moves a staged entry in. One that was written here since it was staged is merged again."""
    final = store.directories[0] / name
    with store.lock(key):
        here = store.newest(key, any_compiler=True)
        theirs = Entry.from_json((staging / "theirs" / name).read_text())
        both = merge(here, theirs) if here is not None else theirs
        if here == both:
            done.kept += 1
            return
        done.added += new
        done.merged += not new
        text = both.to_json()
        if (staging / name).read_text() != text:
            (staging / name).write_text(text)
        os.replace(staging / name, final)
    store.forget(key)


def join(paths: Sequence[Path], path: Path, *, trusted: Sequence[str] = (), key_file: Path | None = None,
         limits: Limits = USUAL, made_by: str = "") -> Exported:  # fmt: skip
    """Makes one bundle of several; where they know the same key, the one named first goes before (see merge.py)."""
    with tempfile.TemporaryDirectory(prefix="flykernels-") as folder:
        store = Store([folder])
        for p in paths:
            try:
                import_(store, p, trusted=trusted, limits=limits)
            except BundleError as e:
                raise BundleError(f"{p}: {e}") from None
        return export(store, path, key_file=key_file, made_by=made_by)
