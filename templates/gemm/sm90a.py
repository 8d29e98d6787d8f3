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

from . import sm90a_cluster, sm90a_mma
from .arguments import declared
from .gfx950_operands import matrix
from .problem import GemmProblem
from .sm90a_config import Sm90aConfig, tensor_maps, tma_reads
from .sm90a_multiply import Multiplier
from .sm90a_output import EARLY_SUMS, Output
from .sm90a_ring import READY, Stages, in_roles
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

    in_roles(k, p, cfg, work, ring, lambda: consume(k, p, cfg, work, given, ring))


def consume(k: Kernel, p: GemmProblem, cfg: Sm90aConfig, work: Work, given, ring: Stages) -> None:
    """Multiplies one K tile after the other as they come, and writes tiles of C. By all warpgroups."""
    mine = Multiplier(k, cfg, ring)
    held = lambda name, batch: matrix(k, p, given, name, batch)

    def piece(piece: Piece, carried):
        at = barriers.Position.of(carried, cfg.stages)
        box_batch = (work.batch_of("c", piece),) if p.batched else ()
        output = Output(k, p, cfg, lambda n: held(n, piece.batch), (piece.row, piece.column), box_batch, ring.shelf)

        def added_up():
            sums, after = mine.added(piece.first + 1, piece.end, mine.begun(at))
            return mine.fragment(sums), after

        return through(k, p, cfg, work, ring, piece, output, added_up)

    work.walk(barriers.Position.start(cfg.stages, 0).carried, piece)
    if cfg.tma_store:
        k.when(mine.lane.equals(0))(lambda: tma.wait_stores_read(0))  # shared memory goes when the workgroup does


def through(k: Kernel, p: Any, cfg: Sm90aConfig, work: Work, ring: Stages, piece: Piece, output: Output, added_up: Any):
    """Takes a piece of C from its sums to where they go; what is added to them is fetched ahead where registers hold
    both. added_up: () -> (the sums, what the walk carries on, which is returned). Scaled products' too."""
    early = piece.inside is True and cfg.split_k == 1 and not work.shares and cfg.sums <= EARLY_SUMS
    added = output.fetch(0) if early else {}
    acc, after = added_up()
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
