"""GEMM on sm_90a: C = activation(A B + bias) + residual, a workgroup a tile (or one tile after the other).

One warp brings K tiles of A and B into a ring of shared-memory stages by TMA; warpgroups multiply them there with
wgmma, the sums in registers. A stage is full when its bytes have come, and empty again when every warpgroup has
multiplied it. TMA and wgmma read all four layouts; where rows or columns of an operand end within a tile, and where K
does, TMA gives zeros. M, the batch and all strides are run-time arguments (`arguments.py`); N and K are constants.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import f32
from flykernels.lang import Global, Kernel
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma
from flykernels.targets import sm90a_wgmma as wgmma

from . import sm90a_cluster, sm90a_mma
from .arguments import declared
from .gfx950_operands import matrix
from .problem import GemmProblem
from .sm90a_config import BLOCK_M, WARP, Sm90aConfig, tensor_maps, tma_reads
from .sm90a_output import EARLY_SUMS, Output
from .sm90a_ring import READY, Stages, bring_all
from .sm90a_turns import consume_in_turns
from .sm90a_work import Piece, Work

DTYPES = ("bf16", "f16")


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
        if cfg.k_cluster:
            barriers.cluster_arrive()
        (consume_in_turns if cfg.k_groups > 1 else consume)(k, p, cfg, work, given, ring)

    k.branch(mine, bring, multiply)
    if cfg.cluster_size > 1:
        barriers.cluster_barrier()  # nobody leaves while another may still arrive at its barriers


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
    start = wgmma.descriptor(A, a_start), wgmma.descriptor(B, b_start)

    def release(stage):
        """One thread of each warpgroup says that it is done with a stage, to every workgroup that fills it."""
        if cfg.cluster_size == 1:
            k.when(lane.equals(0))(lambda: empty.arrive(stage))
        else:
            k.when(lane < cfg.cluster_size)(lambda: empty.arrive_at(stage, lane))

    def piece(piece: Piece, carried):
        at = barriers.Position.of(carried, cfg.stages)
        box_batch = (work.batch_of("c", piece),) if p.batched else ()
        output = Output(k, p, cfg, lambda n: held(n, piece.batch), (piece.row, piece.column), box_batch, ring.shelf)
        early = piece.inside is True and cfg.split_k == 1 and not work.shares and cfg.sums <= EARLY_SUMS
        added = output.fetch(0) if early else {}

        full.wait(at.stage, at.parity)
        sums = ring.product(start, [wgmma.undefined(cfg.columns)] * cfg.blocks, at.stage, True)

        @k.loop(piece.first + 1, piece.end, carry=(sums, at.next().carried, at.stage))
        def done(step, carried):
            sums, now, before = carried
            at = barriers.Position.of(now, cfg.stages)
            full.wait(at.stage, at.parity)
            sums = ring.product(start, sums, at.stage, False)
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
