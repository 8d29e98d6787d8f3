"""RMSNorm on a CPU: each thread a run of rows; of a row first the sum of squares, then, from the cache, the result."""

from __future__ import annotations

from flykernels.dtypes import f32
from flykernels.lang import Kernel, rsqrt
from flykernels.lang.values import constant

from . import x86_backward
from .config import X86Config
from .problem import RMSNormProblem
from .x86_rows import Units, arguments, line, share, spread, together


def steps(p: RMSNormProblem, cfg: X86Config):
    """The kernels that are launched in turn."""
    return x86_backward.steps(p) if p.backward else (rms_norm,)


def rms_norm(k: Kernel, p: RMSNormProblem, cfg: X86Config):
    """y = x rstd w, or of x + residual, which is left as well; arguments as in arguments.py."""
    given = arguments(k, p)
    width = given["width"]
    units = Units(k, [t for t in (p.type, p.weight_type) if t], clean=True)
    count = width.to(f32)  # exact: widths are below 2**24
    eps = given["eps"].bitcast(f32)
    first, end = share(k, given)

    @k.loop(first, end)
    def _(row):
        x, y = line(given["x"], row, given["x_row"]), line(given["y"], row, width)
        residual = line(given["residual"], row, given["residual_row"]) if p.residual else None
        total = line(given["sum"], row, width) if p.residual else x

        def add_square(at, sums, keep, n):
            v = units.read(x, at)
            if residual is not None:
                v = units.round([a + b for a, b in zip(v, units.read(residual, at))], p.type)
                units.write(total, at, v)
            return spread(sums, n, [a * a for a in keep(v)])

        def add_one_square(at, sums):
            v = x.get(at).to(f32)
            if residual is not None:
                total.put((v + residual.get(at).to(f32)).to(p.type), at)
                v = total.get(at).to(f32)
            return (sums[0].insert(0, sums[0][0] + v * v), *sums[1:])

        zero = constant(0, f32, units.lanes)
        sums = units.visit(width, cfg.unroll, add_square, add_one_square, (zero,) * (cfg.unroll * units.vectors))
        rstd = rsqrt(together(sums) / count + eps)
        if p.rstd:
            given["rstd"].put(rstd, row)

        def scale(at, _, keep, n):
            v = [a * rstd for a in units.read(total, at)]
            if p.weight_type:
                v = [a * w for a, w in zip(v, units.read(given["weight"], at))]
            units.write(y, at, v)
            return ()

        def scale_one(at, _):
            v = total.get(at).to(f32) * rstd
            y.put((v * given["weight"].get(at).to(f32) if p.weight_type else v).to(p.type), at)
            return ()

        units.visit(width, cfg.unroll, scale, scale_one)
