"""`bench cache --part million`: so many entries and some code objects, exported, imported, looked up.

What is timed runs in processes of its own (`python -m bench._cache_scale WHAT ...`, one line of JSON), so that memory
is theirs alone, and a look-up can be the first that a process does."""

from __future__ import annotations

import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tuning_cache import Store, Timing, export, import_, segment

from ._cache_keys import CANDIDATE, candidate, entry, key, lines
from .common import Report

ROOT = Path(__file__).parents[1]
IMPORT_SECONDS, LOOKUP_US, MEMORY_MIB = 60.0, 100.0, 1024
OBJECTS = 1000  # code objects of as many further entries, of 24 KiB each
LOOKUPS, PROCESSES, COLD = 2000, 5, 21
FIRST_US = 2000.0  # of opening the cache and finding one entry, all code being cold


def child(*what: object) -> dict:
    command = [sys.executable, "-m", "bench._cache_scale", *map(str, what)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def million(report: Report, entries: int, bundle: Path | None = None) -> None:
    """Bars of the full million, in proportion for fewer. bundle: where the bundle is, or is left for the next time."""
    with tempfile.TemporaryDirectory(prefix="flykernels-bench-") as name:
        folder = Path(name)
        made = bundle or folder / "b.tar"
        exported: dict = {"seconds": "-"}
        if not made.exists():
            _fill(folder / "source", entries)
            exported = child("export", folder / "source", made)
        imported = child("import", made, folder / "target")
        _read_through(folder / "target")
        found = [child("lookup", folder / "target", entries, -n) for n in range(PROCESSES)]
        lookup = statistics.median(f["median_us"] for f in found)
        peak_mib = max(f["peak_mib"] for f in found)
        cold = [child("lookup", folder / "target", entries, n, 1) for n in range(1, COLD + 1)]
        first = statistics.median(c["first_us"] for c in cold)
        opened = statistics.median(c["open_us"] + c["first_us"] for c in cold)
        report.row(
            entries=entries, code_objects=imported["objects"], bundle_mib=round(made.stat().st_size / 2**20),
            export_s=exported["seconds"], import_s=imported["seconds"], import_cpu_s=imported["cpu_s"],
            import_mib=imported["peak_mib"],
            lookup_us=lookup, lookup_us_by_process=" ".join(str(f["median_us"]) for f in found),
            first_lookup_us=first, opening_and_first_us=round(opened, 1), lookup_mib=peak_mib,
        )  # fmt: skip
    report.note("look-ups: files are in the system's page cache, entries are new to their process")
    report.bar(f"import of {entries} entries", imported["seconds"], at_most=IMPORT_SECONDS * entries / 10**6, unit="s")
    report.bar("entries that came in", imported["added"], at_least=entries + OBJECTS)
    report.bar("look-up of an entry that its process has not read, median", lookup, at_most=LOOKUP_US, unit="us")
    report.bar("opening the cache and the first look-up of a process, median", opened, at_most=FIRST_US, unit="us")
    report.bar("peak memory of importing", imported["peak_mib"], at_most=MEMORY_MIB, unit="MiB")
    report.bar("peak memory of looking up", peak_mib, at_most=MEMORY_MIB, unit="MiB")


def _read_through(folder: Path) -> None:
    """So that all of it is in memory as far as the system keeps files there: a look-up is measured, not a disk."""
    for path in folder.glob("segments/*"):
        with path.open("rb", buffering=0) as file:
            while file.read(segment.BLOCK):
                pass


def _fill(folder: Path, entries: int) -> None:
    """A cache with segments of so many entries, and files of some with code objects."""
    store = Store([folder])
    folder.mkdir(parents=True)
    store.layers[0].publish("entries", segment.write(folder, "entries", lines(entries)))
    for n in range(entries, entries + OBJECTS):
        artefact = store.add(candidate(n))
        timing = Timing(CANDIDATE, 10.0, {"tile": [256, 256, 64], "waves": [2, 4]}, artefact)
        made = entry(n).with_timing(timing)
        store.layers[0].write("entries", made.key.digest, made.to_json().encode())


def peak() -> int:
    """MiB of this process or of the largest that it started. Its own getrusage would count its parent's before exec."""
    own = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024


def main(what: str, *rest: str) -> None:
    start = time.perf_counter()
    if what == "export":
        export(Store([rest[0]]), Path(rest[1]))
        found: dict = {}
    elif what == "import":
        done = import_(Store([rest[1]]), Path(rest[0]))
        found = {"added": done.added, "kept": done.kept, "objects": done.objects}
    else:
        found = _lookups(Path(rest[0]), int(rest[1]), int(rest[2]), int(rest[3]) if len(rest) > 3 else LOOKUPS)
    seconds = round(time.perf_counter() - start, 2)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = round(sum(r.ru_utime + r.ru_stime for r in used), 1)
    print(json.dumps({**found, "seconds": seconds, "cpu_s": cpu, "peak_mib": peak()}))


def _lookups(folder: Path, entries: int, seed: int, count: int) -> dict:
    start, waits = time.perf_counter(), []
    store = Store([folder])
    opened = (time.perf_counter() - start) * 1e6
    for n in random.Random(seed).sample(range(entries), min(count, entries)):
        asked = key(n)
        start = time.perf_counter()
        found = store.lookup(asked)
        waits.append((time.perf_counter() - start) * 1e6)
        assert found is not None and found.winner == CANDIDATE
    times = {"open_us": opened, "first_us": waits[0], "median_us": statistics.median(waits)}
    return {name: round(us, 1) for name, us in times.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
