"""Runs top-k code objects for gfx950 on the simulator."""

from __future__ import annotations

import numpy as np

from flykernels.sim import run_on_sim
from flykernels.sim.load import load as decoded
from flykernels.sim.trace import LINE, Recorder
from flykernels.targets import gfx950
from templates.topk.arguments import COUNTERS, scalars, workspace_bytes
from templates.topk.build import build
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem

from .case import Case

NARROW = ("global_load_dword", "global_load_ushort", "global_load_short_d16", "global_load_short_d16_hi")
_built: dict = {}


def code_for(p: TopKProblem, config: TopKConfig):
    from templates.topk.build import kernel_key

    key = tuple(kernel_key(p, config).items())
    if key not in _built:
        _built[key] = build(p, config, gfx950)
    return _built[key]


class Launch:
    """A launch's arguments on the simulator: `args`, `grid`; after it `check()`."""

    def __init__(self, p: TopKProblem, config: TopKConfig, x: np.ndarray, **places):
        self.code, self.case, self.config = code_for(p, config), Case(p, x, **places), config
        case, named = self.case, dict(zip(scalars(p, config), self.case.scalars(config)))
        kinds = {a.name: a.kind for a in self.code.arguments}
        self.args = [case.x, case.values, case.indices]
        self.args += [np.int64(v) if kinds[n] == "i64" else np.int32(v) for n, v in named.items()]
        if config.split:
            self.workspace = np.full(workspace_bytes(config, p.rows) // 4, 0xABABABAB, np.uint32)
            self.workspace[: COUNTERS // 4] = 0
            self.args.append(self.workspace)
        self.grid = (*self.code.grid_for(named), 1, 1)[:3]

    def check(self):
        self.case.check()
        if self.config.split:
            assert not self.workspace[: COUNTERS // 4].any(), "a counter is not zero after the launch"


def run(p: TopKProblem, config: TopKConfig, x: np.ndarray, **places):
    """Launches, checks findings and results; the simulator's result."""
    launch = Launch(p, config, x, **places)
    result = run_on_sim(launch.code, launch.args, launch.grid, outputs=None if config.split else [1, 2])
    result.raise_for_findings()
    launch.check()
    return result


def counters(p: TopKProblem, config: TopKConfig, x: np.ndarray, **places) -> dict[str, int]:
    """Of one workgroup, which is the whole launch: LDS cycles and how many of them are conflicts; loads from memory of
    16 bytes a lane, the bytes they ask for and those of the lines that they touch; and how many lines loads of single
    elements touch."""
    launch = Launch(p, config, x, **places)
    instructions = decoded(launch.code).code.instructions
    recorder = Recorder(instructions=instructions)
    run_on_sim(launch.code, launch.args, launch.grid, trace=recorder).raise_for_findings()
    launch.check()
    out = dict.fromkeys(("lds", "conflicts", "wide", "asked", "moved", "narrow"), 0)
    for pc, site in recorder.sites.items():
        if site.ideal:
            out["lds"] += site.cycles
            out["conflicts"] += site.cycles - site.ideal
        elif "load_dwordx4" in instructions[pc].name:
            out["wide"] += site.accesses
            out["asked"] += site.bytes
            out["moved"] += LINE * site.lines
        elif instructions[pc].name in NARROW:
            out["narrow"] += site.lines
    return out
