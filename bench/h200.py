"""Everything on one H200 within ten minutes: sanitizers, products, epilogues, launches, models, tuning, warm starts.

    python -m bench h200                      # all parts
    python -m bench h200 --part dense --json FILE

A part's figures are in the JSON as soon as they are there; `--keep DIR` keeps the caches for another run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from . import _h200_time as timing
from ._h200_ahead import Ahead
from .common import Report, geomean, parser

LABEL = "measured on H200"
SECONDS_MOST = 600  # that everything may take
SECONDS_LEFT = 90  # of these for what was begun


class Run:
    """A report that is saved with every row, and a bar that shows how far a part is."""

    def __init__(self, folder: Path, file: Path | None, progress: Progress, seconds: float):
        self.folder, self.file, self.progress = folder, file, progress
        self.end = time.perf_counter() + seconds
        self.ahead: Ahead | None = None
        self.begun: list[Callable[[], None]] = []  # what goes on beside the sanitizers; these wait for it and report
        self.report = Report("h200", LABEL)
        self.raw: dict[str, list] = {}

    def rows(self, part: str, of: int, made: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Collects a part's rows, the raw figures as they come."""
        task = self.progress.add_task(part, total=of, note="")
        found = self.raw.setdefault(part, [])
        start = time.perf_counter()
        for row in made:
            found.append(row)
            note = str(row.get("note", ""))
            self.progress.update(task, advance=1, note=note)
            if not self.progress.console.is_terminal:
                print(
                    f"{part} {len(found)}/{of} {time.perf_counter() - start:.0f} s {note}", file=sys.stderr, flush=True
                )
            self.save()
            if time.perf_counter() > self.end and len(found) < of:
                self.report.note(f"{part}: out of time, {len(found)} of {of} done")
                break
        self.progress.update(task, completed=of, note="done")
        failed = [row["failed"] for row in found if "failed" in row]
        if failed:
            self.report.bar(f"{part}: failed ({failed[0][:200]})", len(failed), at_most=0)
        return [row for row in found if "failed" not in row]

    def collect(self) -> None:
        """Waits for what was begun earlier, and reports it."""
        while self.begun:
            try:
                self.begun.pop(0)()
            except Exception as e:
                self.report.bar(f"second process: {type(e).__name__}: {str(e)[:300]}", float("inf"), at_most=0)

    def save(self) -> None:
        if self.file is not None:
            text = json.dumps({**self.report.as_dict(), "raw": self.raw}, indent=1, default=str)
            part = self.file.with_suffix(".part")
            part.write_text(text + "\n")
            os.replace(part, self.file)


# -- products


def dense(run: Run) -> None:
    """dense15: plain products, L2 cold and hot, graph and launches."""
    from . import _h200_gemm as gemm

    cases = gemm.cases("mm")
    found = run.rows("dense", len(cases), _tuned(cases))
    for form in timing.FORMS:
        for row in found:
            cells = {form: f"{row['M']}x{row['N']}x{row['K']}", "floor": row["floor us"]}
            for state in timing.STATES:
                at = row[f"{state} {form}"]
                us = at["us"] | {"ours": at["us"].get("ours", float("nan"))}
                cells |= {f"{state} {way}": us[way] for way in ("ATen", "Triton", "ours", "with us")}
                cells |= {f"{state} ratio": at.get("ours ratio", float("nan")), f"{state} chosen": at["with us ratio"]}
            run.report.row(**cells)
    for state in timing.STATES:
        for form in timing.FORMS:
            at = [row[f"{state} {form}"] for row in found]
            ours = [a["ours ratio"] for a in at if "ours ratio" in a]
            name = f"dense15{_of(ours, cases)}, L2 {state}, {form}"
            _bound(run, name, found, state, form)
            run.report.bar(f"{name}: ours / faster of ATen and Triton, geomean", _mean(ours), at_least=1.12)
            chosen = [a["with us ratio"] for a in at]
            run.report.bar(f"{name}: as autotuned with us, slowest shape", min(chosen, default=0.0), at_least=0.99)


def fused(run: Run) -> None:
    """dense15 with an epilogue: linear + bias + gelu, linear + residual."""
    from . import _h200_gemm as gemm

    cases = [c for kind in ("gelu", "residual") for c in gemm.cases(kind)]
    found = run.rows("fused", len(cases), _tuned(cases, forms=("graph",), least=None))
    for row in found:
        what = "bias + gelu" if row["kind"] == "gelu" else "residual"
        cells = {"linear + ...": f"{what} {row['M']}x{row['N']}x{row['K']}"}
        for state in timing.STATES:
            at = row[f"{state} graph"]
            for way in ("ATen", "ATen at once", "Inductor", "ours", "with us"):
                cells[f"{state} {way}"] = at["us"].get(way, float("nan"))
            cells[f"{state} ratio"] = at.get("ours ratio", float("nan"))
        run.report.row(**cells)
    for state in timing.STATES:
        at = [row[f"{state} graph"] for row in found]
        ours = [a["ours ratio"] for a in at if "ours ratio" in a]
        name = f"fused{_of(ours, cases)}, L2 {state}, graph"
        _bound(run, name, found, state, "graph")
        run.report.bar(f"{name}: ours / best of ATen and Inductor, geomean", _mean(ours), at_least=1.12)
        chosen = [a["with us ratio"] for a in at]
        run.report.note(f"{name}: as autotuned, geomean {_mean(chosen):.4g}, slowest {min(chosen, default=0.0):.4g}")


def _bound(run: Run, name: str, found: list, state: str, form: str) -> None:
    """What the geometric mean can be at most, and the cases that it is made of."""
    from . import _h200_bound as bound

    if found:
        most = bound.most(found, state, form)
        run.report.note(f"{name}: the geomean that no kernel goes beyond: {most:.4g} (see bench/_h200_bound.py)")
        run.raw.setdefault("bounds", []).append({"of": name, "cases": bound.bounds(found, state, form)})


def _of(found: list, cases: list) -> str:
    """Says so where a figure is not of all cases."""
    return "" if len(found) == len(cases) else f" ({len(found)} of {len(cases)})"


def _tuned(cases: list, **how: Any) -> Iterable[dict[str, Any]]:
    from . import _h200_gemm as gemm

    for case in cases:
        try:
            row = gemm.run(case, **how)
        except Exception as e:
            yield {
                "failed": f"{case}: {type(e).__name__}: {e}",
                "note": f"{case} failed: {type(e).__name__}: {str(e)[:200]}",
            }
            continue
        at = row.get("cold graph", {})
        row["note"] = f"{case.kind} {case.m}x{case.n}x{case.k}: {at.get('ours ratio', '-')}, {row['winner']}"
        yield row


# -- models


def layers(run: Run) -> None:
    """Decoder layers and a sentence encoder: tokens a second, tuning time, and a second process."""
    from . import _h200_layers as models

    folder = run.folder / "models"
    settings = [*models.SETTINGS, models.ENCODER]

    def made() -> Iterable[dict[str, Any]]:
        for row in models.rows(settings, folder):
            yield row | {"note": f"{row['setting']}: {row['ratio']:.3f}, tuning {row['added']:+.0%}"}

    found = run.rows("models", len(settings), made())
    for row in found:
        rate = row["tokens/s"]
        run.report.row(
            model=row["setting"], max_autotune_tokens_s=rate["max-autotune"], with_us_tokens_s=rate["with us"],
            ratio=row["ratio"], error_to_eager=row["errors"]["with us"],
        )  # fmt: skip
    for row in found:
        seconds = {f"{way}, s": s for way, s in row["compile s"].items()}
        ours = {f"ours, {part}": s for part, s in row["spent on ours"].items()}
        run.report.row(tuning=row["setting"], **seconds, added=row["added"], **ours)
    ratios = [row["ratio"] for row in found]
    run.report.bar("models: tokens/s with us / max-autotune, geomean", _mean(ratios), at_least=1.05)
    run.report.bar("models: the slowest", min(ratios, default=0.0), at_least=0.99)
    added = [row["added"] for row in found] or [float("inf")]
    run.report.bar(
        "tuning from empty caches: time that we add, median of models", statistics.median(added), at_most=0.25
    )
    run.report.note(
        f"Decoder: {models.LAYERS} layers of Llama 3 8B's shape, random bf16 weights, {models.CACHE} tokens of each "
        "sequence in the KV cache when decoding. Encoder: MiniLM-L6-v2's shape, mean pooling, random weights."
    )
    if any(row["setting"] == models.TUNED.name for row in found):
        run.begun.append(_second_process(run, models.TUNED, folder))


def _second_process(run: Run, setting: Any, folder: Path) -> Callable[[], None]:
    """Begins two processes that compile a model anew; what waits for them and reports. What they count does not depend
    on what runs beside them."""
    from . import _h200_layers as models

    starts = {"with us": "Inductor's cache and ours", "fresh": "our cache alone"}
    threads = ThreadPoolExecutor(len(starts))
    started = {what: threads.submit(models.Waiting(way, setting, folder).go) for way, what in starts.items()}

    def reported() -> None:
        found = run.rows("second process", 2, ({"start": what, **p.result()} for what, p in started.items()))
        for row in found:
            counts = {what: row[what] for what in ("seconds", "from_cache", "benchmarks", "compiles")}
            run.report.row(
                **{"a second process with": row["start"], **counts, "benchmarks of Inductor": row["measured"]}
            )
            run.report.bar(f"second process, {row['start']}: benchmarks", row["benchmarks"], at_most=0)
            run.report.bar(f"second process, {row['start']}: compiles", row["compiles"], at_most=0)
        run.report.bar("second process: anything measured by anybody", found[0]["measured"], at_most=0)

    return reported


# -- the rest


def sanitizer(run: Run) -> None:
    """compute-sanitizer over every kernel of the suite at small sizes."""
    from . import _h200_sanitize as sanitize

    folder = run.folder / "sanitizer"
    count = len(sanitize.build(folder))
    found = run.rows("sanitizer", len(sanitize.TOOLS), sanitize.rows(folder))
    for row in found:
        run.report.row(tool=row["tool"], kernels=row.get("kernels", 0), of=count, found=str(row["found"]))
        bad = float("inf") if row["found"] is None or row.get("kernels") != count else row["found"]
        run.report.bar(f"compute-sanitizer {row['tool']}: errors in {count} kernels", bad, at_most=0)


def calls(run: Run) -> None:
    """What a launch costs the CPU."""
    from . import _h200_calls

    for row in run.rows("calls", len(_h200_calls.ways()), _h200_calls.rows()):
        run.report.row(**row)


PARTS: dict[str, Callable[[Run], None]] = {
    "calls": calls, "models": layers, "sanitizer": sanitizer, "dense": dense, "fused": fused,
}  # fmt: skip
UNDISTURBED = ("calls", "models")  # the CPU is timed, or what compiling takes: nobody else compiles meanwhile


def ahead(parts: list[str]) -> Ahead:
    """Processes that build what these parts will want, in their order: while the sanitizers have the GPU, and then
    beside the first measurements."""
    from . import _h200_gemm as gemm

    kinds = {"dense": ("mm",), "fused": ("gelu", "residual")}
    wanted = [c for part in parts for kind in kinds.get(part, ()) for c in gemm.cases(kind)]
    return Ahead([f"{c.kind},{c.m},{c.n},{c.k}" for c in wanted])


def _mean(values: list[float]) -> float:
    return geomean(values) if values else 0.0


def main(argv: list[str]) -> int:
    options: argparse.ArgumentParser = parser("h200", __doc__ or "")
    options.add_argument("--part", action="append", choices=list(PARTS), help="only this (may be given several times)")
    options.add_argument(
        "--seconds",
        type=float,
        default=SECONDS_MOST - SECONDS_LEFT,
        help="begin nothing new after so long (default: %(default)g)",
    )
    options.add_argument("--keep", type=Path, help="directory for caches (default: a temporary one)")
    given = options.parse_args(argv)
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("bench h200: needs an H100 or H200 (compute capability 9.0) and a torch built for CUDA", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="flykernels-h200-") as temporary:
        folder = (given.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        os.environ.setdefault("FLYKERNELS_CACHE_DIR", str(folder / "flykernels"))
        parts = [part for part in PARTS if not given.part or part in given.part]
        return _run(folder, parts, given.json, given.seconds)


def _run(folder: Path, parts: list[str], file: Path | None, seconds: float) -> int:
    import torch._inductor.config as config

    import inductor_plugin

    inductor_plugin.enable()
    config.autotune_num_choices_displayed = 0
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)  # of what does not fit, at length
    config.compile_threads = 1  # what was built ahead is found by this process, not by helpers that compile once more
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    start = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        run = Run(folder, file.absolute() if file else None, progress, seconds)
        for part in parts:
            if time.perf_counter() > run.end:
                run.report.note(f"{part}: out of time, not begun")
                continue
            if part not in UNDISTURBED and run.ahead is None:
                run.ahead = ahead(parts)
            if part != "sanitizer":  # which times nothing
                run.collect()
            try:
                PARTS[part](run)
            except Exception as e:
                run.report.bar(f"{part}: {type(e).__name__}: {str(e)[:300]}", float("inf"), at_most=0)
            run.save()
        run.collect()
        run.save()
        if run.ahead is not None:
            run.ahead.stop()
    run.report.note(
        "cold: operands that L2 does not hold (copies in turn, or L2 overwritten); hot: the same ones each time."
    )
    run.report.note("graph: replays of a CUDA graph of many calls; plain: launches one by one, timed as do_bench does.")
    run.report.bar(f"{', '.join(parts)}: seconds in all", time.perf_counter() - start, at_most=SECONDS_MOST)
    status = run.report.close()
    run.save()
    return status
