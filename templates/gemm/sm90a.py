"""GEMM on sm_90a: C = activation(A B + bias) + residual, a workgroup a tile (or one tile after the other).

One warp brings K tiles of A and B into a ring of shared-memory stages by TMA; warpgroups multiply them there with
wgmma, the sums in registers. A stage is full when its bytes have come, and empty again when every warpgroup has
multiplied it. TMA and wgmma read all four layouts; where rows or columns of an operand end within a tile, and where K
does, TMA gives zeros. M, the batch and all strides are run-time arguments (`arguments.py`); N and K are constants.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from flykernels.dtypes import f32, i8
from flykernels.lang import Global, Kernel
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma

from . import sm90a_cluster, sm90a_mma
from .arguments import declared
from .gfx950_operands import matrix
from .problem import GemmProblem
from .sm90a_config import (
    BRINGER_REGISTERS,
    WARP,
    Sm90aConfig,
    along_k,
    boxes,
    shared_memory,
    shared_operands,
    tensor_maps,
    tma_reads,
)
from .sm90a_multiply import Multiplier
from .sm90a_output import EARLY_SUMS, Output
from .sm90a_work import Piece, Work

DTYPES = ("bf16", "f16")
READY = 1  # the named barrier where warpgroups learn that the ring is there, and later that it is free


def why_not(p: GemmProblem) -> str | None:
    """Why this template does not serve the problem, in words; None if it does."""
    if p.dtype not in DTYPES:
        return f"dtype is {p.dtype}; the sm90a kernel multiplies {' and '.join(DTYPES)}"
    if p.packed_b:
        return "a packed B is for x86; on sm90a operands are used where they lie"
    return None


def gemm(k: Kernel, p: GemmProblem, cfg: Sm90aConfig):
    """The kernel; arguments as `arguments.declared` says (with shared tiles, `workspace` at the end)."""
    if cfg.kind == "mma":
        return sm90a_mma.gemm(k, p, cfg)
    reason = tma_reads(p)
    if reason is not None:
        raise ValueError(f"{cfg}: {reason}. Do: take a configuration of kind mma")

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
    mine = k.thread >= cfg.multipliers
    rank = barriers.cluster_rank() if cfg.cluster_size > 1 else 0

    def bring():
        bring_all(k, p, cfg, work, ring, rank)

    def multiply():
        if cfg.bringers > WARP:
            barriers.take_registers(cfg.registers)
        if cfg.warm:
            warm(k, p, cfg, work, given)
        if k.overlaps:
            barriers.wait_for_kernels_ahead()
        if cfg.cluster_size > 1:
            barriers.cluster_barrier()
        else:
            barriers.named_barrier(READY, cfg.workgroup_size)
        consume(k, p, cfg, work, given, ring)

    k.branch(mine, bring, multiply)
    if cfg.cluster_size > 1:
        barriers.cluster_barrier()  # nobody leaves while another may still arrive at its barriers


class Stages:
    """The workgroup's shared memory: a ring of stages of A and B, each with a barrier that says it is full and one that
    says it is empty; shelves for C."""

    def __init__(self, k: Kernel, p: GemmProblem, cfg: Sm90aConfig):
        self.cfg, self.room = cfg, shared_memory(p, cfg)
        self.a, self.b = shared_operands(p, cfg)
        self.memory = k.target.dynamic_memory(k, self.room.total)
        self.full = barriers.Barriers(advance_bytes(self.memory, self.room.barriers), cfg.stages)
        self.empty = barriers.Barriers(self.full.at(cfg.stages), cfg.stages)

    def prepare(self) -> None:
        """By one thread, before anyone waits: a stage is full when its bytes have come, and empty when all warpgroups
        of all workgroups that its boxes come from have multiplied it."""
        self.full.init(1)
        self.empty.init(self.cfg.groups[0] * self.cfg.groups[1] * self.cfg.cluster_size)
        barriers.fence_init()

    def at(self, stage):
        """Pointers to a stage's A and B."""
        start = advance_bytes(self.memory, stage * self.room.stage)
        return start, advance_bytes(start, self.a.bytes)

    @property
    def shelf(self):
        return advance_bytes(self.memory, self.room.shelves)

    @property
    def board(self):
        """A word beside the barriers, for warpgroups that add up shared tiles."""
        return self.empty.at(self.cfg.stages)


def advance_bytes(pointer, size):
    """A pointer `size` bytes (an int or Value) further on."""
    return advance(pointer, size, i8)


def warm(k: Kernel, p: GemmProblem, cfg: Sm90aConfig, work: Work, given) -> None:
    """Asks L2 for what B's first trip through the ring needs: a cold tensor map keeps TMA waiting for about as long as
    memory takes to answer."""
    piece = work.start()
    source = matrix(k, p, given, "b", piece.batch).transposed()
    source = source.at(piece.column * cfg.tile_n, piece.first * cfg.tile_k)
    rows, depth = p.n - piece.column * cfg.tile_n, p.k - piece.first * cfg.tile_k  # that are left
    wide, high = cfg.stages * cfg.tile_k, cfg.tile_n
    if not along_k(p, "b"):
        wide, high = high, wide
    line = tma.LINE // p.input_type.bytes
    across = ceil(wide / line)
    for i in range(0, across * high, cfg.multipliers):
        number = k.thread + i
        along, other = number % across * line, number // across
        row, depth_at = (other, along) if along_k(p, "b") else (along, other)
        inside = (row < rows) & (depth_at < depth)

        @k.when(inside & (other < high))
        def _():
            tma.prefetch_line(source.at(row, depth_at).pointer)


def bring_all(k: Kernel, p: Any, cfg: Sm90aConfig, work: Work, ring: Stages, rank) -> None:
    """What the warps beside those that multiply do: one thread prepares the ring and fills it. Scaled products too."""
    if cfg.bringers > WARP:
        barriers.give_registers(BRINGER_REGISTERS)
    first = k.thread.equals(cfg.multipliers)

    @k.when(first)
    def _():
        for t in k.tensor_maps:
            tma.prefetch_map(k.tensor_map(t.name))
        ring.prepare()

    if cfg.cluster_size > 1:
        barriers.cluster_barrier()
    else:
        barriers.named_arrive(READY, cfg.workgroup_size)

    @k.when(first)
    def _():
        if cfg.overlap == "early":
            barriers.let_kernels_follow()
        if k.overlaps:
            barriers.wait_for_kernels_ahead()
        produce(k, p, cfg, work, ring, rank)


def produce(k: Kernel, p: GemmProblem, cfg: Sm90aConfig, work: Work, ring: Stages, rank) -> None:
    """Brings one K tile after the other into the ring. By one thread. rank: this workgroup's number in its cluster."""
    shared_along = {"a": cfg.cluster[1], "b": cfg.cluster[0]}  # workgroups side by side along N have the same A
    place = {"a": rank // cfg.cluster[0], "b": rank % cfg.cluster[0]} if cfg.cluster_size > 1 else {"a": 0, "b": 0}
    # bits of the workgroups that get what this one brings: cluster ranks run along M first
    masks: dict[str, Any] = {"a": None, "b": None}
    if shared_along["a"] > 1:
        masks["a"] = tma.mask_of(sum(1 << (cfg.cluster[0] * j) for j in range(cfg.cluster[1])), place["b"])
    if shared_along["b"] > 1:
        along_m = (1 << cfg.cluster[0]) - 1
        masks["b"] = tma.mask_of(along_m, place["a"] * cfg.cluster[0])
    policy = {
        "a": "evict_first" if cfg.evict == "both" else "normal",
        "b": "normal" if cfg.evict == "none" else "evict_first",
    }

    def load(name: str, shared, start, batch, origin, at_k, barrier) -> None:
        how, part = boxes(shared, shared_along[name]), place[name]
        for size, row, depth in how.at:
            to = advance_bytes(start, size + part * how.share[0])
            at_row, at_depth = origin + (row + part * how.share[1]), at_k + (depth + part * how.share[2])
            at = (at_depth, at_row) if shared.along_k else (at_row, at_depth)
            tma.load_box(k.tensor_map(f"{name}_map"), to, barrier, (*at, *batch), policy[name], masks[name])

    def piece(piece: Piece, carried):
        at = barriers.Position.of(carried, cfg.stages)
        row, column = piece.row * cfg.tile_m, piece.column * cfg.tile_n
        batch = {n: (work.batch_of(n, piece),) if p.batched else () for n in "ab"}

        @k.loop(piece.first, piece.end, carry=at.carried)
        def after(step, carried):
            at = barriers.Position.of(carried, cfg.stages)
            ring.empty.wait(at.stage, at.parity)
            ring.full.expect(at.stage, ring.room.stage)
            (a, b), barrier = ring.at(at.stage), ring.full.at(at.stage)
            load("a", ring.a, a, batch["a"], row, step * cfg.tile_k, barrier)
            load("b", ring.b, b, batch["b"], column, step * cfg.tile_k, barrier)
            return at.next().carried

        return after

    work.walk(barriers.Position.start(cfg.stages, 1).carried, piece)


def consume(k: Kernel, p: GemmProblem, cfg: Sm90aConfig, work: Work, given, ring: Stages) -> None:
    """Multiplies one K tile after the other as they come, and writes tiles of C. By all warpgroups."""
    mine = Multiplier(k, cfg, ring)
    held = lambda name, batch: matrix(k, p, given, name, batch)

    def piece(piece: Piece, carried):
        at = barriers.Position.of(carried, cfg.stages)
        box_batch = (work.batch_of("c", piece),) if p.batched else ()
        output = Output(k, p, cfg, lambda n: held(n, piece.batch), (piece.row, piece.column), box_batch, ring.shelf)
        early = piece.inside is True and cfg.split_k == 1 and not work.shares and cfg.sums <= EARLY_SUMS
        added = output.fetch(0) if early else {}

        sums, after = mine.added(piece.first + 1, piece.end, mine.begun(at))
        if cfg.one_tile and not cfg.k_cluster:
            barriers.named_barrier(READY, cfg.multipliers)  # the shelves lie in stages that all have multiplied
        acc = mine.fragment(sums)

        if cfg.k_cluster:
            sm90a_cluster.add_up(k, p, cfg, acc, ring.memory, barriers.cluster_rank(), output)
        elif work.shares:
            work.add_up(piece, acc, ring.board, lambda acc: output.store(acc, output.fetch(0)))
        elif piece.inside is True:
            output.store(acc, added if early else output.fetch(0))
        else:
            k.when(piece.inside)(lambda: output.store(acc, output.fetch(0)))
        return after

    work.walk(barriers.Position.start(cfg.stages, 0).carried, piece)
    if cfg.tma_store:
        k.when(mine.lane.equals(0))(lambda: tma.wait_stores_read(0))  # shared memory goes when the workgroup does
