"""How long kernels take on a GPU, taken so that small ones can be told apart: the GPU alone is timed, never the CPU.

Inductor overwrites what L2 holds before each run, and is done with that before Python has launched the next kernel: for
kernels of a few tens of microseconds it then times Python, each candidate with its own overhead. Here enough memory is
overwritten that the launch is always there in time, and medians are taken.

A launch that nothing precedes is one thing, kernel after kernel, as in a model, another: `alone` times the first,
`in_turns` the second, as a captured graph replays it, with operands that L2 does not hold and with operands that it
does. The candidates' own order comes from `alone`; who wins is decided by `in_turns`.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FLUSHED = 256 << 20  # bytes overwritten before each run: several times what L2 holds, and 70 us or more of a GPU's time
WARM, FEWEST, MOST = 3, 5, 50  # runs of each
BUDGET_MS = 25.0  # for each
ROUNDS, COPIES_MOST = 9, 32
SAMPLE_MS, CALLS_LEAST, CALLS_MOST = 0.4, 4, 32  # of a graph whose calls all have the same operands
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


@dataclass(frozen=True)
class Pair:
    """Milliseconds of a call: with operands that L2 does not hold, and with the same ones each time."""

    cold: float
    hot: float

    @property
    def mean(self) -> float:
        """The geometric mean: both count alike."""
        return (self.cold * self.hot) ** 0.5

    def plus(self, milliseconds: float) -> Pair:
        return Pair(self.cold + milliseconds, self.hot + milliseconds)


def in_turns(makers: Sequence[Callable[[int], list[Callable[[], Any]]]], size: int) -> list[Pair]:
    """The time of a call of each candidate, when one call follows the other in a graph; the candidates take turns. Of
    ROUNDS the lower quartile: what disturbs a measurement makes it longer.

    makers  makers[i](n): n calls of candidate i, each on tensors of its own, so that L2 does not hold what comes next.
            They may keep to the stream on which they were made
    size    bytes of one call's tensors"""
    with _side_stream():
        return _in_turns(makers, size)


def _in_turns(makers: Sequence[Callable[[int], list[Callable[[], Any]]]], size: int) -> list[Pair]:
    copies = max(2, min(COPIES_MOST, -(-FLUSHED // max(1, size))))
    graphs = []
    for make in makers:
        calls = make(copies)
        calls[0]()
        cold = graph_of(calls)
        again = max(CALLS_LEAST, min(CALLS_MOST, int(SAMPLE_MS / max(_replayed(cold) / copies, 1e-3))))
        graphs += [(cold, copies), (graph_of([calls[0]] * again), again)]
    found: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for kept, (graph, count) in zip(found, graphs):
            kept.append(_replayed(graph) / count)
    low = [statistics.quantiles(kept)[0] for kept in found]
    return [Pair(*pair) for pair in zip(low[::2], low[1::2])]


@contextlib.contextmanager
def _side_stream() -> Iterator[None]:
    """A stream that can be captured is the current one: this one, if it can be."""
    import torch

    before = torch.cuda.current_stream()
    if before != torch.cuda.default_stream():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


def graph_of(calls: Sequence[Callable[[], Any]]) -> Any:
    """A captured graph of the calls, in order. Whatever other threads do meanwhile is not in the way."""
    import torch

    graph: Any = torch.cuda.CUDAGraph()
    with _side_stream():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            graph.kept = [(call, call()) for call in calls]  # what a graph reads and writes lives as long
        finally:
            graph.capture_end()
    return graph


def _replayed(graph: Any) -> float:
    """Milliseconds of a replay that follows another, so that the launch is there in time."""
    graph.replay()
    start, end = _timed([graph.replay])
    end.synchronize()
    return start.elapsed_time(end)


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
