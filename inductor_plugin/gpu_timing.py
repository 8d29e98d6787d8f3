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
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import private

FLUSHED = 256 << 20  # bytes overwritten before each run: several times what L2 holds, and 70 us or more of a GPU's time
WARM, FEWEST, MOST = 3, 5, 50  # runs of each
FLUSHING = 60e-6  # seconds that this takes at least
LATE, LATE_MOST = 100e-6, 300e-6  # that Python may take for a run, until that is known; a longer time was a pause
GIGAHERTZ = 2.0  # of a GPU's clock, about
BUDGET_MS = 25.0  # for each
COPIES_MOST = 32
CALLS_LEAST, CALLS_MOST = 4, 32  # of a graph whose calls all have the same operands
QUICK_ROUNDS, QUICK_MS = 3, 0.4  # samples of a candidate, and how long one lasts, to tell who may be the fastest
ROUNDS, SUSTAINED_MS = 9, 1.5  # the same of those few: long enough that a GPU held back by its power is seen to be
DEVICE = "cuda"


def alone(run: Callable[[], Any]) -> float:
    """The median time of a run, in ms, on the current device, with L2 cold. Raises what the run raises."""
    import torch

    flush = _flush()

    def taken(times: int, late: float) -> tuple[float, float]:
        """(the median time of so many runs, seconds that Python took for each). late: those that it may take: the GPU
        is kept busy so long that no run waits for Python, which may first have to copy what a run changes."""
        pairs = []
        private.occupy_gpu(int(max(late, times * (late - FLUSHING)) * GIGAHERTZ * 1e9))
        begin = time.perf_counter()
        for _ in range(times):
            flush.zero_()
            pairs.append(_timed([run]))
        late = min((time.perf_counter() - begin) / times, LATE_MOST)
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs), late

    run()
    about, late = taken(WARM, LATE)
    return taken(max(FEWEST, min(MOST, int(BUDGET_MS / max(about, 1e-3)))), late)[0]


@dataclass(frozen=True)
class Pair:
    """Milliseconds of a call: with operands that L2 does not hold, and with the same ones each time."""

    cold: float
    hot: float

    @property
    def mean(self) -> float:
        """The geometric mean: both count alike."""
        return (self.cold * self.hot) ** 0.5

    def plus(self, other: Pair) -> Pair:
        return Pair(self.cold + other.cold, self.hot + other.hot)


Makers = Sequence[Callable[[int], list[Callable[[], Any]]]]


def in_turns(
    makers: Makers, size: int, variants: int = 1, likely: Callable[[list[Pair]], list[int]] | None = None
) -> list[Pair | None]:
    """The time of a call of each candidate, when one call follows the other in a graph; the candidates take turns. Of
    all samples the lower quartile: what disturbs a measurement makes it longer.

    makers    makers[i](n): n calls of candidate i, each on tensors of its own, so that L2 does not hold the next ones.
              They may keep to the stream on which they were made
    size      bytes of one call's tensors
    variants  so many calls in a row differ in more than their tensors; all count alike
    likely    of all candidates' times, taken quickly, the numbers of those to be timed at length: the others' are None
              then. With none named the quick ones stand"""
    with _side_stream():
        graphs = _graphs(makers, size, variants)
        everybody = list(range(len(makers)))
        if likely is None:
            return list(_times(graphs, everybody, ROUNDS, SUSTAINED_MS))
        quick = _times(graphs, everybody, QUICK_ROUNDS, QUICK_MS)
        few = likely(quick)
        if not few:
            return list(quick)
        found = dict(zip(few, _times(graphs, few, ROUNDS, SUSTAINED_MS)))
        return [found.get(i) for i in everybody]


def _graphs(makers: Makers, size: int, variants: int) -> list[list[tuple[Any, int]]]:
    """For each candidate (graph, how many calls) with operands that L2 does not hold, and with the same ones."""
    copies = max(2, min(COPIES_MOST, -(-FLUSHED // max(1, size))))
    copies = -(-copies // variants) * variants
    graphs = []
    for make in makers:
        calls = make(copies)
        calls[0]()
        cold = graph_of(calls)
        again = max(CALLS_LEAST, min(CALLS_MOST, int(QUICK_MS / max(_replayed(cold, 1) / copies, 1e-3))))
        again = -(-again // variants)
        graphs.append([(cold, copies), (graph_of(calls[:variants] * again), variants * again)])
    return graphs


def _times(graphs: list[list[tuple[Any, int]]], which: list[int], rounds: int, sample_ms: float) -> list[Pair]:
    """Of these candidates, in so many rounds, each in an order of its own."""
    turns = [(i, state) for i in which for state in (0, 1)]
    replays = {t: max(1, round(sample_ms / _replayed(graphs[t[0]][t[1]][0], 1))) for t in turns}
    found: dict[tuple[int, int], list[float]] = {t: [] for t in turns}
    shuffled = random.Random(0)  # the same in every process
    for _ in range(rounds):
        for turn in shuffled.sample(turns, len(turns)):
            graph, calls = graphs[turn[0]][turn[1]]
            found[turn].append(_replayed(graph, replays[turn]) / calls)
    low = {turn: statistics.quantiles(kept)[0] for turn, kept in found.items()}
    return [Pair(low[i, 0], low[i, 1]) for i in which]


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


def graph_of(calls: Sequence[Callable[[], Any]], pool: Any = None) -> Any:
    """A captured graph of the calls, in order; what they return is not kept: its memory serves the next call, as in
    compiled code. Whatever other threads do meanwhile is not in the way.

    pool: what torch.cuda.graph_pool_handle gave; graphs of one pool write their results to the same memory"""
    import torch

    graph: Any = torch.cuda.CUDAGraph()
    with _side_stream():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    graph.kept = list(calls)  # with the tensors they hold
    return graph


def _replayed(graph: Any, times: int) -> float:
    """Milliseconds of a replay: the mean of so many in a row that follow another, so launches are there in time."""
    graph.replay()
    start, end = _timed([graph.replay] * times)
    end.synchronize()
    return start.elapsed_time(end) / times


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
