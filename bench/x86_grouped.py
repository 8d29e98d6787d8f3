"""x86 grouped GEMM against torch._grouped_mm: small MoE layers, paired in one process.

Both take their turn in every round; a time is the median over the rounds, a ratio the median of the rounds' own ratios.
Candidates come from the template's space and are chosen by a first measurement, as a tuner would; the figures are those
of a second, independent one.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch

from bench.common import Report, geomean, parser
from flykernels.launch import host
from flykernels.targets import x86
from templates.grouped_gemm.arguments import pointers, problem_of, scalar_values
from templates.grouped_gemm.build import build
from templates.grouped_gemm.reference import reference, tolerance
from templates.grouped_gemm.space import candidates

from ._grouped_suite import SHARES, sizes_of
from .x86_gemm import Entry, measure

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FORWARD = ((8, 16), (8, 128), (32, 32))  # (groups, rows of a group on average)
WEIGHT = (512, 1024)  # (N, K)
OTHER_FORMS = ("n", "k", "batch")
BAR, ROUNDS = 1.3, 7


def main(argv: list[str]) -> int:
    """Measures, prints and judges; 0 if the bars are met."""
    options = parser("x86-grouped", __doc__.split("\n", 1)[0])
    options.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each measurement (default {ROUNDS})")
    options.add_argument("--dtype", choices=list(DTYPES), nargs="*", default=list(DTYPES))
    options.add_argument("--threads", type=int, help="threads of both (default: torch's)")
    options = options.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    report = Report("x86-grouped", "measured on CPU")
    with torch.inference_mode():
        for dtype in options.dtype:
            ratios = []
            for form, groups, tokens, kind in cases():
                row = one(dtype, form, groups, tokens, kind, options.rounds)
                report.row(**row)
                ratios.append(row["ratio"])
            report.bar(f"{dtype} geomean over torch._grouped_mm", geomean(ratios), at_least=BAR)
            report.bar(f"{dtype} least ratio", min(ratios))
    report.note(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}. (N, K) = {WEIGHT}; forms: m ragged rows x "
        "weights, n weights x ragged columns, k the weight's gradient, batch 3-D x 3-D. us: medians of paired rounds."
    )
    return report.close(options.json)


def cases():
    """(form, groups, rows of a group, set of sizes)"""
    for groups, tokens in FORWARD:
        for kind in SHARES:
            yield "m", groups, tokens, kind
    for form in OTHER_FORMS:
        yield form, 8, 128, "balanced" if form == "batch" else "zipf"


def tensors(dtype: torch.dtype, form: str, groups: int, tokens: int, kind: str):
    """(A, B, offs) as an MoE layer has them: weights are (G, N, K), activations row-major."""
    n, k = WEIGHT
    total = groups * tokens
    draw = lambda *shape: torch.randn(*shape).to(dtype)
    offs = torch.tensor(np.cumsum(sizes_of(groups, tokens, kind)), dtype=torch.int32)
    if form == "m":
        return draw(total, k), draw(groups, n, k).transpose(-2, -1), offs
    if form == "n":
        return draw(groups, n, k), draw(total, k).t(), offs
    if form == "k":
        return draw(total, k).t(), draw(total, n), offs
    return draw(groups, tokens, k), draw(groups, n, k).transpose(-2, -1), None


def one(dtype: str, form: str, groups: int, tokens: int, kind: str, rounds: int) -> dict:
    """One row of the table."""
    a, b, offs = tensors(DTYPES[dtype], form, groups, tokens, kind)
    p, threads = problem_of(a, b, offs), torch.get_num_threads()
    theirs = Entry("ATen", lambda: torch._grouped_mm(a, b, offs=offs))
    given = None if offs is None else offs.numpy()
    wide = [x.double().numpy() for x in (a, b)]
    exact, allowed = reference(p, *wide, given), tolerance(p, *wide, given)
    entries = [ours(p, c.config, a, b, offs, exact, allowed) for c in candidates(p, x86, threads).kept]
    trial = measure(entries, max(5, rounds // 2))
    best = min(entries, key=lambda e: statistics.median(trial[e.name]))
    final = measure([theirs, best], rounds)
    us = {name: statistics.median(times) * 1e6 for name, times in final.items()}
    return {
        "dtype": dtype, "form": form, "groups": groups, "tokens": tokens, "set": kind, "aten_us": us["ATen"],
        "ours_us": us[best.name],
        "ratio": statistics.median(t / o for t, o in zip(final["ATen"], final[best.name], strict=True)),
        "kernel": best.name,
    }  # fmt: skip


def ours(p, config, a, b, offs, exact, allowed: float) -> Entry:
    """One of our kernels, checked once against f64."""
    kernel = host.load(build(p, config, x86))
    out = torch.empty(exact.shape, dtype=a.dtype)
    given = {"a": a, "b": b, "offs": offs, "c": out}
    scalars, launch = scalar_values(p, a, b, out), kernel.launcher(config.threads)
    call = lambda: launch(*(given[x].data_ptr() for x in pointers(p)), *scalars)
    call()
    error = np.nanmax(np.abs(out.double().numpy() - exact))
    if not error <= allowed:
        raise AssertionError(f"{p} {config}: error {error:.2g}")
    how = f"{config.family} {config.rows}x{config.columns} k{config.k_block} tile {config.tile_m}x{config.tile_n}"
    return Entry(f"{how} t{config.threads}", call, True)
