"""Softmax of each row. One source; rows are dealt out as rows.py says."""

from __future__ import annotations

from math import e, log2

from flykernels.codeobject import Extent
from flykernels.lang import Global, Kernel, exp2, f32, i32, reciprocal

from .rows import RowsConfig, RowsProblem


def softmax(k: Kernel, p: RowsProblem, cfg: RowsConfig):
    x, y, _ = k.args(x=Global(p.dtype, ("rows", p.n)), y=Global(p.dtype, ("rows", p.n)), rows=i32)
    k.grid = ((Extent("rows", cfg.rows_per_workgroup),),)
    rows = k.fragment(cfg.rows_of(p.n), streamed=cfg.streamed)
    here = (cfg.rows_per_workgroup, p.n), k.workgroup_id()
    v = rows.load(x.tile(*here)).to(f32) * log2(e)
    power = exp2(v - v.max(axis=1))
    rows.store(y.tile(*here), (power * reciprocal(power.sum(axis=1))).to(p.dtype))
