"""What a chosen kernel costs to call from compiled code, against ATen's extern call.

The lines that Inductor generates are called as it generates them: `extern_kernels.mm(a, b, out=c)` against
`flykernels_mm_...(a, b, out=c)`, on problems so small that the arithmetic is a small part. Interleaved, one thread of
Python, medians of many rounds. Also measured: what the plugin adds to `import torch`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from .common import Report, geomean, parser

ROUNDS, CALLS = 40, 1000
IMPORTS = 5
SHAPES = ((1, 8, 8), (8, 16, 16), (1, 64, 64))  # M, N, K


def main(argv: list[str]) -> int:
    given = parser("dispatch", "call overhead of a chosen kernel, and what importing costs").parse_args(argv)
    import torch
    from torch._inductor.select_algorithm import extern_kernels

    from flykernels.targets import x86
    from inductor_plugin import kernels
    from templates.gemm.problem import GemmProblem
    from templates.gemm.space import candidates

    report = Report("dispatch", "measured on CPU")
    ratios = []
    for m, n, k in SHAPES:
        for what, bias in (("mm", "none"), ("addmm", "row")):
            problem = GemmProblem(n=n, k=k, b="col", bias=bias, m_hint=m)
            config = candidates(problem, x86, torch.get_num_threads()).kept[0].config
            ours = kernels.callable_for(kernels.Spec(what, "x86", problem, config.key()))
            a, b, c = torch.randn(m, k), torch.randn(n, k).t(), torch.empty(m, n)
            operands = (a, b) if what == "mm" else (a, b, torch.randn(n))
            order = operands if what == "mm" else (operands[2], a, b)
            theirs = getattr(extern_kernels, what)
            ours(*operands, out=c)
            assert torch.allclose(c, theirs(*order), atol=1e-5)
            mine, aten = _interleaved(lambda: ours(*operands, out=c), lambda: theirs(*order, out=c))
            ratios.append(mine / aten)
            report.row(call=what, M=m, N=n, K=k, ATen_ns=aten, ours_ns=mine, ratio=mine / aten)
    report.bar("a chosen kernel's call / ATen's", geomean(ratios), at_most=1.0)
    added = {what: _added_seconds(call) for what, call in (("autoload", "_autoload()"), ("enable()", "enable()"))}
    for what, seconds in added.items():
        report.row(after_import_torch=f"importing the plugin and {what}", added_ms=seconds * 1e3)
    report.bar("added to import torch", max(added.values()) * 1e3, at_most=20.0, unit="ms")
    return report.close(given.json)


def _interleaved(first: Callable, second: Callable) -> tuple[float, float]:
    """Nanoseconds a call, medians over rounds that take turns; the cost of the loop itself is in both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for function, seconds in zip((first, second), times, strict=True):
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            seconds.append((time.perf_counter() - start) / CALLS * 1e9)
    return statistics.median(times[0]), statistics.median(times[1])


def _added_seconds(call: str) -> float:
    """Median time, in new processes, of importing the plugin and one of its functions after `import torch`. (The
    difference of two whole imports of torch drowns in their spread of hundreds of ms.)"""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    program = (
        "import time, torch; t = time.perf_counter(); import inductor_plugin; "
        f"inductor_plugin.{call}; print(time.perf_counter() - t)"
    )
    run = lambda: float(subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True).stdout)
    return statistics.median(run() for _ in range(IMPORTS))
