"""`flykernels warmup SHAPES --target gfx950`: compiles the candidates of problems ahead, without their GPU.

The store is the only state: what is in it is not compiled again, so a run that was stopped goes on where it was. All
problems' likeliest candidates come first, then their second ones, and so on: whenever it stops, the time was spent on
what is likely to be wanted. Candidates are compiled in processes of their own (templates/gemm/workers.py)."""

from __future__ import annotations

import itertools
import resource
import sys
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
from templates.gemm.problem import GemmProblem
from templates.gemm.workers import BuildFailed, Workers
from tuning_cache import Entry, Key, Store, Timing
from tuning_cache.shapes import Shape

from . import settings
from .devices import DEVICES, here
from .fingerprint import versions
from .kernels import Spec
from .strides import alignments, unit_stride

TARGETS = ("x86", "gfx950", "sm90a")
# What torch says of a GPU that is not here: see `devices.py` for what keys hold of it.
ELSEWHERE = {
    "gfx950": {"arch": "gfx950", "product": "AMD Instinct MI350X", "compute_units": 256},
    "sm90a": {"arch": "sm_90", "product": "NVIDIA H200", "compute_units": 132},
}
BYTES = {"f32": 4, "bf16": 2, "f16": 2}
FAILURES_SHOWN = 5
THREADS_A_JOB = 2
LINES = 20  # progress lines where there is no terminal


@dataclass(frozen=True)
class Problem:
    """A shape on a target, as the plugin will ask for it."""

    shape: Shape
    target: str
    problem: GemmProblem
    key: Key

    def __str__(self) -> str:
        return f"{self.shape} on {self.target}"


@dataclass
class Tally:
    """What became of the candidates."""

    known: int = 0
    compiled: int = 0
    left: int = 0  # not begun when time was up or the run was stopped


def problem_of(shape: Shape, target: str, description: dict) -> Problem:
    """The problem and key that contiguous tensors of the shape lead to under Inductor (requests.py)."""
    base, _, activation = shape.op.partition("+")
    batched = base in ("bmm", "baddbmm")
    bias, residual = shape.bias, shape.residual
    if bias == "full" and not residual and not activation and target != "x86":
        bias, residual = "none", True
    size = {"a": (shape.m, shape.k), "b": (shape.k, shape.n), "c": (shape.m, shape.n)}
    held = {x: _layout(size[x], letter, shape, batched) for x, letter in zip("abc", shape.layout + "N")}
    lie = {x: unit_stride(held[x].size[-2:], held[x].stride[-2:]) for x in "ab"}
    aligned = alignments(held["a"], held["b"], [held["c"]]) if target != "x86" else {}
    problem = GemmProblem(
        n=shape.n, k=shape.k, dtype=shape.dtype, out_dtype=shape.dtype, a=lie["a"], b=lie["b"], batched=batched,
        bias=bias, activation=activation or "none", residual=residual, packed_b=shape.frozen and target == "x86",
        m_hint=shape.m if shape.m is not None else shape.hint, **aligned,
    )  # fmt: skip
    named = {**problem.key(), "m": "symbolic" if shape.m is None else shape.m}
    if batched:
        named["batch"] = shape.batch
    return Problem(shape, target, problem, Key(shape.op, named, description, versions()))


def _layout(size: tuple[int | None, int | None], letter: str, shape: Shape, batched: bool) -> Any:
    rows, columns = size
    stride = (columns, 1) if letter == "N" else (1, rows)
    if batched:
        one = None if rows is None or columns is None else rows * columns
        size, stride = (shape.batch, *size), (one, *stride)  # type: ignore[assignment]
    return SimpleNamespace(dtype=SimpleNamespace(itemsize=BYTES[shape.dtype]), size=size, stride=stride, offset=0)


def description_of(target: str, product: str | None, compute_units: int | None) -> dict:
    """A target as keys hold it: of the device here if there is one, else what torch says of the usual one."""
    device = here(target)
    found = dict(device.description() if device is not None else ELSEWHERE[target])
    given = {"product": product, "compute_units": compute_units if target != "x86" else None}
    return {**found, **{k: v for k, v in given.items() if v is not None}}


def candidates_of(problem: Problem, pool: Workers) -> list[Spec]:
    """Likeliest first. ValueError with the reason where the target's templates do not serve the problem."""
    threads = DEVICES["cpu"].description()["threads"] if problem.target == "x86" else 1
    kept, dropped = pool.candidates(problem.problem, problem.target, threads)
    if not kept:
        raise ValueError(dropped[0] if dropped else "no configuration fits")
    return [Spec(problem.shape.op, problem.target, problem.problem, config) for config in kept]


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

    def todo(self) -> Iterator[tuple[Problem, Spec]]:
        """What is to be compiled, in the best order."""
        for rank in itertools.count():
            some = False
            for at, problem in enumerate(self.problems):
                specs = self.specs(at)
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

    def go(self) -> Iterator[None]:
        """Compiles, in the pool; hands over once a candidate is done."""
        running: dict[Future, tuple[Problem, Spec]] = {}
        todo = self.todo()
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
        done_so_far = self.tally.known + self.tally.compiled + len(self.failed)
        self.tally.left = self.total - done_so_far if self.stopped else 0

    def _note(self, problem: Problem, spec: Spec, future: Future) -> None:
        try:
            future.result()
            self.tally.compiled += 1
        except Exception as e:  # not recorded: it may be this machine's fault, so the next run tries again
            self.failed[f"{problem}: {spec.name}"] = str(e)

    def _compile(self, problem: Problem, spec: Spec) -> None:
        """In a thread: one candidate, from its specification to the store."""
        code: CodeObject = self.pool.build(spec.problem, spec.config, spec.target)
        artefact = self.store.add(code)

        def change(entry: Entry) -> Entry:
            if not entry.timings:
                entry = replace(entry, source="compiled")
            here = entry.timings.get(spec.name, Timing(spec.name, None, spec.config))
            return entry.with_timing(replace(here, artefact=artefact))

        self.store.update(problem.key, change)


def run(
    shapes: Sequence[Shape], targets: Sequence[str], jobs: int, budget: float | None = None, dry_run: bool = False,
    product: str | None = None, compute_units: int | None = None, console: Console | None = None,
) -> int:  # fmt: skip
    """0: all is there, or the time was up; 1: nothing could be done, or a candidate failed; 130: stopped."""
    if console is None:
        console = Console()
        console = console if console.is_terminal else Console(width=160)
    if settings.mode() != "tune" and not dry_run:
        console.print(f"FLYKERNELS_MODE is {settings.mode()}: the cache is not written. Unset it to compile.")
        return 1
    if mlir_version() is None:
        console.print("no compiler here: pip install 'flykernels[compile,gfx950]'")
        return 1
    described = {t: description_of(t, product, compute_units) for t in targets}
    asked = (problem_of(s, t, described[t]) for s in shapes for t in targets)
    problems = list({p.key.digest: p for p in asked}.values())
    start, cpu = time.monotonic(), _cpu_seconds()
    with Workers(jobs) as pool:
        work = Run(problems, settings.store(), pool, budget)
        with work.searchers:
            if dry_run:
                return _plan(work, described, console)
            _shown(work, work.go(), console)
    seconds = time.monotonic() - start
    return _summary(work, seconds, _cpu_seconds() - cpu, console)


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(r.ru_utime + r.ru_stime for r in both)


def _shown(work: Run, steps: Iterator[None], console: Console) -> None:
    """A bar with the time that is left on a terminal, a line now and then elsewhere."""
    done = lambda: work.tally.known + work.tally.compiled + len(work.failed)
    if console.is_terminal and sys.stdout.isatty():
        columns = (
            TextColumn("compiling"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("", total=work.total)
            for _ in steps:
                progress.update(bar, completed=done(), total=work.total)
        return
    start, said, before = time.monotonic(), 0, 0
    for _ in steps:
        total, now = work.total, done()
        if now * LINES // max(1, total) > said:
            said = now * LINES // max(1, total)
            before = before or work.tally.known
            each = (time.monotonic() - start) / max(1, now - before)
            console.print(f"{now} of {total}, about {each * (total - now):.0f} s left", highlight=False)


def _plan(work: Run, described: dict[str, dict], console: Console) -> int:
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
    console.print(f"{left} candidates to compile, {work.jobs} at a time; nothing was written", highlight=False)
    return 1 if len(work.refused) == len(work.problems) else 0


def _refusals(work: Run, console: Console) -> None:
    for name, reason in work.refused.items():
        console.print(f"{name}: not eligible: {reason}", highlight=False, soft_wrap=True)


def _summary(work: Run, seconds: float, cpu: float, console: Console) -> int:
    _refusals(work, console)
    for name, reason in list(work.failed.items())[:FAILURES_SHOWN]:
        console.print(f"{name}: not compiled: {reason}", highlight=False, soft_wrap=True, markup=False)
    if len(work.failed) > FAILURES_SHOWN:
        console.print(f"and {len(work.failed) - FAILURES_SHOWN} more")
    t = work.tally
    rate = f"{t.compiled / seconds:.2f} candidates/s, {cpu / seconds:.2f} of {work.jobs} cores busy"
    text = f"{t.compiled} compiled in {seconds:.1f} s ({rate}), {t.known} known before, {len(work.failed)} failed"
    console.print(text, highlight=False, soft_wrap=True)
    if work.stopped:
        console.print(f"{work.stopped}: about {t.left} are left; run it again to go on", highlight=False)
    console.print(f"cache: {work.store.directories[0]}", highlight=False, soft_wrap=True)
    if work.stopped == "stopped":
        return 130
    return 1 if work.failed or len(work.refused) == len(work.problems) else 0
