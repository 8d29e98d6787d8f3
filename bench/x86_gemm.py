"""x86 GEMM against torch: Linear-shaped products, paired in one process.

Every function of a shape takes its turn in every round, so what else the machine does hits them alike; a time is the
median over the rounds, a ratio the median of the rounds' own ratios. Candidates come from the template's space and are
chosen by a first measurement, as a tuner would; the figures are those of a second, independent one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.common import Report, geomean, parser
from flykernels.launch import host
from flykernels.targets import x86
from templates.gemm.arguments import scalar_values
from templates.gemm.build import build
from templates.gemm.packing import pack_b
from templates.gemm.problem import GemmProblem
from templates.gemm.space import candidates

ROWS = (1, 16, 64, 128, 512)
WEIGHTS = ((384, 384), (1536, 384), (384, 1536), (4096, 4096))  # (N, K)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
BARS = {"f32": 1.10, "bf16": 1.60}  # geometric means over torch's best way
FLOOR = 0.97  # of the choice among ours and torch's, on any shape
COMPILE_BAR = 0.25  # seconds, median
SAMPLE = 100e-6  # seconds that one turn lasts at least
LONGEST = 20.0  # seconds that one measurement may take: fewer rounds for large shapes, but at least 5
FAR = 2.0  # a way of torch's that took so many times the best one's in the trial is not measured again
MARGIN = 1.02  # by which ours must win to be chosen over torch


@dataclass
class Entry:
    """One contestant: a call, and what it is."""

    name: str
    call: Callable[[], object]
    ours: bool = False
    packed: bool = False


def main(argv: list[str]) -> int:
    """Measures, prints and judges; 0 if the bars are met."""
    options = parser("x86-gemm", __doc__.split("\n", 1)[0])
    options.add_argument("--rounds", type=int, default=25, help="rounds of each measurement (default 25)")
    options.add_argument("--rows", type=int, nargs="*", default=ROWS, help="values of M")
    options.add_argument("--dtype", choices=list(DTYPES), nargs="*", default=list(DTYPES))
    options.add_argument("--threads", type=int, help="threads of both (default: torch's)")
    options = options.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    report, compiles, floors = Report("x86-gemm", "measured on CPU"), [], []
    with torch.inference_mode():
        for dtype in options.dtype:
            ratios = []
            for n, k in WEIGHTS:
                for m in options.rows:
                    row, seconds = shape(dtype, m, n, k, options.rounds)
                    report.row(**row)
                    compiles += seconds
                    ratios.append(row["ratio"])
                    floors.append(row["chosen_ratio"])
            report.bar(f"{dtype} geomean over torch's best way", geomean(ratios), at_least=BARS[dtype])
    report.bar("least ratio of the choice, ATen among the choices", min(floors), at_least=FLOOR)
    report.bar("compile time, median", statistics.median(compiles), at_most=COMPILE_BAR, unit="s")
    report.note(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}. B is weight.t(), as in nn.Linear. us: medians "
        "of paired rounds. ratio: torch's best way over our best kernel that takes B as it is; packed ratio: over our "
        f"best with B packed ahead (a constant weight). chosen: what a tuner takes where ours must win by {MARGIN}."
    )
    return report.close(options.json)


def shape(dtype: str, m: int, n: int, k: int, rounds: int) -> tuple[dict, list[float]]:
    """One row of the table, and what each kernel took to compile."""
    a, weight = torch.randn(m, k).to(DTYPES[dtype]), torch.randn(n, k).to(DTYPES[dtype])
    b, out = weight.t(), torch.empty(m, n, dtype=DTYPES[dtype])
    entries, seconds = torch_ways(dtype, a, weight, b, out), []
    for packed in (False, True):
        problem = GemmProblem(n, k, dtype, dtype, "row", "col", packed_b=packed, m_hint=m)
        for candidate in candidates(problem, x86, torch.get_num_threads()).kept:
            entry, spent = ours(problem, candidate.config, a, b)
            entries.append(entry)
            seconds.append(spent)
    trial = measure(entries, max(5, rounds // 2))
    best = lambda keep: min((e for e in entries if keep(e)), key=lambda e: statistics.median(trial[e.name]))
    plain, ahead = best(lambda e: e.ours and not e.packed), best(lambda e: e.packed)
    theirs = best(lambda e: not e.ours)
    wins = statistics.median(trial[theirs.name]) >= MARGIN * statistics.median(trial[plain.name])
    near = lambda e: statistics.median(trial[e.name]) <= FAR * statistics.median(trial[theirs.name])
    ways = [e for e in entries if not e.ours and near(e)]
    final = measure([*ways, plain, ahead], rounds)
    fastest = min(ways, key=lambda e: statistics.median(final[e.name]))
    paired = lambda e: statistics.median(r / t for r, t in zip(final[fastest.name], final[e.name], strict=True))
    us = lambda e: statistics.median(final[e.name]) * 1e6
    row = {
        "dtype": dtype,
        "M": m,
        "N": n,
        "K": k,
        "torch_us": us(fastest),
        "way": fastest.name,
        "ours_us": us(plain),
        "ratio": paired(plain),
        "kernel": plain.name,
        "packed_us": us(ahead),
        "packed_ratio": paired(ahead),
        "packed_kernel": ahead.name,
        "chosen": "ours" if wins else "ATen",
        "chosen_ratio": paired(plain) if wins else 1.0,
    }
    return row, seconds


def torch_ways(dtype: str, a, weight, b, out) -> list[Entry]:
    """How one can do it in torch."""
    found = [
        Entry("mm", lambda: torch.mm(a, b, out=out)),
        Entry("linear", lambda: F.linear(a, weight)),
    ]
    if dtype != "f32":
        found.append(Entry("upcast + mm", lambda: torch.mm(a.float(), b.float()).to(a.dtype)))
    return found


def ours(problem: GemmProblem, config, a, b) -> tuple[Entry, float]:
    """One of our kernels, checked once against torch in f64, and the seconds that it took to compile."""
    start = time.perf_counter()
    code = build(problem, config, x86)
    spent = time.perf_counter() - start
    kernel, out = host.load(code), torch.empty(a.shape[0], problem.n, dtype=a.dtype)
    b_here = pack_b(problem, config, b) if problem.packed_b else b
    scalars = scalar_values(problem, a=a, b=b_here, c=out)
    launch = kernel.launcher(config.threads)  # as compiled code calls it
    call = lambda: launch(a.data_ptr(), b_here.data_ptr(), out.data_ptr(), *scalars)
    call()
    exact = a.double() @ b.double()
    worst = ((out.double() - exact).abs().max() / exact.abs().max()).item()
    if not worst < problem.output_type.epsilon * 2 + 1e-6 * problem.k**0.5:
        raise AssertionError(f"{problem} {config}: relative error {worst:.1e}")
    name = f"{config.family} {config.rows}x{config.columns} k{config.k_block}" + (" packed" if problem.packed_b else "")
    return Entry(f"{name} t{config.threads}", call, True, problem.packed_b), spent


def measure(entries: list[Entry], rounds: int) -> dict[str, list[float]]:
    """Seconds a call of each, one figure a round."""
    turns, total = {}, 0.0
    for e in entries:
        e.call()
        start = time.perf_counter()
        e.call()
        spent = time.perf_counter() - start
        turns[e.name] = max(1, int(SAMPLE / max(spent, 1e-7)))
        total += max(spent, SAMPLE)
    rounds = max(5, min(rounds, int(LONGEST / total)))
    times: dict[str, list[float]] = {e.name: [] for e in entries}
    for r in range(rounds):
        for e in entries[r % len(entries) :] + entries[: r % len(entries)]:
            start = time.perf_counter()
            for _ in range(turns[e.name]):
                e.call()
            times[e.name].append((time.perf_counter() - start) / turns[e.name])
    return times
