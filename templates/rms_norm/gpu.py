"""RMSNorm on a GPU, one text for gfx950 and sm_90a: rows lie in registers between the sum and the scaling."""

from __future__ import annotations

from math import ceil, gcd

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i32, i64
from flykernels.lang import Global, Kernel, Mode, ThreadValues, minimum, rsqrt

from .arguments import pointers, scalar_types
from .config import GpuConfig
from .problem import VECTOR_BYTES, RMSNormProblem


def steps(p: RMSNormProblem, cfg: GpuConfig):
    """The kernels that are launched in turn."""
    return (rms_norm,)


def rms_norm(k: Kernel, p: RMSNormProblem, cfg: GpuConfig):
    """y = x rstd w, or of x + residual, which is left as well; arguments as in arguments.py.

    One tile of rows a workgroup; with cfg.parts only so many workgroups, each of which goes through its tiles in turn,
    keeps the weight, and fetches the next tile while it works on one."""
    given = arguments(k, p, cfg)
    tile = k.fragment(layout(p, cfg), streamed=not cfg.held)
    here = lambda name, at: given[name].tile((cfg.rows_per_workgroup, p.width), at)
    fetch = lambda at: tuple(tile.load(here(name, at)) for name in ("x", "residual") if name in given)
    weight = tile.load(given["weight"]) if p.weight_type else None

    def work(at, read):
        x = read[0].to(f32)
        if p.residual:
            total = (x + read[1].to(f32)).to(p.type)
            tile.store(here("sum", at), total)
            x = total.to(f32)
        rstd = rsqrt((x * x).sum(axis=1) / p.width + given["eps"].bitcast(f32))  # over registers, lanes, waves
        if p.rstd:
            leave(k, cfg, given["rstd"], at, given["rows"], rstd)
        y = x * rstd
        tile.store(here("y", at), (y * weight.to(f32) if weight else y).to(p.type))

    if not cfg.parts:
        k.grid = ((Extent("rows", cfg.rows_per_workgroup),),)
        work(k.workgroup_id(), fetch(k.workgroup_id()))
        return
    k.grid = ((Extent("parts"),),)
    tiles = ((given["rows"] + (cfg.rows_per_workgroup - 1)) // cfg.rows_per_workgroup).to(i32)
    stride = given["parts"].to(i32)

    @k.loop(k.workgroup_id(), tiles, stride, carry=fetch(k.workgroup_id()))
    def _(at, read):
        following = fetch(minimum(at + stride, tiles - 1))
        work(at, read)
        return following


# -- what the kernels share
def arguments(k: Kernel, p: RMSNormProblem, cfg: GpuConfig, *more: str) -> dict:
    """The arguments by name; more: names of further pointers to f32."""
    kinds = {"weight": p.weight_type, "dweight": p.weight_type, "rstd": f32} | dict.fromkeys(more, f32)
    memory = {}
    for name in (*pointers(p), *more):
        kind = kinds.get(name, p.type)
        if name in kinds:
            shape = ("rows",) if name == "rstd" else (p.width,)
            memory[name] = Global(kind, shape, alignment=max(kind.bytes, p.align if name == "weight" else VECTOR_BYTES))
        elif f"{name}_row" in scalar_types(p):
            memory[name] = Global(
                kind, ("rows", p.width), (f"{name}_row", 1), alignment=p.align, stride_multiple=p.align // kind.bytes
            )
        else:
            memory[name] = Global(kind, ("rows", p.width))
    order = {n: memory[n] for n in pointers(p)} | scalar_types(p) | {n: memory[n] for n in more}
    return dict(zip(order, k.args(**order)))


def layout(p: RMSNormProblem, cfg: GpuConfig) -> ThreadValues:
    """Who holds what of a (rows_per_workgroup, width) tile: each row in vectors dealt out to its threads in turn."""
    span = cfg.threads_per_row * cfg.vector  # elements of a row that its threads hold in one piece
    return ThreadValues(
        (cfg.rows_per_workgroup, p.width),
        threads=(Mode(cfg.threads_per_row, 1, cfg.vector), Mode(cfg.rows_per_workgroup, 0, 1)),
        vector=Mode(cfg.vector, 1, 1),
        pieces=(Mode(ceil(p.width / span), 1, span),),
    )


def widest_vector(p: RMSNormProblem) -> int:
    """Elements that may move together: as all rows' starts are aligned, the results' dense ones included."""
    return gcd(p.align, p.width * p.type.bytes, VECTOR_BYTES) // p.type.bytes


def leave(k: Kernel, cfg: GpuConfig, to, at, rows, value):
    """Writes one number a row of tile `at`, held by all threads of the row."""
    row = at.to(i64) * cfg.rows_per_workgroup + k.thread // cfg.threads_per_row
    first = (k.thread % cfg.threads_per_row).equals(0) if cfg.threads_per_row > 1 else True

    @k.when(first & (row < rows) if cfg.threads_per_row > 1 else row < rows)
    def _():
        (v,) = value.values()
        to.put(v, row)
