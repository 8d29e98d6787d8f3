"""How long kernels take on a GPU, taken so that small ones can be told apart: the GPU alone is timed, never the CPU.

Inductor overwrites what L2 holds before each run, and is done with that before Python has launched the next kernel: for
kernels of a few tens of microseconds it then times Python, each candidate with its own overhead. Here enough memory is
overwritten that the launch is always there in time, the candidates take turns, and medians are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

FLUSHED = 256 << 20  # bytes overwritten before each run: several times what L2 holds, and 70 us or more of a GPU's time
WARM, FEWEST, MOST = 3, 5, 50  # runs of each
BUDGET_MS = 25.0  # for each


def milliseconds(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """The median time of each run on the current device, with L2 cold. Raises what a run raises."""
    import torch

    flush = torch.empty(FLUSHED // 4, dtype=torch.int32, device="cuda")

    def once(run: Callable[[], Any]) -> tuple[Any, Any]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        return start, end

    def taken(rounds: int) -> list[float]:
        events: list[list[tuple[Any, Any]]] = [[] for _ in runs]
        for _ in range(rounds):
            for kept, run in zip(events, runs):
                kept.append(once(run))
        torch.cuda.synchronize()
        return [statistics.median(start.elapsed_time(end) for start, end in kept) for kept in events]

    for run in runs:
        run()
    slowest = max(taken(WARM), default=0.0)
    return taken(max(FEWEST, min(MOST, int(BUDGET_MS / max(slowest, 1e-3)))))
