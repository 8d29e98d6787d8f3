"""`flykernels explain rms_norm` and `topk`: who serves an eager call of these sizes, and how that is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from templates.rms_norm.problem import RMSNormProblem
from templates.topk.problem import TopKProblem
from tuning_cache import Entry

from . import eager_gate, settings
from .consoles import console_here
from .devices import DEVICES, here
from .explain import _us


@dataclass(frozen=True)
class Question:
    """A call as the command line asks about it: dense operands, along the last dimension."""

    op: str
    rows: int
    width: int
    k: int = 0
    dtype: str = "f32"
    weight_dtype: str = "f32"
    gradient: bool = False
    largest: bool = True
    target: str = "x86"

    @property
    def problem(self) -> Any:
        if self.op == "topk":
            p = TopKProblem(self.rows, self.width, self.k, self.dtype, self.largest)
            return replace(p, align=p.element.bytes) if p.short else p
        return RMSNormProblem(self.width, self.dtype, self.weight_dtype, rstd=True, rows_hint=self.rows)

    def case(self) -> dict:
        from . import eager_rms_call, eager_topk

        if self.op == "topk":
            return eager_topk.case_of(self.problem)
        return eager_rms_call.case_of(self.problem, self.target == "x86", self.gradient)


def answer(question: Question, console: Console | None = None) -> bool:
    """Print the answer; True if the call is eligible."""
    console = console or console_here()
    q = question
    of = f" k={q.k} {'largest' if q.largest else 'smallest'}" if q.op == "topk" else f" weight {q.weight_dtype}"
    title = f"{q.op} rows={q.rows} width={q.width} {q.dtype}{of}{' with gradient' if q.gradient else ''} on {q.target}"
    device = next(d for d in DEVICES.values() if d.target == q.target) if q.target in _targets() else None
    reason = _why_not(q, device)
    if reason:
        console.print(f"{title}\nnot eligible: {reason}\nATen serves it")
        return False
    console.print(f"{title}\neligible")
    local = here(q.target)
    entry = None
    if local is not None:
        entry = settings.store().lookup(eager_gate.key_for(q.op, q.op, q.case(), local))
    console.print(_table(q, entry))
    console.print(_standing(q, local, entry), soft_wrap=True)
    return True


def _targets() -> set[str]:
    return {d.target for d in DEVICES.values()}


def _why_not(q: Question, device: Any) -> str | None:
    from types import SimpleNamespace

    if q.rows < 1 or q.width < 1:
        return "there is nothing to compute"
    try:
        return q.problem.why_not(device or SimpleNamespace(name=q.target))
    except ValueError as e:
        return str(e)


def _table(q: Question, entry: Entry | None) -> Table:
    import importlib

    from flykernels import targets

    target, problem = getattr(targets, q.target), q.problem
    if q.op == "rms_norm" and q.target == "x86":
        problem = problem.canonical(target)
    space = importlib.import_module(f"templates.{q.op}.space").configurations(problem, target)
    table = Table(title="candidates", title_justify="left")
    for column in ("candidate", "offered", "why", "last measured, us"):
        table.add_column(column)
    timings = dict(entry.timings) if entry else {}
    for c in space.kept:
        name = _name_of(q, c.config)
        timing = timings.pop(name, None)
        quarantined = timing.quarantined if timing else None
        table.add_row(
            name.removeprefix("flykernels "), "no: quarantined" if quarantined else "yes", quarantined or c.reason,
            _us(timing.microseconds if timing else None),
        )  # fmt: skip
    for dropped in space.dropped:
        table.add_row(str(dropped.config), "no", dropped.reason, "")
    for name, timing in timings.items():
        table.add_row(name, "yes", "PyTorch's own" if name == eager_gate.ATEN else "", _us(timing.microseconds))
    return table


def _name_of(q: Question, config: Any) -> str:
    from . import eager_rms_call, eager_topk

    return eager_topk._name(config) if q.op == "topk" else eager_rms_call.name_of(config.key())


def _standing(q: Question, local: Any, entry: Entry | None) -> str:
    if local is None:
        able = "compiled and simulated" if q.target == "gfx950" else "compiled"
        return f"no {q.target} device here: its candidates can be {able}, not measured"
    if entry is None or not entry.winner:
        mode = settings.mode()
        then = {
            "tune": "it is measured when first met",
            "pinned": "ATen serves it",
            "pinned-strict": "a call is an error",
        }
        return f"nothing known yet for this case on this machine (mode {mode}): {then[mode]}. Case: {q.case()}"
    best = entry.best()
    aten = entry.timings.get(eager_gate.ATEN)
    times = [t.microseconds for t in (best, aten) if t is not None and t.microseconds not in (None, math.inf)]
    ratio = f", {times[1] / times[0]:.2f} times as fast as ATen" if best is not aten and len(times) == 2 else ""
    return f"winner: {entry.winner}{ratio} (measured on this machine for the case {q.case()})"
