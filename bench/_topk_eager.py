"""torch.topk as the user calls it: with eager operators of ours, and without, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench._topk_data import check
from inductor_plugin import devices, eager, eager_gate, settings
from inductor_plugin.eager_topk import call_of, case_of

SAMPLE = 200e-6  # seconds that one turn lasts at least, on the CPU
ROUNDS, LEAST_ROUNDS, LONGEST = 25, 5, 2.0  # rounds of a measurement, and the seconds it may take
PLAIN_ROUNDS = 9  # on a GPU


def measure(x: torch.Tensor, k: int, dim: int = -1) -> dict[str, Any]:
    """A row of the report: microseconds of torch.topk with eager operators off and on, their ratio, who serves it.

    On a GPU by graph replay, and plain_*: of calls in a row. AssertionError if a result is not exact."""
    name = x.device.type
    call = lambda: torch.topk(x, k, dim)
    with eager.enabled([name]):
        check(x, k, dim, *call())  # the first call may measure who serves it
    compared = _on_gpu(x, k, dim) if name == "cuda" else _on_cpu(call)
    return compared | {"served_by": _winner(x, k, dim)}


def _on_cpu(call: Callable[[], Any]) -> dict[str, Any]:
    spent, turns = {}, {}
    for on in (False, True):
        with eager.enabled(["cpu"], on):
            call()
            spent[on] = min(_seconds(call, 1) for _ in range(2))
            turns[on] = max(1, int(SAMPLE / max(spent[on], 1e-7)))
    total = sum(max(s, SAMPLE) for s in spent.values())
    seen = []
    for _ in range(max(LEAST_ROUNDS, min(ROUNDS, int(LONGEST / total)))):
        times = {}
        for on in (False, True):
            with eager.enabled(["cpu"], on):
                if turns[on] > 1:
                    call()  # the first after switching looks things up
                times[on] = _seconds(call, turns[on])
        seen.append(times)
    theirs, ours = (statistics.median(t[on] for t in seen) * 1e6 for on in (False, True))
    return {"torch_us": theirs, "ours_us": ours, "ratio": statistics.median(t[False] / t[True] for t in seen)}


def _on_gpu(x: torch.Tensor, k: int, dim: int) -> dict[str, Any]:
    from bench._gpu_replay import lasting, plain_us, replay_us
    from bench._topk_cuda import buffers

    calls = [lambda b=b: torch.topk(b, k, dim) for b in buffers(x)]
    graphs, plain = {}, []
    for on in (False, True):
        with eager.enabled(["cuda"], on):
            calls[0]()
            graphs[on] = lasting(calls)
    for _ in range(PLAIN_ROUNDS):
        row = {}
        for on in (False, True):
            with eager.enabled(["cuda"], on):
                row[on] = plain_us(calls[0])
        plain.append(row)
    theirs, ours = replay_us([graphs[False], graphs[True]])
    told = {f"plain_{n}": statistics.median(t[on] for t in plain) for n, on in (("torch_us", False), ("us", True))}
    ratio = statistics.median(t[False] / t[True] for t in plain)
    return {"torch_us": theirs, "ours_us": ours, "ratio": theirs / ours, **told, "plain_ratio": ratio}


def _winner(x: torch.Tensor, k: int, dim: int) -> str:
    """Who serves the call, by the tuning cache."""
    given = call_of(x, k, dim, True)
    if isinstance(given, str):
        return f"ATen: {given}"
    device = devices.DEVICES[devices.kind_of(x.device)]
    entry = settings.store().lookup(eager_gate.key_for("topk", "topk", case_of(given[0]), device))
    return (entry.winner or "?").removeprefix("flykernels ") if entry is not None else "?"


def _seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
