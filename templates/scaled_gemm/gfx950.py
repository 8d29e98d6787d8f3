"""Scaled GEMM on gfx950: FP8 and FP4 operands, a workgroup a tile, through LDS into scaled matrix instructions.

K tiles of A and B stand in a ring of LDS stages, their scales in slots that serve several K tiles each: they come by
direct-to-LDS loads, a slot while the one before is read. Sums are f32. Tails: M and N by guarded stores, K by zeros in
the last stage. With one scale a matrix or a row, instructions multiply unscaled and the sums are scaled at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flykernels.codeobject import Extent
from flykernels.dtypes import f32
from flykernels.lang import Global, Kernel, View
from flykernels.lang.fragment import Fragment
from flykernels.lang.plan import Plan
from flykernels.lang.ring import Ring
from flykernels.lang.values import Value
from templates.gemm.gfx950 import direct_loop_to, shelves_of, tiles_of
from templates.gemm.gfx950_hti import interleaved_loop
from templates.gemm.gfx950_output import last_of_slices, slot_bytes, store
from templates.gemm.order import tile_of

from .arguments import declared
from .gfx950_config import WORD, ScaledConfig
from .gfx950_operands import LoadedScales, ScaledMma, ScaledRing, ShiftedScales, Slots, SlotScales
from .problem import ALIGN, ScaledGemmProblem

K_STEP = 16  # numbers: K's multiple without block scaling, as torch's _scaled_mm asks; FP8 rows then are whole chunks


def why_not(p: ScaledGemmProblem) -> str | None:
    """Why this template does not serve the problem, in words; None if it does."""
    for name, align, rows in (("A", p.align_a, p.row_bytes("a")), ("B", p.align_b, p.row_bytes("b"))):
        if min(align, rows & -rows) < ALIGN:
            return (
                f"{name}'s rows along K begin at multiples of {align} bytes and have {rows}; direct loads move "
                f"{ALIGN}: K must be a multiple of {K_STEP} (FP4: {2 * K_STEP}), pointer and stride of {ALIGN} bytes"
            )
    return None


def uneven(p: Any, cfg: ScaledConfig) -> str | None:
    """Why K cannot be cut as a configuration says, in words; None if it can: a slice's last K tile would take in what
    is the next slice's, or lies beyond the operands."""
    if cfg.split_k > 1 and p.k % (cfg.split_k * cfg.tile_k):
        return f"K = {p.k} is not {cfg.split_k} slices of whole K tiles of {cfg.tile_k}"
    return None


def scaled_gemm(k: Kernel, p: Any, cfg: ScaledConfig):
    """The kernel; arguments as `arguments.declared` says (with split_k, `workspace` at the end), a one-dimensional grid
    of tiles x slices of K in the order of the dense kernel's `order.py`. p: a ScaledGemmProblem, which has what the
    parts of the dense kernel ask of theirs. ValueError where K cannot be cut so."""
    reason = uneven(p, cfg)
    if reason is not None:
        raise ValueError(f"{cfg}: {reason}. Do: choose a split_k and tile_k whose product divides K")

    # limits: who does which tile of C, over which part of K
    names = declared(p) | ({"workspace": Global(f32, ())} if cfg.split_k > 1 else {})
    given = dict(zip(names, k.args(**names)))
    across = (Extent("m", cfg.tile_m), Extent(p.n, cfg.tile_n))
    k.grid = ((*across, *([Extent(cfg.split_k)] if cfg.split_k > 1 else [])),)
    if cfg.split_k > 1:
        k.workspace = (*across, Extent(slot_bytes(cfg)))
    rows, columns = tiles_of(given["m"], cfg.tile_m), tiles_of(p.n, cfg.tile_n)
    piece, row, column = tile_of(k.workgroup_id(), rows, columns, cfg.split_k, cfg.group_m, k.target.limits.dies)
    piece, row, column = (k.target.uniform(x) if isinstance(x, Value) else x for x in (piece, row, column))

    # layouts: rows of A and columns of B as (rows, bytes along K), their scales as (rows, blocks)
    mma = ScaledMma(k, cfg.spread_atom(p), cfg.waves, cfg.repeat(p), cfg.k_waves)
    sides = {"a": (given["m"], cfg.tile_m, row, "a_row"), "b": (p.n, cfg.tile_n, column, "b_col")}
    views: dict[str, View] = {}
    scales: dict[str, View] = {}
    for which, (count, tile, at, stride) in sides.items():
        width, of = p.row_bytes(which), given[f"scale_{which}"]
        x = replace(
            given[which], shape=(count, width), stride=(given[stride], 1), alignment=ALIGN, stride_multiple=ALIGN
        )
        views[which] = x.tile((tile, width // cfg.split_k), at, piece)
        if p.scaling == "block":
            align = WORD if p.blocks % WORD == 0 else 1
            of = replace(of, shape=(count, p.blocks), stride=(p.blocks, 1), alignment=align)
            scales[which] = of.tile((tile, p.blocks // cfg.split_k), at, piece)

    # prologue and main loop
    sums, rings = multiplied(k, p, cfg, mma, views, scales)

    # epilogue
    k.afresh()  # registers are for the main loop
    shelves = shelves_of(k, p, cfg, rings)
    view = lambda name: result(p, given, name)

    def write(sums):
        store(k, p, cfg, mma, scaled(k, p, cfg, mma, sums, given, (row, column)), view, (row, column), shelves)

    if cfg.split_k == 1:
        write(sums)
    else:
        last_of_slices(k, cfg, sums, given["workspace"], row * columns + column, piece, write)


def multiplied(k: Kernel, p: Any, cfg: ScaledConfig, mma: ScaledMma, views: dict, scales: dict):
    """({part of the tile: its sums}, the rings by name, whose LDS is free once all are here) of a workgroup's rows of A
    and columns of B.

    views   "a" and "b", each (rows, bytes along K, which may be a Value: a multiple of 32 numbers, or 0)
    scales  with block scaling the same of their scales, (rows, blocks); else empty"""
    run_time = isinstance(views["a"].shape[1], Value)  # K: groups of it
    staged = cfg.staged(p) and not run_time
    kind = LoadedScales if not staged else SlotScales if p.blocks % WORD == 0 else ShiftedScales
    of: dict[str, Any] = {which: kind(k, cfg, mma, view, which) for which, view in scales.items()}
    slots = Slots(*of.values()) if staged else None
    ring = lambda which, view, rows, part: ScaledRing(k, p, cfg, which, view, rows, of.get(which), part * rows)
    if cfg.interleaved:
        return interleaved_loop(k, p, cfg, mma, views["a"], views["b"], ring_of=ring, slots=slots)
    rings = {which: ring(which, views[which], tile, 0) for which, tile in zip(("a", "b"), cfg.tile_mn)}
    if run_time:
        return {(0, 0): direct_loop_to(k, mma, rings["a"], rings["b"])}, rings
    return {(0, 0): ring_loop(k, mma, rings["a"], rings["b"], slots)}, rings


def ring_loop(k: Kernel, mma: ScaledMma, A: Ring, B: Ring, slots: Slots | None) -> Fragment:
    """C's tile, with `stages - 1` K tiles on their way from memory while one is multiplied."""
    ahead, per = A.stages - 1, slots.per if slots else 1

    def fetch(t):
        slot = [(r, t // per + 1) for r in slots.rings] if slots and t % per == 0 else []
        return [*slot, (A, t + ahead), (B, t + ahead)]

    need = lambda t: [(A, t), (B, t), *([(r, t // per) for r in slots.rings] if slots else [])]
    plan = Plan(start=-max(ahead, per if slots else 0), fetch=fetch, need=need)
    plan.prologue()

    def tile(number, t, acc):
        """K tile t, which is `number` in the plan or one like it."""
        drain = A.ragged and isinstance(t, int)  # a cut tile mixes loads that return nothing: do not count those
        k.wait_loads(0 if drain else plan.in_flight(number))  # my part of tile t has landed
        k.barrier()  # ... everyone's has; and everyone is done with t - 1
        for r, n in plan.fetch(number):  # into what t - 1 left
            r.prefetch(t // per + (n - number // per) if slots and r in slots.rings else t + (n - number))
        for step in range(A.steps(t, mma.a.tile[1])):
            acc = mma(A.read(mma.a, t, step), B.read(mma.b, t, step), acc)
        return acc

    turn = per  # K tiles of a turn of the loop
    whole = max(0, A.tiles - ahead - A.ragged) // turn * turn  # tiles that fetch a whole tile; a cut one with care
    assert plan.steady(turn, whole)
    acc = mma.zeros()
    if whole:

        @k.loop(0, whole, turn, carry=acc)
        def acc(t, acc):
            for number in range(turn):
                acc = tile(number, t + number, acc)
            return acc

    for t in range(whole, A.tiles):
        acc = tile(t, t, acc)
    return acc


def scaled(k: Kernel, p: ScaledGemmProblem, cfg: ScaledConfig, mma: ScaledMma, sums, given, at):
    """The sums times the scales of their rows and columns, or of the matrices; with block scaling as they are."""
    if p.scaling == "block":
        return sums
    of_a, of_b = given["scale_a"], given["scale_b"]
    if p.scaling == "tensor":
        a, b = of_a.get(), of_b.get()
        return {part: acc * a * b for part, acc in sums.items()}
    of_rows = replace(of_a, shape=(given["m"], 1), stride=(1, 0)).tile((cfg.tile_m, 1), at[0], 0)
    of_columns = replace(of_b, shape=(p.n,), stride=(1,)).tile((cfg.tile_n,), at[1])
    out = {}
    for part, acc in sums.items():
        held = mma.d.shifted(*(i * n for i, n in zip(part, cfg.part)))
        each_row = k.fragment(held.without(1)).load(of_rows).map(lambda v: v[0])
        out[part] = acc * each_row * k.fragment(held.without(0)).load(of_columns)
    return out


def result(p: ScaledGemmProblem, given, name: str) -> View:
    """C as (M, N), or bias as (N,)."""
    view = replace(given[name], alignment=p.align_c, stride_multiple=max(1, p.align_c // p.output_type.bytes))
    if name == "bias":
        return replace(view, shape=(p.n,), stride=(1,))
    return replace(view, shape=(given["m"], p.n), stride=(given["c_row"], 1))
