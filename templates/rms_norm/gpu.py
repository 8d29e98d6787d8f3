"""RMSNorm on a GPU, one text for gfx950 and sm_90a: rows lie in registers between the sum and the scaling."""

from __future__ import annotations

from flykernels.dtypes import f32
from flykernels.lang import Kernel, rsqrt

from . import gpu_backward
from .config import GpuConfig
from .gpu_rows import arguments, layout, leave, tiles_in_turn
from .gpu_slices import slice_scaled, slice_sums
from .problem import RMSNormProblem


def steps(p: RMSNormProblem, cfg: GpuConfig):
    """The kernels that are launched in turn."""
    if p.backward:
        return gpu_backward.steps(p, cfg)
    return (rms_norm,) if cfg.slices == 1 else (slice_sums, slice_scaled)


def rms_norm(k: Kernel, p: RMSNormProblem, cfg: GpuConfig):
    """y = x rstd w, or of x + residual, which is left as well; arguments as in arguments.py."""
    given = arguments(k, p)
    tile = k.fragment(layout(p, cfg), streamed=not cfg.held)
    here = lambda name, at: given[name].tile((cfg.rows_per_workgroup, p.width), at)
    fetch = lambda at: tuple(tile.load(here(name, at)) for name in ("x", "residual") if name in given)
    weight = tile.load(given["weight"]) if p.weight_type else None
    eps = given["eps"].bitcast(f32)

    def work(at, read, _):
        x = read[0].to(f32)
        if p.residual:
            total = (x + read[1].to(f32)).to(p.type)
            tile.store(here("sum", at), total)
            x = total.to(f32)
        rstd = rsqrt((x * x).sum(axis=1) / p.width + eps)  # over registers, lanes, waves
        if p.rstd:
            leave(k, cfg, given["rstd"], at, given["rows"], rstd)
        y = x * rstd
        tile.store(here("y", at), (y * weight.to(f32) if weight else y).to(p.type))
        return ()

    tiles_in_turn(k, cfg, given, fetch, work)
