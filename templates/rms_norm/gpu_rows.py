"""What RMSNorm's kernels for GPUs share: the arguments as memory, who holds what of a row, and turns over tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i32, i64
from flykernels.lang import Global, Kernel, Mode, ThreadValues, minimum

from .arguments import element_type, pointers, scalar_types
from .config import GpuConfig
from .problem import VECTOR_BYTES, RMSNormProblem

MANY = 1 << 30  # rows of workspace: more than there can be workgroups, so that nothing of it is masked


def arguments(k: Kernel, p: RMSNormProblem, cfg: GpuConfig, workspace: int = 0) -> dict:
    """The arguments by name. x, y and their like are (rows, width); rstd is (rows, 1).

    workspace: if not 0, rows of so many f32."""
    memory = {}
    for name in pointers(p):
        kind = element_type(p, name)
        if name == "rstd":
            memory[name] = Global(kind, ("rows", 1), (1, 1), alignment=kind.bytes)
        elif name in ("weight", "dweight"):
            alignment = p.align if name == "weight" else VECTOR_BYTES
            memory[name] = Global(kind, (p.columns,), alignment=max(kind.bytes, alignment))
        elif f"{name}_row" in scalar_types(p):
            rows, multiple = (("rows", p.columns), (f"{name}_row", 1)), p.align // kind.bytes
            memory[name] = Global(kind, *rows, alignment=p.align, stride_multiple=multiple)
        else:
            memory[name] = Global(kind, ("rows", p.columns))
    k.of_target.beside = cfg.beside
    more = {"workspace": Global(f32, (MANY, workspace))} if workspace else {}
    order = memory | scalar_types(p) | more
    given = dict(zip(order, k.args(**order)))
    once = ("x", "residual", "y", "sum") if cfg.once else ()
    return given | {n: replace(given[n], once=True) for n in once if n in given}


def layout(p: RMSNormProblem, cfg: GpuConfig) -> ThreadValues:
    """Who holds what of a (rows_per_workgroup, width) tile: each row in vectors dealt out to its threads in turn."""
    span = cfg.threads_per_row * cfg.vector  # elements of a row that its threads hold in one piece
    return ThreadValues(
        (cfg.rows_per_workgroup, p.columns),
        threads=(Mode(cfg.threads_per_row, 1, cfg.vector), Mode(cfg.rows_per_workgroup, 0, 1)),
        vector=Mode(cfg.vector, 1, 1),
        pieces=(Mode(ceil(p.columns / span), 1, span),),
    )


def tiles_in_turn(k: Kernel, cfg: GpuConfig, given: dict, fetch: Callable, work: Callable, carry=()):
    """work(tile's number, what fetch(number) read, carried) for the tiles of this workgroup; what was carried last.

    One tile a workgroup; or, with cfg.parts, tiles in turn, the next one fetched while one is worked on."""
    if not cfg.parts:
        k.grid = ((Extent("rows", cfg.rows_per_workgroup),),)
        return work(k.workgroup_id(), fetch(k.workgroup_id()), carry)
    k.grid = ((Extent("parts"),),)
    tiles = ((given["rows"] + (cfg.rows_per_workgroup - 1)) // cfg.rows_per_workgroup).to(i32)
    stride, first = given["parts"].to(i32), k.workgroup_id()
    if not (cfg.held and cfg.ahead):  # what is streamed is read when it is used

        @k.loop(first, tiles, stride, carry=carry)
        def in_turn(at, *now):
            return work(at, fetch(at), *now) if now else work(at, fetch(at), ())

        return in_turn

    last = tiles - 1

    @k.loop(first, tiles, stride, carry=(fetch(first), carry))
    def held(at, now):
        read, carried = now
        following = fetch(minimum(at + stride, last))
        return following, work(at, read, carried)

    return held[1]


def leave(k: Kernel, cfg: GpuConfig, to, at, rows, value):
    """Writes one number a row of tile `at`, held by all threads of the row."""
    row = at.to(i64) * cfg.rows_per_workgroup + k.thread // cfg.threads_per_row
    inside = row < rows
    if cfg.threads_per_row > 1:
        inside = inside & (k.thread % cfg.threads_per_row).equals(0)

    @k.when(inside)
    def _():
        (v,) = value.values()
        to.put(v, row)
