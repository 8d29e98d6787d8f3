"""RMSNorm of few and wide rows on a GPU: each row is cut into slices, a workgroup each, in two launches.

The first leaves each slice's sum of squares in workspace; the second adds those of its row, in order, and scales its
slice. Both read x, the second time from a cache: few rows fit in one."""

from __future__ import annotations

from math import ceil

from flykernels.codeobject import Extent
from flykernels.dtypes import f32
from flykernels.lang import Kernel, Mode, ThreadValues, rsqrt

from .config import GpuConfig
from .gpu_rows import arguments
from .problem import RMSNormProblem


def slice_sums(k: Kernel, p: RMSNormProblem, cfg: GpuConfig):
    """Each slice's sum of squares, of x or of x + residual, which is left too."""
    given, tile, here, at = slices(k, p, cfg)
    x = tile.load(here("x")).to(f32)
    if p.residual:
        total = (x + tile.load(here("residual")).to(f32)).to(p.type)
        tile.store(here("sum"), total)
        x = total.to(f32)
    (square,) = (x * x).sum(axis=1).values()

    @k.when(k.thread.equals(0))
    def _():
        given["workspace"].put(square, *at)


def slice_scaled(k: Kernel, p: RMSNormProblem, cfg: GpuConfig):
    """y of each slice, from its row's sums."""
    given, tile, here, (row, number) = slices(k, p, cfg)
    x = tile.load(here("sum" if p.residual else "x")).to(f32)
    weight = tile.load(given["weight"].tile((tile.layout.tile[1],), number)) if p.weight_type else None
    squares = given["workspace"].get(row, 0, width=counted(p, cfg)).fold(lambda a, b: a + b)
    rstd = rsqrt(squares / p.width + given["eps"].bitcast(f32))
    if p.rstd:

        @k.when(k.thread.equals(0) & number.equals(0))
        def _():
            given["rstd"].put(rstd, row, 0)

    y = x * rstd
    tile.store(here("y"), (y * weight.to(f32) if weight else y).to(p.type))


def slices(k: Kernel, p: RMSNormProblem, cfg: GpuConfig):
    """(arguments, how a slice is held, argument's name -> this workgroup's slice of it, (row, number of the slice))."""
    given, long, span = arguments(k, p, workspace=counted(p, cfg)), length(p, cfg), cfg.threads_per_row * cfg.vector
    threads = (Mode(cfg.threads_per_row, 1, cfg.vector),)
    tile = k.fragment(ThreadValues((1, long), threads, Mode(cfg.vector, 1, 1), (Mode(long // span, 1, span),)))
    k.grid = ((Extent(counted(p, cfg)), Extent("rows")),)
    number, row = k.workgroup_id() % counted(p, cfg), k.workgroup_id() // counted(p, cfg)
    return given, tile, lambda name: given[name].tile((1, long), row, number), (row, number)


def length(p: RMSNormProblem, cfg: GpuConfig) -> int:
    """Elements of a slice: whole vectors of all threads."""
    span = cfg.threads_per_row * cfg.vector
    return span * ceil(p.width / (span * cfg.slices))


def counted(p: RMSNormProblem, cfg: GpuConfig) -> int:
    """Slices of a row: as many as asked for, or fewer where that would leave some empty."""
    return ceil(p.width / length(p, cfg))
