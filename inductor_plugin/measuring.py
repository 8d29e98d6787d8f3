"""The part of a warmup that measures, where the device is: problems are decided as Inductor would decide them, by
taking a program that asks for them through it as far as lowering. What the store knows is not measured again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tuning_cache import Store

from .lowering import ModelError, Program, lower
from .wanted import Problem


@dataclass(frozen=True)
class Unit:
    """Problems that one program asks for.

    target    of all of them
    program   () -> the program; ValueError where there is none"""

    target: str
    problems: Sequence[Problem]
    program: Callable[[], Program]


class Measuring:
    """decided, known, late: problems that were measured, that were decided before, that were left for want of time.
    undone: why others were not. now: what is being measured."""

    def __init__(self, units: Sequence[Unit], store: Store, described: dict[str, dict], deadline: float | None = None):
        self.units, self.store, self.described, self.deadline = units, store, described, deadline
        self.decided = self.known = self.late = self.done = 0
        self.undone: dict[str, str] = {}
        self.now = ""

    @property
    def total(self) -> int:
        return sum(len(unit.problems) for unit in self.units)

    def undecided(self, units: Sequence[Unit] | None = None) -> list[Problem]:
        """The problems, of all units or of some, that have no winner yet."""
        return [p for u in (self.units if units is None else units) for p in u.problems if not self._winner(p)]

    def _winner(self, problem: Problem) -> bool:
        entry = self.store.newest(problem.key)
        return entry is not None and bool(entry.winner)

    def go(self, units: Sequence[Unit]) -> Iterator[None]:
        """Measures; hands over once a unit is done."""
        for unit in units:
            left = self.undecided([unit])
            self.known += len(unit.problems) - len(left)
            if left and self.deadline is not None and time.monotonic() >= self.deadline:
                self.late += len(left)
            elif left:
                self.now = str(left[0])
                yield
                self._measure(unit, left)
                self.now = ""
            self.done += len(unit.problems)
            yield

    def _measure(self, unit: Unit, left: Sequence[Problem]) -> None:
        try:
            seen = lower(
                unit.program(), unit.target, self.described[unit.target], True, decide=True, deadline=self.deadline
            )
        except Exception as e:  # one program that Inductor cannot take costs itself
            known = isinstance(e, (ValueError, ModelError))
            self.undone |= {str(p): str(e) if known else f"{type(e).__name__}: {e}" for p in left}
            return
        for problem in left:
            if self._winner(problem):
                self.decided += 1
            elif seen.late:
                self.late += 1
            elif problem.key.digest not in seen.requests:
                self.undone[str(problem)] = "Inductor does not ask for it here" + "".join(f"; {x}" for x in seen.failed)
            else:
                self.undone[str(problem)] = "no candidate was offered"
