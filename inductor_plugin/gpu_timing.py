"""How long kernels take on a GPU, taken so that small ones can be told apart: the GPU alone is timed, never the CPU.

Inductor overwrites what L2 holds before each run, and is done with that before Python has launched the next kernel: for
kernels of a few tens of microseconds it then times Python, each candidate with its own overhead. Here enough memory is
overwritten that the launch is always there in time, and medians are taken.

A launch that nothing precedes is one thing, kernel after kernel, as in a model, another: `alone` times the first,
`in_turns` the second. The candidates' own order comes from `alone`; who wins is decided by `in_turns`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

FLUSHED = 256 << 20  # bytes overwritten before each run: several times what L2 holds, and 70 us or more of a GPU's time
WARM, FEWEST, MOST = 3, 5, 50  # runs of each
BUDGET_MS = 25.0  # for each
ROUNDS, COPIES_MOST = 3, 32
DEVICE = "cuda"


def alone(run: Callable[[], Any]) -> float:
    """The median time of a run, in ms, on the current device, with L2 cold. Raises what the run raises."""
    import torch

    flush = _flush()

    def taken(times: int) -> float:
        pairs = []
        for _ in range(times):
            flush.zero_()
            pairs.append(_timed([run]))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs)

    run()
    return taken(max(FEWEST, min(MOST, int(BUDGET_MS / max(taken(WARM), 1e-3)))))


def in_turns(makers: Sequence[Callable[[int], list[Callable[[], Any]]]], size: int, fewest: int = 2) -> list[float]:
    """The median time of a call of each candidate, in ms, when one call follows the other.

    makers  makers[i](n): n calls of candidate i, each on tensors of its own, so that L2 does not hold what comes next
    size    bytes of one call's tensors
    fewest  calls"""
    import torch

    flush = _flush()
    copies = max(fewest, min(COPIES_MOST, -(-FLUSHED // max(1, size))))
    found: list[list[float]] = [[] for _ in makers]
    for _ in range(ROUNDS):
        for kept, make in zip(found, makers):
            calls = make(copies)
            calls[0]()
            torch.cuda.synchronize()
            for _ in range(2):  # the launches get ahead of the GPU
                flush.zero_()
            start, end = _timed(calls)
            torch.cuda.synchronize()
            kept.append(start.elapsed_time(end) / len(calls))
            del calls  # one candidate's tensors at a time
    return [statistics.median(kept) for kept in found]


def _flush() -> Any:
    import torch

    return torch.empty(FLUSHED // 4, dtype=torch.int32, device=DEVICE)


def _timed(calls: Sequence[Callable[[], Any]]) -> tuple[Any, Any]:
    """Events before and after the calls."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in calls:
        call()
    end.record()
    return start, end
