"""TopK beside torch.topk: random data over the suite, and data made to be hard.

On the CPU both are called in turn, in pairs, in one process; on the H200 by graph replay. Ratios are torch's time over
ours; every result is compared with a reference first.
"""

from __future__ import annotations

import torch

from bench._topk_data import ADVERSARIAL, DTYPES, data, suite
from bench.common import Report, geomean, parser
from templates.topk.problem import TopKProblem
from templates.topk.space import configurations

LIMITS = {"cpu": 1 << 30, "cuda": 9 << 30}  # bytes of an input
HARD = ((1, 1000000, 100), (16, 32000, 50), (256, 8192, 8), (4096, 128, 6))  # shapes for adversarial data
BARS = {"cpu": (2.0, 0.95, 0.9), "cuda": (8.0, 2.0, 1.0)}  # geomean, least on random data, least on adversarial data


def main(argv: list[str]) -> int:
    """Measures, prints and judges; 0 if the bars are met."""
    options = parser("topk", __doc__.split("\n", 1)[0])
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--dtype", choices=list(DTYPES), nargs="*", default=list(DTYPES))
    options.add_argument("--threads", type=int, help="threads of both, on the CPU (default: torch's)")
    options.add_argument("--rows", type=int, nargs="*", help="only these numbers of rows")
    options = options.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("topk: --device cuda needs a GPU that torch can use")
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    where = "measured on H200" if options.device == "cuda" else "measured on CPU"
    report, random, hard = Report("topk", where), [], []
    compare = _cuda if options.device == "cuda" else _cpu
    mean, least, least_hard = BARS[options.device]
    with torch.inference_mode():
        for dtype in options.dtype:
            shapes = suite(LIMITS[options.device], DTYPES[dtype].itemsize)
            shapes = [s for s in shapes if not options.rows or s[0] in options.rows]
            mine = [compare(report, "random", dtype, *shape) for shape in shapes]
            random += mine
            report.bar(f"{dtype} geomean over torch.topk, random data", geomean(mine), at_least=mean)
            hard += [compare(report, kind, dtype, *s) for s in HARD if s in shapes for kind in ADVERSARIAL]
    report.bar("least ratio on random data", min(random), at_least=least)
    if hard:
        report.bar("least ratio on adversarial data", min(hard), at_least=least_hard)
    how = "by graph replay" if options.device == "cuda" else f"in turn, {torch.get_num_threads()} threads"
    report.note(f"us a call, medians, {how}; torch {torch.__version__}. Every result was right, indices included.")
    return report.close(options.json)


def _row(report: Report, kind: str, dtype: str, p: TopKProblem, config, ours: float, theirs: float) -> float:
    report.row(
        dtype=dtype, data=kind, rows=p.rows, N=p.width, k=p.k, torch_us=theirs, ours_us=ours, ratio=theirs / ours,
        kernel=f"{config.family} {config.workgroup_size}x{config.elements} parts {config.parts}",
    )  # fmt: skip
    return theirs / ours


def _cuda(report: Report, kind: str, dtype: str, rows: int, n: int, k: int) -> float:
    from bench import _topk_cuda as cuda
    from flykernels.targets import sm90a

    p, x = TopKProblem(rows, n, k, dtype), data(kind, rows, n, DTYPES[dtype], "cuda")
    config = configurations(p, sm90a).kept[0].config
    if not cuda.right(p, config, x):
        raise AssertionError(f"{p} {config} on {kind} data: a wrong result")
    ours, theirs = cuda.measure(x, p, [config])
    return _row(report, kind, dtype, p, config, ours, theirs)


def _cpu(report: Report, kind: str, dtype: str, rows: int, n: int, k: int) -> float:
    from bench import _topk_cpu as cpu
    from flykernels.targets import x86

    p, x = TopKProblem(rows, n, k, dtype), data(kind, rows, n, DTYPES[dtype], "cpu")
    config = configurations(p, x86, torch.get_num_threads()).kept[0].config
    ours, theirs, ratio = cpu.measure(x, p, config)
    _row(report, kind, dtype, p, config, ours, theirs)
    return ratio
