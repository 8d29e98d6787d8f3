"""Delay mode: one memory operation arrives only at its own wait while all others land at issue. A reported race
becomes a
shown corruption, or shows none.

The wave of the delayed operation runs last within each barrier interval, so that the others meet LDS as they would if
that
wave were slow; a second run lets it go first. Results are compared bit for bit with a run in which nothing is late.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .findings import Finding
from .load import load
from .memory import as_array
from .run import Simulation

RACES = ("lds-race", "lds-in-flight", "register-in-flight", "scalar-load-wait")


@dataclass(frozen=True)
class Operation:
    """A memory operation: wave of the workgroup, its how-manieth memory operation, the instruction."""

    wave: int
    number: int
    pc: int


@dataclass
class Delayed:
    """What delaying one operation did: bytes of each argument that differ from the run without delay."""

    operation: Operation
    instruction: str
    changed: dict[int, int]

    @property
    def corrupts(self) -> bool:
        return bool(self.changed)


@dataclass
class DelayReport:
    """Outcome of delay mode. `corruptions` are the delayed operations that changed a result; `tried` counts all."""

    tried: int
    corruptions: list[Delayed] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.corruptions:
            return f"{self.tried} operations delayed one at a time: no result changed"
        lines = [f"{self.tried} operations delayed one at a time: {len(self.corruptions)} change results"]
        for d in self.corruptions[:8]:
            where = ", ".join(f"argument {k}: {n} bytes" for k, n in d.changed.items())
            lines.append(f"  wave {d.operation.wave}, operation {d.operation.number} ({d.instruction}): {where}")
        return "\n".join(lines)


def run_delayed(
    code: Any,
    args: Sequence[Any],
    grid: Sequence[int] = (1, 1, 1),
    findings: Iterable[Finding] | None = None,
    *,
    only: Iterable[int] | None = None,
    workgroup: tuple[int, int, int] = (0, 0, 0),
    entry: str | None = None,
    limit: int = 64,
    stop_at_first: bool = True,
    **options: Any,
) -> DelayReport:
    """Delays memory operations of one workgroup one at a time and compares results. The arguments are not changed.

    findings       delay only operations of the instructions that these findings name; None: of any instruction
    only           delay only operations of these instructions, by index
    limit          most operations to try, spread evenly over the candidates
    stop_at_first  one shown corruption is enough
    """
    loaded = load(code, entry) if not hasattr(code, "code") else code
    plain = _Runner(loaded, args, grid, workgroup, options)
    want = plain.run(None, None)
    pcs = None if findings is None else {pc for f in findings if f.kind in RACES for pc in (f.pc, f.other_pc)}
    if only is not None:
        pcs = set(only) if pcs is None else pcs & set(only)
    operations = [
        Operation(wave, number, pc)
        for wave, log in sorted(plain.log.items())
        for number, pc in enumerate(log)
        if pcs is None or pc in pcs
    ]
    if len(operations) > limit:
        step = len(operations) / limit
        operations = [operations[int(k * step)] for k in range(limit)]
    report = DelayReport(len(operations))
    for tried, operation in enumerate(operations, 1):
        for last in (True, False):
            got = plain.run(operation, last)
            changed = {
                k: n for k, n in ((k, int((a != b).sum())) for k, (a, b) in enumerate(zip(want, got, strict=True))) if n
            }
            if changed:
                text = loaded.code.instructions[operation.pc].text
                report.corruptions.append(Delayed(operation, text, changed))
                break
        if report.corruptions and stop_at_first:
            report.tried = tried
            break
    return report


class _Runner:
    def __init__(self, loaded, args, grid, workgroup, options):
        self.loaded, self.args, self.grid, self.workgroup, self.options = loaded, args, grid, workgroup, options
        self.log: dict[int, list[int]] = {}

    def run(self, operation: Operation | None, last: bool | None) -> list[np.ndarray]:
        """Results as bytes of every argument (empty for values). The waves run one by one between barriers."""
        fresh = [copy.deepcopy(a) if as_array(a) is not None else a for a in self.args]
        simulation = Simulation(self.loaded, fresh, self.grid, check=False, **self.options)
        m = simulation.machine
        m.delay_mode, m.poison = True, False
        m.operation_log = None if operation else self.log
        if operation is not None:
            m.delayed = (operation.wave, operation.number)
            others = [w for w in range(simulation.waves_each) if w != operation.wave]
            m.wave_order = [*others, operation.wave] if last else [operation.wave, *others]
        simulation.run([self.workgroup])
        found = []
        for a in fresh:
            pair = as_array(a)
            found.append(
                np.zeros(0, np.uint8) if pair is None else np.ascontiguousarray(pair[0]).view(np.uint8).ravel()
            )
        return found
