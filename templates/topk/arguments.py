"""What a top-k kernel is called with, in order: the same for every target and configuration of a problem.

    x, values, indices          pointers to the first element; indices are int64
    rows, width, k              i32
    layout "last":              x_row, values_row, indices_row: i64, elements from one row to the next
    layout "any":               inner (i32), then for x, values and indices three i64 each, in elements: NAME_outer,
                                NAME_along, NAME_inner. Row r has outer coordinate r // inner, inner coordinate r % inner
    split configurations only:  parts (i32), and last the workspace's pointer: at least `workspace_bytes` bytes, zero
                                before their first launch. Any launch of any split kernel of this template leaves them
                                fit for any other; two launches at a time must not share them.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import i32, i64

from .config import TopKConfig
from .problem import TopKProblem

POINTERS = ("x", "values", "indices")
MOST_SPLIT_ROWS = 1024  # rows of a launch whose rows are split: each has a counter at the head of the workspace
COUNTERS = 4 * MOST_SPLIT_ROWS  # bytes of the counters; they are zero between launches
ENTRY = 8  # bytes of a candidate: 32 bits of order, 32 of position


def scalars(p: TopKProblem, config: TopKConfig) -> tuple[str, ...]:
    """Names of the scalar arguments, in order."""
    if p.layout == "last":
        strides = tuple(f"{x}_row" for x in POINTERS)
    else:
        strides = ("inner", *(f"{x}_{axis}" for x in POINTERS for axis in ("outer", "along", "inner")))
    return ("rows", "width", "k", *strides, *(("parts",) if config.split else ()))


def slot_bytes(config: TopKConfig) -> int:
    """Workspace of one part of one row (the counters counted in each time: the size is a product that way)."""
    return COUNTERS + config.most_k * ENTRY


def workspace_bytes(config: TopKConfig, rows: int) -> int:
    """Of the workspace that a launch over `rows` rows needs; 0 for configurations that are not split."""
    return rows * config.parts * slot_bytes(config) if config.split else 0


def declared(p: TopKProblem, config: TopKConfig) -> dict[str, Any]:
    """The kernel's arguments as `Kernel.args` takes them."""
    from flykernels.dtypes import u64
    from flykernels.lang.memory import Global  # needs MLIR; naming arguments does not

    kinds = {"x": Global(p.element, (), alignment=min(p.align, 16)), "values": Global(p.element, (), alignment=p.element.bytes)}
    kinds["indices"] = Global(i64, (), alignment=i64.bytes)
    kinds |= {n: i32 if n in ("rows", "width", "k", "inner", "parts") else i64 for n in scalars(p, config)}
    return kinds | ({"workspace": Global(u64, (1,), (1,), alignment=16)} if config.split else {})


def scalar_values(p: TopKProblem, config: TopKConfig, strides: dict[str, tuple[int, ...]], inner: int = 1) -> tuple[int, ...]:
    """The scalar arguments of a launch, in order.

    strides  elements, for each of "x", "values", "indices": (row,) for layout "last", (outer, along, inner) for "any"
    inner    layout "any": rows that differ in the inner coordinate"""
    given = {"rows": p.rows, "width": p.width, "k": p.k, "parts": config.parts, "inner": inner}
    axes = ("row",) if p.layout == "last" else ("outer", "along", "inner")
    for x in POINTERS:
        given |= {f"{x}_{axis}": s for axis, s in zip(axes, strides[x], strict=True)}
    return tuple(given[n] for n in scalars(p, config))
