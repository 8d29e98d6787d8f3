"""Grouped products of an MoE layer on an H200: ours beside ATen's (torch._grouped_mm) and Inductor's Triton template.

    python -m bench h200-grouped --json FILE
    python -m bench h200-grouped --groups 8 --groups 64 --tokens 128

Some processes compile all candidates ahead, others tune and measure one size after the other, one of them at a time on
the GPU. Figures are in the JSON as soon as they are there; `--keep DIR` keeps the caches for another run. A second
table has the weights' gradients, beside ATen's. `--sanitize` runs small kernels under compute-sanitizer instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from queue import Queue
from threading import Thread

from ._grouped_suite import GROUPS, SHARES, SIZES_NK, TOKENS
from ._h200_ahead import ROOT, SINGLE, Ahead
from .common import Report, geomean, parser

LABEL, ROUNDS, BAR = "measured on H200", 5, 1.10
MEASURING = 4  # processes that tune and measure, in turns
PARTS, PARTS_AT_FIRST = 2, 4  # processes that share the candidates of a size, and of those that are waited for
GRADIENTS = ((8, 1024), (64, 128), (64, 1024))  # groups and tokens of the second table
GRADIENT_NK = SIZES_NK[0]


def main(argv: list[str]) -> int:
    options: argparse.ArgumentParser = parser("h200-grouped", __doc__ or "")
    options.add_argument("--groups", action="append", type=int, choices=GROUPS, help="only these")
    options.add_argument("--tokens", action="append", type=int, choices=TOKENS, help="of an average group: only these")
    options.add_argument("--seconds", type=float, default=3600, help="begin nothing new after so long (default: 3600)")
    options.add_argument("--keep", type=Path, help="directory for caches (default: a temporary one)")
    options.add_argument("--sanitize", action="store_true", help="small kernels under compute-sanitizer, no figures")
    given = options.parse_args(argv)
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("bench h200-grouped: needs an H100 or H200 and a torch built for CUDA", file=sys.stderr)
        return 2
    groups, tokens = given.groups or GROUPS, given.tokens or TOKENS
    # first what compiles fast, then what takes the GPU longest: others compile meanwhile
    gradients = [(g, t) for g, t in GRADIENTS if g in groups and t in tokens]
    names = [f"gradient,{g},{t},{GRADIENT_NK[0]},{GRADIENT_NK[1]}" for g, t in gradients]
    names += [f"forward,{g},{t},{n},{k}" for (n, k), t, g in product(SIZES_NK, sorted(tokens, reverse=True), groups)]
    with tempfile.TemporaryDirectory(prefix="flykernels-h200-") as temporary:
        folder = (given.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        os.environ.setdefault("FLYKERNELS_CACHE_DIR", str(folder / "flykernels"))
        return sanitized(folder, given.json) if given.sanitize else run(names, given.json, folder, given.seconds)


def sanitized(folder: Path, file: Path | None) -> int:
    """Every kernel that is offered, at small sizes, under memcheck and racecheck."""
    from . import _h200_grouped_sanitize as sanitize

    made, start = Report("h200-grouped", LABEL), time.perf_counter()
    count, raw = sanitize.build(folder / "sanitizer"), []
    for row in sanitize.rows(folder / "sanitizer"):
        raw.append(row)
        made.row(tool=row["tool"], kernels=row["kernels"], of=count, found=str(row["found"]))
        bad = float("inf") if row["found"] is None or row["kernels"] != count else row["found"] + len(row["wrong"])
        made.bar(f"compute-sanitizer {row['tool']}: errors in {count} kernels", bad, at_most=0)
        print(*row["wrong"], *row["said"], sep="\n", file=sys.stderr, flush=True)
        save(made, raw, file)
    made.note(f"{time.perf_counter() - start:.0f} s in all")
    return made.close()


def run(names: list[str], file: Path | None, folder: Path, seconds: float) -> int:
    start = time.perf_counter()
    parts = [PARTS_AT_FIRST if i < 2 * MEASURING else PARTS for i in range(len(names))]
    ahead = Ahead([f"grouped,{name},{i},{of}" for name, of in zip(names, parts) for i in range(of)])
    raw: list[dict] = []
    try:
        for row in measured(names, folder, seconds):
            raw.append(row)
            print(told(row), file=sys.stderr, flush=True)
            save(report(raw, names, start), raw, file)
    finally:
        ahead.stop()
    made = report(raw, names, start)
    save(made, raw, file)
    return made.close()


def measured(names: Sequence[str], folder: Path, seconds: float) -> Iterator[dict]:
    """Rows of all sizes as they come."""
    what = [str(folder / "gpu.lock"), str(time.time() + seconds), str(ROUNDS)]
    command = [sys.executable, "-m", "bench._h200_grouped", *what]
    running = [
        subprocess.Popen(
            [*command, *names[i::MEASURING]], cwd=ROOT, env={**os.environ, **SINGLE}, stdout=subprocess.PIPE,
            stderr=(folder / f"measuring-{i}.log").open("w"), text=True,
        )
        for i in range(min(MEASURING, len(names)))
    ]  # fmt: skip
    lines: Queue[str | None] = Queue()

    def passed_on(process: subprocess.Popen) -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    for process in running:
        Thread(target=passed_on, args=(process,), daemon=True).start()
    try:
        left = len(running)
        while left:
            line = lines.get()
            if line is None:
                left -= 1
            elif line.startswith("{"):
                yield json.loads(line)
    finally:
        for process in running:
            process.terminate()
            process.wait()


def told(row: dict) -> str:
    if "failed" in row:
        return row["failed"]
    figures = f"{row.get('ours ratio', '-')} ({row['us']}, floor {row['floor us']})"
    return f"{row['kind']} {row['G']}x{row['tokens']} {row['share']} N {row['N']}: {figures} {row['ours']}"


def save(made: Report, raw: list[dict], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps({**made.as_dict(), "raw": raw}, indent=1, default=str) + "\n")


def report(raw: list[dict], names: Sequence[str], start: float) -> Report:
    made = Report("h200-grouped", LABEL)
    rows = [row for row in raw if "failed" not in row]
    order = ("kind", "N", "tokens", "G", "share")
    for row in sorted(rows, key=lambda row: tuple(row[x] for x in order)):
        cells = {x: row[x] for x in ("kind", "G", "tokens", "share", "N", "K")} | {"floor_us": row["floor us"]}
        us = {f"{n}_us": row["us"].get(n, "-") for n in ("ATen", "Triton", "ours", "with us")}
        tuned = {"tuned_ratio": row["with us ratio"], "tuned_to_ATen": row["with us / ATen"]}
        made.row(**cells, **us, ratio=row.get("ours ratio", "-"), **tuned)
    forward = [row for row in rows if row["kind"] == "forward"]
    wanted = len(SHARES) * sum(name.startswith("forward") for name in names)
    done = "all" if len(forward) == wanted else f"{len(forward)} of {wanted}"
    of = lambda rows, ratio: geomean(row.get(ratio, 0.01) for row in rows) if rows else 0.0
    for tokens in sorted({row["tokens"] for row in forward}):
        some = [row for row in forward if row["tokens"] == tokens]
        made.bar(f"{tokens} tokens a group: ours / faster of ATen and Triton, geomean", of(some, "ours ratio"))
    made.bar(f"{done}: ours / faster of ATen and Triton, geomean", of(forward, "ours ratio"), at_least=BAR)
    made.bar(f"{done}: as autotuned with us, geomean", of(forward, "with us ratio"))
    made.bar(f"{done}: as autotuned with us, slowest", min((r["with us ratio"] for r in forward), default=0.0))
    made.bar(f"{done}: as autotuned / ATen, slowest", min((r["with us / ATen"] for r in forward), default=0.0))
    gradients = [row for row in rows if row["kind"] == "gradient"]
    if gradients:
        made.bar("gradients of weights: ours / ATen, geomean", of(gradients, "ours ratio"))
    # of gradients ours alone: what ATen gives for an empty group depends on its version (pytorch#172439)
    errors = [e for row in rows for way, e in row["errors"].items() if row["kind"] == "forward" or way == "ours"]
    worst = max((e if e == e else float("inf") for e in errors), default=0.0)
    made.bar("largest error relative to f64, any way (bf16 rounds by 2^-9)", worst, at_most=2.0**-8)
    failed = [row["failed"] for row in raw if "failed" in row]
    if failed:
        made.bar(f"failed: {failed[0]}", len(failed), at_most=0)
    made.note("Graphs of many calls, replayed in turn; weights alone are more than L2 holds.")
    used = sum(sum(row["GPU s"].values()) for row in rows if row["share"] == SHARES[0])
    made.note("Tuned once a size, on groups that are alike, Zipf-like, and a third empty; gradients' tokens by 8.")
    made.note(f"{time.perf_counter() - start:.0f} s in all, {used:.0f} of them on the GPU")
    return made
