"""The tuning cache under load: processes that are killed, look-ups and bundles of many entries."""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tuning_cache import Entry, EntryError, Store, export, import_, verify

from ._cache_keys import CANDIDATE, candidate, entry, key
from ._cache_warmup import warmup
from .common import Report, parser

PARTS = ("concurrency", "bundle", "warmup")
TUNE_SECONDS = 0.01  # of a key: short, so that processes meet often
KILLED = 0.5  # of the processes
ROOT = Path(__file__).parents[1]


def concurrency(report: Report, processes: int, keys: int, limit: float, seed: int) -> None:
    """Half of the processes are killed with SIGKILL at random moments while all tune the same keys."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="flykernels-bench-") as folder:
        cache, log = Path(folder) / "cache", Path(folder) / "log"
        log.touch()
        start = time.monotonic()
        command = lambda n: [
            sys.executable, "-m", "bench._cache_worker", str(cache), str(log), str(keys), str(n), str(TUNE_SECONDS),
            str(limit),
        ]  # fmt: skip
        running = [subprocess.Popen(command(n), cwd=ROOT) for n in range(processes)]
        doomed = draw.sample(running, int(processes * KILLED))
        while b"started" not in log.read_bytes():  # so that moments are drawn within the work, not within imports
            time.sleep(0.01)
        for victim in doomed:
            time.sleep(draw.expovariate(len(doomed) / (keys * TUNE_SECONDS * 2)))
            victim.kill()  # SIGKILL
        codes = [p.wait() for p in running]
        seconds = time.monotonic() - start
        dead = {p.pid for p, code in zip(running, codes) if code == -9}
        failed = sum(code not in (0, -9) for code in codes)
        lost, torn = _examine(cache, keys)
        _told(report, log.read_text().splitlines(), keys, dead, limit)
        report.row(
            processes=processes, keys=keys, killed=len(dead), seconds=round(seconds, 1), lost=lost, torn=torn,
            failed_processes=failed,
        )  # fmt: skip
        report.bar("lost entries", lost, at_most=0)
        report.bar("torn or damaged files", torn, at_most=0)
        report.bar("processes that failed without being killed", failed, at_most=0)
        report.bar("processes killed while at work", len(dead), at_least=processes * KILLED * 0.8)


def _examine(cache: Path, keys: int) -> tuple[int, int]:
    """(keys without a whole entry and code object, files that are damaged)."""
    store, lost, torn = Store([cache]), 0, 0
    for n in range(keys):
        found = store.lookup(key(n))
        timing = found.timings.get(CANDIDATE) if found else None
        whole = timing is not None and timing.artefact and store.load(timing.artefact) == candidate(n)
        lost += not whole
    for path in store.entry_files():
        try:
            Entry.from_json(path.read_text())
        except (OSError, UnicodeDecodeError, EntryError):
            torn += 1
    for path in cache.glob("objects/*/*.fko"):
        torn += store.content(path.stem) is None
    return lost, torn


def _told(report: Report, lines: list[str], keys: int, dead: set[int], limit: float) -> None:
    """Reads the processes' log: who tuned what, and how long they waited."""
    started: dict[str, list[int]] = defaultdict(list)
    tuned: dict[str, list[int]] = defaultdict(list)
    waits, wrong = [], 0
    for line in lines:
        word, what, pid = line.split()
        if word == "waited":
            waits.append(float(what))
        elif word == "wrong":
            wrong += 1
        else:
            (started if word == "started" else tuned)[what].append(int(pid))
    again = sum(len(pids) - 1 for pids in started.values())
    # Whoever started a key and lives has tuned it, and it is tuned again only after its owner died.
    needless = sum(sum(pid not in dead for pid in pids) - 1 for pids in started.values() if set(pids) - dead)
    report.row(
        keys_tuned=len(started), tuned_again_after_a_death=again, tuned_twice_by_the_living=needless,
        longest_wait_s=max(waits, default=0.0), median_longest_wait_s=round(statistics.median(waits or [0.0]), 3),
    )  # fmt: skip
    report.bar("keys that were tuned", len(started), at_least=keys)
    report.bar("keys tuned again although their owner lived", needless, at_most=0)
    report.bar("wrong timings handed out", wrong, at_most=0)
    report.bar("longest wait over its limit", max(waits, default=0.0) / limit, at_most=1)


def bundle(report: Report, entries: int) -> None:
    """Export, verify, import and look up so many entries."""
    with tempfile.TemporaryDirectory(prefix="flykernels-bench-") as folder:
        root = Path(folder)
        source = Store([root / "source"])
        for n in range(entries):
            made = entry(n)
            path = root / "source" / "entries" / made.key.digest[:2] / f"{made.key.digest}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made.to_json())
        times = {}
        for name, run in (
            ("export", lambda: export(source, root / "b.tar.gz")),
            ("verify", lambda: verify(root / "b.tar.gz")),
            ("import", lambda: import_(Store([root / "target"]), root / "b.tar.gz")),
        ):
            start = time.perf_counter()
            run()
            times[name] = time.perf_counter() - start
        store, waits = Store([root / "target"]), []
        for n in random.Random(0).sample(range(entries), min(entries, 2000)):
            asked = key(n)
            start = time.perf_counter()
            found = store.lookup(asked)
            waits.append(time.perf_counter() - start)
            assert found is not None and found.winner == CANDIDATE
        lookup = statistics.median(waits) * 1e6
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report.row(
            entries=entries, bundle_mib=round((root / "b.tar.gz").stat().st_size / 2**20, 1),
            **{f"{name}_s": round(s, 2) for name, s in times.items()}, first_lookup_us=round(lookup, 1),
            peak_mib=round(peak),
        )  # fmt: skip
        report.bar("look-up of an entry that this process has not read, median", lookup, at_most=100, unit="us")
        report.bar("import", entries / times["import"], unit="entries/s")


def main(argv: list[str]) -> int:
    options = parser("cache", __doc__ or "")
    options.add_argument("--part", choices=PARTS, action="append", help="default: all")
    options.add_argument("--processes", type=int, default=64)
    options.add_argument("--keys", type=int, default=200)
    options.add_argument("--limit", type=float, default=60.0, help="seconds that a process waits for a key at most")
    options.add_argument("--entries", type=int, default=10_000, help="of --part bundle")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=int, default=100, help="of --part warmup")
    options.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="of --part warmup")
    chosen = options.parse_args(argv)
    report = Report("cache", "measured on CPU")
    for part in chosen.part or PARTS:
        if part == "concurrency":
            concurrency(report, chosen.processes, chosen.keys, chosen.limit, chosen.seed)
        elif part == "warmup":
            warmup(report, chosen.seconds, chosen.jobs)
        else:
            bundle(report, chosen.entries)
    return report.close(chosen.json)
