"""One acceptance case: a compiled kernel, its launch, and what it must compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(eq=False)
class Case:
    """A kernel with one launch.

    name       compiler and kernel, as shown in reports
    text       assembly text, where the compiler gives it ("" for a code object only)
    binary     linked code object
    grid       workgroups along x, y, z
    arguments  () -> fresh arguments in order (numpy arrays, ints, floats); arrays that a kernel writes are poisoned
    wrong      arguments after the run -> largest error over what the types allow; at most 1 is right
    entry      kernel name; None where the code object has only one
    options    further options of `run_on_sim` (waivers, ...)
    """

    name: str
    text: str
    binary: bytes
    grid: tuple[int, int, int]
    arguments: Callable[[], list[Any]]
    wrong: Callable[[list[Any]], float]
    entry: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def bf16(x: np.ndarray) -> np.ndarray:
    """float -> bf16 bits (uint16), round to nearest even; finite input."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) -> float64."""
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def excess(got: np.ndarray, exact: np.ndarray, scale: np.ndarray | float, k: int, step: float) -> float:
    """Largest |got - exact| over its bound: one rounding of the result (`step` of |exact|) plus f32 accumulation of k
    terms whose absolute values sum to at most `scale` (k * 2^-24 of it). NaN counts as infinitely wrong."""
    bound = step * np.abs(exact) + np.maximum(k, 8) * 2.0**-24 * scale + 1e-30
    ratio = np.abs(np.asarray(got, np.float64) - exact) / bound
    return float(np.max(np.where(np.isnan(ratio), np.inf, ratio), initial=0.0))


STEP = {"bf16": 2.0**-8, "fp16": 2.0**-10, "f32": 2.0**-22}
