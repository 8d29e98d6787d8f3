"""One run of a gfx950 grouped kernel on the simulator, with the checker."""

from __future__ import annotations

from functools import cache

import numpy as np

from flykernels.codeobject import CodeObject
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.grouped_gemm.arguments import pointers, scalar_values
from templates.grouped_gemm.build import build
from templates.grouped_gemm.config import GroupedConfig
from templates.grouped_gemm.problem import GroupedGemmProblem
from tests.gemm.x86_case import Guarded, bits

from .case import Case


@cache
def compiled(p: GroupedGemmProblem, cfg: GroupedConfig) -> CodeObject:
    return build(p, cfg, gfx950)


def memory(g: Guarded) -> np.ndarray:
    """What a pointer to the operand sees: the buffer from its first element on."""
    return bits(g.buffer).numpy()[g.view.storage_offset() :]


def run(case: Case, cfg: GroupedConfig, code: CodeObject | None = None):
    """All workgroups, one after the other; fails on a finding and on a wrong result. The simulator's result."""
    p, code = case.problem, code or compiled(case.problem, cfg)
    assert code.spills == 0 and code.scratch_bytes == 0, f"{code.spills} registers spilled"
    held = {name: memory(g) for name, g in case.operands.items()}
    if case.offs is not None:
        held["offs"] = case.offs.numpy()
    views = {name: g.view for name, g in case.operands.items()}
    args = [held[x] for x in pointers(p)] + [np.int64(x) for x in scalar_values(p, **views)]
    grid = code.grid_for({})
    result = run_on_sim(code, args, (*grid, 1, 1)[:3], outputs=[pointers(p).index("c")])
    result.raise_for_findings()
    case.check()
    return result


