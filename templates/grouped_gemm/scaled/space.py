"""Which configurations of a scaled grouped product are worth compiling: the scaled template's for an average group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from templates.gemm.space import Candidate, Dropped, Space
from templates.scaled_gemm import space as scaled
from templates.scaled_gemm.gfx950_config import SLOTS
from templates.scaled_gemm.problem import ALIGN

from .. import space_gfx950
from ..problem import GroupedGemmProblem
from ..space import columns_of_tile
from . import gfx950
from .arguments import WORD, scalars
from .config import ScaledGroupedConfig
from .problem import ScaledGroupedProblem


def candidates(problem: ScaledGroupedProblem, target, threads: int = 1) -> Space:
    """The few configurations to try on `target` (with `threads` threads, on a CPU), best guess first.

    Empty `kept` where the problem is not eligible, with that reason in `dropped`. ValueError for an unknown target."""
    reason = problem.why_not(target)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    if target.name == "gfx950":
        reason = gfx950.why_not(problem)
        return Space(dropped=[Dropped(None, reason)]) if reason else _on_gfx950(problem, target)
    if target.name != "x86":
        raise ValueError(f"scaled grouped GEMM kernels exist for x86 and gfx950, not for {target.name}")
    space = scaled.candidates(problem.dense, target, threads=1)
    p = problem
    space.kept = [
        Candidate(
            replace(c.config, tile_n=columns_of_tile(p.groups, p.n, c.config, threads), threads=threads), c.reason
        )
        for c in space.kept
    ]
    return space


WAVES_MOST = 8  # 256 registers each; with half of them and 64 sums LLVM spills 3 in form "k", 184 in form "m"
SCALARS_MOST = 54  # of a wave's 106: places in LDS; what walking the groups needs takes the others (56 to 102: up to 83
# are spilled; the kernel of one product has room for 85)


def _on_gfx950(p: ScaledGroupedProblem, target) -> Space:
    """The dense grouped template's candidates for 16-bit operands of as many bytes, as the scaled template has them."""
    d: Any = p.dense  # it has what the dense kernel's configurations ask of a problem
    limits = target.limits
    rows = p.tokens_hint if p.form == "m" else p.m * p.groups
    alike = GroupedGemmProblem(
        "m", p.groups, n=p.n, k=scaled.units(d), out_dtype=p.out_dtype, tokens_hint=rows, align_c=p.align_c
    )
    found = space_gfx950.candidates(alike, target)
    space = Space(dropped=found.dropped)
    tables = space_gfx950.table_bytes(p.groups, len(scalars(p)), limits)
    room = limits.shared_bytes - tables
    for c in found.kept:
        tile = scaled.of_dense(d, c.config.tile)
        reason = scaled.limit(d, tile, limits) or scalar_limit(d, tile, limits)
        if p.form == "k":
            reason = run_time_limit(d, tile)
        if tile.workgroup_size > WAVES_MOST * limits.lanes:
            reason = reason or f"more than {WAVES_MOST} waves have too few registers for sums, fragments and scales"
        if tile.interleaved and p.scaling == "block" and d.blocks % WORD:
            reason = f"K = {p.k}: rows of scales are no whole words, and may begin anywhere"
        if tile.lds_bytes(d) > room:
            reason = reason or f"{tile.lds_bytes(d)} bytes of LDS; {room} are left beside the table of groups"
        if reason is None:
            fit = limits.compute_units * (limits.shared_bytes // (tile.lds_bytes(d) + tables))
            space.kept.append(Candidate(ScaledGroupedConfig(tile, min(c.config.workgroups, fit)), c.reason))
        else:
            space.dropped.append(Dropped(tile, reason))
    return space


def scalar_limit(d: Any, tile: Any, limits: Any) -> str | None:
    """Why a ring's loads, of tiles and of scales, have more places in LDS than there are scalar registers, in words;
    None if they have not. A load's place is its wave's, and so in a register; with one wave it is a constant."""
    if not tile.staged(d) or tile.interleaved or tile.workgroup_size == limits.lanes:
        return None
    moved = tile.tile_m * tile.bytes_of(d, "a") + tile.tile_n * tile.bytes_of(d, "b")
    of_tiles = tile.stages * moved // (ALIGN * tile.workgroup_size)
    of_scales = SLOTS * sum(tile.tile_mn) * tile.slot_pitch(d.blocks) // (WORD * tile.workgroup_size)
    # K tiles of a slot are a turn of the loop: unless those are whole rounds of the ring, where A's and B's stages
    # begin is not known while compiling either
    begin = 2 * tile.stages if tile.tiles_a_slot % tile.stages else 0
    places = of_tiles + of_scales + begin
    if places > SCALARS_MOST:
        return f"{places} places in LDS that loads of tiles and scales go to; scalar registers hold {SCALARS_MOST}"
    return None


def run_time_limit(d: Any, tile: Any) -> str | None:
    """The limit that a tile runs into where only the run knows K, in words; None if it fits."""
    if tile.interleaved:
        return "K is only known at run time, and interleaved tiles have slots of scales, which begin at whole words"
    return None
