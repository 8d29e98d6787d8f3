"""FP8 products of one scale a matrix or a row on an H200: our kernels beside ATen's torch._scaled_mm.

Kernels are called directly; every candidate is compiled first, in processes of its own, checked and timed. Compiled
code takes ATen's where that is the faster ("either"): a ratio under 1 costs a user nothing but the tuning.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from flykernels.codeobject import CodeObject
from flykernels.targets import sm90a
from templates.scaled_gemm.arguments import pointers, scalar_values
from templates.scaled_gemm.build import build
from templates.scaled_gemm.problem import ScaledGemmProblem
from templates.scaled_gemm.space import candidates

from .common import Report, geomean, parser

SHAPES = (  # (M, N, K): a decoder's layers, #133334 of PyTorch, a large cube
    (16, 4096, 4096), (128, 14336, 4096), (1024, 4096, 14336), (2048, 4096, 4096), (8352, 1536, 4096),
    (8192, 8192, 8192),
)  # fmt: skip
SCALINGS, SUMS = ("row", "tensor"), {"promoted": False, "fast": True}
# C is rounded to bf16: 2^-9 of each element at most, 2^-10 in the mean; fast sums have about 14 bits besides.
ERROR_MOST = 2e-3


def problem(m: int, n: int, k: int, scaling: str, fast: bool) -> ScaledGemmProblem:
    return ScaledGemmProblem(n, k, scaling=scaling, m_hint=m, fast_accum=fast)


def made(p: ScaledGemmProblem, config: Any) -> bytes:
    """A candidate's code object, as bytes: what processes hand over."""
    return build(p, config, sm90a).to_bytes()


def operands(m: int, n: int, k: int, scaling: str) -> dict[str, Any]:
    """Tensors by the kernel's argument names, b as (K, N)."""
    import torch

    codes = lambda rows: torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn)
    scale = lambda *shape: torch.rand(shape if scaling == "row" else (), device="cuda") + 0.5
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return {"a": codes(m), "b": codes(n).t(), "scale_a": scale(m, 1), "scale_b": scale(1, n), "c": c}


def main(argv: list[str]) -> int:
    """Measures and prints; 0 if every kernel that was timed is right."""
    options = parser("h200-scaled", (__doc__ or "").split("\n", 1)[0])
    options.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2), help="processes")
    options.add_argument("--most", type=int, default=3, help="candidates of a problem: the first guesses (default: 3)")
    given = options.parse_args(argv)
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("bench h200-scaled: needs an H100 or H200 and a torch built for CUDA", file=sys.stderr)
        return 2
    report, ratios, worst = Report("h200-scaled", "measured on H200"), [], 0.0
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        coming = {}
        for shape in SHAPES:
            for scaling in SCALINGS:
                for sums, fast in SUMS.items():
                    p = problem(*shape, scaling, fast)
                    kept = [c.config for c in candidates(p, sm90a).kept[: given.most]]
                    coming[shape, scaling, sums] = [(config, pool.submit(made, p, config)) for config in kept]
        for shape in SHAPES:
            for scaling in SCALINGS:
                tensors = operands(*shape, scaling)
                for sums in SUMS:
                    codes = [(c, CodeObject.from_bytes(f.result())) for c, f in coming[shape, scaling, sums]]
                    row, error = timed(shape, scaling, sums, tensors, codes)
                    ratios.append(row["ratio"])
                    worst = max(worst, error)
                    report.row(**row)
                    print(*row.values(), file=sys.stderr, flush=True)
                    if given.json is not None:  # kept as it comes
                        given.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    report.bar("largest relative error of a kernel, Frobenius norm", worst, at_most=ERROR_MOST)
    report.bar("ATen's time over our fastest kernel's, geomean", geomean(ratios))
    report.bar("the faster of both, as compiled code takes it, geomean", geomean(max(1.0, r) for r in ratios))
    report.note("Graphs of several calls, replayed in turn: the mean of operands cold and hot in L2. C is bf16")
    return report.close(given.json)


def timed(shape, scaling: str, sums: str, tensors: dict, codes: list) -> tuple[dict, float]:
    """(a row of figures, the largest error of ours) of one problem."""
    import torch

    from flykernels.launch.current import Launcher
    from inductor_plugin.gpu_timing import in_turns

    m, n, k = shape
    fast = SUMS[sums]
    names = pointers(problem(m, n, k, scaling, fast))
    exact = exact_of(tensors)
    worst = 0.0

    def ours(code: CodeObject):
        launch = Launcher(code)

        def calls(count: int):
            made = []
            for _ in range(count):
                mine = copy_of(tensors)
                given = [mine[x].data_ptr() for x in names] + list(scalar_values(mine["a"], mine["b"], mine["c"]))
                made.append(lambda given=given, mine=mine: launch(*given))
            return made

        return calls

    def theirs(count: int):
        made = []
        for _ in range(count):
            t = copy_of(tensors)
            made.append(
                lambda t=t: torch._scaled_mm(
                    t["a"], t["b"], t["scale_a"], t["scale_b"], out_dtype=torch.bfloat16, use_fast_accum=fast
                )
            )
        return made

    for _, code in codes:
        tensors["c"].fill_(float("nan"))
        launch = Launcher(code)
        launch(*(tensors[x].data_ptr() for x in names), *scalar_values(tensors["a"], tensors["b"], tensors["c"]))
        error = ((tensors["c"].double() - exact).norm() / exact.norm()).item()
        worst = max(worst, error if error == error else float("inf"))
    size = sum(t.nbytes for t in tensors.values())
    times = [t.mean * 1e3 for t in in_turns([theirs, *(ours(code) for _, code in codes)], size)]
    best = min(range(1, len(times)), key=times.__getitem__)
    row = {
        "shape": f"{m}x{n}x{k}", "scales": scaling, "sums": sums, "ATen_us": times[0], "ours_us": times[best],
        "ratio": times[0] / times[best], "first_guess_us": times[1], "TFLOPs": 2e-6 * m * n * k / times[best],
        "ours": str(codes[best - 1][0]),
    }  # fmt: skip
    return row, worst


def copy_of(tensors: dict) -> dict:
    return {name: t.t().clone().t() if name == "b" else t.clone() for name, t in tensors.items()}


def exact_of(tensors: dict):
    a, b = tensors["a"].double() * tensors["scale_a"].double(), tensors["b"].double() * tensors["scale_b"].double()
    return a @ b
