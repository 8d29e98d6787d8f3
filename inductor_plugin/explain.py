"""For one operation and shapes: eligible or why not, candidates with reasons, what won and how that is known."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from flykernels.dtypes import dtype as element_type
from templates.gemm.problem import GemmProblem
from tuning_cache import Entry, Key
from tuning_cache.shapes import Shape

from . import settings, wanted
from .consoles import console_here
from .devices import DEVICES, here
from .fingerprint import versions
from .kernels import Spec

DROPPED_MOST = 100  # configurations that are listed one by one


@dataclass(frozen=True)
class Question:
    """An operation with its sizes and layouts, as the command line asks about it.

    op       "mm", "addmm", "bmm", "baddbmm", or one of them + an activation: "addmm+gelu"
    m        rows; None: symbolic, tuned for `hint`
    layout   BLAS's two letters for A and B: N row-major, T column-major (a Linear layer's weight is T)
    """

    op: str
    m: int | None
    n: int
    k: int
    dtype: str = "f32"
    layout: str = "NT"
    batch: int = 1
    bias: str = "none"
    residual: bool = False
    frozen: bool = False
    hint: int = 128
    target: str = "x86"

    @property
    def problem(self) -> GemmProblem:
        base, _, activation = self.op.partition("+")
        bias = self.bias if base in wanted.BIASED or activation else "none"
        shape = Shape(
            self.op, self.m, self.n, self.k, self.dtype, self.layout, self.batch, frozen=self.frozen, hint=self.hint
        )
        return wanted.problem_of(shape, self.op, bias, self.residual, activation, self.target, {}).problem

    @property
    def key(self) -> Key:
        """The key under which the plugin would look this up on this machine."""
        problem = {**self.problem.key(), "m": "symbolic" if self.m is None else self.m}
        if self.problem.batched:
            problem["batch"] = self.batch
        device = next(d for d in DEVICES.values() if d.target == self.target)
        return Key(self.op, problem, device.description(), versions())

    @property
    def title(self) -> str:
        size = "symbolic" if self.m is None else self.m
        return f"{self.op} M={size} N={self.n} K={self.k} {self.dtype} {self.layout} on {self.target}"

    def refused(self) -> str | None:
        """Why no template takes its types and layout, or None. ValueError for a type that nobody knows."""
        element_type(self.dtype)
        return self.problem.why_not(SimpleNamespace(name=self.target))


def why_not(question: Question) -> str | None:
    """The reason no template takes it, or None."""
    sizes = {"M": question.m, "N": question.n, "K": question.k, "batch": question.batch}
    empty = [name for name, size in sizes.items() if size == 0]
    if empty:
        return f"{', '.join(empty)} is 0: nothing to multiply, ATen's result is immediate"
    try:
        return question.refused()
    except ValueError as e:
        return str(e)


def answer(question: Question, console: Console | None = None) -> bool:
    """Print the answer; True if the problem is eligible."""
    console = console or console_here()
    title = question.title
    reason = why_not(question) or _nothing_offered(question)
    if reason is not None:
        console.print(f"{title}\nnot eligible: {reason}")
        return False
    console.print(f"{title}\neligible")
    entry = settings.store().lookup(question.key) if here(question.target) else None
    console.print(_candidates(question, entry))
    _standing(question, entry, console)
    return True


def _nothing_offered(question: Question) -> str | None:
    """Why the target's template has no configuration for a problem that others may serve; None if it has one."""
    space = _space(question)
    return None if space.kept else next((d.reason for d in space.dropped), "no configuration fits")


@functools.lru_cache(1)
def _space(question: Question) -> Any:
    from flykernels import targets
    from templates.gemm.space import candidates

    for device in DEVICES.values():
        if device.target == question.target:
            return device.candidates(question.problem)
    return candidates(question.problem, getattr(targets, question.target))


def _candidates(question: Question, entry: Entry | None) -> Table:
    table = Table(title="candidates", title_justify="left")
    for column in ("candidate", "offered", "why", "last measured, us"):
        table.add_column(column)
    space = _space(question)
    for candidate in space.kept:
        spec = Spec(question.op, question.target, question.problem, candidate.config.key())
        timing = entry.timings.get(spec.name) if entry else None
        offered = "no: quarantined" if timing and timing.quarantined else "yes"
        reason = timing.quarantined if timing and timing.quarantined else candidate.reason
        table.add_row(
            spec.name.removeprefix("flykernels "), offered, reason, _us(timing.microseconds if timing else None)
        )
    for name, reason in _dropped(space.dropped):
        table.add_row(name, "no", reason, "")
    for name, timing in (entry.timings if entry else {}).items():
        if timing.config is None:
            table.add_row(name, "yes", "PyTorch's own", _us(timing.microseconds))
    return table


def _dropped(dropped: list) -> Iterator[tuple[str, str]]:
    """(configuration, reason); where there are many, those whose reasons differ in numbers only share a line."""
    alike: dict[str, list] = {}
    for d in dropped:
        alike.setdefault(re.sub(r"\d+(\.\d+)?", "#", d.reason) if len(dropped) > DROPPED_MOST else str(d), []).append(d)
    for group in alike.values():
        others = f", and {len(group) - 1} like it" if len(group) > 1 else ""
        yield f"{group[0].config}{others}", group[0].reason


def _us(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return "failed" if math.isinf(microseconds) else f"{microseconds:.1f}"


def _standing(question: Question, entry: Entry | None, console: Console) -> None:
    if here(question.target) is None:
        able = "compiled and simulated" if question.target == "gfx950" else "compiled"
        console.print(f"no {question.target} device here: its candidates can be {able}, not measured")
        return
    if entry is None or not entry.winner:
        console.print(
            f"nothing known yet for this problem on this machine (mode {settings.mode()}): it would be measured"
        )
        return
    where = settings.store().place(question.key) or "in memory only"
    console.print(f"winner: {entry.winner} (measured on this target; {where})", soft_wrap=True)
