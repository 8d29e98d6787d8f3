"""Runs top-k code objects for gfx950 on the simulator."""

from __future__ import annotations

from functools import cache

import numpy as np

from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.topk.arguments import COUNTERS, scalars, workspace_bytes
from templates.topk.build import build
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem

from .case import Case

_built: dict = {}


def code_for(p: TopKProblem, config: TopKConfig):
    from templates.topk.build import kernel_key

    key = tuple(kernel_key(p, config).items())
    if key not in _built:
        _built[key] = build(p, config, gfx950)
    return _built[key]


def run(p: TopKProblem, config: TopKConfig, x: np.ndarray, **places):
    """Launches, checks findings and results; the simulator's counters."""
    code, case = code_for(p, config), Case(p, x, **places)
    named = dict(zip(scalars(p, config), case.scalars(config)))
    kinds = {a.name: a.kind for a in code.arguments}
    args = [case.storage[len(case.storage) - len(case.x) :], case.values, case.indices]
    args += [np.int64(v) if kinds[n] == "i64" else np.int32(v) for n, v in named.items()]
    workspace = None
    if config.split:
        workspace = np.full(workspace_bytes(config, p.rows) // 4, 0xABABABAB, np.uint32)
        workspace[: COUNTERS // 4] = 0
        args.append(workspace)
    grid = (*code.grid_for(named), 1, 1)[:3]
    result = run_on_sim(code, args, grid, outputs=None if config.split else [1, 2])
    result.raise_for_findings()
    case.check()
    if workspace is not None:
        assert not workspace[: COUNTERS // 4].any(), "a counter is not zero after the launch"
    return result
