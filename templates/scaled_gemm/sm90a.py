"""Scaled GEMM on sm_90a: FP8 operands of one scale a matrix or a row, on the dense kernel's ring.

TMA brings K tiles, warpgroups multiply them there with wgmma; the sums are scaled as they are written. wgmma adds FP8
products up with fewer bits than f32 has: about 14 ("DeepSeek-V3 Technical Report", 2024, section 3.3.2). So unless the
problem allows `fast_accum`, the sums of every PROMOTE of K are begun anew and added in f32 registers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flykernels.dtypes import f32
from flykernels.lang import Global, Kernel, View
from flykernels.lang.fragment import Fragment
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_tma as tma
from templates.gemm.gfx950_operands import matrix
from templates.gemm.sm90a import through
from templates.gemm.sm90a_config import Sm90aConfig, tensor_maps, tma_reads
from templates.gemm.sm90a_output import Output, Part
from templates.gemm.sm90a_ring import Stages, in_roles
from templates.gemm.sm90a_work import Piece, Work

from .arguments import declared
from .problem import FP8, ScaledGemmProblem
from .sm90a_sums import PROMOTE, STEP, Sums

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
    ring = Stages(k, p, cfg, (p.a_type, p.b_type))

    in_roles(k, p, cfg, work, ring, lambda: consume(k, p, cfg, work, given, ring))


def consume(k: Kernel, p: Any, cfg: Sm90aConfig, work: Work, given, ring: Stages) -> None:
    """Multiplies one K tile after the other as they come, and writes tiles of C. By all warpgroups."""
    mine = Sums(k, cfg, ring)
    view = lambda name: argument(k, p, given, name)

    def piece(piece: Piece, carried):
        output = ScaledOutput(k, p, cfg, view, (piece.row, piece.column), (), ring.shelf).scaled_by(given)
        sums = mine.fast if p.fast_accum else mine.promoted
        added_up = lambda: sums(piece, barriers.Position.of(carried, cfg.stages))
        return through(k, p, cfg, work, ring, piece, output, added_up)

    work.walk(barriers.Position.start(cfg.stages, 0).carried, piece)
    if cfg.tma_store:
        k.when(mine.lane.equals(0))(lambda: tma.wait_stores_read(0))  # shared memory goes when the workgroup does


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
