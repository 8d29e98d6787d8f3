"""Timing on a GPU: ways to do the same, in turns within one process, medians; L2 hot and cold, graphs and launches.

hot    every call reads the same operands, which L2 may hold
cold   calls go through copies of the operands that together are COLD_TIMES what L2 holds, so none is there when read
graph  GRAPH_SECONDS of calls are one CUDA graph, replayed
plain  as many calls are launched one by one while the GPU is kept busy: what is timed is the GPU, not Python
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COLD_TIMES = 4
COPIES_MOST = 64
SAMPLE_US = 1500.0  # of GPU time a sample
CALLS_MOST = 60
CLOCK_MHZ = 1980  # of an H200's multiprocessors, at most
LAUNCH_US = 60.0  # that the CPU may need for a launch: so long is the GPU kept busy beforehand, for each
ROUNDS = 9
STATES, FORMS = ("cold", "hot"), ("graph", "plain")

Run = Callable[[int], Any]


def copies(bytes_of_one: int) -> int:
    """How many sets of operands are needed so that none is in L2 when its turn comes again."""
    import torch

    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(COPIES_MOST, -(-COLD_TIMES * l2 // bytes_of_one)))


@dataclass
class Timed:
    """Microseconds of a call: samples[way] in the order of the rounds, the ways of a round having taken turns."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def us(self, way: str) -> float:
        return statistics.median(self.samples[way])

    def fastest(self, *ways: str) -> str:
        return min((w for w in ways if w in self.samples), key=self.us)

    def ratio(self, base: str, way: str) -> float:
        """How many times as fast as `base` a way is: the median over rounds, each compared within itself."""
        return statistics.median(b / w for b, w in zip(self.samples[base], self.samples[way], strict=True))


def _elapsed(run: Callable[[], Any]) -> float:
    """Microseconds of GPU time."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


class _Way:
    """One way to do the work, in one state: as a graph of `calls` calls and as so many launches."""

    def __init__(self, run: Run, sets: int, calls: int):
        import torch

        self.calls = calls
        self.launches = lambda: [run(i % sets) for i in range(calls)]
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = self.launches()
        self.graph.replay()

    def sample(self, form: str) -> float:
        import torch

        if form == "graph":
            return _elapsed(self.graph.replay) / self.calls
        torch.cuda._sleep(int(LAUNCH_US * self.calls * CLOCK_MHZ))
        return _elapsed(self.launches) / self.calls


def measure(ways: Mapping[str, Run], sets: int, states=STATES, forms=FORMS, rounds: int = ROUNDS) -> dict:
    """{(state, form): Timed}. A way is run(i): does the work on set i of `sets`; the same i for all ways is the same
    work. What a way allocates stays its own."""
    import torch

    found = {}
    for run in ways.values():
        for _ in range(3):
            run(0)
    torch.cuda.synchronize()
    for state in states:
        count = sets if state == "cold" else 1
        made = {}
        for name, run in ways.items():
            run(0)
            each = min(_elapsed(lambda run=run: [run(i % count) for i in range(8)]) / 8 for _ in range(3))
            calls = max(count if state == "cold" else 1, min(CALLS_MOST, round(SAMPLE_US / max(1.0, each))))
            made[name] = _Way(run, count, calls)
        for form in forms:
            timed = found[state, form] = Timed({name: [] for name in ways})
            for turn in range(rounds + 1):
                for name in random.sample(list(made), len(made)):
                    us = made[name].sample(form)
                    if turn:  # the first round warms up
                        timed.samples[name].append(us)
        del made
        torch.cuda.empty_cache()
    return found
