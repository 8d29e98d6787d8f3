"""RMSNorm's gradients on a CPU: of each row first mean(g x), then dx, and the row's terms of the weight's gradient.

Each thread adds up the terms of its rows, in order, in a row of workspace; a second launch adds those, in order."""

from __future__ import annotations

from flykernels.dtypes import f32, i64
from flykernels.lang import Kernel
from flykernels.lang.values import constant

from .config import X86Config
from .problem import RMSNormProblem
from .x86_rows import Units, arguments, line, share, spread, together


def steps(p: RMSNormProblem):
    """The kernels that are launched in turn."""
    return (rms_norm_backward, column_sums) if p.weight_gradient else (rms_norm_backward,)


def rms_norm_backward(k: Kernel, p: RMSNormProblem, cfg: X86Config):
    """dx = rstd (g - x rstd^2 mean(g x)) [+ dsum] with g = dy w, and each part's sums of dy x rstd."""
    given = arguments(k, p, *(["workspace"] if p.weight_gradient else []))
    width, weight = given["width"], given.get("weight")
    units = Units(k, [p.type, *([p.weight_type] if weight else []), *([f32] if p.weight_gradient else [])], clean=False)
    first, end = share(k, given)
    sums = line(given["workspace"], k.workgroup_id().to(i64), width) if p.weight_gradient else None
    zero = constant(0, f32, units.lanes)
    weighted = lambda dy, at: [a * b for a, b in zip(dy, units.read(weight, at))] if weight else dy
    weighted_one = lambda dy, at: dy * weight.get(at).to(f32) if weight else dy

    if sums is not None:
        clear = lambda at, _, keep, n: units.write(sums, at, [zero]) or ()
        units.visit(width, cfg.unroll, clear, lambda at, _: sums.put(constant(0, f32), at) or ())

    @k.loop(first, end)
    def _(row):
        x, dy = (line(given[n], row, given[f"{n}_row"]) for n in ("x", "dy"))
        dsum = line(given["dsum"], row, given["dsum_row"]) if p.residual else None
        dx, rstd = line(given["dx"], row, width), given["rstd"].get(row)

        def project(at, total, keep, n):
            g = weighted(units.read(dy, at), at)
            return spread(total, n, [a * b for a, b in zip(keep(g), keep(units.read(x, at)))])

        def project_one(at, total):
            g = weighted_one(dy.get(at).to(f32), at)
            return (total[0].insert(0, total[0][0] + g * x.get(at).to(f32)), *total[1:])

        total = units.visit(width, cfg.unroll, project, project_one, (zero,) * (cfg.unroll * units.vectors))
        projection = together(total) * rstd * rstd / width.to(f32)

        def gradient(at, _, keep, n):
            here, there = units.read(x, at), units.read(dy, at)
            out = [(g - a * projection) * rstd for g, a in zip(weighted(there, at), here)]
            if dsum is not None:
                out = [a + b for a, b in zip(out, units.read(dsum, at))]
            units.write(dx, at, out)
            if sums is not None:
                terms = keep([b * a * rstd for a, b in zip(here, there)])
                units.write(sums, at, [s + t for s, t in zip(units.read(sums, at), terms)])
            return ()

        def gradient_one(at, _):
            here, there = x.get(at).to(f32), dy.get(at).to(f32)
            out = (weighted_one(there, at) - here * projection) * rstd
            dx.put((out + dsum.get(at).to(f32) if dsum is not None else out).to(p.type), at)
            if sums is not None:
                sums.put(sums.get(at) + there * here * rstd, at)
            return ()

        units.visit(width, cfg.unroll, gradient, gradient_one)


def column_sums(k: Kernel, p: RMSNormProblem, cfg: X86Config):
    """dweight: the sums of all parts, each thread a run of columns."""
    given = arguments(k, p, "workspace")
    width, parts = given["width"], given["parts"]
    units = Units(k, [f32, p.weight_type])
    first, end = share(k, given, of="width")
    columns, dweight = given["workspace"].at(first), given["dweight"].at(first)

    def total(at, zero, read):
        @k.loop(constant(0, i64), parts, carry=zero)
        def so_far(part, so_far):
            return so_far + read(line(columns, part, width), at)

        return so_far

    def add(at, _, keep, n):
        zero = constant(0, f32, units.lanes)
        units.write(dweight, at, [total(at, zero, lambda row, at: units.read(row, at)[0])])
        return ()

    def add_one(at, _):
        dweight.put(total(at, constant(0, f32), lambda row, at: row.get(at)).to(p.weight_type), at)
        return ()

    units.visit(end - first, 1, add, add_one)
