"""RMSNorm beside ATen's, as the user calls it: F.rms_norm with and without eager operators of ours.

On the CPU both are called in turn, in pairs, in one process. On the H200 by graph replay, which shows the kernels, and
by plain launches, which show the call; `copy` is what copying as many bytes takes. All of them write to the same
memory, large operands take turns, and each graph follows a replay of its own, so that it pays for what it writes
itself. Ratios are ATen's time over ours. Every result is compared with float64 first. `--call direct` leaves the
dispatcher out: our kernel on a fresh result.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench._rms_norm_direct import EPS, Direct, wrong
from bench.common import Report, geomean, parser
from inductor_plugin.eager_rms_call import compare as compare_results

ROWS, WIDTHS = (1, 64, 1024, 8192), (1024, 4096, 7168, 8192, 16384)
SHAPES = tuple((r, w) for r in ROWS for w in WIDTHS) + ((314, 4096), (32768, 512))
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BARS = {"cpu": (2.5, 0.95), "cuda": (1.6, 0.97)}  # geometric mean, least ratio
LARGE_BYTES, COPY_BAR = 64 << 20, 0.92  # from this size of x on, the least part of the copy's rate
SAMPLE, ROUNDS, LEAST_ROUNDS, LONGEST = 200e-6, 25, 3, 0.7  # seconds a turn, rounds, seconds of a measurement
PLAIN_ROUNDS, PLAIN_MOST = 25, 100  # on a GPU: what else the host does is some 10% of a call, this way or that
OPERANDS = 3  # of LARGE_BYTES or more, in turn: as in a model, nothing of the last call's is read from a cache
DRAWN_ROWS = 1024  # at random; more are those again
CHECKED_BYTES = 1 << 25  # of x, at most, of which all rows are compared with float64; of larger ones the last rows


def main(argv: list[str]) -> int:
    """Measures, prints and judges; 0 if the bars are met."""
    options = parser("rms-norm", __doc__.split("\n", 1)[0])
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--dtype", choices=list(DTYPES), nargs="*", default=list(DTYPES))
    options.add_argument("--call", choices=("eager", "direct"), default="eager")
    options.add_argument("--gradient", action="store_true", help="forward and backward, of x and weight")
    options.add_argument("--rows", type=int, nargs="*", help="only these numbers of rows")
    options.add_argument("--threads", type=int, help="threads of both, on the CPU (default: torch's)")
    options = options.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("rms-norm: --device cuda needs a GPU that torch can use")
        return 2
    if options.gradient and options.call == "direct":
        print("rms-norm: --gradient goes by --call eager")
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    report = Report("rms-norm", "measured on H200" if options.device == "cuda" else "measured on CPU")
    compare, ratios, plain, rates = (_cuda if options.device == "cuda" else _cpu), [], [], []
    mean, least = BARS[options.device]
    with torch.inference_mode(not options.gradient):
        for dtype in options.dtype:
            for rows, width in SHAPES:
                if not options.rows or rows in options.rows:
                    row = compare(dtype, rows, width, options.call, options.gradient)
                    report.row(dtype=dtype, rows=rows, width=width, **row)
                    ratios.append(row["ratio"])
                    plain.append(row.get("plain_ratio", row["ratio"]))
                    if "of_copy" in row and rows * width * DTYPES[dtype].itemsize >= LARGE_BYTES:
                        rates.append(row["of_copy"])
    report.bar("geomean over ATen", geomean(ratios), at_least=mean)
    report.bar("least ratio", min(ratios), at_least=least)
    if options.device == "cuda":
        report.bar("geomean over ATen, plain launches", geomean(plain), at_least=1.0)
        report.bar("least ratio, plain launches", min(plain), at_least=least)
        if rates:
            report.bar("least part of the copy's rate from 64 MiB on", min(rates), at_least=COPY_BAR)
    how = "graph replay and plain launches" if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    what = "forward and backward" if options.gradient else "forward"
    report.note(
        f"us a call, medians; {what}; {how}; {options.call} calls; weight of x's dtype; torch {torch.__version__}."
    )
    return report.close(options.json)


class Contest:
    """Two calls of one operator on the same operands: ATen's, and ours within `on()`."""

    def __init__(self, dtype: str, rows: int, width: int, call: str, device: str, gradient: bool):
        make = torch.Generator(device).manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=make, device=device, dtype=torch.float32).to(DTYPES[dtype])
        self.x, self.weight = draw(min(rows, DRAWN_ROWS), width), draw(width)
        self.x = self.x.repeat(-(-rows // DRAWN_ROWS), 1)[:rows]
        self.norm = lambda x: F.rms_norm(x, (width,), self.weight, EPS)
        self.aten = lambda: F.rms_norm(self.x, (width,), self.weight, EPS)
        self.name = ""
        check, forward = None, self.aten
        if gradient:
            dy = self.x.flip(0)
            self.x, self.weight = self.x.requires_grad_(), self.weight.requires_grad_()
            self.aten = lambda: torch.autograd.grad(forward(), (self.x, self.weight), dy)
            check = self.aten()
        if call == "direct":
            direct = Direct(dtype, self.x, self.weight)
            self.ours, self.name, self.switch = direct.best(), direct.name, lambda on: contextlib.nullcontext()
        else:
            eager = importlib.import_module("inductor_plugin.eager")
            self.ours, self.switch = self.aten, lambda on: eager.enabled(on=on)
        with self.switch(True):
            self.ours()  # the tuning cache may have to measure first
            some = slice(None) if self.x.nbytes <= CHECKED_BYTES else slice(-64, None)
            y = forward() if gradient else self.ours()
            error = wrong(dtype, self.x[some].detach(), self.weight.detach(), y[some].detach())
            if check is not None:
                compare_results(self.ours(), check, width, rows)
        if not error <= 1:
            raise AssertionError(f"{dtype} {rows}x{width}: {error:.3g} times the error that rounding explains")


def _cpu(dtype: str, rows: int, width: int, call: str, gradient: bool) -> dict[str, Any]:
    contest, seconds = Contest(dtype, rows, width, call, "cpu", gradient), {}
    ways = {False: contest.aten, True: contest.ours}
    for on, way in ways.items():
        with contest.switch(on):
            seconds[on] = _seconds(way, 1)
            if seconds[on] < LONGEST:
                seconds[on] = min(_seconds(way, 1) for _ in range(2))
    turns = {on: max(1, int(SAMPLE / max(s, 1e-7))) for on, s in seconds.items()}
    total = sum(max(s, SAMPLE) for s in seconds.values())
    rounds, seen = max(LEAST_ROUNDS, min(ROUNDS, int(LONGEST / total))), []
    for _ in range(rounds):
        times = {}
        for on, way in ways.items():
            with contest.switch(on):
                if turns[on] > 1:
                    way()  # the first after switching looks things up
                times[on] = _seconds(way, turns[on])
        seen.append(times)
    theirs, ours = (statistics.median(t[on] for t in seen) * 1e6 for on in (False, True))
    return {"aten_us": theirs, "ours_us": ours, "ratio": statistics.median(t[False] / t[True] for t in seen)}


def _seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def _cuda(dtype: str, rows: int, width: int, call: str, gradient: bool) -> dict[str, Any]:
    from bench import _gpu_replay as cuda

    contest = Contest(dtype, rows, width, call, "cuda", gradient)
    pool = torch.cuda.graph_pool_handle()  # of all: where a result lies in memory is some percent of a large copy
    operands = [contest.x]
    if call == "eager" and not gradient and contest.x.nbytes >= LARGE_BYTES:
        operands += [contest.x.clone() for _ in range(OPERANDS - 1)]
    turns = -(-cuda.times_for(max(3.0, 2 * contest.x.nbytes / 4e6)) // len(operands))  # by a guess of microseconds
    calls = turns * len(operands)
    of_each = lambda do: (cuda.graph([lambda x=x: do(x) for x in operands], calls, pool), calls)
    graphs, plain = {}, []
    ways = {False: contest.aten, True: contest.ours}
    for on, way in ways.items():
        with contest.switch(on):
            graphs[on] = of_each(contest.norm if len(operands) > 1 else lambda _, way=way: way())
    plain_ratio = lambda: statistics.median(t[False] / t[True] for t in plain)
    # in turn: what else the host does falls on both; more of them where the figure is near its bar or below
    while len(plain) < PLAIN_ROUNDS or (len(plain) < PLAIN_MOST and plain_ratio() < 1):
        times = {}
        for on, way in ways.items():
            with contest.switch(on):
                times[on] = cuda.plain_us(way)
        plain.append(times)
    copy = of_each(lambda x: torch.empty_like(x).copy_(x))
    theirs, ours, copied = cuda.replay_us([graphs[False], graphs[True], copy], after_itself=True)
    row = {"aten_us": theirs, "ours_us": ours, "copy_us": copied, "ratio": theirs / ours}
    row |= {} if gradient else {"of_copy": copied / ours}  # forward and backward move x or as much five times, not two
    row |= {f"plain_{name}": statistics.median(t[on] for t in plain) for name, on in (("aten_us", False), ("us", True))}
    row["plain_ratio"] = plain_ratio()
    return row | ({"kernel": contest.name} if contest.name else {})
