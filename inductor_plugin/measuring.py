"""The part of a warmup that measures, where the device is: problems are decided as Inductor would decide them, by
taking a program that asks for them through it as far as lowering. What the store knows is not measured again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tuning_cache import Store, parcel

from . import settings
from .lowering import ModelError, Program, lower
from .wanted import Problem, runs_here

# What a process that measures for another one answers: parcels (tuning_cache/parcel.py) of the entries that were
# decided, why other problems were not, how many were left for want of time.
Measured = tuple[list[bytes], dict[str, str], int]


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

    # -- units that another process measures
    def _parcels(self, unit: Unit) -> list[bytes]:
        """What the store knows of a unit's problems."""
        entries = [e for e in (self.store.newest(p.key) for p in unit.problems) if e is not None]
        return [parcel.pack(self.store, entry, winner_only=False) for entry in entries]

    def _took(self, unit: Unit, count: int, answer: Measured) -> None:
        """Keeps what came of a unit of which so many problems were undecided."""
        found, undone, late = answer
        for data in found:
            parcel.unpack(self.store, data)
        self.undone |= undone
        self.late += late
        self.decided += count - len(self.undecided([unit]))
        self.done += len(unit.problems)

    def close(self) -> None:
        """Ends what it has started."""


def measured(unit: Unit, description: dict, known: list[bytes], seconds: float | None, folder: str) -> Measured:
    """Measures a unit in a process that has its device for itself, with what is known; its caches lie in `folder`."""
    if not runs_here(unit.target, description):
        why = f"the worker is not {', '.join(f'{k} {v}' for k, v in description.items())}"
        return [], {str(p): why for p in unit.problems}, 0
    os.environ["FLYKERNELS_CACHE_DIR"] = folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    for name in ("FLYKERNELS_REMOTE", "FLYKERNELS_CACHE_MAX_SIZE", "FLYKERNELS_RECORD"):
        os.environ.pop(name, None)
    store = settings.store()
    before = {digest for digest, entry in store.entries() if entry.winner}
    for data in known:
        parcel.unpack(store, data)
    deadline = None if seconds is None else time.monotonic() + seconds
    measuring = Measuring([unit], store, {unit.target: description}, deadline)
    for _ in measuring.go([unit]):
        pass
    found = [parcel.pack(store, e) for digest, e in store.entries() if e.winner and digest not in before]
    return found, measuring.undone, measuring.late
