"""RMSNorm on a CPU: one thread a run of rows; of each row first the sum of squares, then, from the cache, the result."""

from __future__ import annotations

from dataclasses import replace

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i64
from flykernels.lang import Global, Kernel, View, rsqrt
from flykernels.lang.values import Value, constant

from .arguments import pointers, scalar_types
from .config import X86Config
from .problem import RMSNormProblem
from .x86_rows import Units


def steps(p: RMSNormProblem, cfg: X86Config):
    """The kernels that are launched in turn."""
    return (rms_norm,)


def rms_norm(k: Kernel, p: RMSNormProblem, cfg: X86Config):
    """y = x rstd w, or of x + residual, which is left as well; arguments as in arguments.py."""
    given = arguments(k, p)
    width, rows = given["width"], given["rows"]
    units = Units(k, [t for t in (p.type, p.weight_type) if t], clean=True)
    count = f32_of(width)
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


# -- what the kernels share
def arguments(k: Kernel, p: RMSNormProblem, *more: str) -> dict:
    """The arguments by name, memory as rows of neighbours; more: names of further pointers to f32."""
    kinds = {"weight": p.weight_type, "dweight": p.weight_type, "rstd": f32} | dict.fromkeys(more, f32)
    row = lambda name: kinds.get(name, p.type)
    memory = {n: Global(row(n), (1,), (1,), alignment=row(n).bytes) for n in (*pointers(p), *more)}
    order = {n: memory[n] for n in pointers(p)} | scalar_types(p) | {n: memory[n] for n in more}
    k.grid = ((Extent("parts"),),)
    return dict(zip(order, k.args(**order)))


def share(k: Kernel, given: dict, of: str = "rows"):
    """(first, end): this part's run of rows (or of what `of` counts)."""
    part, parts, all_of_them = k.workgroup_id().to(i64), given["parts"], given[of]
    return part * all_of_them // parts, (part + 1) * all_of_them // parts


def line(memory: View, row: Value, stride: Value) -> View:
    """One row."""
    return replace(replace(memory, stride=(stride,)).at(row), stride=(1,))


def spread(sums: tuple, n: int, unit: list[Value]) -> tuple:
    """Adds unit number n of a turn to its own sums."""
    first = n * len(unit)
    return tuple(s + unit[i - first] if first <= i < first + len(unit) else s for i, s in enumerate(sums))


def together(sums) -> Value:
    """The sum of all elements of some vectors, by halves."""
    sums = list(sums)
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2])] + (sums[-1:] if len(sums) % 2 else [])
    return sums[0].fold(lambda a, b: a + b)


def f32_of(count: Value) -> Value:
    """An i64 that f32 holds exactly (up to 2**24)."""
    return count.to(f32)
