"""Which configurations of a scaled GEMM are worth compiling, and why the others are not."""

from __future__ import annotations

from dataclasses import replace

from flykernels.microscaling import BLOCK
from templates.gemm import space_x86
from templates.gemm.problem import GemmProblem
from templates.gemm.space import Candidate, Dropped, Space

from .problem import ScaledGemmProblem


def candidates(problem: ScaledGemmProblem, target, threads: int = 1) -> Space:
    """The few configurations to try on `target` (with up to `threads` threads, on a CPU), best guess first.

    Empty `kept` where the problem is not eligible, with that reason in `dropped`. ValueError for an unknown target."""
    reason = problem.why_not(target)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    if target.name == "x86":
        return _on_x86(problem, target, threads)
    raise ValueError(f"scaled GEMM kernels exist for x86 and gfx950, not for {target.name}")


def _on_x86(p: ScaledGemmProblem, target, threads: int) -> Space:
    """The dense kernel's panels over f32, both operands packed: that is where they are decoded."""
    dense = GemmProblem(n=p.n, k=p.k, dtype="f32", a="any", b="any", m_hint=p.m_hint)
    found = space_x86.candidates(dense, target, threads)
    space = Space(dropped=found.dropped)
    for c in found.kept:
        k_block = -(-c.config.k_block // BLOCK) * BLOCK  # a block of K begins with a block of scales
        space.kept.append(replace(c, config=replace(c.config, k_block=k_block, pack_a=True, pack_b=True)))
    if not space.kept:
        space.kept = [Candidate(replace(d.config, pack_a=True), "the only one") for d in found.dropped if d.config][:1]
    return space
