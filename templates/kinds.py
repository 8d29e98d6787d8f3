"""The templates of matrix products by name: what travels between processes and lies in files names its template so."""

from __future__ import annotations

import functools
import importlib
from typing import Any

# Name (that of the template's folder) -> class of its problems.
PROBLEMS = {"gemm": "GemmProblem", "scaled_gemm": "ScaledGemmProblem"}


@functools.cache
def problem_class(template: str) -> type:
    """The dataclass of a template's problems. ValueError if there is no such template."""
    if template not in PROBLEMS:
        raise ValueError(f"there is no template {template!r}; there are {', '.join(PROBLEMS)}")
    return getattr(importlib.import_module(f"templates.{template}.problem"), PROBLEMS[template])


def template_of(problem: Any) -> str:
    """The name of a problem's template. ValueError for anything else."""
    name = next((t for t in PROBLEMS if type(problem) is problem_class(t)), None)
    if name is None:
        raise ValueError(f"{type(problem).__name__} is a problem of none of {', '.join(PROBLEMS)}")
    return name


def candidates(problem: Any, target: Any, threads: int = 1) -> Any:
    """The template's search space (templates/gemm/space.py's Space) for a problem. Needs a compiler."""
    return importlib.import_module(f"templates.{template_of(problem)}.space").candidates(problem, target, threads)


def build(problem: Any, config: dict, target: str) -> Any:
    """The code object of a problem and a configuration's key() on a target, by name. Needs a compiler."""
    return importlib.import_module(f"templates.{template_of(problem)}.build").build_from_json(problem, config, target)
