"""What the tests of the cache have in common: keys, code objects, filled stores, and a look at what a folder holds."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flykernels.codeobject import Argument, CodeObject, Extent
from tuning_cache import FAILED, BundleError, Entry, EntryError, Key, Store, Timing, export, import_, segment, verify
from tuning_cache.archive import END, header
from tuning_cache.manifest import Manifest, each_once

VERSIONS = {"plugin": "1", "templates": "ab" * 32, "mlir": "flydsl 0.5.0"}
MI350 = {"arch": "gfx950", "product": "AMD Instinct MI350X", "compute_units": 256}


def key(n: int = 1, target: dict = MI350, **versions) -> Key:
    return Key("mm", {"n": n, "k": 3, "m": "symbolic"}, target, {**VERSIONS, **versions})


def code(seed: int = 0, size: int = 256) -> CodeObject:
    binary = b"\x7fELF" + bytes((seed + i) % 256 for i in range(size))
    arguments = (Argument("a", "pointer", "bf16"), Argument("m", "i32", "i32"))
    return CodeObject("gfx950", "gfx950", "gemm", arguments, ((Extent("m", 64),),), 256, binary=binary)


def fill(store: Store, count: int = 3, measured: bool = True, size: int = 256, **key_options) -> list[Entry]:
    """Entries of two candidates of ours (one quarantined) and ATen's; unmeasured: artefacts only."""
    made = []
    for n in range(1, count + 1):
        artefact = store.add(code(n, size))
        mine = Timing("flykernels t=1", 10.0 + n if measured else None, {"t": 1}, artefact)
        entry = Entry(key(n, **key_options), source="measured" if measured else "compiled").with_timing(mine)
        if measured:
            entry = entry.with_timing(Timing("flykernels t=2", FAILED, {"t": 2}, None, "ValueError: no"))
            entry = replace(entry.with_timing(Timing("aten mm", 20.0 + n)), winner=mine.name)
        made.append(store.update(entry.key, lambda _, entry=entry: entry))
    return made


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for locks, which hold nothing."""
    found = (p for p in folder.rglob("*") if p.is_file() or p.is_symlink())
    return {str(p.relative_to(folder)): p.read_bytes() for p in found if p.suffix != ".lock"}


def held(folder: Path) -> dict[str, bytes]:
    """What a cache knows, wherever it lies: entries as lines, code objects, by kind/address."""
    store = Store([folder])
    found = {f"entries/{address}": entry.to_line() for address, entry in store.entries()}
    for address, _, there in store.layers[0].every("objects"):
        found.setdefault(f"objects/{address}", there.content)
    return found


# -- bundles, whole and forged


def bundle(folder: Path, name: str = "b.tar", **fill_options) -> Path:
    store = Store([folder / "source"])
    fill(store, **fill_options)
    return export(store, folder / name).path


def archive(path: Path, members: list[tuple[str, bytes]], end: bytes = END) -> Path:
    path.write_bytes(b"".join(header(n, len(d)) + d + bytes(-len(d) % 512) for n, d in members) + end)
    return path


def parts(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar]


def records(path: Path) -> dict[str, bytes]:
    """A bundle's entries and code objects, by kind/address."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, data in parts(path)[1:]:
            (Path(folder) / Path(name).name).write_bytes(data)
            part = segment.Segment(Path(folder) / Path(name).name)
            found |= {f"{part.kind}/{address.hex()}": content for address, _, content in part.records()}
    return found


def packed(path: Path, known: dict[str, bytes], **manifest) -> Path:
    """A bundle of these records and a manifest that fits them: what a forger without a key would make."""
    entries = []
    for name, line in known.items():
        try:
            entries += [Entry.from_json(line)] if name.startswith("entries") else []
        except EntryError:
            continue
    members, sums = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("entries", "objects"):
            rows = sorted((bytes.fromhex(n[8:]), data) for n, data in known.items() if n.startswith(kind))
            for n, (part, digest) in enumerate(segment.write(Path(folder), kind, rows)):
                data = part.read_bytes()
                members.append((f"segments/{segment.name_of(kind, n, digest)}", data))
                sums[members[-1][0]] = len(data), digest
    counts = [sum(n.startswith(kind) for n in known) for kind in ("entries", "objects")]
    targets, versions = each_once(e.key.target for e in entries), each_once(e.key.versions for e in entries)
    made = Manifest(sums, *counts, targets or (MI350,), versions or (VERSIONS,))
    return archive(path, [("manifest.json", replace(made, **manifest).to_bytes()), *members])


def signed_off(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """The bundle's manifest, made to fit other contents of its segments; the names too."""
    old = Manifest.from_bytes(parts(path)[0][1])
    renamed = [(n[:-68] + hashlib.sha256(d).hexdigest() + ".fks", d) for n, d in members]
    sums = {n: (len(d), hashlib.sha256(d).hexdigest()) for n, d in renamed}
    return archive(path, [("manifest.json", replace(old, files=sums).to_bytes()), *renamed])


def rewritten(path: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> Path:
    return packed(path, change(records(path)))


def refused(tmp_path: Path, path: Path, match: str, **options) -> None:
    target = tmp_path / "target"
    store = Store([target])
    fill(store, 1, measured=False)
    before = files(target)
    with pytest.raises(BundleError, match=match):
        import_(store, path, **options)
    with pytest.raises(BundleError, match=match):
        verify(path, **options)
    assert files(target) == before
    assert not list(target.glob(".staging-*"))
