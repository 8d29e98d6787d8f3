"""GEMM on sm_90a: C = activation(A B + bias) + residual, a workgroup a tile (or one tile after the other).

One warp brings K tiles of A and B into a ring of shared-memory stages by TMA; warpgroups multiply them there with
wgmma, the sums in registers. A stage is full when its bytes have come, and empty again when every warpgroup has
multiplied it. TMA and wgmma read all four layouts; where rows or columns of an operand end within a tile, and where K
does, TMA gives zeros. M, the batch and all strides are run-time arguments (`arguments.py`); N and K are constants.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import f32, i8, i32
from flykernels.lang import Global, Kernel, Value, View, constant, minimum, select
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma
from flykernels.targets import sm90a_wgmma as wgmma

from . import sm90a_cluster, sm90a_mma
from .arguments import declared
from .gfx950_operands import matrix
from .problem import GemmProblem
from .sm90a_config import (
    BLOCK_K,
    BLOCK_M,
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
        bring_all(k, p, cfg, work, given, ring, rank)

    def multiply():
        if cfg.bringers > WARP:
            barriers.take_registers(cfg.registers)
        if k.overlaps:
            barriers.wait_for_kernels_ahead()
        if cfg.cluster_size > 1:
            barriers.cluster_barrier()
        else:
            barriers.named_barrier(READY, cfg.workgroup_size)
        (consume_in_turns if cfg.k_groups > 1 else consume)(k, p, cfg, work, given, ring)

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
    """Asks L2 for the first K tiles of B, by one warp: memory has work while the kernel ahead ends, and this one need
    not wait for its tensor maps."""
    piece = work.start()
    column, first = piece.column * cfg.tile_n, piece.first * cfg.tile_k
    depth = minimum(minimum(piece.end * cfg.tile_k, p.k) - first, abs(cfg.warm) * cfg.tile_k)
    rows = minimum(p.n - column, cfg.tile_n)
    if cfg.warm < 0:

        @k.when(k.thread.equals(cfg.multipliers))
        def _():
            b = shared_operands(p, cfg)[1]
            how = boxes(b, 1)
            for step in range(-cfg.warm):
                for size, row, d in how.at:
                    at_row, at_depth = column + row, constant(0, i32) + first + (d + step * cfg.tile_k)
                    tma.prefetch_box(k.tensor_map("b_map"), (at_depth, at_row) if b.along_k else (at_row, at_depth))

        return
    high, wide = (rows, depth) if along_k(p, "b") else (depth, rows)
    size = wide * p.input_type.bytes // tma.TMA_ALIGNMENT * tma.TMA_ALIGNMENT
    size = size if isinstance(size, Value) else constant(size, i32)
    source = matrix(k, p, given, "b", piece.batch).transposed().at(column, first)

    @k.loop((k.thread - cfg.multipliers) % WARP, high, WARP)
    def _(line):
        at = (line, 0) if along_k(p, "b") else (0, line)
        k.when(size > 0)(lambda: tma.prefetch_bytes(source.at(*at).pointer, size))


def bring_all(k: Kernel, p: Any, cfg: Sm90aConfig, work: Work, given, ring: Stages, rank) -> None:
    """What the warps beside those that multiply do: one thread prepares the ring and fills it. Scaled products too."""
    if cfg.bringers > WARP:
        barriers.give_registers(BRINGER_REGISTERS)
    if cfg.warm:
        k.when(k.thread < cfg.multipliers + WARP)(lambda: warm(k, p, cfg, work, given))
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
        if cfg.overlap == "last":
            barriers.let_kernels_follow()


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
    leaves = {"a": cfg.evict == "both", "b": cfg.evict != "none"}

    def hint(name: str, step):
        """Of L2, for K tile number `step`."""
        if not leaves[name]:
            return None
        first = tma.policy("evict_first")
        return select((step % cfg.keep).equals(0), tma.POLICIES["normal"], first) if cfg.keep and name == "b" else first

    def load(name: str, shared, start, batch, origin, step, barrier) -> None:
        at_k, of_l2 = step * cfg.tile_k, hint(name, step)
        how, part = boxes(shared, shared_along[name], p.k), place[name]
        for size, row, depth in how.at:
            to = advance_bytes(start, size + part * how.share[0])
            at_row, at_depth = origin + (row + part * how.share[1]), at_k + (depth + part * how.share[2])
            at = (at_depth, at_row) if shared.along_k else (at_row, at_depth)
            if len(how.box) > len(at):
                at = (constant(0, i32), at_row, step * (cfg.tile_k // shared.row))
            tma.load_box(k.tensor_map(f"{name}_map"), to, barrier, (*at, *batch), of_l2, masks[name])

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
            load("a", ring.a, a, batch["a"], row, step, barrier)
            load("b", ring.b, b, batch["b"], column, step, barrier)
            return at.next().carried

        return after

    work.walk(barriers.Position.start(cfg.stages, 1).carried, piece)


def consume(k: Kernel, p: GemmProblem, cfg: Sm90aConfig, work: Work, given, ring: Stages) -> None:
    """Multiplies one K tile after the other as they come, and writes tiles of C. By all warpgroups."""
    A, B, full, empty = ring.a, ring.b, ring.full, ring.empty
    group = k.thread // wgmma.WARPGROUP if cfg.multipliers > wgmma.WARPGROUP else 0
    along_m, along_n = group % cfg.groups[0], group // cfg.groups[0]
    lane = k.thread % wgmma.WARPGROUP
    origin = wgmma.address_of(ring.memory)
    layout = wgmma.sums_layout(cfg.columns, cfg.blocks, cfg.groups)
    held = lambda name, batch: matrix(k, p, given, name, batch)
    # a warpgroup's part of the tile begins at whole boxes or groups of rows: the distance is the same multiple for each
    a_start = origin + along_m * A.step_bytes(BLOCK_M * cfg.blocks, 0)
    b_start = origin + (along_n * B.step_bytes(cfg.columns, 0) + A.bytes)
    a_origin, b_origin = wgmma.descriptor(A, a_start), wgmma.descriptor(B, b_start)

    def release(stage):
        """One thread of each warpgroup says that it is done with a stage, to every workgroup that fills it."""
        if cfg.cluster_size == 1:
            k.when(lane.equals(0))(lambda: empty.arrive(stage))
        else:
            k.when(lane < cfg.cluster_size)(lambda: empty.arrive_at(stage, lane))

    def product(sums, stage, fresh: bool):
        """sums + A B^T of the K tile in `stage`, started as one group."""
        offset = (stage * (ring.room.stage // wgmma.UNIT)).to(a_origin.dtype)
        a, b, sums = a_origin + offset, b_origin + offset, list(sums)
        wgmma.fence()
        for depth in range(0, cfg.tile_k, BLOCK_K):
            for block in range(cfg.blocks):
                at_a = wgmma.moved(a, A.step_bytes(BLOCK_M * block, depth))
                at_b = wgmma.moved(b, B.step_bytes(0, depth))
                sums[block] = wgmma.multiply(at_a, at_b, sums[block], A, B, fresh and depth == 0)
        wgmma.commit()
        return tuple(sums)

    def piece(piece: Piece, carried):
        at = barriers.Position.of(carried, cfg.stages)
        box_batch = (work.batch_of("c", piece),) if p.batched else ()
        output = Output(k, p, cfg, lambda n: held(n, piece.batch), (piece.row, piece.column), box_batch, ring.shelf)
        early = piece.inside is True and cfg.split_k == 1 and not work.shares and cfg.sums <= EARLY_SUMS
        added = output.fetch(0) if early else {}

        full.wait(at.stage, at.parity)
        if cfg.skew:
            k.when(group.equals(1))(lambda: barriers._assembly(f"nanosleep.u32 {cfg.skew};"))
        sums = product([wgmma.undefined(cfg.columns)] * cfg.blocks, at.stage, True)

        @k.loop(piece.first + 1, piece.end, carry=(sums, at.next().carried, at.stage))
        def done(step, carried):
            sums, now, before = carried
            at = barriers.Position.of(now, cfg.stages)
            full.wait(at.stage, at.parity)
            sums = product(sums, at.stage, False)
            wgmma.wait(1)
            release(before)
            return sums, at.next().carried, at.stage

        sums, after, last = done
        wgmma.wait(0)
        release(last)
        if cfg.one_tile and not cfg.k_cluster:
            barriers.named_barrier(READY, cfg.multipliers)  # the shelves lie in stages that all have multiplied
        acc = wgmma.fragment(k, layout, list(sums))

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
        k.when(lane.equals(0))(lambda: tma.wait_stores_read(0))  # shared memory goes when the workgroup does


def consume_in_turns(k: Kernel, p: GemmProblem, cfg: Sm90aConfig, work: Work, given, ring: Stages) -> None:
    """As `consume`, of one tile: each warpgroup multiplies every `k_groups`-th K tile, and the first adds up. The
    products of one tile wait for each other; so there are as many such chains, each shorter."""
    A, B, full, empty, turns = ring.a, ring.b, ring.full, ring.empty, cfg.k_groups
    turn, lane = k.thread // wgmma.WARPGROUP, k.thread % wgmma.WARPGROUP
    origin = wgmma.address_of(ring.memory)
    layout = wgmma.sums_layout(cfg.columns, cfg.blocks, cfg.groups)
    a_origin, b_origin = wgmma.descriptor(A, origin), wgmma.descriptor(B, origin + A.bytes)

    def product(sums, stage, fresh: bool):
        offset = (stage * (ring.room.stage // wgmma.UNIT)).to(a_origin.dtype)
        wgmma.fence()
        for depth in range(0, cfg.tile_k, BLOCK_K):
            at_a = wgmma.moved(a_origin + offset, A.step_bytes(0, depth))
            at_b = wgmma.moved(b_origin + offset, B.step_bytes(0, depth))
            sums = wgmma.multiply(at_a, at_b, sums, A, B, fresh and depth == 0)
        wgmma.commit()
        return sums

    def release(stage):
        k.when(lane.equals(0))(lambda: empty.arrive(stage))

    piece = work.start()
    at = barriers.Position(turn, constant(0, i32), cfg.stages)
    full.wait(at.stage, at.parity)
    sums = product(wgmma.undefined(cfg.columns), at.stage, True)

    @k.loop(piece.first + turn + turns, piece.end, turns, carry=(sums, at.next(turns).carried, at.stage))
    def done(step, carried):
        sums, now, before = carried
        at = barriers.Position.of(now, cfg.stages)
        full.wait(at.stage, at.parity)
        sums = product(sums, at.stage, False)
        wgmma.wait(1)
        release(before)
        return sums, at.next(turns).carried, at.stage

    sums, _, last = done
    wgmma.wait(0)
    release(last)
    barriers.named_barrier(READY, cfg.multipliers)  # nobody needs the ring any more
    acc = wgmma.fragment(k, layout, [sums])
    names = acc.names()
    pairs = [(n, (1, *n[1:])) for n in names if n[0] == 0]
    inbox = advance_bytes(ring.memory, sm90a_cluster.inbox_start(p, cfg))
    view = View(inbox, f32, (1,), (1,))

    def slot(sender, i: int):
        first = (sender * len(pairs) + i) * (wgmma.WARPGROUP * 4)
        return advance(advance(inbox, first, f32), lane * 4, f32)

    @k.when(turn > 0)
    def _():
        for i, (low, high) in enumerate(pairs):
            view.write(slot(turn - 1, i), acc[low].shuffle(range(4), acc[high]), 4 * f32.bytes)

    barriers.named_barrier(READY, cfg.multipliers)

    @k.when(turn.equals(0))
    def _():
        output = Output(k, p, cfg, lambda n: matrix(k, p, given, n, piece.batch), (piece.row, piece.column), (), ring.shelf)
        values = {}
        added = output.fetch(0)
        for i, (low, high) in enumerate(pairs):
            total = acc[low].shuffle(range(4), acc[high])
            for sender in range(turns - 1):
                total = total + view.read(slot(sender, i), 4, 4 * f32.bytes)
            values[low], values[high] = total.shuffle((0, 1)), total.shuffle((2, 3))
        output.store(acc.like([values[n] for n in names]), added)
