"""How busy a warmup keeps the cores: the dense, MXFP and grouped suites, compiled for gfx950 without the GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .common import Report

SUITES = ("dense15", "mxfp", "grouped")
ROOT = Path(__file__).parents[1]
SUBREAPER, LEFT_SECONDS = 36, 10.0  # PR_SET_CHILD_SUBREAPER of prctl(2); how long what the command left may take to end


def warmup(report: Report, seconds: int, jobs: int) -> None:
    """Runs the command as a user does, from its start to its end, for so many seconds; all its processes count."""
    files = [str(ROOT / "bench" / f"{name}.yaml") for name in SUITES]
    with tempfile.TemporaryDirectory(prefix="flykernels-bench-") as folder:
        command = [
            sys.executable, "-m", "inductor_plugin.cli", "warmup", *files, "--target", "gfx950", "--jobs", str(jobs),
            "--budget", f"{seconds}s",
        ]  # fmt: skip
        ctypes.CDLL(None).prctl(SUBREAPER, 1)  # workers that outlive the command become ours, and count
        before, start = _children(), time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "FLYKERNELS_CACHE_DIR": folder}, capture_output=True, text=True
        )
        wall = time.monotonic() - start
        _wait_for_all()
        busy = _children() - before
    found = re.search(r"(\d+) compiled in .* (\d+) failed", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"the warmup failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    compiled, failed = int(found[1]), int(found[2])
    report.row(
        suites=" + ".join(SUITES), jobs=jobs, seconds=round(wall, 1), compiled=compiled, cpu_seconds=round(busy, 1),
        cpu_seconds_each=round(busy / max(1, compiled), 3),
    )  # fmt: skip
    report.bar("share of the cores busy, from the command's start to its end", busy / (jobs * wall), at_least=0.9)
    report.bar("candidates compiled for gfx950", compiled / wall, unit="candidates/s")
    report.bar("candidates that failed", failed, at_most=0)


def _wait_for_all() -> None:
    end = time.monotonic() + LEFT_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)


def _children() -> float:
    """CPU seconds of processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
