"""Keys and code objects for `bench cache`: as large as real ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from flykernels.codeobject import Argument, CodeObject, Extent
from tuning_cache import Entry, Key, Timing, canonical
from tuning_cache.entry import HEAD

CANDIDATE = "flykernels tile_k=64 tile_m=256 tile_n=256 waves=2x4"
TARGET = {"arch": "gfx950", "product": "AMD Instinct MI350X", "compute_units": 256}
BINARY_BYTES = 24 << 10  # a gfx950 GEMM's code object


def key(n: int) -> Key:
    problem = {"n": n + 1, "k": 4096, "m": 128, "dtype": "bf16", "a": "row", "b": "col", "align_a": 16, "align_b": 16}
    return Key("mm", problem, TARGET, {"plugin": "0.1.0", "templates": "0" * 64, "mlir": "flydsl 0.5.0"})


def candidate(n: int) -> CodeObject:
    """A code object that differs for every n."""
    arguments = tuple(Argument(name, "pointer", "bf16") for name in ("a", "b", "c"))
    binary = n.to_bytes(8, "little") * (BINARY_BYTES // 8)
    return CodeObject("gfx950", "gfx950", "gemm", arguments, ((Extent(n + 1, 256),),), 512, binary=binary)


def entry(n: int) -> Entry:
    """Measured: the winner of ours and ten others."""
    made = Entry(key(n)).with_timing(Timing(CANDIDATE, 10.0 + n % 90, {"tile": [256, 256, 64], "waves": [2, 4]}))
    for i in range(10):
        made = made.with_timing(Timing(f"{CANDIDATE} stages={i}", 120.0 + i, {"tile": [128, 128, 64], "stages": i}))
    return replace(made, winner=CANDIDATE)


def _around(text: str, *marks: str) -> list[str]:
    """What lies around the marks, each of which is there once."""
    pieces = []
    for mark in marks:
        before, found, text = text.partition(mark)
        assert found and mark not in text, f"{mark} is there {text.count(mark)} times more"
        pieces.append(before)
    return [*pieces, text]


def lines(count: int) -> Iterator[tuple[bytes, bytes]]:
    """(address, line) of entry(0) to entry(count - 1), in the order of addresses: as `Entry.to_line` writes them, but
    put together from pieces, since making a million entries takes longer than what is to be measured."""
    first = entry(0)
    body = first.to_line()[len(HEAD) :].decode().partition(',"format":')[0]
    a, b, c = _around(body, '"n":1}', '"microseconds":10.0,')
    named = {"op": "mm", "problem": first.key.problem, "target": TARGET, "versions": first.key.versions}
    named["versions"] = {k: v for k, v in first.key.versions.items() if k != "mlir"}
    d, e = _around(canonical(named), '"n":1}')
    address = lambda n: hashlib.sha256(f'{d}"n":{n + 1}}}{e}'.encode()).digest()
    for where, n in sorted((address(n), n) for n in range(count)):
        text = f'{a}"n":{n + 1}}}{b}"microseconds":{10.0 + n % 90},{c}'.encode()
        yield where, HEAD + text + b',"format":1,"sha256":"%s"}\n' % hashlib.sha256(text).hexdigest().encode()
