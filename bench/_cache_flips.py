"""`bench cache --part flips`: every byte of everything that is read, changed in turn, is never loaded, and no crash."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from flykernels.codeobject import Argument, CodeObject, Extent
from tuning_cache import BundleError, Entry, Key, Store, Timing, export, fold, verify

from .common import Report, tracked

FLIPS = (0x01, 0x20, 0x80, 0xFF)
SMALL = 32  # bytes of a code object's binary: what is around it is what is read

WHAT = {".json": "an entry's file", ".fko": "a code object's file", ".tar": "a bundle, manifest and all"}


def _filled(folder: Path) -> tuple[Store, Entry]:
    store = Store([folder])
    arguments = (Argument("a", "pointer", "bf16"),)
    code = CodeObject("gfx950", "gfx950", "gemm", arguments, ((Extent(64, 64),),), 256, binary=bytes(range(SMALL)))
    key = Key("mm", {"m": 1, "n": 2, "k": 3}, {"arch": "gfx950"}, {"plugin": "1", "templates": "ab", "mlir": "x 1"})
    made = Entry(key).with_timing(Timing("ours", 1.5, {"t": 1}, store.add(code))).with_timing(Timing("aten", 2.0))
    return store, store.update(key, lambda _: replace(made, winner="ours"))


def flips(report: Report) -> None:
    logging.getLogger("tuning_cache").setLevel(logging.ERROR)  # thousands of files are skipped, each with a warning
    with tempfile.TemporaryDirectory(prefix="flykernels-bench-") as name:
        folder = Path(name)
        store, entry = _filled(folder / "files")
        _filled(folder / "segments")
        fold(Store([folder / "segments"]))
        whole = export(store, folder / "b.tar").path
        found = (*sorted(folder.glob("files/[eo]*/*/*")), *sorted(folder.glob("segments/segments/*.fks")))
        cases = [*((path, _looked_up(path, folder, entry)) for path in found), (whole, lambda: _bundle(whole))]
        for path, same in tracked(cases, "files"):
            loaded = harmless = crashed = 0
            data = path.read_bytes()
            for changed in _changed(data):
                path.write_bytes(changed)
                try:
                    outcome = same()
                    loaded += outcome is False
                    harmless += outcome is True
                except Exception:
                    crashed += 1
            path.write_bytes(data)
            what = WHAT.get(path.suffix, f"a segment of {path.name.partition('-')[0]}")
            report.row(what=what, bytes=len(data), loaded_changed=loaded, read_as_it_was=harmless, crashed=crashed)
            report.bar(f"{what}: loaded with a changed byte", loaded, at_most=0)
            report.bar(f"{what}: crashed", crashed, at_most=0)
    report.note("read as it was: white space between words, or bytes of an index that a look-up does not read")


def _changed(data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ FLIPS[at % len(FLIPS)]]) + data[at + 1 :]


def _looked_up(path: Path, folder: Path, entry: Entry) -> Callable[[], bool | None]:
    root = folder / ("segments" if path.suffix == ".fks" else "files")
    best = entry.best()
    digest = best.artefact if best is not None else None
    objects = path.suffix == ".fko" or path.name.startswith("objects")

    def same() -> bool | None:
        """True: as it was; False: changed; None: not loaded."""
        store = Store([root])
        if objects:
            code = store.load(str(digest))
            return None if code is None else code.digest == digest
        found = store.lookup(entry.key)
        return None if found is None else found == entry

    return same


def _bundle(path: Path) -> bool | None:
    """False where a changed bundle verifies; None where it is refused."""
    try:
        verify(path)
        return False
    except BundleError:
        return None
