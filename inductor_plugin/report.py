"""What the cache knows, for a person: each problem's candidates beside ATen's and Triton's, who won, what it saves.

Every figure carries how it came about. A cache holds times that were measured on the machine that its key names; what
was only compiled has none. Figures of other origin (simulated ones) come in through benches' JSON files and labels.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flykernels.dtypes import dtype as element_type
from flykernels.microscaling import FORMATS
from tuning_cache import Entry, Key, Store

from .wanted import title

LABELS = ("measured on CPU", "measured on H200", "simulated", "counted")  # of benches' figures
UNMEASURED = "compiled, not measured"
RIVALS = {"aten": "ATen", "triton": "Triton", "cpp": "C++", "unfused": "unfused"}  # by a candidate's first word
LEAST_US, MOST_US = 1e-6, 1e12  # of times that a figure is made of: entries come from outside
SIZE_MOST = 2**63 - 1  # of a size, likewise
FIGURES_MOST = 8 << 20  # bytes of a bench's file
ROWS_MOST = 2000  # of a bench's


class FiguresError(ValueError):
    """Why a file of figures is not taken."""


@dataclass(frozen=True)
class Candidate:
    """One candidate's time.

    kind          "ours", or one of RIVALS' values, or "other"
    microseconds  None: not measured; inf: failed
    note          why it must not win, if so"""

    name: str
    kind: str
    microseconds: float | None
    note: str = ""

    @property
    def counts(self) -> bool:
        return self.microseconds is not None and LEAST_US <= self.microseconds <= MOST_US and not self.note


@dataclass(frozen=True)
class Line:
    """One problem. origin: where its entry is from. flops, bytes: of one call, 0 where unknown."""

    name: str
    machine: str
    label: str
    origin: str
    winner: str | None
    candidates: Sequence[Candidate]
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = ""
    target: dict = field(default_factory=dict)

    def best(self, kind: str) -> float | None:
        """The shortest time of a kind's candidates, in us."""
        return min((c.microseconds for c in self.candidates if c.kind == kind and c.counts), default=None)  # type: ignore

    @property
    def rival(self) -> float | None:
        """The shortest time that is not ours."""
        return min((c.microseconds for c in self.candidates if c.kind != "ours" and c.counts), default=None)  # type: ignore

    @property
    def ours_won(self) -> bool:
        return any(c.name == self.winner and c.kind == "ours" for c in self.candidates)

    @property
    def saved(self) -> float:
        """us that a call takes less than with the best of the others; 0 where theirs is used."""
        ours, rival = self.best("ours"), self.rival
        return max(0.0, rival - ours) if self.ours_won and ours is not None and rival is not None else 0.0


@dataclass
class Total:
    """Of all problems with one label and machine: calls of each once."""

    problems: int = 0
    decided: int = 0
    ours: int = 0
    rivals_us: float = 0.0
    saved_us: float = 0.0
    logs: list[float] = field(default_factory=list)

    def take(self, line: Line) -> None:
        self.problems += 1
        self.decided += line.winner is not None
        self.ours += line.ours_won
        rival, ours = line.rival, line.best("ours")
        if rival is not None and line.winner is not None:
            self.rivals_us += rival
            self.saved_us += line.saved
            if line.ours_won and ours:
                self.logs.append(math.log(rival / ours))

    @property
    def geomean(self) -> float | None:
        """Rivals' time over ours where ours won."""
        return math.exp(sum(self.logs) / len(self.logs)) if self.logs else None


@dataclass
class Report:
    """lines: the problems that save most, then the rest, `most` of them. totals: of all, by (label, machine)."""

    lines: list[Line]
    totals: dict[tuple[str, str], Total]
    directories: list[str]
    figures: list[dict] = field(default_factory=list)

    @property
    def problems(self) -> int:
        return sum(t.problems for t in self.totals.values())


def collect(store: Store, most: int, figures: Sequence[Path] = ()) -> Report:
    """Reads the cache once; keeps no more than `most` problems in memory. FiguresError for a file not of a bench."""
    totals: dict[tuple[str, str], Total] = {}
    kept: list[tuple[float, int, Line]] = []
    for n, line in enumerate(_lines(store)):
        totals.setdefault((line.label, line.machine), Total()).take(line)
        rank = line.saved if line.winner else -1.0
        heapq.heappush(kept, (rank, -n, line))
        if len(kept) > most:
            heapq.heappop(kept)
    lines = [line for _, _, line in sorted(kept, key=lambda x: x[:2], reverse=True)]
    return Report(lines, totals, [str(d) for d in store.directories], [read_figures(path) for path in figures])


def _lines(store: Store) -> Iterator[Line]:
    for _, entry, found in store.chosen():
        yield line_of(entry, _origin(store, found))


def _origin(store: Store, found: Any) -> str:
    layer = next((d for d in store.directories if found.path.is_relative_to(d)), None)
    if layer is not None and layer != store.directories[0]:
        return f"layer {layer}"
    return "imported" if found.segment is not None else "made here"


def line_of(entry: Entry, origin: str) -> Line:
    candidates = [Candidate(t.name, _kind(t), t.microseconds, t.quarantined or "") for t in entry.timings.values()]
    candidates.sort(key=lambda c: math.inf if c.microseconds is None else c.microseconds)
    key = entry.key
    flops, size = work_of(key)
    measured = any(c.counts for c in candidates)
    return Line(
        title(key), machine_of(key), label_of(key) if measured else UNMEASURED, origin, entry.winner, candidates, flops,
        size, str(key.problem.get("dtype") or key.problem.get("a_dtype") or ""), key.target,
    )  # fmt: skip


def _kind(timing: Any) -> str:
    if timing.config is not None:
        return "ours"
    return RIVALS.get(timing.name.partition(" ")[0].lower(), "other")


def machine_of(key: Key) -> str:
    product = str(key.target.get("product") or key.target.get("arch") or "?")
    if "threads" in key.target:
        return f"{product}, {key.target['threads']} threads"
    return product


def label_of(key: Key) -> str:
    """How times under a key came about."""
    if "threads" in key.target:
        return "measured on CPU"
    product = machine_of(key)
    return "measured on H200" if "H200" in product else f"measured on {product}"


def work_of(key: Key) -> tuple[float, float]:
    """(floating-point operations, bytes that must move) of one call of a product; (0, 0) for anything else."""
    p = key.problem
    m = p.get("m_hint") if p.get("m") == "symbolic" else p.get("m")
    sizes = (m, p.get("n"), p.get("k"), p.get("batch", 1))
    if any(type(x) is not int or not 1 <= x <= SIZE_MOST for x in sizes):
        return 0.0, 0.0
    m, n, k, batch = (int(x) for x in sizes)  # type: ignore[arg-type]
    try:
        out = element_type(str(p["out_dtype"])).bytes
        item = [_bytes(str(p.get(f"{x}_dtype") or p["dtype"])) for x in "ab"]
    except (KeyError, ValueError):
        return 0.0, 0.0
    size = m * k * item[0] + k * n * item[1] + m * n * out * (2 if p.get("residual") else 1)
    if p.get("scaling") == "block":
        size += (m + n) * k / 32
    return 2.0 * batch * m * n * k, float(batch * size)


def _bytes(name: str) -> float:
    kind = element_type(name)
    return 1 / FORMATS[kind].per_byte if kind in FORMATS else kind.bytes


def read_figures(path: Path) -> dict:
    """A bench's `--json` file: {"bench", "label", "rows", "bars", ...}. FiguresError if it is none."""
    try:
        with path.open("rb") as file:
            data = file.read(FIGURES_MOST + 1)
        held = json.loads(data)
    except (OSError, ValueError, RecursionError) as e:
        raise FiguresError(f"{path}: {e}") from None
    whole = isinstance(held, dict) and isinstance(held.get("bench"), str) and held.get("label") in LABELS
    if len(data) > FIGURES_MOST or not whole:
        raise FiguresError(f"{path} is not what a bench's --json writes, with a label of {', '.join(LABELS)}")
    for name in ("rows", "bars"):
        rows = held.get(name, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise FiguresError(f"{path}: {name} is no list of objects")
        held[name] = rows[:ROWS_MOST]
    return held


# -- on a terminal
def show(report: Report, console: Console) -> None:
    """The totals, and the problems with their best times."""
    totals = Table(title="what the cache saves, calling each problem once", title_justify="left")
    for column in ("figures", "machine", "problems", "decided", "ours", "others, us", "saved, us", "others / ours"):
        totals.add_column(column, justify="left" if column in ("figures", "machine") else "right")
    for (label, machine), t in sorted(report.totals.items()):
        mean = f"{t.geomean:.2f}" if t.geomean else "-"
        totals.add_row(
            label,
            machine,
            str(t.problems),
            str(t.decided),
            str(t.ours),
            f"{t.rivals_us:.1f}",
            f"{t.saved_us:.1f}",
            mean,
        )
    console.print(totals)
    table = Table(title="problems, most saved first (us)", title_justify="left")
    for column in ("problem", "ours", "ATen", "Triton", "C++", "unfused", "winner", "saved", "from", "figures"):
        table.add_column(
            column, justify="right" if column in ("ours", *RIVALS.values(), "saved") else "left", overflow="fold"
        )
    for line in report.lines:
        times = (us(line.best(kind)) for kind in ("ours", *RIVALS.values()))
        winner = "-" if line.winner is None else "ours" if line.ours_won else line.winner
        saved = f"{line.saved:.1f}" if line.saved else "-"
        table.add_row(line.name, *times, winner, saved, line.origin, line.label)
    console.print(table)
    if report.problems > len(report.lines):
        console.print(f"{report.problems - len(report.lines)} more problems are in the totals only")


def us(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return "failed" if math.isinf(microseconds) else f"{microseconds:.1f}"
