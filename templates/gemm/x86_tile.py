"""A workgroup's tile of C on a CPU, and what is done with a finished sum."""

from __future__ import annotations

from dataclasses import dataclass

from flykernels.dtypes import f32
from flykernels.lang import View
from flykernels.lang.values import Value, constant

from .epilogue import activate
from .problem import GemmProblem


@dataclass(frozen=True)
class Tile:
    """A workgroup's part: views of one batch's operands, and which rows and columns of C it makes."""

    a: View  # (M, K)
    b: View  # (K, N), or as pack_b left it
    bias: View | None  # (M, N) with any strides
    residual: View | None  # (M, N)
    c: View  # (M, N), any strides
    m: Value  # rows there are
    k: Value | int  # what is summed over; may be 0 if a Value
    first_row: Value
    end_row: Value
    column_tile: Value  # number of the tile along N


def finish(p: GemmProblem, tile: Tile, x: Value, row, column, count: int):
    """Bias, activation, residual, C for a vector of sums at (row, column...); only the first `count` are there."""
    width = x.width
    if p.bias != "none":
        x = x + _bias(p, tile, row, column, width, count)
    x = activate(p.activation, x)
    if tile.residual is not None:
        x = x + tile.residual.get(row, column, width=width, count=count).to(f32)
    x = x.to(p.output_type)
    if isinstance(tile.c.stride[1], int):
        tile.c.put(x, row, column, count=count)
        return
    for i in range(count):
        tile.c.put(x[i], row, column + i)


def _bias(p: GemmProblem, tile: Tile, row, column, width, count) -> Value:
    assert tile.bias is not None
    if p.bias == "row":
        return tile.bias.get(0, column, width=width, count=count).to(f32)
    out = constant(0, f32, width)  # any strides: element by element
    for i in range(count):
        out = out.insert(i, tile.bias.get(row, column + i).to(f32))
    return out
