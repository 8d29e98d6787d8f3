"""Which configurations of a scaled grouped product are worth compiling: the scaled template's for an average group."""

from __future__ import annotations

from dataclasses import replace

from templates.gemm.space import Candidate, Dropped, Space
from templates.scaled_gemm import space as scaled

from ..space import columns_of_tile
from .problem import ScaledGroupedProblem


def candidates(problem: ScaledGroupedProblem, target, threads: int = 1) -> Space:
    """The few configurations to try on `target` (with `threads` threads, on a CPU), best guess first.

    Empty `kept` where the problem is not eligible, with that reason in `dropped`. ValueError for an unknown target."""
    reason = problem.why_not(target)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    if target.name != "x86":
        raise ValueError(f"scaled grouped GEMM kernels exist for x86, not for {target.name}")
    space = scaled.candidates(problem.dense, target, threads=1)
    p = problem
    space.kept = [
        Candidate(
            replace(c.config, tile_n=columns_of_tile(p.groups, p.n, c.config, threads), threads=threads), c.reason
        )
        for c in space.kept
    ]
    return space
