"""Timing on a GPU: ways to do the same, in turns within one process, medians; L2 hot and cold, graphs and launches.

graph  a CUDA graph of many calls, replayed: one call follows the other. Cold: the calls go through copies of the
       operands that together are COLD_TIMES what L2 holds; hot: every call has the same operands. What a way allocates
       lies at the same address for all ways: where in memory results lie is worth up to 3%
plain  each call is launched and timed by itself, as triton.testing.do_bench and Inductor do. Cold: L2 is overwritten
       before; hot: the call has just been made. The GPU is kept busy until the launch has come, so Python is not timed
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COLD_TIMES = 4
COPIES_MOST = 64
SAMPLE_US = 1500.0  # of GPU time a sample of graphs
CALLS_MOST, CALLS_LEAST = 60, 4
ROUNDS, LAUNCHES = 9, 5  # samples of a way; launches that the median of a sample is of
ROUNDS_MOST = 45  # where more are asked for
FLUSHED = 256 << 20  # bytes that are overwritten for a cold launch
BUSY_US, CLOCK_MHZ = 400, 1980  # how long the GPU is busy before a launch is timed; an H200's clock, at most
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

    @property
    def rounds(self) -> int:
        return min(map(len, self.samples.values()), default=0)

    def us(self, way: str) -> float:
        return statistics.median(self.samples[way])

    def fastest(self, *ways: str) -> str:
        return min((w for w in ways if w in self.samples), key=self.us)

    def ratio(self, base: str, way: str) -> float:
        """How many times as fast as `base` a way is: the median over rounds, each compared within itself."""
        return statistics.median(b / w for b, w in zip(self.samples[base], self.samples[way], strict=True))


def calls_of(ways: Mapping[str, Run], sets: int) -> int:
    """How many calls the graphs have: as many for all ways, or what a launch of a graph takes would not be shared
    alike. The fastest way's count: others may be called so slowly that Python would be timed."""
    from ._gpu_replay import elapsed

    each = min(
        elapsed(lambda run=run: [run(i % sets) for i in range(8)]) / 8 for run in ways.values() for _ in range(3)
    )
    return max(sets, CALLS_LEAST, min(CALLS_MOST, round(SAMPLE_US / max(1.0, each))))


class Graphs:
    """One way's calls as a graph, with results in a pool's memory."""

    def __init__(self, run: Run, sets: int, calls: int, pool: Any):
        from inductor_plugin.gpu_timing import graph_of

        self.calls = calls
        self.graph = graph_of([functools.partial(run, i % sets) for i in range(calls)], pool)
        self.graph.replay()

    def sample(self) -> float:
        """Of a replay that follows another, so that its launch is there in time."""
        from ._gpu_replay import elapsed

        self.graph.replay()
        return elapsed(self.graph.replay) / self.calls


class Launches:
    """One way's calls, each by itself."""

    def __init__(self, run: Run, flush: Any):
        self.run, self.flush = run, flush

    def sample(self) -> float:
        import torch

        events = []
        for i in range(LAUNCHES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_US * CLOCK_MHZ)
            if self.flush is not None:
                self.flush.zero_()
            else:
                self.run(0)
            start.record()
            self.run(i % 2 if self.flush is not None else 0)
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) * 1e3 for start, end in events)


def measure(
    ways: Mapping[str, Run], sets: int, states=STATES, forms=FORMS, rounds: int = ROUNDS,
    unsure: Callable[[Timed], bool] = lambda _: False,
) -> dict[tuple[str, str], Timed]:  # fmt: skip
    """{(state, form): Timed}. A way is run(i): does the work on set i of `sets` (2 or more); the same i for all ways is
    the same work. unsure: whether more rounds are needed, up to ROUNDS_MOST; asked after every `rounds`."""
    import torch

    found = {}
    for run in ways.values():
        for _ in range(3):
            run(0)
    torch.cuda.synchronize()
    for state in states:
        for form in forms:
            if form == "graph":
                pool = torch.cuda.graph_pool_handle()
                of = sets if state == "cold" else 1
                calls = calls_of(ways, of)
                made: dict[str, Any] = {n: Graphs(run, of, calls, pool) for n, run in ways.items()}
            else:
                flush = torch.empty(FLUSHED // 4, dtype=torch.int32, device="cuda")
                made = {n: Launches(run, flush if state == "cold" else None) for n, run in ways.items()}
            timed = found[state, form] = Timed({name: [] for name in ways})
            for way in made.values():
                way.sample()  # warms up
            done = 0
            while done < rounds or (done < ROUNDS_MOST and unsure(timed)):
                for _ in range(rounds):
                    for name in random.sample(list(made), len(made)):
                        timed.samples[name].append(made[name].sample())
                done += rounds
            del made
            torch.cuda.empty_cache()
    return found
