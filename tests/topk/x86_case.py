"""Runs top-k code objects on this CPU."""

from __future__ import annotations

import numpy as np

from flykernels.launch.host import load
from flykernels.targets import x86
from templates.topk.arguments import COUNTERS, workspace_bytes
from templates.topk.build import build, kernel_key
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem

from .case import Case

_loaded: dict = {}


def kernel_for(p: TopKProblem, config: TopKConfig):
    key = tuple(kernel_key(p, config).items())
    if key not in _loaded:
        _loaded[key] = load(build(p, config, x86))
    return _loaded[key]


def run(p: TopKProblem, config: TopKConfig, x: np.ndarray, threads: int = 1, **places):
    """Launches and checks the results."""
    kernel, case = kernel_for(p, config), Case(p, x, **places)
    workspace = np.full(workspace_bytes(config, p.rows) // 4 + 1, 0xABABABAB, np.uint32)
    workspace[: COUNTERS // 4] = 0
    arguments = [a.ctypes.data for a in (case.x, case.values, case.indices)] + list(case.scalars(config))
    kernel(*arguments, *([workspace.ctypes.data] if config.split else []), threads=threads)
    case.check()
    if config.split:
        assert not workspace[: COUNTERS // 4].any(), "a counter is not zero after the launch"
