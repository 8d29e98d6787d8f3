"""`flykernels warmup --eager`, and of what FLYKERNELS_RECORD wrote: makes the calls that a program will make, once, so
that their cases get measured."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flykernels.dtypes import dtype as element_type
from tuning_cache.record import EagerMiss

from . import asked, eager, settings
from .consoles import console_here
from .counters import counters
from .fingerprint import versions
from .strides import WIDEST

ELEMENTS_MOST = {"cpu": 1 << 27, "cuda": 1 << 29}  # of one input: larger calls take their case from mode tune
# What is measured if nothing is named: rows of a decoding step, a prompt, a training batch; widths of usual models, and
# of gates, vocabularies and retrieval.
ROWS = {"rms_norm": tuple(1 << n for n in range(16)), "topk": (1, 4, 16, 64, 256, 1024, 4096)}
WIDTHS = (512, 1024, 2048, 4096, 7168, 8192, 16384)
TOPK = ((128, 6), (256, 8), (8192, 8), (32000, 50), (128256, 64), (1000000, 100))


@dataclass(frozen=True)
class Case:
    """One call to be made: rows of `width` elements; k: of topk; gradient: rms_norm is followed by its backward, and of
    add_rms_norm it is the backward; residual: with a gradient of its sum."""

    op: str
    dtype: str
    rows: int
    width: int
    k: int = 0
    gradient: bool = False
    weight: str | None = None  # rms_norm: the weight's dtype, "none" without one; None: that of x
    weight_gradient: bool = True
    largest: bool = True
    last: bool = True  # topk along the last axis
    align: int = WIDEST  # bytes, that all rows' starts are a multiple of
    residual: bool = True

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


def case_of(miss: EagerMiss) -> Case:
    """The call that leads to a recorded case."""
    held = miss.case
    gradient = held.get("gradient", miss.op == "rms_norm_backward" or held.get("direction") == "backward")
    align = held.get("align", WIDEST if held.get("wide", True) else 0)
    return Case(
        miss.op.removesuffix("_backward"), held["dtype"], held["rows"], held["width"], held.get("k", 0), gradient,
        weight=held.get("weight_dtype"), weight_gradient=held.get("weight_gradient", True),
        largest=held.get("largest", True), last=held.get("layout") != "any", align=align,
        residual=held.get("residual", True),
    )  # fmt: skip


def call(case: Case, device: str) -> None:
    """Makes the call, on new operands."""
    import torch

    if case.op == "topk":
        x = _operand(case, device)
        if not case.last:  # a row's elements lie apart, those of the only row too
            x = torch.nn.functional.pad(x.t(), (0, 1))[:, : case.rows]
        torch.topk(x, case.k, -1 if case.last else 0, case.largest)
        return
    kind = case.weight or case.dtype
    weight = None if kind == "none" else torch.randn(case.width, device=device).to(_dtype(kind))
    if case.op == "add_rms_norm":
        _add_rms_norm(case, device, weight)
        return
    with torch.set_grad_enabled(case.gradient):
        x = _operand(case, device).requires_grad_(case.gradient)
        if weight is not None:
            weight.requires_grad_(case.gradient and case.weight_gradient)
        y = torch.nn.functional.rms_norm(x, (case.width,), weight)
        if case.gradient:
            y.backward(torch.ones_like(y))


def _add_rms_norm(case: Case, device: str, weight: Any) -> None:
    """The public operator, forward or backward."""
    import torch

    from . import ops  # what makes it

    x, other = _operand(case, device), _operand(case, device)
    with torch.no_grad():
        if not case.gradient:
            ops.add_rms_norm(x, other, weight)
            return
        rstd, dsum = torch.ones(case.rows, 1, device=device), _operand(case, device) if case.residual else None
        torch.ops.flykernels.add_rms_norm_backward(other, dsum, x, rstd, weight, case.weight_gradient)


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, str(element_type(name).torch))


def _operand(case: Case, device: str) -> Any:
    """(rows, width), where all rows begin at multiples of the case's alignment and of no larger power of two."""
    import torch

    dtype = _dtype(case.dtype)
    align = max(case.align, dtype.itemsize)
    wanted = align // dtype.itemsize  # elements
    pitch = -(-case.width // wanted) * wanted
    offset = 0 if align >= WIDEST else wanted
    flat = torch.randn(case.rows * pitch + offset, device=device).to(dtype)
    return flat.as_strided((case.rows, case.width), (pitch, 1), offset)


def run(console: Console | None = None, **chosen: Any) -> int:
    """Measures the usual calls, or those that are named; 0 if it went through, 1 if there is nothing to measure on, 130
    if it was stopped."""
    return measure(list(cases(**chosen)), chosen["device"], console or console_here())


def device_of(miss: EagerMiss) -> str:
    """ "cpu" or "cuda": where a case was recorded."""
    return "cpu" if str(miss.target.get("arch")).startswith("x86") else "cuda"


def why_not(miss: EagerMiss) -> str | None:
    """Why a recorded case cannot be measured here; None if it can."""
    import torch

    device = device_of(miss)
    here = device == "cpu" or torch.cuda.is_available()
    if not here or miss.target != eager.description(device):
        return f"recorded on another machine: {', '.join(f'{k} {v}' for k, v in miss.target.items())}"
    if miss.case["rows"] * miss.case["width"] > ELEMENTS_MOST[device]:
        return f"more than {ELEMENTS_MOST[device]} elements"
    return None


def run_recorded(
    misses: Sequence[EagerMiss], console: Console, seconds: float | None = None, dry_run: bool = False,
    compile_only: bool = False,
) -> int:  # fmt: skip
    """Measures recorded cases, of which all are of this machine, for so many seconds; 0, 1 and 130 as `run`, and 1
    where a case did not come about."""
    if compile_only:
        console.print(f"{len(misses)} eager cases are left out: they are measured, not compiled ahead", highlight=False)
        return 0
    end = None if seconds is None else time.monotonic() + seconds
    code = 0
    for device in sorted(set(map(device_of, misses))):
        here = [miss for miss in misses if device_of(miss) == device]
        todo = [miss for miss in here if not _decided(miss)]
        words = f"{len(todo)} eager cases to measure on {device}, {len(here) - len(todo)} decided before"
        console.print(words, highlight=False)
        if dry_run or not todo:
            continue
        code = max(code, measure([case_of(miss) for miss in todo], device, console, end))
        if code or (end is not None and time.monotonic() >= end):
            break
        for miss in todo:
            if not _decided(miss):
                code = 1
                console.print(f"eager {case_of(miss)}: a call of this size led to another case", highlight=False)
    return code


def _decided(miss: EagerMiss) -> bool:
    entry = settings.store().lookup(miss.key(versions(miss.template)))
    return entry is not None and entry.winner is not None


def measure(todo: Sequence[Case], device: str, console: Console, end: float | None = None) -> int:
    """Makes the calls. end: of time.monotonic(), after which no further one is made."""
    if settings.mode() != "tune":
        console.print(
            f"FLYKERNELS_MODE is {settings.mode()}: the cache decides and is not written. Unset it to measure."
        )
        return 1
    served = eager.enable([device]).get(device)
    if served is None:
        console.print(f"there is no {device} device here that eager operators can be ours on")
        return 1
    for op, how in served.items():
        if how.startswith("ATen"):
            console.print(f"{op}: {how}")
    done = 0
    before = counters["benchmarks"], counters["from cache"]
    try:
        with asked.listening(asked.Listener(decide=True)):  # what it meets is no miss to be recorded
            for case in _shown(todo, console):
                if end is not None and time.monotonic() >= end:
                    console.print(f"the time is up: {len(todo) - done} calls are left; run it again to go on")
                    break
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


def _shown(todo: Sequence[Case], console: Console) -> Iterator[Case]:
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
