"""The templates of matrix products by name, for files that name a problem."""

from __future__ import annotations

import functools
import importlib

# Name (that of the template's folder, with dots) -> class of its problems.
PROBLEMS = {
    "gemm": "GemmProblem", "scaled_gemm": "ScaledGemmProblem", "grouped_gemm": "GroupedGemmProblem",
    "grouped_gemm.scaled": "ScaledGroupedProblem",
}  # fmt: skip


@functools.cache
def problem_class(template: str) -> type:
    """The dataclass of a template's problems. ValueError if there is no such template."""
    if template not in PROBLEMS:
        raise ValueError(f"there is no template {template!r}; there are {', '.join(PROBLEMS)}")
    return getattr(importlib.import_module(f"templates.{template}.problem"), PROBLEMS[template])
