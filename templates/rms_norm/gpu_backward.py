"""RMSNorm's gradients on a GPU, one text for gfx950 and sm_90a.

The weight's gradient is a sum over all rows. Each workgroup adds up the rows that it works on, in registers and in
order, and leaves the sums in workspace; a second launch adds those of all workgroups in order. So it depends on how
many workgroups there are, and never on which comes first. Where rows are too wide for their sums to be held, they are
read again, by columns.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i32
from flykernels.lang import Kernel, Mode, ThreadValues, View

from .config import GpuConfig
from .gpu_rows import arguments, layout, tiles_in_turn
from .problem import RMSNormProblem

UNDER_WAY = 32  # elements of x that a thread has under way, where columns are summed up, of ROWS_UNDER_WAY at most:
ROWS_UNDER_WAY = 8  # each row has its own condition, in scalar registers
SUM_LANES = 8  # threads side by side along a row of sums: a line of 128 bytes
SUMS_UNDER_WAY = 4  # rows of sums whose loads a thread has under way


def steps(p: RMSNormProblem, cfg: GpuConfig):
    """The kernels that are launched in turn."""
    if not p.weight_gradient or cfg.alone:
        return (rms_norm_backward,)
    return (rms_norm_backward, column_sums) if cfg.sums else (rms_norm_backward, weight_terms, column_sums)


def rms_norm_backward(k: Kernel, p: RMSNormProblem, cfg: GpuConfig):
    """dx = rstd (g - x rstd^2 mean(g x)) [+ dsum] with g = dy w, and with cfg.sums the sums of dy x rstd."""
    given = arguments(k, p, cfg, workspace=p.columns if p.weight_gradient and not cfg.alone else 0)
    rows = layout(p, cfg)
    tile, one_a_row = k.fragment(rows, streamed=not cfg.held), k.fragment(rows.without(1))
    here = lambda name, at: given[name].tile((cfg.rows_per_workgroup, p.columns), at)
    names = [n for n in ("x", "dy", "dsum") if n in given]
    fetch = lambda at: tuple(tile.load(here(n, at)) for n in names)
    weight = tile.load(given["weight"]) if p.weight_type else None
    adds_up = p.weight_gradient and cfg.sums

    def work(at, read, sums):
        x, dy = read[0].to(f32), read[1].to(f32)
        rstd = one_a_row.load(given["rstd"].tile((cfg.rows_per_workgroup, 1), at)).map(lambda v: v[0])
        g = dy * weight.to(f32) if weight else dy
        projection = (g * x).sum(axis=1) * rstd * rstd / p.columns
        dx = (g - x * projection) * rstd
        if p.residual:
            dx = dx + read[2].to(f32)
        tile.store(here("dx", at), dx.to(p.type))
        return sums + dy * x * rstd if adds_up else ()

    sums = tile.zeros(f32) if adds_up else ()
    sums = tiles_in_turn(k, cfg, given, fetch, work, sums)
    if cfg.alone and adds_up:
        tile.store(one_row(given["dweight"], p), sums.to(p.weight_type))
    elif adds_up:
        tile.store(given["workspace"].tile((cfg.rows_per_workgroup, p.columns), k.workgroup_id()), sums)


def weight_terms(k: Kernel, p: RMSNormProblem, cfg: GpuConfig):
    """The sums over each part's rows of dy x rstd, a block of columns a workgroup."""
    given = arguments(k, p, cfg, workspace=p.columns if p.weight_gradient else 0)
    block, deep = cfg.workgroup_size * cfg.vector, min(ROWS_UNDER_WAY, UNDER_WAY // cfg.vector)
    k.grid = ((Extent(p.columns, block),), (Extent("parts"),))
    rows = ThreadValues(
        (deep, block), (Mode(cfg.workgroup_size, 1, cfg.vector),), Mode(cfg.vector, 1, 1), (Mode(deep, 0, 1),)
    )
    tile, one_a_row, one_a_column = k.fragment(rows), k.fragment(rows.without(1)), k.fragment(rows.without(0))
    column, part = k.workgroup_id(0), k.workgroup_id(1)
    tiles = ((given["rows"] + (deep - 1)) // deep).to(i32)

    @k.loop(part, tiles, given["parts"].to(i32), carry=one_a_column.zeros(f32))
    def sums(at, sums):
        read = lambda name: tile.load(given[name].tile((deep, block), at, column)).to(f32)
        rstd = one_a_row.load(given["rstd"].tile((deep, 1), at)).map(lambda v: v[0])
        return sums + (read("dy") * read("x") * rstd).sum(axis=0)

    one_a_column.store(given["workspace"].tile((1, block), part, column), sums)


def column_sums(k: Kernel, p: RMSNormProblem, cfg: GpuConfig):
    """dweight: the sums of all parts, column by column, in a fixed order."""
    given = arguments(k, p, cfg, workspace=p.columns)
    vector = gcd(k.target.vector_bytes // f32.bytes, p.columns)
    across, down = SUM_LANES, max(1, cfg.workgroup_size // SUM_LANES)
    block, deep = across * vector, down * SUMS_UNDER_WAY
    k.grid = ((Extent(p.columns, block),),)
    slots = given["parts"] * cfg.slots
    threads = (Mode(across, 1, vector), Mode(down, 0, 1))
    rows = ThreadValues((deep, block), threads, Mode(vector, 1, 1), (Mode(SUMS_UNDER_WAY, 0, down),))
    tile, one_a_column = k.fragment(rows), k.fragment(rows.without(0))
    column = k.workgroup_id()
    workspace = replace(given["workspace"], shape=(slots, p.columns))

    @k.loop(0, ((slots + (deep - 1)) // deep).to(i32), carry=tile.zeros(f32))
    def sums(at, sums):
        return sums + tile.load(workspace.tile((deep, block), at, column))

    total = sums.sum(axis=0).to(p.weight_type)

    @k.when(k.thread < across)
    def _():
        one_a_column.store(one_row(given["dweight"], p).tile((1, block), 0, column), total)


def one_row(dweight: View, p: RMSNormProblem) -> View:
    """(columns,) as (1, columns)."""
    return replace(dweight, shape=(1, p.columns), stride=(0, 1), multiple=())
