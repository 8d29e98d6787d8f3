"""`flykernels warmup`: compiles the candidates of problems ahead, without their GPU, and measures them where it is.

The store is the only state: what is in it is not compiled again, so a run that was stopped goes on where it was. All
problems' likeliest candidates come first, then their second ones, and so on: whenever it stops, the time was spent on
what is likely to be wanted. Candidates are compiled in processes of their own (templates/gemm/workers.py)."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flykernels.codeobject import CodeObject
from flykernels.versions import mlir_version
from templates.gemm.workers import BuildFailed, Workers
from tuning_cache import Entry, Store, Timing
from tuning_cache.record import EagerMiss

from . import settings
from .consoles import console_here
from .devices import DEVICES
from .kernels import Spec
from .measuring import Measuring, Unit
from .measuring_gpus import GpuMeasuring, gpus_of
from .wanted import Problem, runs_here

FAILURES_SHOWN = 5
THREADS_A_JOB = 2
STOPPED = 130  # the exit code of what Ctrl-C has ended
LINES = 20  # progress lines where there is no terminal


@dataclass
class Tally:
    """What became of the candidates."""

    known: int = 0
    compiled: int = 0
    left: int = 0  # not begun when time was up or the run was stopped


def candidates_of(problem: Problem, pool: Workers) -> list[Spec]:
    """Likeliest first. ValueError with the reason where the target's templates do not serve the problem."""
    threads = DEVICES["cpu"].description()["threads"] if problem.target == "x86" else 1
    reason = problem.problem.why_not(SimpleNamespace(name=problem.target))
    if reason is not None:
        raise ValueError(reason)
    kept, dropped = pool.candidates(problem.problem, problem.target, threads)
    if not kept:
        raise ValueError(dropped[0] if dropped else "no configuration fits")
    return [Spec(problem.key.op, problem.target, problem.problem, config) for config in kept]


class Run:
    """One warmup. `tally`, `refused` and `failed` say what became of it; `stopped` why it ended early, if it did."""

    def __init__(self, problems: Sequence[Problem], store: Store, pool: Any, budget: float | None = None):
        self.pool, self.jobs = pool, pool.count
        self.searchers = ThreadPoolExecutor(self.jobs)
        self.problems, self.store = problems, store
        self.deadline = None if budget is None else time.monotonic() + budget
        self.tally = Tally()
        self.refused: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.stopped: str | None = None
        self.found: dict[str, list[Spec]] = {}  # by the key's digest
        self.searches: dict[str, Future] = {}
        self.built: dict[str, Future] = {}  # code objects' digests, by target, problem and configuration
        self.building = threading.Lock()

    def specs(self, at: int) -> list[Spec]:
        """A problem's candidates; none, and a reason in `refused`, where it has none. Those of the next are looked for
        meanwhile: it takes as long as some compiling."""
        problem = self.problems[at]
        digest = problem.key.digest
        if digest not in self.found:
            for ahead in self.problems[at : at + THREADS_A_JOB * self.jobs]:
                if ahead.key.digest not in self.searches:
                    search = self.searchers.submit(candidates_of, ahead, self.pool)
                    self.searches[ahead.key.digest] = search
            try:
                self.found[digest] = self.searches.pop(digest).result()
            except (ValueError, BuildFailed) as e:
                self.refused[str(problem)] = str(e)
                self.found[digest] = []
        return self.found[digest]

    def known(self, problem: Problem, spec: Spec) -> bool:
        """Whether the store has the candidate's code object, or knows that it is of no use."""
        entry = self.store.newest(problem.key)
        timing = entry.timings.get(spec.name) if entry else None
        if timing is None:
            return False
        return bool(timing.quarantined) or (timing.artefact is not None and all(map(self.store.has, timing.artefacts)))

    def todo(self, part: Sequence[int]) -> Iterator[tuple[Problem, Spec]]:
        """What is to be compiled of some of the problems, in the best order."""
        for rank in itertools.count():
            some = False
            for at in part:
                problem, specs = self.problems[at], self.specs(at)
                if rank >= len(specs):
                    continue
                some = True
                if self.known(problem, specs[rank]):
                    self.tally.known += 1
                else:
                    yield problem, specs[rank]
            if not some:
                return

    @property
    def total(self) -> int:
        """Candidates of all problems; those not looked at yet are taken to have as many as the others."""
        seen = [len(x) for x in self.found.values()]
        return round(sum(seen) + (len(self.problems) - len(seen)) * (sum(seen) / len(seen) if seen else 1))

    def go(self, part: Sequence[int] | None = None) -> Iterator[None]:
        """Compiles, in the pool, the candidates of the problems at these places (default: all); hands over once a
        candidate is done."""
        running: dict[Future, tuple[Problem, Spec]] = {}
        todo = self.todo(range(len(self.problems)) if part is None else part)
        # More threads than compilers: writing waits for the disk, and meanwhile no compiler should wait for a thread.
        threads_most = THREADS_A_JOB * self.jobs
        with ThreadPoolExecutor(threads_most) as threads:
            try:
                more = True
                while more or running:
                    while more and len(running) < threads_most:
                        if self.deadline is not None and time.monotonic() >= self.deadline:
                            self.stopped, more = "the time is up", False
                            break
                        problem, spec = next(todo, (None, None))
                        if problem is None or spec is None:
                            more = False
                            break
                        running[threads.submit(self._compile, problem, spec)] = problem, spec
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        self._note(*running.pop(future), future)
                        yield
            except KeyboardInterrupt:
                self.stopped = "stopped"
                for future in running:
                    future.cancel()
                for future, (problem, spec) in running.items():
                    if not future.cancelled():
                        self._note(problem, spec, future)
        if self.stopped:
            self.stop(self.stopped)

    def stop(self, why: str) -> None:
        """Notes that it ended early, and what is left."""
        self.stopped = why
        self.tally.left = self.total - (self.tally.known + self.tally.compiled + len(self.failed))

    def _note(self, problem: Problem, spec: Spec, future: Future) -> None:
        try:
            future.result()
            self.tally.compiled += 1
        except Exception as e:  # not recorded: it may be this machine's fault, so the next run tries again
            self.failed[f"{problem}: {spec.name}"] = str(e)

    def _compile(self, problem: Problem, spec: Spec) -> None:
        """In a thread: one candidate, from its specification to the store."""
        artefact = self._artefact(spec)

        def change(entry: Entry) -> Entry:
            if not entry.timings:
                entry = replace(entry, source="compiled")
            here = entry.timings.get(spec.name, Timing(spec.name, None, spec.config))
            return entry.with_timing(replace(here, artefact=artefact))

        self.store.update(problem.key, change)

    def _artefact(self, spec: Spec) -> str:
        """The digest of a candidate's code object, compiled unless another operation led to the same kernel."""
        text = json.dumps([spec.target, spec.problem.key(), spec.config], sort_keys=True)
        with self.building:
            mine = text not in self.built
            future = self.built.setdefault(text, Future())
        if mine:
            try:
                code: CodeObject = self.pool.build(spec.problem, spec.config, spec.target)
                future.set_result(self.store.add(code))
            except BaseException as e:
                future.set_exception(e)
                with self.building:
                    self.built.pop(text)
        return future.result()


@dataclass(frozen=True)
class Asked:
    """What a warmup is to prepare.

    units      problems that are measured together, in the best order (measuring.py)
    described  the targets, by name, as keys hold them
    notes      what a person should know of how they were found
    eager      cases of eager operators, which are measured where they were recorded"""

    units: Sequence[Unit]
    described: dict[str, dict]
    notes: Sequence[str] = ()
    eager: Sequence[EagerMiss] = ()


def run(
    asked: Asked, pool: Workers, budget: float | None = None, dry_run: bool = False, compile_only: bool = False,
    console: Console | None = None,
) -> int:  # fmt: skip
    """0: all is there, or the time was up; 1: nothing could be done, or a candidate failed; 130: stopped."""
    console, began = console or console_here(), time.monotonic()
    for note in asked.notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    code = _products(asked, pool, budget, dry_run, compile_only, console) if asked.units else 0
    if not asked.eager or code == STOPPED:
        return code
    from . import eager_warmup

    left = None if budget is None else max(0.0, budget - (time.monotonic() - began))
    return max(code, eager_warmup.run_recorded(asked.eager, console, left, dry_run, compile_only))


def _products(
    asked: Asked, pool: Workers, budget: float | None, dry_run: bool, compile_only: bool, console: Console
) -> int:
    """`run`, of what Inductor asks for."""
    problems = list({p.key.digest: p for unit in asked.units for p in unit.problems}.values())
    with pool:
        work = Run(problems, settings.store(), pool, budget)
        measuring = _measuring(asked, pool, work, compile_only)
        with work.searchers, contextlib.closing(measuring):
            if dry_run:
                return _plan(work, measuring, asked.described, console)
            try:
                _shown(work, measuring, _steps(work, measuring), console)
            except KeyboardInterrupt:  # not while it compiled, which `Run.go` knows of
                work.stop("stopped")
    seconds = time.monotonic() - pool.began[0]
    return _summary(work, measuring, seconds, _cpu_seconds() - pool.began[1], console)


def _measuring(asked: Asked, pool: Workers, work: Run, compile_only: bool) -> Measuring:
    """Of what runs here; of all of it, where the pool is of machines that may have the devices."""
    elsewhere = getattr(pool, "measuring", None)
    if compile_only:
        units = []
    elif elsewhere is not None:
        return elsewhere(asked.units, work.store, asked.described, work.deadline)
    else:
        local = {t for t, held in asked.described.items() if runs_here(t, held)}
        units = [u for u in asked.units if u.target in local]
        for target in local if len(units) > 1 else ():
            gpus = gpus_of(target, asked.described[target])
            if len(gpus) > 1:
                return GpuMeasuring(target, gpus, units, work.store, asked.described, work.deadline)
    return Measuring(units, work.store, asked.described, work.deadline)


def able(dry_run: bool, console: Console) -> bool:
    """Whether a warmup can do anything here; says why it cannot."""
    if settings.mode() != "tune" and not dry_run:
        console.print(f"FLYKERNELS_MODE is {settings.mode()}: the cache is not written. Unset it to compile.")
        return False
    if mlir_version() is None:
        console.print("no compiler here: pip install 'flykernels[compile,gfx950]'")
        return False
    return True


def _steps(work: Run, measuring: Measuring) -> Iterator[None]:
    """Compiles; where problems can be measured, a few at a time, each few before the next are compiled: whenever it
    stops, what was begun is decided. Nothing is compiled meanwhile, which would be heard in the times."""
    place = {p.key.digest: at for at, p in enumerate(work.problems)}
    measured: set[str] = set()
    for first in range(0, len(measuring.units), work.jobs):
        units = measuring.units[first : first + work.jobs]
        part = {p.key.digest for unit in units for p in unit.problems}
        measured |= part
        yield from work.go([place[d] for d in part if d in place])
        if work.stopped:
            break
        yield from measuring.go(units)
    if not work.stopped:
        yield from work.go([at for digest, at in place.items() if digest not in measured])


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(r.ru_utime + r.ru_stime for r in both)


def _shown(work: Run, measuring: Measuring, steps: Iterator[None], console: Console) -> None:
    """A bar with the time that is left on a terminal, a line now and then elsewhere."""
    done = lambda: work.tally.known + work.tally.compiled + len(work.failed) + measuring.done
    whole = lambda: work.total + measuring.total
    if console.is_terminal and sys.stdout.isatty():
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("compiling", total=whole())
            for _ in steps:
                what = f"measuring {measuring.now}" if measuring.now else "compiling"
                progress.update(bar, description=what, completed=done(), total=whole())
        return
    start, said, before = time.monotonic(), 0, 0
    for _ in steps:
        total, now = whole(), done()
        if now * LINES // max(1, total) > said:
            said = now * LINES // max(1, total)
            before = before or work.tally.known
            each = (time.monotonic() - start) / max(1, now - before)
            console.print(f"{now} of {total}, about {each * (total - now):.0f} s left", highlight=False)


def _plan(work: Run, measuring: Measuring, described: dict[str, dict], console: Console) -> int:
    """--dry-run: what would be compiled, for which problems and targets."""
    table = Table(title="what would be compiled", title_justify="left")
    for column in ("problem", "candidates", "in the cache", "to compile", "first"):
        table.add_column(column, justify="left" if column in ("problem", "first") else "right", overflow="fold")
    left = 0
    for at, problem in enumerate(work.problems):
        specs = work.specs(at)
        if not specs:
            continue
        todo = [s for s in specs if not work.known(problem, s)]
        left += len(todo)
        first = todo[0].name.removeprefix("flykernels ") if todo else "-"
        table.add_row(str(problem), str(len(specs)), str(len(specs) - len(todo)), str(len(todo)), first)
    console.print(table)
    _refusals(work, console)
    for target, held in described.items():
        console.print(f"{target}: {', '.join(f'{k} {v}' for k, v in held.items())}", highlight=False)
    to_measure = len(measuring.undecided())
    measured = f", {to_measure} problems to measure here" if measuring.units else ""
    console.print(
        f"{left} candidates to compile, {work.jobs} at a time{measured}; nothing was written", highlight=False
    )
    return 1 if len(work.refused) == len(work.problems) else 0


def _refusals(work: Run, console: Console) -> None:
    for name, reason in work.refused.items():
        console.print(f"{name}: not eligible: {reason}", highlight=False, soft_wrap=True)


def _summary(work: Run, measuring: Measuring, seconds: float, cpu: float, console: Console) -> int:
    _refusals(work, console)
    for name, reason in list(work.failed.items())[:FAILURES_SHOWN]:
        console.print(f"{name}: not compiled: {reason}", highlight=False, soft_wrap=True, markup=False)
    if len(work.failed) > FAILURES_SHOWN:
        console.print(f"and {len(work.failed) - FAILURES_SHOWN} more")
    t = work.tally
    rate = f"{t.compiled / seconds:.2f} candidates/s, {cpu / seconds:.2f} of {work.jobs} cores busy"
    text = f"{t.compiled} compiled in {seconds:.1f} s ({rate}), {t.known} known before, {len(work.failed)} failed"
    console.print(text, highlight=False, soft_wrap=True)
    for name, reason in measuring.undone.items():
        console.print(f"{name}: not measured: {reason}", highlight=False, soft_wrap=True, markup=False)
    if measuring.units:
        text = f"{measuring.decided} problems measured, {measuring.known} decided before"
        console.print(f"{text}, {measuring.late} left" if measuring.late else text, highlight=False)
    if work.stopped or measuring.late:
        left = ["problems are left to measure"] if measuring.late or measuring.done < measuring.total else []
        left += [f"about {t.left} candidates are left"] if work.stopped and (t.left or not left) else []
        told = f"{work.stopped or 'the time is up'}: {' and '.join(left)}; run it again to go on"
        console.print(told, highlight=False, soft_wrap=True)
    lost = work.store.unwritten
    if lost:
        console.print(f"{lost} files could not be written: what they hold is lost", highlight=False, soft_wrap=True)
    console.print(f"cache: {work.store.directories[0]}", highlight=False, soft_wrap=True)
    if work.stopped == "stopped":
        return STOPPED
    return 1 if work.failed or lost or len(work.refused) == len(work.problems) else 0
