"""The tuning cache under load: processes that are killed, look-ups and bundles of many entries."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tuning_cache import Store
from tuning_cache.layer import damage

from ._cache_bundle import bundle
from ._cache_demo import demo
from ._cache_engines import engine
from ._cache_flips import flips
from ._cache_keys import CANDIDATE, candidate, key
from ._cache_scale import million
from ._cache_warmup import warmup
from .common import Report, parser

PARTS = ("concurrency", "engine", "million", "flips", "bundle", "demo", "warmup")
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
    for kind in ("entries", "objects"):
        torn += sum(damage(kind, at, found.content) is not None for at, _, found in store.layers[0].every(kind))
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


def main(argv: list[str]) -> int:
    options = parser("cache", __doc__ or "")
    options.add_argument("--part", choices=PARTS, action="append", help="default: all")
    options.add_argument("--processes", type=int, default=64)
    options.add_argument("--keys", type=int, default=200)
    options.add_argument("--limit", type=float, default=60.0, help="seconds that a process waits for a key at most")
    options.add_argument("--entries", type=int, default=10**6, help="of --part million")
    options.add_argument("--bundle", type=Path, help="of --part million: import this one, made if it is not there")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of --part bundle: where it serves")
    options.add_argument("--made", type=Path, help="of --part bundle: one that was made elsewhere, of the same shapes")
    options.add_argument("--engine-entries", type=int, default=100_000, help="of --part engine")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=int, default=100, help="of --part warmup")
    options.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="of --part warmup")
    chosen = options.parse_args(argv)
    parts: dict[str, Callable[[Report], None]] = {
        "concurrency": lambda report: concurrency(report, chosen.processes, chosen.keys, chosen.limit, chosen.seed),
        "engine": lambda report: engine(report, chosen.engine_entries),
        "million": lambda report: million(report, chosen.entries, chosen.bundle),
        "flips": flips,
        "bundle": lambda report: bundle(report, chosen.device, made=chosen.made),
        "demo": demo,
        "warmup": lambda report: warmup(report, chosen.seconds, chosen.jobs),
    }
    code = 0
    for part in chosen.part or PARTS:
        on_gpu = part == "bundle" and chosen.device != "cpu"
        report, start = Report("cache", "measured on H200" if on_gpu else "measured on CPU"), time.monotonic()
        parts[part](report)
        report.note(f"{part}: {time.monotonic() - start:.0f} s in all")
        code |= report.close()
        if chosen.json is not None:
            _keep(chosen.json, f"{part} on a GPU" if on_gpu else part, report)
    return code


def _keep(path: Path, part: str, report: Report) -> None:
    """Puts a part's figures in the file, beside those of other parts that an earlier run has left there."""
    held = json.loads(path.read_text()) if path.exists() else {"bench": report.name, "parts": {}}
    held["parts"][part] = report.as_dict()
    path.write_text(json.dumps(held, indent=1) + "\n")
