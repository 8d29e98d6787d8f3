"""The language's small kernels, compiled for sm_90a and run: one source, a third target."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
import torch

from flykernels.lang import f32, trace
from flykernels.launch.current import Launcher
from flykernels.targets import sm90a
from tests.lang.kernels.direct_gemm import DirectConfig, direct_gemm
from tests.lang.kernels.rows import RowsConfig, RowsProblem, choose
from tests.lang.kernels.softmax import softmax

GUARD = 512  # elements before and after a result, which nobody may touch


def guarded(rows: int, columns: int, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole, result): a (rows, columns) result of NaN inside a guard zone of NaN."""
    whole = torch.full((2 * GUARD + rows * columns,), float("nan"), device="cuda", dtype=dtype)
    return whole, whole[GUARD : GUARD + rows * columns].view(rows, columns)


def check(whole, result, expected, depth: int, eps: float) -> None:
    torch.cuda.synchronize()
    assert torch.isnan(whole[:GUARD]).all() and torch.isnan(whole[-GUARD:]).all(), "written outside the result"
    error = (result.double() - expected).abs()
    bound = eps * expected.abs() + depth * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (error <= bound).all(), f"{error.max().item():.3g}"


@pytest.mark.parametrize("rows, n", [(1, 1), (3, 33), (64, 4096), (9, 5000)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0])
def test_softmax(rows, n, scale):
    p = RowsProblem(n, f32)
    code = sm90a.compile(trace(softmax, sm90a, p, choose(p, sm90a)))
    x = torch.randn(rows, n, device="cuda") * scale
    whole, y = guarded(rows, n, x.dtype)
    Launcher(code)(x.data_ptr(), y.data_ptr(), rows)
    # exp2 and the reciprocal are the hardware's: 2 ulp each, and an exponent's rounding grows with it
    check(whole, y, x.double().softmax(-1), 8 + ceil(4 * scale), 16 * (1 + scale) * torch.finfo(x.dtype).eps)


def test_a_streamed_row():
    code = sm90a.compile(trace(softmax, sm90a, RowsProblem(4000, f32), RowsConfig(128, 2, 4, streamed=True)))
    x = torch.randn(33, 4000, device="cuda")
    whole, y = guarded(33, 4000, x.dtype)
    Launcher(code)(x.data_ptr(), y.data_ptr(), 33)
    check(whole, y, x.double().softmax(-1), 80, 32 * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("m, n, depth", [(128, 128, 256), (100, 72, 64), (1, 8, 32), (300, 1000, 4096)])
@pytest.mark.parametrize("form", ["cubin", "PTX"])
def test_direct_gemm(m, n, depth, form):
    code = sm90a.compile(trace(direct_gemm, sm90a, (n, depth), DirectConfig((2, 2), (4, 8), 32)))
    code = code if form == "cubin" else replace(code, binary=code.text.encode())
    a, b = (torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    whole, c = guarded(m, n, a.dtype)
    Launcher(code)(a.data_ptr(), b.data_ptr(), c.data_ptr(), m)
    check(whole, c, a.double() @ b.double().t(), depth, torch.finfo(a.dtype).eps)
