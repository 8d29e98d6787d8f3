"""What a kernel has to know of how tensors lie: where neighbours are, and how far addresses are aligned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

WIDEST = 16  # bytes of a lane's widest access, on every GPU there are templates for


def number(expr: Any) -> int | None:
    """An int that Inductor knows, or None."""
    try:
        return int(expr)
    except (TypeError, ValueError):
        return None


def unit_stride(size: Sequence[Any], stride: Sequence[Any]) -> str:
    """ "row", "col" or "any" for a matrix: where neighbours lie. An axis of one element fits everything."""
    rows, columns = (number(s) for s in stride)
    if columns == 1 or number(size[1]) == 1:
        return "row"
    if rows == 1 or number(size[0]) == 1:
        return "col"
    return "any"


def alignments(a: Any, b: Any, rest: Sequence[Any]) -> dict[str, int]:
    """align_a, align_b and align_c (of all of `rest`) from layouts' strides and offsets; a GPU's wide loads need them,
    run-time guards check them. A symbolic stride promises no more than whole elements."""
    return {"align_a": _alignment(a), "align_b": _alignment(b), "align_c": min(map(_alignment, rest))}


def _alignment(held: Any) -> int:
    size = held.dtype.itemsize
    steps = [number(s) for s, n in zip(held.stride, held.size, strict=True) if number(n) != 1]
    strides = [s for s in (*steps, number(held.offset)) if s != 1]
    common = 0 if None not in strides else 1
    return math.gcd(WIDEST, *(s * size for s in strides if s is not None), *((size,) if common else ()))
