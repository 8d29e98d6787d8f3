"""RMSNorm kernels without the dispatcher: every configuration of a problem, built, checked by the caller, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from flykernels import targets
from templates.rms_norm import reference
from templates.rms_norm.arguments import eps_bits, scalars
from templates.rms_norm.build import build
from templates.rms_norm.problem import RMSNormProblem
from templates.rms_norm.space import configurations

EPS = 1e-5


@cache
def launchers(problem: RMSNormProblem, config: Any, target: str) -> list[tuple[Any, Callable]]:
    """(code object, what launches it) of each step of a kernel, compiled once."""
    codes = build(problem, config, getattr(targets, target))
    if target == "x86":
        from flykernels.launch.host import load

        return [(c, load(c).launcher()) for c in codes]
    from flykernels.launch.current import Launcher

    return [(c, Launcher(c)) for c in codes]


class Direct:
    """Our kernels on one x (rows, width) and weight (width,), both dense."""

    def __init__(self, dtype: str, x: torch.Tensor, weight: torch.Tensor):
        self.x, self.weight, self.name = x, weight, ""
        self.target = "x86" if x.device.type == "cpu" else "sm90a"
        rows, width = x.shape
        problem = RMSNormProblem(width, dtype, dtype, rows_hint=rows)
        self.problem = problem.canonical(getattr(targets, self.target))

    def call(self, config: Any) -> Callable[[], torch.Tensor]:
        """() -> y, a fresh tensor."""
        x, weight, (rows, width) = self.x, self.weight, self.x.shape
        parts = config.parts_for(rows, width, torch.get_num_threads())
        given = {"eps": eps_bits(EPS), "rows": rows, "width": width, "x_row": width, "parts": parts}
        numbers = [given[n] for n in scalars(self.problem)]
        steps = launchers(self.problem, config, self.target)
        if len(steps) == 1:
            ((_, launch),) = steps

            def once() -> torch.Tensor:
                y = torch.empty_like(x)
                launch(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *numbers)
                return y

            return once
        size = config.workspace_bytes(rows, width, parts)

        def several() -> torch.Tensor:
            y, space = torch.empty_like(x), torch.empty(size, dtype=torch.uint8, device=x.device)
            for _, launch in steps:
                launch(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *numbers, space.data_ptr())
            return y

        return several

    def best(self) -> Callable[[], torch.Tensor]:
        """The fastest of the configurations that spill nothing, by a first measurement."""
        found = []
        for candidate in configurations(self.problem, getattr(targets, self.target)).kept:
            if any(code.spills for code, _ in launchers(self.problem, candidate.config, self.target)):
                continue
            call = self.call(candidate.config)
            found.append((self._time(call), candidate.reason, call))
        _, self.name, call = min(found, key=lambda f: f[0])
        return call

    def _time(self, call: Callable[[], Any]) -> float:
        if self.target != "x86":
            from bench import _gpu_replay as cuda

            return cuda.replay_us([cuda.repeated(call, max(3.0, 2 * self.x.nbytes / 4e6))])[0]
        call()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def wrong(dtype: str, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> float:
    """The largest error of y, over what rounding and the order of sums explain."""
    want = reference.forward(x, weight, None, EPS)
    limit = reference.bound(RMSNormProblem(x.shape[1], dtype, dtype), "y", want, x.shape[1])
    return float(((y.double() - want["y"]).abs() / limit).max())
