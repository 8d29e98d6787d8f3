"""Which configurations are worth compiling for a grouped product, and why the others are not: the dense template's
candidates for an average group."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from templates.gemm import space_x86
from templates.gemm.config import X86Config
from templates.gemm.space import Candidate, Dropped, Space

from .problem import GroupedGemmProblem

TILES_A_THREAD = 8  # of the whole line of tiles at least, so that threads end within a tile of each other
COLUMNS_LEAST = 128  # columns of a tile: fewer, and A is packed more often than it is worth


def candidates(problem: GroupedGemmProblem, target, threads: int = 1) -> Space:
    """The few configurations to try on `target` (with `threads` threads, on a CPU).

    Empty `kept` where the problem is not eligible, with that reason in `dropped`. ValueError for an unknown target."""
    reason = problem.why_not(target)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    if target.name == "x86":
        return _x86(problem, target, threads)
    if target.name == "sm90a":
        from . import space_sm90a

        return space_sm90a.candidates(problem, target)
    if target.name == "gfx950":
        from . import space_gfx950

        return space_gfx950.candidates(problem, target)
    raise ValueError(f"grouped GEMM kernels exist for x86, gfx950 and sm90a, not for {target.name}")


def _x86(p: GroupedGemmProblem, target, threads: int) -> Space:
    """The dense blocks, N cut so that there are tiles to share out; panels where only the run knows K."""
    space = space_x86.candidates(p.dense, target, threads=1)
    kept = []
    for c in space.kept:
        if p.form == "k" and c.config.family == "dot":
            space.dropped.append(Dropped(c.config, "dot: K is only known at run time, and lies across"))
            continue
        tile_n = columns_of_tile(p.groups, p.dense.n, c.config, threads)
        kept.append(Candidate(replace(c.config, tile_n=tile_n, threads=threads), c.reason))
    space.kept = kept
    return space


def columns_of_tile(groups: int, n: int, cfg: X86Config, threads: int) -> int:
    """tile_n such that threads have tiles to share out, and few enough of them."""
    wanted = max(1, TILES_A_THREAD * threads // groups) if threads > 1 else 1
    wide = max(ceil(n / wanted), COLUMNS_LEAST)
    return min(ceil(wide / cfg.columns), ceil(n / cfg.columns)) * cfg.columns
