"""The ring of shared-memory stages that an sm_90a GEMM works from, and the warp that fills it by TMA.

A stage is full when its bytes have come, and empty again when every warpgroup has multiplied it. Dense, scaled and
grouped kernels have the same ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flykernels.dtypes import i8
from flykernels.lang import Kernel
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma
from flykernels.targets import sm90a_wgmma as wgmma

from .problem import GemmProblem
from .sm90a_config import (
    BLOCK_M,
    BRINGER_REGISTERS,
    WARP,
    Sm90aConfig,
    boxes,
    shared_memory,
    shared_operands,
)
from .sm90a_work import Piece, Work

READY = 1  # the named barrier where warpgroups learn that the ring is there, and later that it is free


class Stages:
    """The workgroup's shared memory: a ring of stages of A and B, each with a barrier that says it is full and one that
    says it is empty; shelves for C. types: of A and B, where they are not the problem's `input_type`."""

    def __init__(self, k: Kernel, p: GemmProblem, cfg: Sm90aConfig, types=None):
        self.cfg, self.room = cfg, shared_memory(p, cfg)
        self.a, self.b = shared_operands(p, cfg)
        if types:
            self.a, self.b = (replace(x, dtype=t) for x, t in zip((self.a, self.b), types, strict=True))
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
    def inbox(self):
        return advance_bytes(self.memory, self.room.inbox)

    @property
    def board(self):
        """A word beside the barriers, for warpgroups that add up shared tiles."""
        return self.empty.at(self.cfg.stages)

    def product(self, start, sums, stage, fresh: bool, depths: range | None = None):
        """sums + A B^T of the K tile in `stage`, started as one group. start: descriptors of a warpgroup's part of A
        and B in the first stage; sums: of each of its blocks of 64 rows; depths: where along K instructions begin, if
        not all of the K tile is asked for."""
        depths = depths or range(0, self.cfg.tile_k, wgmma.DEPTH_BYTES // self.a.dtype.bytes)
        offset = (stage * (self.room.stage // wgmma.UNIT)).to(start[0].dtype)
        a, b, sums = start[0] + offset, start[1] + offset, list(sums)
        wgmma.fence()
        for depth in depths:
            for block in range(self.cfg.blocks):
                at_a = wgmma.moved(a, self.a.step_bytes(BLOCK_M * block, depth))
                at_b = wgmma.moved(b, self.b.step_bytes(0, depth))
                sums[block] = wgmma.multiply(at_a, at_b, sums[block], self.a, self.b, fresh and depth == depths[0])
        wgmma.commit()
        return tuple(sums)


def advance_bytes(pointer, size):
    """A pointer `size` bytes (an int or Value) further on."""
    return advance(pointer, size, i8)


def in_roles(k: Kernel, p: Any, cfg: Sm90aConfig, work: Work, ring: Stages, consume: Callable[[], None]) -> None:
    """The last warps prepare the barriers and bring, and go on without waiting for the others, who multiply. Scaled
    products too."""
    rank = barriers.cluster_rank() if cfg.cluster_size > 1 else 0

    def multiply():
        meet_the_ring(k, cfg)
        consume()

    k.branch(k.thread >= cfg.multipliers, lambda: bring_all(k, p, cfg, work, ring, rank), multiply)
    if cfg.cluster_size > 1:
        barriers.cluster_barrier()  # nobody leaves while another may still arrive at its barriers


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
    if cfg.k_cluster:
        barriers.cluster_arrive()

    @k.when(first)
    def _():
        if cfg.overlap == "early":
            barriers.let_kernels_follow()
        if k.overlaps:
            barriers.wait_for_kernels_ahead()
        produce(k, p, cfg, work, ring, rank)

    if cfg.k_cluster:
        barriers.cluster_wait()


def meet_the_ring(k: Kernel, cfg: Sm90aConfig) -> None:
    """What the warps that multiply do first: the other side of `bring_all`'s beginning."""
    if cfg.bringers > WARP:
        barriers.take_registers(cfg.registers)
    if k.overlaps:
        barriers.wait_for_kernels_ahead()
    if cfg.cluster_size > 1:
        barriers.cluster_barrier()
    else:
        barriers.named_barrier(READY, cfg.workgroup_size)
    if cfg.k_cluster:
        barriers.cluster_arrive()


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

    def load(name: str, shared, start, batch, origin, at_k, barrier) -> None:
        how, part = boxes(shared, shared_along[name]), place[name]
        for size, row, depth in how.at:
            to = advance_bytes(start, size + part * how.share[0])
            at_row, at_depth = origin + (row + part * how.share[1]), at_k + (depth + part * how.share[2])
            at = (at_depth, at_row) if shared.along_k else (at_row, at_depth)
            tma.load_box(k.tensor_map(f"{name}_map"), to, barrier, (*at, *batch), cfg.policy(name), masks[name])

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
