"""TopK on the CPU: ours beside torch.topk, called in turn; our call is the one that compiled code makes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from flykernels.launch.host import HostKernel, load
from flykernels.targets import x86
from templates.topk.arguments import scalar_values, workspace_bytes
from templates.topk.build import build, kernel_key
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem
from templates.topk.reference import reference

SAMPLE = 200e-6  # seconds that one turn lasts at least
ROUNDS, LEAST_ROUNDS, LONGEST = 25, 5, 4.0  # rounds of a measurement, and the seconds it may take

_kernels: dict[tuple, HostKernel] = {}


def kernel(p: TopKProblem, config: TopKConfig) -> HostKernel:
    """The kernel, compiled once for all problems that share it."""
    key = tuple(kernel_key(p, config).items())
    if key not in _kernels:
        _kernels[key] = load(build(p, config, x86))
    return _kernels[key]


def ours(p: TopKProblem, config: TopKConfig, x, values, indices) -> Callable[[], Any]:
    launch, strides = kernel(p, config).launcher(config.threads), {"x": (p.width,), "values": (p.k,), "indices": (p.k,)}
    pointers, scalars = (x.data_ptr(), values.data_ptr(), indices.data_ptr()), scalar_values(p, config, strides)
    space = torch.zeros(workspace_bytes(config, p.rows), dtype=torch.uint8)
    last = (space.data_ptr(),) if config.split else ()

    def call(space=space):
        launch(*pointers, *scalars, *last)

    return call


def check(p: TopKProblem, x, values, indices) -> None:
    """AssertionError if a row is not exact, to the bit and the index: the first and last few rows."""
    some = sorted({*range(min(3, p.rows)), *range(max(0, p.rows - 3), p.rows)})
    at = torch.from_numpy(reference(x[some].float().numpy(), p.k, p.largest))
    bits = torch.int32 if x.element_size() == 4 else torch.int16
    same = torch.equal(values[some].view(bits), x[some].view(bits).gather(1, at))
    if not (same and torch.equal(indices[some], at)):
        raise AssertionError(f"{p}: a wrong result")


def measure(x, p: TopKProblem, config: TopKConfig) -> tuple[float, float, float]:
    """(our microseconds a call, torch's, torch's over ours): medians over rounds, the ratio of the rounds' own."""
    values, indices = torch.empty(p.rows, p.k, dtype=x.dtype), torch.empty(p.rows, p.k, dtype=torch.int64)
    calls = (ours(p, config, x, values, indices), lambda: torch.topk(x, p.k, dim=-1, largest=p.largest))
    turns, total = [], 0.0
    for call in calls:
        call()
        spent = _seconds(call, 1)
        turns.append(max(1, int(SAMPLE / max(spent, 1e-7))))
        total += max(spent, SAMPLE)
    check(p, x, values, indices)
    rounds = max(LEAST_ROUNDS, min(ROUNDS, int(LONGEST / total)))
    seen = [[_seconds(call, n) for call, n in zip(calls, turns)] for _ in range(rounds)]
    mine, theirs = (statistics.median(column) * 1e6 for column in zip(*seen))
    return mine, theirs, statistics.median(b / a for a, b in seen)


def _seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
