"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w, row by row: sums over registers, lanes and waves."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flykernels.lang import DType, Global, Kernel, Mode, ThreadValues, f32, rsqrt


@dataclass(frozen=True)
class RMSNormProblem:
    rows: int
    n: int
    dtype: DType


@dataclass(frozen=True)
class RMSNormConfig:
    """threads_per_row is a power of two: part of a wave, a wave, or several; `vector` elements move together."""

    threads_per_row: int
    rows_per_workgroup: int
    vector: int

    @property
    def workgroup_size(self) -> int:
        return self.threads_per_row * self.rows_per_workgroup

    def rows_of(self, n: int) -> ThreadValues:
        """Who holds what of a (rows_per_workgroup, n) tile: each row in vectors, dealt out to its threads in turn."""
        span = self.threads_per_row * self.vector
        return ThreadValues(
            (self.rows_per_workgroup, n),
            threads=(Mode(self.threads_per_row, 1, self.vector), Mode(self.rows_per_workgroup, 0, 1)),
            vector=Mode(self.vector, 1, 1),
            pieces=(Mode(ceil(n / span), 1, span),),
        )


def rms_norm(k: Kernel, p: RMSNormProblem, cfg: RMSNormConfig):
    x, w, y, eps = k.args(
        x=Global(p.dtype, (p.rows, p.n)), w=Global(p.dtype, (p.n,)), y=Global(p.dtype, (p.rows, p.n)), eps=f32
    )
    rows = k.fragment(cfg.rows_of(p.n))
    here = (cfg.rows_per_workgroup, p.n), k.workgroup_id()
    v = rows.load(x.tile(*here)).to(f32)
    weight = rows.load(w).to(f32)  # under way while the sum is formed
    inverse = rsqrt((v * v).sum(axis=1) / p.n + eps)
    rows.store(y.tile(*here), (v * inverse * weight).to(p.dtype))
