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


def cases() -> Iterator[Case]:
    yield hti()
