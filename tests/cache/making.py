"""What the tests of the cache have in common: keys, code objects, filled stores, and a look at what a folder holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flykernels.codeobject import Argument, CodeObject, Extent
from tuning_cache import FAILED, Entry, Key, Store, Timing

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
