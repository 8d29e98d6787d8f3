"""What a quantiser is called with, in order: the same for every target and configuration.

x                      (M, N)
[codes, scales]        with rows: bytes (M, N / numbers a byte), (M, N / 32); contiguous
[codes_t, scales_t]    with columns: bytes (N, M / numbers a byte), (N, M / 32); contiguous
m, x_row               rows; elements from a row of X to the next (i64)
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import i64, u8
from flykernels.microscaling import BLOCK

from .problem import QuantizeProblem

SCALARS = ("m", "x_row")


def outputs(p: QuantizeProblem) -> tuple[str, ...]:
    """Names of what is written, in order."""
    return (*(("codes", "scales") if p.rows else ()), *(("codes_t", "scales_t") if p.columns else ()))


def declared(p: QuantizeProblem) -> dict[str, Any]:
    """The kernel's arguments as `Kernel.args` takes them. Outputs are aligned as torch allocates: 16 bytes."""
    from flykernels.lang.memory import Global  # needs MLIR; naming arguments does not

    each = {"x": Global(p.input_type, (), alignment=p.align_x)} | {name: Global(u8, ()) for name in outputs(p)}
    return each | dict.fromkeys(SCALARS, i64)


def shapes(p: QuantizeProblem, m: int) -> dict[str, tuple[int, int]]:
    """Bytes (rows, row bytes) of each output for M rows. ValueError where M or N cannot be."""
    if p.rows and p.n % BLOCK:
        raise ValueError(f"N = {p.n} is not a multiple of {BLOCK}, the numbers along a row that share a scale")
    if p.columns and m % BLOCK:
        raise ValueError(
            f"M = {m} is not a multiple of {BLOCK}, the numbers along a column that share a scale: pad rows with zeros"
        )
    found = {
        "codes": (m, p.n // p.per_byte),
        "scales": (m, p.n // BLOCK),
        "codes_t": (p.n, m // p.per_byte),
        "scales_t": (p.n, m // BLOCK),
    }
    return {name: found[name] for name in outputs(p)}
