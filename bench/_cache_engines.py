"""`bench cache --part engine`: the ways in which the cache could keep its entries, on the same entries.

files     one file an entry, each written beside its place, to the disk, and renamed
sqlite    one table in WAL mode, by the standard library
lmdb      by the package `lmdb`, where it is installed
segments  what the cache uses for many at a time: tuning_cache/segment.py (single entries are files)

What is timed beside loading runs in processes of its own: python -m bench._cache_engines ENGINE WHAT ..."""

from __future__ import annotations

import json
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tuning_cache import Store, segment
from tuning_cache.layer import SETTLED_SECONDS

from ._cache_keys import key, lines
from .common import Report

ROOT = Path(__file__).parents[1]
FILES_MOST = 2000  # of the engine that writes a file each: a million would take an hour, and shows the same
LOOKUPS, COLD, UPDATES, WRITERS = 2000, 7, 100, 4
MILLION = 10**6

Records = Iterable[tuple[bytes, bytes]]


class Files:
    def __init__(self, folder: Path):
        self.layer = Store([folder]).layers[0]

    def load(self, records: Records) -> None:
        for address, line in records:
            self.layer.write("entries", address.hex(), line)

    def get(self, address: bytes) -> bytes | None:
        return next((found.content for found in self.layer.found("entries", address.hex())), None)

    def put(self, address: bytes, line: bytes) -> None:
        self.layer.write("entries", address.hex(), line)


class Segments(Files):
    """put: a file, as the cache does it."""

    def load(self, records: Records) -> None:
        self.layer.root.mkdir(parents=True, exist_ok=True)
        self.layer.publish("entries", segment.write(self.layer.root, "entries", records))


class Sqlite:
    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.db = sqlite3.connect(folder / "cache.sqlite", timeout=60, isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=FULL")  # as durable as the others
        self.db.execute("CREATE TABLE IF NOT EXISTS entries (address BLOB PRIMARY KEY, line BLOB) WITHOUT ROWID")

    def load(self, records: Records) -> None:
        self.db.execute("BEGIN")
        self.db.executemany("INSERT INTO entries VALUES (?, ?)", records)
        self.db.execute("COMMIT")
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def get(self, address: bytes) -> bytes | None:
        found = self.db.execute("SELECT line FROM entries WHERE address = ?", (address,)).fetchone()
        return found[0] if found else None

    def put(self, address: bytes, line: bytes) -> None:
        self.db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?)", (address, line))


class Lmdb:
    def __init__(self, folder: Path):
        import lmdb

        folder.mkdir(parents=True, exist_ok=True)
        self.db = lmdb.open(str(folder), map_size=1 << 35)

    def load(self, records: Records) -> None:
        with self.db.begin(write=True) as transaction:
            for address, line in records:
                transaction.put(address, line, append=True)

    def get(self, address: bytes) -> bytes | None:
        with self.db.begin() as transaction:
            return transaction.get(address)

    def put(self, address: bytes, line: bytes) -> None:
        with self.db.begin(write=True) as transaction:
            transaction.put(address, line)


ENGINES: dict[str, Any] = {"files": Files, "sqlite": Sqlite, "lmdb": Lmdb, "segments": Segments}


def engine(report: Report, entries: int) -> None:
    """Loads so many entries, looks some up, updates some from several processes at a time."""
    for name, make in ENGINES.items():
        if name == "lmdb" and find_spec("lmdb") is None:
            report.note("lmdb: not measured: pip install lmdb")
            continue
        count = min(entries, FILES_MOST) if name == "files" else entries
        with tempfile.TemporaryDirectory(prefix="flykernels-bench-") as folder:
            records = list(lines(count))
            start = time.perf_counter()
            make(Path(folder) / "c").load(records)
            seconds = time.perf_counter() - start
            del records
            size = sum(p.stat().st_blocks * 512 for p in Path(folder).rglob("*") if p.is_file())
            time.sleep(SETTLED_SECONDS)  # a folder that changed just now is listed each time
            warm = child(name, "get", Path(folder) / "c", count, 0, LOOKUPS)
            cold = [child(name, "get", Path(folder) / "c", count, n, 1)["first_us"] for n in range(1, COLD + 1)]
            alone = child(name, "put", Path(folder) / "c", count, 0, UPDATES)
            together = _together(name, Path(folder) / "c", count)
            report.row(
                engine=name, entries=count, load_s=round(seconds, 2), million_s=round(seconds * MILLION / count),
                kib_an_entry=round(size / count / 1024, 2), lookup_us=warm["median_us"],
                first_of_a_process_us=statistics.median(cold), durable_update_us=alone["median_us"],
                updates_per_s_of_4=round(together),
            )  # fmt: skip
    report.note("look-ups are of an entry's bytes, without reading them; a load is on the disk when it counts as done")


def child(*what: object) -> dict:
    command = [sys.executable, "-m", "bench._cache_engines", *map(str, what)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def _together(name: str, folder: Path, count: int) -> float:
    """Updates a second of WRITERS processes, from the first's beginning to the last's end."""
    command = [sys.executable, "-m", "bench._cache_engines", name, "put", str(folder), str(count)]
    running = [
        subprocess.Popen([*command, str(n), str(UPDATES)], cwd=ROOT, stdout=subprocess.PIPE) for n in range(WRITERS)
    ]
    spans = [json.loads(p.communicate()[0])["span"] for p in running]
    return WRITERS * UPDATES / (max(end for _, end in spans) - min(start for start, _ in spans))


def main(name: str, what: str, folder: str, entries: str, seed: str, count: str) -> None:
    draw = random.Random(int(seed)).sample(range(int(entries)), min(int(count), int(entries)))
    asked = [bytes.fromhex(key(n).digest) for n in draw]
    line, waits, begun = next(iter(lines(1)))[1], [], time.time()
    start = time.perf_counter()
    held = ENGINES[name](Path(folder))
    for address in asked:
        if what == "get":
            assert held.get(address) is not None
        else:
            held.put(address, line)
        end = time.perf_counter()
        waits.append((end - start) * 1e6)
        start = end
    found = {"first_us": round(waits[0], 1), "median_us": round(statistics.median(waits), 1)}
    print(json.dumps({**found, "span": [begun, time.time()]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
