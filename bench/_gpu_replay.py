"""Times on a GPU: graphs replayed in turn, and plain calls. _h200_time.py adds states of L2 and calls one by one."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_plugin.gpu_timing import graph_of

GRAPH_US = 300.0  # that a graph lasts at least, so that its own launch does not count
MOST_CALLS = 160
FEW_CALLS = 4  # by whose graph a call's time is guessed
ROUNDS = 11
PLAIN_CALLS, PLAIN_US = 40, 2000.0  # calls in a row, or as many as take so long: few, so that there are many turns


def times_for(call_us: float) -> int:
    """How many calls of about so long a graph needs."""
    return max(2, min(MOST_CALLS, round(GRAPH_US / max(call_us, 1.0))))


def graph(calls: Sequence[Callable[[], Any]], times: int, pool: Any = None) -> torch.cuda.CUDAGraph:
    """So many calls, in turn of those given. pool: of `graph_of`."""
    calls[0]()
    torch.cuda.synchronize()
    return graph_of([calls[i % len(calls)] for i in range(times)], pool)


def elapsed(run: Callable[[], Any]) -> float:
    """Microseconds of GPU time."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def repeated(call: Callable[[], Any], guess_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """(a graph of several calls on the same operands, how many). guess_us: about what one takes."""
    times = times_for(guess_us)
    return graph([call], times), times


def lasting(calls: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """(a graph of so many calls, in turn of those given, that it lasts GRAPH_US, how many)."""
    (once,) = replay_us([(graph(calls, FEW_CALLS), FEW_CALLS)], 2)
    times = times_for(once)
    return graph(calls, times), times


def replay_us(
    graphs: list[tuple[torch.cuda.CUDAGraph, int]], rounds: int = ROUNDS, after_itself: bool = False
) -> list[float]:
    """Microseconds of one call in each graph: medians over rounds in which the graphs take turns."""
    return [statistics.median(seen) for seen in samples_us(graphs, rounds, after_itself=after_itself)]


def samples_us(
    graphs: list[tuple[torch.cuda.CUDAGraph, int]], rounds: int, mixed: bool = False, after_itself: bool = False
) -> list[list[float]]:
    """Microseconds of one call in each graph, of each of the rounds after a first one that warms up.

    mixed         in a new order each round, since a GPU at its power limit is slower after who has needed more
    after_itself  each graph runs once more before it is timed. Else L2 is full of what the graph before it has written,
                  which is written back in this one's time: 12 us of large results, whoever left them"""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds + 1):
        turns = list(zip(graphs, times))
        for (g, calls), seen in random.sample(turns, len(turns)) if mixed else turns:
            if after_itself:
                g.replay()
            seen.append(elapsed(g.replay) / calls)
    return [seen[1:] for seen in times]


def plain_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call in a row of calls, until the device has finished them all."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = (time.perf_counter() - start) * 1e6
    times = max(3, min(PLAIN_CALLS, int(PLAIN_US / once)))
    start = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / times
