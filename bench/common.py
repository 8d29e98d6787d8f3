"""What every bench shares: a table, a closing line with the bar, an exit code, and the same figures as JSON.

def main(argv):
    options = parser("sim", "what it measures").parse_args(argv)
    report = Report("sim", "measured on CPU")
    report.row(kernel="hti", ratio=1.2)
    report.bar("throughput", 312e3, at_least=200e3, unit="wave-instructions/s")
    return report.close(options.json)
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

LABELS = ("measured on CPU", "measured on H200", "simulated", "counted")
PACKAGES = ("flykernels", "numpy", "torch", "triton", "flydsl", "iree-base-compiler")


def parser(name: str, what: str) -> argparse.ArgumentParser:
    """An argument parser with the options that every bench has: `--json FILE`."""
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=what)
    made.add_argument("--json", metavar="FILE", type=Path, help="also write the figures, machine and versions here")
    return made


def machine() -> dict[str, Any]:
    """Processor, core count, system and Python: what a figure depends on besides the code."""
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), cpu)
    except OSError:
        pass
    found = {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}
    try:
        import torch

        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    except ImportError:
        pass
    return found


def versions() -> dict[str, str]:
    """Installed versions of the packages that figures depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive values. ValueError if there are none."""
    logs = [math.log(v) for v in values]
    if not logs:
        raise ValueError("geometric mean of nothing")
    return math.exp(sum(logs) / len(logs))


def median_seconds(run: Callable[[], Any], repeats: int = 7, warm: int = 2) -> float:
    """Median wall time of `run()` in seconds after `warm` calls that do not count."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def tracked(items: Sequence[Any], what: str) -> Iterator[Any]:
    """The items one by one, with a bar on a terminal and a line each on standard error elsewhere."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=len(items))
        for n, item in enumerate(items, 1):
            yield item
            progress.update(task, completed=n)
            if not progress.console.is_terminal:
                progress.console.print(f"{what}: {n} of {len(items)}")


def spread(
    do: Callable[[Any], Any],
    items: Sequence[Any],
    jobs: int,
    what: str,
    begin: Callable[..., Any] | None = None,
    given: tuple = (),
) -> Iterator[Any]:
    """do(item) of each item, in their order, by so many processes (1: in this one), with `tracked`'s progress.

    begin, given: begin(*given) is called first in each process. All must be picklable."""
    if jobs == 1:
        if begin is not None:
            begin(*given)
        yield from map(do, tracked(items, what))
        return
    context = multiprocessing.get_context("spawn")  # rich has threads, which a fork would not take along
    with ProcessPoolExecutor(min(jobs, max(1, len(items))), context, begin, given) as pool:
        for made, _ in zip(pool.map(do, items), tracked(items, what), strict=True):
            yield made


def resumed(
    do: Callable[[Any], Any], items: Sequence[Any], jobs: int, what: str, file: Path | None, version: str
) -> list[Any]:
    """As `spread`, what comes of each item (plain JSON values) kept in `file` as it comes: a bench that is stopped, or
    several of which each does some, go on from there. version: of what the results depend on besides the items."""
    key = lambda item: hashlib.sha256(f"{version} {what} {item!r}".encode()).hexdigest()
    known = {}
    if file is not None and file.exists():
        known = dict(json.loads(line) for line in file.read_text().splitlines())
    missing = [item for item in items if key(item) not in known]
    for item, made in zip(missing, spread(do, missing, jobs, what), strict=True):
        known[key(item)] = made
        if file is not None:
            with file.open("a") as f:
                f.write(json.dumps([key(item), made], default=_plain) + "\n")
    return [known[key(item)] for item in items]


@dataclass
class Bar:
    """One figure and what it has to reach: at least, at most, or both."""

    name: str
    figure: float
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    @property
    def met(self) -> bool:
        above = self.at_least is None or self.figure >= self.at_least
        return above and (self.at_most is None or self.figure <= self.at_most)

    def __str__(self) -> str:
        bounds = [f">= {_show(self.at_least)}"] if self.at_least is not None else []
        bounds += [f"<= {_show(self.at_most)}"] if self.at_most is not None else []
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name}: {_show(self.figure)}{unit} (bar: {' and '.join(bounds) or 'none'})"


@dataclass
class Report:
    """Collects a bench's rows and bars; `close` prints them, writes the JSON and says whether all bars are met.

    name   the bench, as typed
    label  how the figures came about: one of LABELS
    """

    name: str
    label: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"label {self.label!r}: a figure is one of {LABELS}")

    def row(self, **cells: Any) -> None:
        """One line of the table. Rows with other columns than the one before start a new table."""
        self.rows.append(cells)

    def bar(
        self,
        name: str,
        figure: float,
        at_least: float | None = None,
        at_most: float | None = None,
        unit: str = "",
    ) -> Bar:
        """A figure with its bar. A missed bar makes the bench's exit code 1."""
        self.bars.append(Bar(name, float(figure), at_least, at_most, unit))
        return self.bars[-1]

    def note(self, text: str) -> None:
        """A line under the tables: what a reader must know to read them right."""
        self.notes.append(text)

    @property
    def met(self) -> bool:
        return all(b.met for b in self.bars)

    def close(self, json_file: Path | None = None, console: Console | None = None) -> int:
        """Prints tables, notes and one `NAME: figure (bar: ...)` line a bar; 0 if all bars are met, else 1."""
        out = console or Console(width=None if os.isatty(1) else 160, highlight=False)
        for table in _tables(self.rows, f"{self.name} ({self.label})"):
            out.print(table)
        for text in self.notes:
            out.print(text, markup=False)
        for bar in self.bars:
            out.print(f"{self.name}: {bar}{'' if bar.met else '  MISSED'}", markup=False)
        if json_file is not None:
            json_file.write_text(json.dumps(self.as_dict(), indent=1, default=_plain) + "\n")
        return 0 if self.met else 1

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, with machine, versions and date."""
        return {
            "bench": self.name,
            "label": self.label,
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "versions": versions(),
            "rows": self.rows,
            "bars": [{**vars(b), "met": b.met} for b in self.bars],
            "notes": self.notes,
            "met": self.met,
        }


def _show(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _tables(rows: list[dict[str, Any]], title: str) -> Iterable[Table]:
    table, columns = None, None
    for row in rows:
        if tuple(row) != columns:
            if table is not None:
                yield table
            table, columns = Table(title=title), tuple(row)
            for name in columns:
                numeric = isinstance(row[name], (int, float)) and not isinstance(row[name], bool)
                table.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
        assert table is not None
        table.add_row(*(_show(v) for v in row.values()))
    if table is not None:
        yield table


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)
    return item() if item is not None else str(value)
