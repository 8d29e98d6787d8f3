"""Grouped products of an MoE layer on an H200: ours beside ATen's (torch._grouped_mm) and Inductor's Triton template.

    python -m bench h200-grouped --json FILE
    python -m bench h200-grouped --groups 8 --groups 64 --tokens 128

Figures are in the JSON as soon as they are there; `--keep DIR` keeps the caches for another run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from ._grouped_suite import GROUPS, SHARES, SIZES_NK, TOKENS, Case
from ._h200_ahead import Ahead
from .common import Report, geomean, parser

LABEL, ROUNDS, BAR = "measured on H200", 11, 1.10


def main(argv: list[str]) -> int:
    options: argparse.ArgumentParser = parser("h200-grouped", __doc__ or "")
    options.add_argument("--groups", action="append", type=int, choices=GROUPS, help="only these")
    options.add_argument("--tokens", action="append", type=int, choices=TOKENS, help="of an average group: only these")
    options.add_argument("--seconds", type=float, default=3600, help="begin nothing new after so long (default: 3600)")
    options.add_argument("--keep", type=Path, help="directory for caches (default: a temporary one)")
    given = options.parse_args(argv)
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("bench h200-grouped: needs an H100 or H200 and a torch built for CUDA", file=sys.stderr)
        return 2
    sizes = product(SIZES_NK, given.tokens or TOKENS, given.groups or GROUPS)
    cases = [Case(g, tokens, "balanced", n, k) for (n, k), tokens, g in sizes]
    with tempfile.TemporaryDirectory(prefix="flykernels-h200-") as temporary:
        folder = (given.keep or Path(temporary)).absolute()
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        os.environ.setdefault("FLYKERNELS_CACHE_DIR", str(folder / "flykernels"))
        return run(cases, given.json, given.seconds)


def run(cases: list[Case], file: Path | None, seconds: float) -> int:
    import inductor_plugin

    inductor_plugin.enable()
    start = time.perf_counter()
    ahead = Ahead([f"grouped,{c.groups},{c.tokens},{c.n},{c.k}" for c in cases[1:]])
    try:
        raw, failed = measured(cases, file, start, seconds)
    finally:
        ahead.stop()
    made = report(raw, failed, len(cases), start)
    save(made, raw, file)
    return made.close()


def measured(cases: list[Case], file: Path | None, start: float, seconds: float) -> tuple[list[dict], list[str]]:
    """(rows, what failed), saved as they come."""
    from . import _h200_grouped as grouped

    raw: list[dict] = []
    failed: list[str] = []
    for case in cases:
        if time.perf_counter() - start > seconds:
            break
        try:
            raw += grouped.run(case, ROUNDS)
        except Exception as e:
            failed.append(f"{case}: {type(e).__name__}: {str(e)[:200]}")
            print(failed[-1], file=sys.stderr, flush=True)
            continue
        for row in raw[-len(SHARES) :]:
            told = f"{row.get('ours ratio', '-')} ({row['us']}, floor {row['floor us']}) {row['ours']}"
            print(f"{case.groups}x{case.tokens} {row['share']} N {case.n}: {told}", file=sys.stderr, flush=True)
        save(report(raw, failed, len(cases), start), raw, file)
    return raw, failed


def save(made: Report, raw: list[dict], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps({**made.as_dict(), "raw": raw}, indent=1, default=str) + "\n")


def report(raw: list[dict], failed: list[str], sizes: int, start: float) -> Report:
    made = Report("h200-grouped", LABEL)
    for row in raw:
        cells = {x: row[x] for x in ("G", "tokens", "share", "N", "K")} | {"floor_us": row["floor us"]}
        us = {f"{n}_us": row["us"].get(n, float("nan")) for n in ("ATen", "Triton", "ours", "with us")}
        made.row(**cells, **us, ratio=row.get("ours ratio", float("nan")))
    done = f"{len(raw)} of {sizes * len(SHARES)}" if len(raw) < sizes * len(SHARES) else "all"
    for tokens in sorted({row["tokens"] for row in raw}):
        ratios = [row.get("ours ratio", 0.01) for row in raw if row["tokens"] == tokens]
        made.bar(f"{tokens} tokens a group: ours / faster of ATen and Triton, geomean", geomean(ratios))
    ratios = [row.get("ours ratio", 0.01) for row in raw]
    made.bar(f"{done}: ours / faster of ATen and Triton, geomean", geomean(ratios) if raw else 0.0, at_least=BAR)
    chosen = [row["with us ratio"] for row in raw]
    made.bar(f"{done}: as autotuned with us, geomean", geomean(chosen) if raw else 0.0)
    made.bar(f"{done}: as autotuned with us, slowest", min(chosen, default=0.0))
    worst = max((max(row["errors"].values()) for row in raw), default=0.0)
    made.bar("largest error relative to f64, any way (bf16 rounds by 2^-9)", worst, at_most=2.0**-8)
    if failed:
        made.bar(f"failed: {failed[0]}", len(failed), at_most=0)
    made.note("Graphs of many calls, replayed in turn; weights alone are more than L2 holds. Tuned on balanced groups.")
    made.note(f"{time.perf_counter() - start:.0f} s in all")
    return made
