"""How kernels that work row by row deal rows out to threads, on any target."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flykernels.lang import DType, Mode, ThreadValues


@dataclass(frozen=True)
class RowsProblem:
    """Rows of n elements; how many there are is a run-time argument."""

    n: int
    dtype: DType


@dataclass(frozen=True)
class RowsConfig:
    """threads_per_row a power of two (part of a wave, a wave, or several); vector: elements that move together;
    streamed: the row is read twice instead of held in registers."""

    threads_per_row: int
    rows_per_workgroup: int
    vector: int
    streamed: bool = False

    @property
    def workgroup_size(self) -> int:
        return self.threads_per_row * self.rows_per_workgroup

    def rows_of(self, n: int) -> ThreadValues:
        """Who holds what of a (rows_per_workgroup, n) tile: each row in vectors dealt out to its threads in turn."""
        span = self.threads_per_row * self.vector  # elements of a row that its threads hold in one piece
        return ThreadValues(
            (self.rows_per_workgroup, n),
            threads=(Mode(self.threads_per_row, 1, self.vector), Mode(self.rows_per_workgroup, 0, 1)),
            vector=Mode(self.vector, 1, 1),
            pieces=(Mode(ceil(n / span), 1, span),),
        )


def choose(p: RowsProblem, target) -> RowsConfig:
    """A sensible configuration from the target's limits; tuning would enumerate around it."""
    if target.lanes == 1:
        return RowsConfig(1, 1, target.vector_bytes, streamed=p.n * 4 > target.held_bytes)  # four registers of f32
    vector = target.vector_bytes // p.dtype.bytes
    fits = lambda t: ceil(p.n / (t * vector)) * vector * 4 <= target.held_bytes
    enough = lambda t: t * vector >= min(p.n, target.lanes * vector) and fits(t)
    threads = next(filter(enough, (2**i for i in range(11))), target.max_workgroup)
    return RowsConfig(threads, max(1, 256 // threads), vector, streamed=not fits(threads))
