"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w, row by row. One source for gfx950, sm90a and x86."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flykernels.codeobject import Extent
from flykernels.lang import DType, Global, Kernel, Mode, ThreadValues, f32, i32, rsqrt


@dataclass(frozen=True)
class RMSNormProblem:
    """Rows of n elements; how many there are and how far apart are run-time arguments."""

    n: int
    dtype: DType
    weight_dtype: DType


@dataclass(frozen=True)
class RMSNormConfig:
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


def rms_norm(k: Kernel, p: RMSNormProblem, cfg: RMSNormConfig):
    x, w, y, eps, _, _, _ = k.args(
        x=Global(p.dtype, ("rows", p.n), ("x_row", 1), alignment=p.dtype.bytes),
        w=Global(p.weight_dtype, (p.n,)),
        y=Global(p.dtype, ("rows", p.n), ("y_row", 1), alignment=p.dtype.bytes),
        eps=f32,
        rows=i32,
        x_row=i32,
        y_row=i32,
    )
    k.grid = ((Extent("rows", cfg.rows_per_workgroup),),)
    rows = k.fragment(cfg.rows_of(p.n), streamed=cfg.streamed)
    here = (cfg.rows_per_workgroup, p.n), k.workgroup_id()
    v = rows.load(x.tile(*here)).to(f32)  # held: the one read of the row
    weight = rows.load(w).to(f32)  # under way while the sum is formed
    inverse_rms = rsqrt((v * v).sum(axis=1) / p.n + eps)  # over registers, lanes, waves
    rows.store(y.tile(*here), (v * inverse_rms * weight).to(p.dtype))


def choose(p: RMSNormProblem, target) -> RMSNormConfig:
    """A sensible configuration from the target's limits; tuning would enumerate around it."""
    if target.lanes == 1:
        return RMSNormConfig(1, 1, target.vector_bytes, streamed=p.n * 4 > target.held_bytes)  # four registers of f32
    vector = target.vector_bytes // p.dtype.bytes
    fits = lambda t: ceil(p.n / (t * vector)) * vector * 4 <= target.held_bytes
    enough = lambda t: t * vector >= min(p.n, target.lanes * vector) and fits(t)
    threads = next(filter(enough, (2**i for i in range(11))), target.max_workgroup)
    return RMSNormConfig(threads, max(1, 256 // threads), vector, streamed=not fits(threads))
