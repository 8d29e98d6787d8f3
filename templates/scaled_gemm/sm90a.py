"""Scaled GEMM on sm_90a: FP8 operands of one scale a matrix or a row, on the dense kernel's ring.

TMA brings K tiles, warpgroups multiply them there with wgmma; the sums are scaled as they are written. wgmma adds FP8
products up with fewer bits than f32 has: about 14 ("DeepSeek-V3 Technical Report", 2024, section 3.3.2). So unless the
problem allows `fast_accum`, the sums of every PROMOTE of K are begun anew and added in f32 registers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flykernels.dtypes import f32
from flykernels.lang import Global, Kernel, Value, View
from flykernels.lang.fragment import Fragment
from flykernels.lang.values import mlir_type
from flykernels.mlir import llvm
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma
from flykernels.targets import sm90a_wgmma as wgmma
from templates.gemm import sm90a_cluster
from templates.gemm.gfx950_operands import matrix
from templates.gemm.sm90a_config import BLOCK_M, Sm90aConfig, tensor_maps, tma_reads
from templates.gemm.sm90a_output import EARLY_SUMS, Output, Part
from templates.gemm.sm90a_ring import READY, Stages, bring_all, meet_the_ring
from templates.gemm.sm90a_work import Piece, Work

from .arguments import declared
from .problem import FP8, ScaledGemmProblem

PROMOTE = 128  # of K, whose products wgmma adds up by itself: four instructions
STEP = 32  # of K, an instruction's
UNIT = 2.0**-13  # of the largest of an instruction's products and sums: what lies below it is cut off
SUMS_MOST = 96  # of C a thread, beside as many that wgmma adds up


def why_not(p: ScaledGemmProblem) -> str | None:
    """Why this template does not serve the problem, in words; None if it does."""
    if p.scaling == "block" or not {p.a_type, p.b_type} <= set(FP8):
        return (
            f"{p.a_dtype} and {p.b_dtype} with scaling {p.scaling!r}; wgmma multiplies FP8 without scales for blocks: "
            "one a matrix, or one a row of A and a column of B"
        )
    return tma_reads(p)  # type: ignore[arg-type]  # a ScaledGemmProblem has what the dense kernel's parts ask


def limit(p: ScaledGemmProblem, cfg: Sm90aConfig) -> str | None:
    """The limit that a configuration runs into beyond those of the dense kernel, in words; None if it fits."""
    if cfg.kind != "wgmma":
        return "only wgmma configurations"
    if cfg.tile_k % PROMOTE:
        return f"K tiles of {cfg.tile_k}; they are whole multiples of {PROMOTE}"
    if not p.fast_accum and cfg.sums > SUMS_MOST:
        return f"{cfg.sums} sums a thread, twice: wgmma's and those of all of K. At most {SUMS_MOST} fit into registers"
    return None


def errors(p: ScaledGemmProblem) -> tuple[float, float]:
    """How far a sum may be from the exact one, beyond what f32 explains: (times |a_i| |b_j|, the norms of A's row and
    B's column; times |c_ij|).

    Every instruction cuts its 32 products and the sum off below UNIT of the largest of them. What is cut off the
    products has their signs: over K it grows with the square root, as what the sum may be does, so that a few UNIT of
    the norms cover it for any K. What is cut off the sum has its sign, once for each instruction."""
    together = p.k if p.fast_accum else min(p.k, PROMOTE)
    return 8 * UNIT, -(-together // STEP) * UNIT


def scaled_gemm(k: Kernel, p: Any, cfg: Sm90aConfig):
    """The kernel; arguments as `arguments.declared` says (with shared tiles, `workspace` at the end).
    p: a ScaledGemmProblem, which has what the parts of the dense kernel ask of theirs."""
    reason = why_not(p) or limit(p, cfg)
    if reason is not None:
        raise ValueError(f"{cfg}: {reason}")

    # limits: who does which tile of C, over which part of K
    names: dict[str, Any] = declared(p)
    work = Work(k, p, cfg)
    if work.shares:
        names["workspace"] = Global(f32, ())
    k.tensor_maps, k.cluster, k.of_target.beside = tensor_maps(p, cfg), cfg.launched_cluster, cfg.beside
    given = dict(zip(names, k.args(**names)))
    k.overlaps = cfg.overlap != "none"
    work.begin(given)

    # layouts: stages of A and B, then shelves for C, then barriers
    ring = Stages(k, p, cfg)

    # prologue: the last warps prepare the barriers, and go on without waiting for the others
    rank = barriers.cluster_rank() if cfg.cluster_size > 1 else 0

    def bring():
        bring_all(k, p, cfg, work, ring, rank)

    def multiply():
        meet_the_ring(k, cfg)
        consume(k, p, cfg, work, given, ring)

    k.branch(k.thread >= cfg.multipliers, bring, multiply)
    if cfg.cluster_size > 1:
        barriers.cluster_barrier()  # nobody leaves while another may still arrive at its barriers


def consume(k: Kernel, p: Any, cfg: Sm90aConfig, work: Work, given, ring: Stages) -> None:
    """Multiplies one K tile after the other as they come, and writes tiles of C. By all warpgroups."""
    full, empty = ring.full, ring.empty
    A, B = replace(ring.a, dtype=p.a_type), replace(ring.b, dtype=p.b_type)
    group = k.thread // wgmma.WARPGROUP if cfg.multipliers > wgmma.WARPGROUP else 0
    along_m, along_n = group % cfg.groups[0], group // cfg.groups[0]
    lane = k.thread % wgmma.WARPGROUP
    origin = wgmma.address_of(ring.memory)
    layout = wgmma.sums_layout(cfg.columns, cfg.blocks, cfg.groups)
    a_start = origin + along_m * A.step_bytes(BLOCK_M * cfg.blocks, 0)
    b_start = origin + (along_n * B.step_bytes(cfg.columns, 0) + A.bytes)
    a_origin, b_origin = wgmma.descriptor(A, a_start), wgmma.descriptor(B, b_start)
    view = lambda name: argument(k, p, given, name)
    nothing = [wgmma.undefined(cfg.columns)] * cfg.blocks

    def release(stage):
        """One thread of each warpgroup says that it is done with a stage, to every workgroup that fills it."""
        if cfg.cluster_size == 1:
            k.when(lane.equals(0))(lambda: empty.arrive(stage))
        else:
            k.when(lane < cfg.cluster_size)(lambda: empty.arrive_at(stage, lane))

    def product(sums, stage, depths, fresh: bool):
        """sums + A B^T of `depths` of the K tile in `stage`, started as one group."""
        offset = (stage * (ring.room.stage // wgmma.UNIT)).to(a_origin.dtype)
        a, b, sums = a_origin + offset, b_origin + offset, list(sums)
        wgmma.fence()
        for depth in depths:
            for block in range(cfg.blocks):
                at_a = wgmma.moved(a, A.step_bytes(BLOCK_M * block, depth))
                at_b = wgmma.moved(b, B.step_bytes(0, depth))
                sums[block] = wgmma.multiply(at_a, at_b, sums[block], A, B, fresh and depth == depths[0])
        wgmma.commit()
        return tuple(sums)

    def fast(piece: Piece, at):
        """(sums, where the ring is then): all in wgmma's own sums, the next K tile begun before one is done."""
        whole = range(0, cfg.tile_k, STEP)
        full.wait(at.stage, at.parity)
        sums = product(nothing, at.stage, whole, True)

        @k.loop(piece.first + 1, piece.end, carry=(sums, at.next().carried, at.stage))
        def done(step, carried):
            sums, now, before = carried
            at = barriers.Position.of(now, cfg.stages)
            full.wait(at.stage, at.parity)
            sums = product(sums, at.stage, whole, False)
            wgmma.wait(1)
            release(before)
            return sums, at.next().carried, at.stage

        sums, after, last = done
        wgmma.wait(0)
        release(last)
        return wgmma.fragment(k, layout, list(sums)), after

    def promoted(piece: Piece, at):
        """The same, wgmma's sums of each PROMOTE of K added in f32: while one warpgroup adds, another multiplies."""

        def tile(at, total):
            full.wait(at.stage, at.parity)
            for first in range(0, cfg.tile_k, PROMOTE):
                part = product(nothing, at.stage, range(first, first + PROMOTE, STEP), True)
                wgmma.wait(0)
                if first + PROMOTE == cfg.tile_k:
                    release(at.stage)
                new = [element(sums, i) for sums in part for i in range(sums.width)]
                total = tuple(new) if total is None else tuple(t + n for t, n in zip(total, new))
            return total

        @k.loop(piece.first + 1, piece.end, carry=(tile(at, None), at.next().carried))
        def done(step, carried):
            total, now = carried
            at = barriers.Position.of(now, cfg.stages)
            return tile(at, total), at.next().carried

        total, after = done
        each = len(total) // cfg.blocks

        def pair(digits):
            half, column, block = digits
            i = block * each + 4 * column + 2 * half  # as `wgmma.fragment` finds them
            return total[i].splat(2).insert(1, total[i + 1])

        return Fragment(k, layout, False, pair), after

    def piece(piece: Piece, carried):
        output = ScaledOutput(k, p, cfg, view, (piece.row, piece.column), (), ring.shelf).scaled_by(given)
        early = piece.inside is True and cfg.split_k == 1 and not work.shares and cfg.sums <= EARLY_SUMS
        added = output.fetch(0) if early else {}
        acc, after = (fast if p.fast_accum else promoted)(piece, barriers.Position.of(carried, cfg.stages))
        if cfg.one_tile and not cfg.k_cluster:
            barriers.named_barrier(READY, cfg.multipliers)  # the shelves lie in stages that all have multiplied

        if cfg.k_cluster:
            sm90a_cluster.add_up(k, p, cfg, acc, ring.inbox, barriers.cluster_rank(), output)
        elif work.shares:
            work.add_up(piece, acc, ring.board, lambda acc: output.store(acc, output.fetch(0)))
        elif piece.inside is True:
            output.store(acc, added if early else output.fetch(0))
        else:
            k.when(piece.inside)(lambda: output.store(acc, output.fetch(0)))
        return after

    work.walk(barriers.Position.start(cfg.stages, 0).carried, piece)
    if cfg.tma_store:
        k.when(lane.equals(0))(lambda: tma.wait_stores_read(0))  # shared memory goes when the workgroup does


class ScaledOutput(Output):
    """The dense kernel's output, of sums times their scales."""

    p: Any  # a ScaledGemmProblem

    def scaled_by(self, given) -> ScaledOutput:
        """With the scales among a kernel's arguments."""
        p, cfg, of_a, of_b = self.p, self.cfg, given["scale_a"], given["scale_b"]
        self.rows = replace(of_a, shape=(given["m"], 1), stride=(1, 0)).tile((cfg.tile_m, 1), self.at[0], 0)
        self.columns = replace(of_b, shape=(p.n,), stride=(1,)).tile((cfg.tile_n,), self.at[1])
        self.pair = (of_a.get(), of_b.get()) if p.scaling == "tensor" else None
        return self

    def _part_of(self, sums: Fragment, part: Part) -> Fragment:
        acc = super()._part_of(sums, part)
        if self.pair is not None:
            return acc * self.pair[0] * self.pair[1]  # one after the other: their product may lie beyond f32
        held = self.held(part)
        of_rows = self.k.fragment(held.without(1)).load(self.rows).map(lambda v: v[0])
        return acc * of_rows * self.k.fragment(held, elementwise=False).load(self.columns)


def argument(k: Kernel, p: Any, given, name: str) -> View:
    """C as (M, N), or bias as (N,), wherever it begins."""
    view = matrix(k, p, given, name)
    return replace(view, alignment=view.dtype.bytes, stride_multiple=1) if name == "bias" else view


def element(struct: Value, i: int) -> Value:
    """Register i of what a wgmma gave."""
    return Value(llvm.extractvalue(mlir_type(f32), struct.ssa, [i]), f32)
