"""What the user's eager call costs where arithmetic is a small part of it: calls of ours, and calls that stay ATen's.

F.rms_norm and torch.topk are called as a program calls them, with eager operators on and off in turn, round by round,
in one process. What a case is, is decided before (and forced to ours: the call is measured, whatever would win). Calls
that fall through are of types or strides that kernels do not take: with eager operators on they go to ATen after that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from .common import Report, geomean, parser

ROUNDS, CALLS = 60, 100
UNWRITTEN = "topk 16x128 k=6 f32, out= transposed"


def main(argv: list[str]) -> int:
    """Measures, prints and judges; 0 if the bars are met."""
    options = parser("eager", __doc__.split("\n", 1)[0])
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = options.parse_args(argv)
    import torch

    from inductor_plugin import eager, eager_gate

    if given.device == "cuda" and not torch.cuda.is_available():
        print("eager: --device cuda needs a GPU that torch can use")
        return 2
    measured = eager_gate.interleaved, eager_gate.in_queue
    eager_gate.interleaved = eager_gate.in_queue = _ours_first
    report = Report("eager", "measured on H200" if given.device == "cuda" else "measured on CPU")
    try:
        calls = _calls(given.device)
        eager.enable([given.device])
        for _, call, _ in calls:
            call()
    finally:
        eager_gate.interleaved, eager_gate.in_queue = measured
    times: dict[tuple[str, bool], list[float]] = {(name, on): [] for name, _, _ in calls for on in (False, True)}
    wait = torch.cuda.synchronize if given.device == "cuda" else lambda: None
    _measure([(name, call) for name, call, _ in calls], given.device, times, wait)
    kept: dict[bool, list[float]] = {False: [], True: []}
    for name, _, ours in calls:
        aten, mine = times[name, False], times[name, True]
        ratio = statistics.median(a / m for a, m in zip(aten, mine))
        kept[ours].append(ratio)
        us = lambda t: statistics.median(t) * 1e6
        report.row(call=name, served_by="ours" if ours else "ATen", off_us=us(aten), on_us=us(mine), ratio=ratio)
    report.bar("ATen's call / ours, geomean", geomean(kept[True]), at_least=1.0)
    report.bar("ATen's call / ours, least", min(kept[True]), at_least=0.95)
    # The C interface costs a call some 1 us; on the CPU what falls through skips a dispatch of ATen's instead.
    least = 0.95 if given.device == "cpu" else None
    report.bar("ATen's call / the same through the look-up, least", min(kept[False]), at_least=least)
    if given.device == "cpu":  # the C interface hands over seven arguments, and ATen serves: no bar
        times |= {(UNWRITTEN, on): [] for on in (False, True)}
        _measure([_unwritten()], given.device, times, wait)
        ratio = statistics.median(a / m for a, m in zip(times[UNWRITTEN, False], times[UNWRITTEN, True]))
        report.bar(f"ATen's call / the same through the look-up, {UNWRITTEN}", ratio)
    report.note(f"medians of {ROUNDS} rounds of {CALLS} calls; ratio: of the rounds' own. torch {torch.__version__}.")
    return report.close(given.json)


def _measure(calls: list[tuple[str, Callable]], device: str, times: dict, wait: Callable) -> None:
    """Adds seconds a call, with eager operators off and on in turn."""
    from inductor_plugin import eager

    for _ in range(ROUNDS):
        for on in (False, True):
            eager.enable([device]) if on else eager.disable()
            for name, call in calls:
                times[name, on].append(_seconds(call, wait))
    eager.disable()


def _unwritten() -> tuple[str, Callable]:
    """A call whose results kernels do not write where the caller wants them."""
    import torch

    x, out = torch.randn(16, 128), (torch.empty(6, 16).t(), torch.empty(6, 16, dtype=torch.int64).t())
    return UNWRITTEN, lambda: torch.topk(x, 6, out=out)


def _ours_first(ways, run, wait) -> dict[str, list[float]]:
    """In the place of a measurement: whatever is right and is not ATen's wins."""
    from inductor_plugin.eager_gate import ATEN

    return {name: [2.0 if name == ATEN else 1.0] for name, _ in ways}


def _calls(device: str) -> list[tuple[str, Callable, bool]]:
    """(name, call, whether kernels take it)."""
    import torch
    import torch.nn.functional as F

    x, few, more = (torch.randn(*s, device=device) for s in ((1, 1024), (1, 128), (16, 128)))
    weight = torch.randn(1024, device=device)
    trained, read = weight.clone().requires_grad_(), x.clone().requires_grad_()
    dy, wide, numbers = torch.randn_like(x), x.double(), torch.arange(128, device=device)
    uneven = torch.randn(4, 5, 32, device=device)[:, :3]
    on_cpu = device == "cpu"

    def inference():
        with torch.inference_mode():
            return F.rms_norm(x, (1024,), weight)

    def step():
        return torch.autograd.grad(F.rms_norm(read, (1024,), trained), (read, trained), dy)

    return [
        ("rms_norm 1x1024 f32", lambda: F.rms_norm(x, (1024,), weight), True),
        ("rms_norm 1x1024 f32, inference mode", inference, True),
        ("rms_norm 1x1024 f32, forward and backward", step, True),
        ("topk 1x128 k=6 f32", lambda: torch.topk(few, 6), True),
        ("topk 16x128 k=6 f32", lambda: torch.topk(more, 6), True),
        ("rms_norm 1x1024 f64", lambda: F.rms_norm(wide, (1024,)), False),
        ("topk 128 k=6 int64", lambda: torch.topk(numbers, 6), on_cpu),
        ("topk 128 k=6 f64", lambda: torch.topk(wide[0, :128], 6), on_cpu),
        ("topk 4x3x32 k=6 f32, rows not evenly spaced", lambda: torch.topk(uneven, 6), on_cpu),
        ("topk 1x128 k=0 f32", lambda: torch.topk(few, 0), on_cpu),
    ]


def _seconds(call: Callable, wait: Callable) -> float:
    call()
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait()
    return (time.perf_counter() - start) / CALLS
