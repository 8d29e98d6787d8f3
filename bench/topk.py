"""TopK beside torch.topk: random data over the suite, and data made to be hard.

torch.topk is called with eager operators of ours on and off, in turn, in one process; on the H200 by graph replay,
which shows the kernels, and in rows of plain calls, which show the call. `--call direct` leaves the dispatcher out: the
first configuration's kernel. `--large-k` is another suite, k from 256 to 4096. Ratios are torch's time over ours; every
result is compared with a reference first.
"""

from __future__ import annotations

from typing import Any

import torch

from bench._topk_data import ADVERSARIAL, DTYPES, OTHER_DIMENSIONS, data, large_k, suite
from bench.common import Report, geomean, parser
from templates.topk.problem import TopKProblem
from templates.topk.space import configurations

LIMITS = {"cpu": 1 << 30, "cuda": 9 << 30}  # bytes of an input
HARD_LARGE = ((1, 8192, 4096), (256, 8192, 4096), (16, 32000, 1000), (1, 128256, 2048), (1, 1000000, 1000))
HARD = ((1, 1000000, 100), (16, 32000, 50), (256, 8192, 8), (4096, 128, 6))  # shapes for adversarial data
PLAIN = 0.95  # of plain calls on a GPU, the least
SAME = 0.97  # least ratio of what may be ATen's
BARS = {"cpu": (2.0, 0.95, 0.9), "cuda": (8.0, 2.0, 1.0)}  # geomean, least on random data, least on adversarial data


def main(argv: list[str]) -> int:
    """Measures, prints and judges; 0 if the bars are met."""
    options = parser("topk", __doc__.split("\n", 1)[0])
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--dtype", choices=list(DTYPES), nargs="*", default=list(DTYPES))
    options.add_argument("--threads", type=int, help="threads of both, on the CPU (default: torch's)")
    options.add_argument("--rows", type=int, nargs="*", help="only these numbers of rows")
    options.add_argument("--call", choices=("eager", "direct"), default="eager")
    options.add_argument("--large-k", action="store_true", help="k from 256 to 4096 in place of the suite")
    options = options.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("topk: --device cuda needs a GPU that torch can use")
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    where = "measured on H200" if options.device == "cuda" else "measured on CPU"
    report, random, hard, plain = Report("topk", where), [], [], []
    if options.call == "eager":
        compare = _eager
    else:
        compare = _cuda if options.device == "cuda" else _cpu
    mean, least, least_hard = BARS[options.device]
    hard_shapes = HARD_LARGE if options.large_k else HARD
    with torch.inference_mode():
        for dtype in options.dtype:
            given = large_k() if options.large_k else suite(LIMITS[options.device], DTYPES[dtype].itemsize)
            shapes = [s for s in given if not options.rows or s[0] in options.rows]
            measured = [compare(report, "random", dtype, *shape, options.device) for shape in shapes]
            ratios = [row["ratio"] for row in measured]
            random += ratios
            plain += [row["plain_ratio"] for row in measured if "plain_ratio" in row]
            bar = None if options.large_k else mean
            report.bar(f"{dtype} geomean over torch.topk, random data", geomean(ratios), at_least=bar)
            hard += [
                compare(report, kind, dtype, *s, options.device)["ratio"]
                for s in hard_shapes
                if s in shapes
                for kind in ADVERSARIAL
            ]
        if options.call == "eager" and options.device == "cpu" and not options.large_k:
            report.bar("other dimensions than the last, least", _dimensions(report, options.dtype), at_least=least)
    if options.large_k:  # beyond the suite: calls that a measurement left to ATen are as fast as ATen's, but for noise
        least = least_hard = SAME if options.call == "eager" else None
    report.bar("least ratio on random data", min(random), at_least=least)
    if hard:
        report.bar("least ratio on adversarial data", min(hard), at_least=least_hard)
    if plain:
        report.bar("least ratio of plain calls, random data", min(plain), at_least=PLAIN)
    how = "graph replay and plain calls" if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    report.note(
        f"us a call, medians; {options.call} calls; {how}; torch {torch.__version__}. "
        "Every result was right, indices included."
    )
    return report.close(options.json)


def _eager(report: Report, kind: str, dtype: str, rows: int, n: int, k: int, device: str) -> dict[str, Any]:
    from bench import _topk_eager

    row = _topk_eager.measure(data(kind, rows, n, DTYPES[dtype], device), k)
    report.row(dtype=dtype, data=kind, rows=rows, N=n, k=k, **row)
    return row


def _dimensions(report: Report, dtypes: list[str]) -> float:
    """The least ratio along other dimensions."""
    from bench import _topk_eager

    ratios = []
    for dtype in dtypes:
        for shape, k, dim in OTHER_DIMENSIONS:
            row = _topk_eager.measure(torch.randn(shape).to(DTYPES[dtype]), k, dim)
            report.row(dtype=dtype, data=f"{list(shape)}, dim {dim}", rows=0, N=shape[dim], k=k, **row)
            ratios.append(row["ratio"])
    return min(ratios)


def _row(report: Report, kind: str, dtype: str, p: TopKProblem, config, ours: float, theirs: float, ratio: float):
    row = {"torch_us": theirs, "ours_us": ours, "ratio": ratio}
    kernel = f"{config.family} {config.workgroup_size}x{config.elements} parts {config.parts}"
    report.row(dtype=dtype, data=kind, rows=p.rows, N=p.width, k=p.k, **row, kernel=kernel)
    return row


def _cuda(report: Report, kind: str, dtype: str, rows: int, n: int, k: int, device: str) -> dict[str, Any]:
    from bench import _topk_cuda as cuda
    from flykernels.targets import sm90a

    p, x = TopKProblem(rows, n, k, dtype), data(kind, rows, n, DTYPES[dtype], "cuda")
    config = configurations(p, sm90a).kept[0].config
    if not cuda.right(p, config, x):
        raise AssertionError(f"{p} {config} on {kind} data: a wrong result")
    ours, theirs = cuda.measure(x, p, [config])
    return _row(report, kind, dtype, p, config, ours, theirs, theirs / ours)


def _cpu(report: Report, kind: str, dtype: str, rows: int, n: int, k: int, device: str) -> dict[str, Any]:
    from bench import _topk_cpu as cpu
    from flykernels.targets import x86

    p, x = TopKProblem(rows, n, k, dtype), data(kind, rows, n, DTYPES[dtype], "cpu")
    config = configurations(p, x86, torch.get_num_threads()).kept[0].config
    ours, theirs, ratio = cpu.measure(x, p, config)
    return _row(report, kind, dtype, p, config, ours, theirs, ratio)
