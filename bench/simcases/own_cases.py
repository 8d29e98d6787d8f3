"""Acceptance cases from this project: the staged GEMM template and the half-tile-interleaved kernel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flykernels.lang import trace
from flykernels.targets import gfx950

from .case import STEP, Case, bf16, excess, from_bf16
from .hti import HtiConfig, HtiProblem, gemm_hti


def hti(M: int = 256, N: int = 256, K: int = 512) -> Case:
    """The half-tile-interleaved GEMM on whole tiles."""
    code = gfx950.compile(trace(gemm_hti, gfx950, HtiProblem(M, N, K), HtiConfig()))
    r = np.random.default_rng(10)
    a, b = bf16(r.standard_normal((M, K))), bf16(r.standard_normal((N, K)))
    x, y = from_bf16(a), from_bf16(b)
    exact, scale = x @ y.T, np.abs(x) @ np.abs(y).T
    arguments = lambda: [a.copy(), b.copy(), np.full((M, N), 0x7FC1, np.uint16)]
    wrong = lambda got: excess(from_bf16(got[2]), exact, scale, K, STEP["bf16"])
    grid = (M // 256, N // 256, 1)
    return Case(f"ours HTI {M}x{N}x{K}", code.text, code.binary, grid, arguments, wrong)


def staged(M: int = 200, N: int = 136, K: int = 320, layout_b: str = "row") -> Case:
    """The staged GEMM template with tails in M, N and K; B (K, N) by rows (transposing LDS reads) or by columns."""
    from templates.gemm.arguments import pointers, scalars
    from templates.gemm.build import build
    from templates.gemm.gfx950_config import Gfx950Config
    from templates.gemm.problem import GemmProblem

    p = GemmProblem(n=N, k=K, dtype="bf16", out_dtype="bf16", a="row", b=layout_b)
    code = build(p, Gfx950Config(), gfx950)
    r = np.random.default_rng(11)
    a, b = bf16(r.standard_normal((M, K))), bf16(r.standard_normal((K, N)))
    x, y = from_bf16(a), from_bf16(b)
    exact, scale = x @ y, np.abs(x) @ np.abs(y)
    stored = b if layout_b == "row" else np.ascontiguousarray(b.T)
    strides = {"a_row": K, "a_col": 1, "b_row": N if layout_b == "row" else 1, "b_col": 1 if layout_b == "row" else K}
    strides |= {"c_row": N, "c_col": 1, "m": M, "batch": 1, "a_batch": 0, "b_batch": 0, "c_batch": 0}
    values = [np.int64(strides[n]) for n in scalars(p)]
    place = {"a": a, "b": stored}

    def arguments():
        c = np.full((M, N), 0x7FC1, np.uint16)
        return [c if n == "c" else place[n].copy() for n in pointers(p)] + values

    wrong = lambda got: excess(from_bf16(got[pointers(p).index("c")]), exact, scale, K, STEP["bf16"])
    grid = (*code.grid_for(strides), 1, 1)[:3]
    return Case(f"ours staged GEMM {M}x{N}x{K} B by {layout_b}", code.text, code.binary, grid, arguments, wrong)


def cases() -> Iterator[Case]:
    yield hti()
    yield staged()
    yield staged(layout_b="col")
