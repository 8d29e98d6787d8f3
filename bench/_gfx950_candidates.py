"""Every candidate of every suite shape: compiled, and run on the simulator on a few workgroups, edges included.

It takes a core some 20 minutes. A run that is started again with the same file goes on from there unless the kernels'
sources have changed (`_resumed.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flykernels.lang import TraceError
from flykernels.targets import gfx950
from templates.digest import digest
from templates.gemm.build import build
from templates.gemm.gfx950_config import Gfx950Config
from templates.gemm.problem import GemmProblem
from templates.gemm.space import candidates

from ._resumed import resumed


@dataclass(frozen=True)
class Outcome:
    """One candidate of one shape. seconds: of CPU to compile it; wrong: a finding, a fault or a wrong value, or ""."""

    shape: str
    config: str
    seconds: float
    registers: int
    spills: int
    scratch_bytes: int
    too_many_registers: bool
    wrong: str

    @property
    def spilled(self) -> bool:
        return bool(self.spills or self.scratch_bytes or self.too_many_registers)


def outcomes(work: Sequence[tuple[str, GemmProblem, Gfx950Config]], file: Path | None, jobs: int) -> list[Outcome]:
    """What becomes of each (shape's name, problem, configuration); file: where to save and to go on from."""
    pieces = {f"{name}: {config}": (name, p, config) for name, p, config in work}
    found = resumed(pieces, _tried, digest("gemm"), file, jobs, "candidates")
    return [Outcome(**found[f"{name}: {config}"]) for name, _, config in work]


def _tried(name: str, p: GemmProblem, cfg: Gfx950Config) -> dict:
    return asdict(tried(name, p, cfg))


def tried(name: str, p: GemmProblem, cfg: Gfx950Config) -> Outcome:
    """Compiles a candidate and runs it."""
    start = time.process_time()  # this process's own: other load on the machine does not count
    try:
        code = build(p, cfg, gfx950)
    except TraceError as e:
        return Outcome(name, str(cfg), round(time.process_time() - start, 3), 0, 0, 0, False, f"not compiled: {e}")
    seconds, wrong = time.process_time() - start, ""
    try:
        run_cut(p, cfg, code)
    except Exception as e:  # a finding, a wrong value, a fault: all count
        wrong = f"{type(e).__name__} {str(e)[:200]}"
    waves = -(-cfg.workgroup_size // (gfx950.limits.lanes * gfx950.limits.simds))  # on a SIMD
    return Outcome(
        name, str(cfg), round(seconds, 3), code.registers, code.spills, code.scratch_bytes,
        code.registers > gfx950.limits.registers // waves, wrong,
    )  # fmt: skip


def run_cut(p: GemmProblem, cfg: Gfx950Config, code) -> None:
    """The candidate's own kernel where K is small, else one for a K of a few tiles: the first and last workgroup."""
    from tests.gemm.gfx950_case import run

    deepest = cfg.split_k * cfg.tile_k * (2 * cfg.stages + 1)
    if p.k > 2 * deepest:
        p, code = replace(p, k=deepest + p.k % (cfg.tile_k * cfg.split_k)), None
    n = min(p.n, 2 * cfg.tile_n + p.n % cfg.tile_n)
    m = min(p.m_hint, 2 * cfg.tile_m + p.m_hint % cfg.tile_m)
    if n != p.n:
        p, code = replace(p, n=n), None
    step = p.align_a // 2
    pads = [-(p.k if along else size) % step for along, size in ((p.a == "row", m), (p.b == "col", n))]
    count = -(-m // cfg.tile_m) * -(-n // cfg.tile_n) * cfg.split_k
    groups = None if cfg.split_k > 1 or count <= 2 else [(0, 0, 0), (count - 1, 0, 0)]
    run(p, cfg, m, pads=(*pads, -n % (p.align_c // 2)), workgroups=groups, code=code)


def all_work(shapes: Iterator[tuple[str, GemmProblem]]) -> Iterator[tuple[str, GemmProblem, list[Gfx950Config]]]:
    """(name, problem, its candidates)"""
    for name, p in shapes:
        yield name, p, [c.config for c in candidates(p, gfx950).kept]


__all__ = ["Outcome", "all_work", "outcomes", "run_cut", "tried"]
