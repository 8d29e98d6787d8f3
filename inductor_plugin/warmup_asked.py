"""From what a user names (a file of shapes, a record of misses, a model) to the problems that a warmup prepares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from tuning_cache import record, shapes
from tuning_cache.shapes import Shape

from . import eager_warmup, lowering
from .measuring import Unit
from .programs import program_of
from .wanted import Problem, description_of, of_heard, of_miss, problems_of, runs_here, target_of
from .warmup import Asked


class NothingAsked(ValueError):
    """Why there is nothing to prepare, in words."""


def from_files(
    paths: Sequence[Path], targets: Sequence[str], product: str | None = None, compute_units: int | None = None
) -> Asked:
    """Files of shapes, or what FLYKERNELS_RECORD wrote. ShapesError, RecordError or NothingAsked with the reason."""
    found = [
        _from_record(path, targets)
        if record.is_record(path)
        else from_shapes(shapes.read(path), targets or ("x86",), product, compute_units)
        for path in paths
    ]
    described: dict[str, dict] = {}
    for asked in reversed(found):
        described |= asked.described
    eager = [miss for a in found for miss in a.eager]
    return Asked([u for a in found for u in a.units], described, [note for a in found for note in a.notes], eager)


def from_shapes(
    listed: Sequence[Shape], targets: Sequence[str], product: str | None = None, compute_units: int | None = None
) -> Asked:
    described = {t: description_of(t, product, compute_units) for t in targets}
    units = []
    for shape in listed:
        for target in targets:
            problems = problems_of(shape, target, described[target])
            # The fused one's program asks for the product alone first; the other names of both are the same program.
            units.append(Unit(target, problems, _program(problems[1] if len(problems) > 1 else problems[0])))
    return Asked(units, described)


def _same(program: lowering.Program) -> lowering.Program:
    return program


def _program(problem: Problem) -> Callable[[], lowering.Program]:
    return functools.partial(program_of, problem)


def _from_record(path: Path, targets: Sequence[str]) -> Asked:
    misses, torn = record.read(path)
    notes = [f"{torn} lines of {path.name} are not whole and were passed over"] if torn else []
    units: list[Unit] = []
    eager: list[record.EagerMiss] = []
    described: dict[str, dict] = {}
    for miss in misses:
        try:
            if isinstance(miss, record.EagerMiss):
                if not targets or target_of(miss.target) in targets:
                    eager.append(_measured_here(miss))
                continue
            problem = of_miss(miss)
        except ValueError as e:
            notes.append(f"{miss.name}: left out: {e}")
            continue
        if targets and problem.target not in targets:
            continue
        if described.setdefault(problem.target, miss.target) != miss.target:
            described[problem.target] = _usual(problem.target, described[problem.target], miss.target)
        units.append(Unit(problem.target, [problem], _program(problem)))
    if not units and not eager:
        wanted = f" for {', '.join(targets)}" if targets else ""
        raise NothingAsked("; ".join([f"{path.name} holds no problem that can be prepared{wanted}", *notes]))
    return Asked(units, described, notes, eager)


def _measured_here(miss: record.EagerMiss) -> record.EagerMiss:
    """ValueError with the reason where it cannot be."""
    reason = eager_warmup.why_not(miss)
    if reason:
        raise ValueError(f"{eager_warmup.case_of(miss)}: {reason}")
    return miss


def _usual(target: str, *held: dict) -> dict:
    """Of several machines that a record is of, the one that is here, if any: that is where problems are measured."""
    return next((x for x in held if runs_here(target, x)), held[0])


def from_model(
    name: str, targets: Sequence[str], training: bool = False, dynamic: bool = False, freezing: bool = False,
    product: str | None = None, compute_units: int | None = None,
) -> Asked:  # fmt: skip
    """Every problem that the graphs of `module:factory` ask for. ModelError or NothingAsked with the reason; what the
    factory or the model raise."""
    program = lowering.from_factory(name, training, dynamic, freezing)
    described = {t: description_of(t, product, compute_units) for t in targets or ("x86",)}
    units, notes = [], []
    for target, description in described.items():
        here = runs_here(target, description)
        if freezing and target != "x86" and not here:
            notes.append(f"{target}: --freezing folds constants on the GPU, which is not here; lowered without")
            program = lowering.Program(program.make, training, program.dynamic)
        try:
            seen = lowering.lower(program, target, description, here)
        except (lowering.ModelError, KeyboardInterrupt):
            raise
        except Exception as e:  # the user's code
            raise NothingAsked(f"{name} cannot be taken through torch.compile: {type(e).__name__}: {e}") from e
        problems = [of_heard(heard, target, description) for heard in seen.requests.values()]
        notes += [f"{target}: a graph of the model was passed over: {reason}" for reason in seen.failed]
        notes.append(f"{target}: the model asks for {len(problems)} problems")
        if problems:
            units.append(Unit(target, problems, functools.partial(_same, program)))
    if not units:
        raise NothingAsked("; ".join([f"{name} asks for nothing that templates serve", *notes]))
    return Asked(units, described, notes)
