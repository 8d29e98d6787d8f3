"""`flykernels warmup --eager`: makes the calls that a program will make, once, so that their cases get measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import eager, settings
from .counters import counters

ELEMENTS_MOST = {"cpu": 1 << 27, "cuda": 1 << 29}  # of one input: larger calls take their case from mode tune
# What is measured if nothing is named: rows of a decoding step, a prompt, a training batch; widths of usual models, and
# of gates, vocabularies and retrieval.
ROWS = {"rms_norm": tuple(1 << n for n in range(16)), "topk": (1, 4, 16, 64, 256, 1024, 4096)}
WIDTHS = (512, 1024, 2048, 4096, 7168, 8192, 16384)
TOPK = ((128, 6), (256, 8), (8192, 8), (32000, 50), (128256, 64), (1000000, 100))


@dataclass(frozen=True)
class Case:
    """One call to be made."""

    op: str
    dtype: str
    rows: int
    width: int
    k: int = 0
    gradient: bool = False

    def __str__(self) -> str:
        more = f" k={self.k}" if self.op == "topk" else " with gradient" if self.gradient else ""
        return f"{self.op} {self.dtype} {self.rows}x{self.width}{more}"


def cases(
    device: str, ops: Sequence[str], dtypes: Sequence[str], rows: Sequence[int], widths: Sequence[int], ks:
    Sequence[int], inference: bool,
) -> Iterator[Case]:  # fmt: skip
    """The calls to make, small ones first."""
    for op in ops or ("rms_norm", "topk"):
        pairs = [(w, 0) for w in widths or WIDTHS]
        if op == "topk":
            pairs = [(w, k) for w in widths for k in ks or (8,) if k <= w] if widths else list(TOPK)
            pairs = [(w, k) for w, k in pairs if not ks or k in ks]
        for r in sorted(rows or ROWS[op]):
            for width, k in pairs:
                if r * width > ELEMENTS_MOST[device]:
                    continue
                for dtype in dtypes or ("f32", "bf16", "f16"):
                    for gradient in (False, True) if op == "rms_norm" and not inference else (False,):
                        yield Case(op, dtype, r, width, k, gradient)


def call(case: Case, device: str) -> None:
    """Makes the call, on new operands."""
    import torch

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[case.dtype]
    x = torch.randn(case.rows, case.width, device=device).to(dtype)
    if case.op == "topk":
        torch.topk(x, case.k)
        return
    weight = torch.randn(case.width, device=device).to(dtype)
    with torch.set_grad_enabled(case.gradient):
        y = torch.nn.functional.rms_norm(
            x.requires_grad_(case.gradient), (case.width,), weight.requires_grad_(case.gradient)
        )
        if case.gradient:
            y.backward(torch.ones_like(y))


def run(console: Console | None = None, **chosen: Any) -> int:
    """Measures; 0 if it went through, 1 if there is nothing to measure on, 130 if it was stopped."""
    console = console or Console()
    if settings.mode() != "tune":
        console.print(
            f"FLYKERNELS_MODE is {settings.mode()}: the cache decides and is not written. Unset it to measure."
        )
        return 1
    device = chosen["device"]
    served = eager.enable([device]).get(device)
    if served is None:
        console.print(f"there is no {device} device here that eager operators can be ours on")
        return 1
    for op, how in served.items():
        if how.startswith("ATen"):
            console.print(f"{op}: {how}")
    todo, done = list(cases(**chosen)), 0
    before = counters["benchmarks"], counters["from cache"]
    try:
        for case in _shown(todo, console):
            call(case, device)
            done += 1
    except KeyboardInterrupt:
        console.print(f"stopped: {done} of {len(todo)} calls are done; run it again to go on")
        return 130
    console.print(_summary(device))
    measured, known = counters["benchmarks"] - before[0], counters["from cache"] - before[1]
    where = settings.store().directories[0]
    console.print(
        f"{done} calls: {measured} kernels measured, {known} cases known before. Cache: {where}", soft_wrap=True
    )
    return 0


def _shown(todo: list[Case], console: Console) -> Iterator[Case]:
    """The cases, with a bar on a terminal and a line now and then elsewhere."""
    if console.is_terminal and sys.stdout.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("measuring", total=len(todo))
            for case in todo:
                progress.update(bar, description=str(case))
                yield case
                progress.advance(bar)
        return
    step = max(1, len(todo) // 20)
    for n, case in enumerate(todo):
        if n % step == 0:
            console.print(f"{n} of {len(todo)}: {case}", highlight=False)
        yield case


def _summary(device: str) -> Table:
    """What the cache now knows of this device's eager operators, by operator and dtype."""
    found: dict[tuple[str, str], list[tuple[bool, float]]] = {}
    here = eager.description(device)
    for _, entry in settings.store().entries():
        if not entry.key.op.startswith("eager ") or entry.key.target != here or "dtype" not in entry.key.problem:
            continue
        times = {n: t.microseconds for n, t in entry.timings.items() if t.microseconds not in (None, math.inf)}
        aten = times.pop("ATen", None)
        ratio = aten / min(times.values()) if aten and times else 1.0
        key = entry.key.op.removeprefix("eager "), str(entry.key.problem["dtype"])
        found.setdefault(key, []).append((entry.winner != "ATen", ratio))
    table = Table(title="cases known to the cache", title_justify="left")
    for column in ("operator", "dtype", "cases", "ours", "ATen / ours, geomean where ours"):
        table.add_column(column, justify="left" if column in ("operator", "dtype") else "right")
    for (op, dtype), list_ in sorted(found.items()):
        won = [math.log(ratio) for ours, ratio in list_ if ours]
        mean = f"{math.exp(sum(won) / len(won)):.2f}" if won else "-"
        table.add_row(op, dtype, str(len(list_)), str(len(won)), mean)
    return table
