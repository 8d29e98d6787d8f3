"""F.grouped_mm in compiled functions on an H200: all forms, gradients against float64, beside Triton, captured."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inductor_plugin import measure
from inductor_plugin.counters import counters
from tests.plugin.conftest import compile_with, ours_ran, own_caches, run_and_get_code  # noqa: F401  # a fixture
from tests.plugin.grouped_case import assert_right

BF16 = torch.bfloat16
SPLITS = {"uneven": (8, 0, 40, 16, 0, 104), "odd": (1, 0, 37, 5, 0, 13), "one": (0, 0, 0, 40, 0, 0)}


@pytest.fixture(autouse=True)
def prefer_ours(monkeypatch):
    monkeypatch.setattr(measure, "INERTIA", -0.999)
    yield
    torch.cuda.synchronize()


def rand(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=BF16)


def offs_of(sizes) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(device="cuda", dtype=torch.int32)


OPERANDS = {
    "m": lambda t: (rand(t, 256), rand(6, 256, 192)),
    "m, the usual weight": lambda t: (rand(t, 256), rand(6, 192, 256).transpose(-2, -1)),
    "n": lambda t: (rand(6, 64, 256), rand(256, -(-t // 8) * 8)),
    "k": lambda t: (rand(t, 64).t(), rand(t, 192)),
}


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("form", OPERANDS)
def test_forms(form, sizes):
    a, b = OPERANDS[form](sum(sizes) + 3)
    offs = offs_of(sizes)
    got, code = run_and_get_code(compile_with(lambda a, b, offs: F.grouped_mm(a, b, offs=offs)), a, b, offs)
    assert ours_ran(code)
    assert_right(got, a, b, offs)


def test_batches():
    a, b = rand(3, 72, 128), rand(3, 136, 128).transpose(-2, -1)
    got, code = run_and_get_code(compile_with(lambda a, b: F.grouped_mm(a, b)), a, b)
    assert ours_ran(code)
    assert_right(got, a, b)


def moe(x, w, offs):
    return F.grouped_mm(x, w.transpose(-2, -1), offs=offs)


def forward_and_backward(function, x, w, offs, dy):
    y = function(x, w, offs)
    y.backward(dy)
    return y


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("groups", [6, 64])
def test_gradients_are_those_of_float64(sizes, groups):
    """Of an expert without tokens exactly zero (pytorch #172439)."""
    sizes = (*sizes, *(0,) * (groups - 6))
    x, w, dy, offs = rand(sum(sizes), 256), rand(groups, 192, 256), rand(sum(sizes), 192), offs_of(sizes)
    x, w = x.requires_grad_(), w.requires_grad_()
    y, code = run_and_get_code(lambda: forward_and_backward(compile_with(moe), x, w, offs, dy))
    assert code.count("flykernels_bind(") >= 3
    with torch.no_grad():
        assert_right(y, x, w.transpose(-2, -1), offs)
        assert_right(x.grad, dy, w, offs)
        assert_right(w.grad, dy.t(), x, offs)
        assert not w.grad[[i for i, n in enumerate(sizes) if n == 0]].any()


def test_any_number_of_tokens():
    function, w = compile_with(moe), rand(6, 192, 256)
    for sizes in ((3, 4, 5, 6, 7, 8), (1, 0, 30, 2, 2, 2), (100, 0, 0, 0, 1, 20)):
        x, offs = rand(sum(sizes), 256), offs_of(sizes)
        torch._dynamo.mark_dynamic(x, 0)
        assert_right(function(x, w, offs), x, w.transpose(-2, -1), offs)


def test_beside_triton_in_cuda_graphs(monkeypatch):
    """All candidates are measured on groups that are alike, whatever offs a benchmark would make up."""
    monkeypatch.setattr(measure, "INERTIA", 0.02)
    function = compile_with(moe, max_autotune_gemm_backends="ATEN,TRITON,FLYKERNELS", **{"triton.cudagraphs": True})
    w = rand(8, 256, 512)
    for sizes in ((16,) * 8, (100, 0, 0, 0, 0, 28, 0, 0)):
        x, offs = rand(128, 512), offs_of(sizes)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert_right(function(x, w, offs), x, w.transpose(-2, -1), offs)
    assert counters["benchmarks"] > 0


def test_offs_that_are_nonsense_stay_within_the_operands():
    """ATen asserts on the device, which ends the process; ours has no way to ask, and cuts them to what there is."""
    x, w = rand(64, 256), rand(3, 192, 256)
    function = compile_with(moe)
    assert_right(function(x, w, offs_of((20, 20, 24))), x, w.transpose(-2, -1), offs_of((20, 20, 24)))
    got = function(x, w, torch.tensor((30, 10, 900), dtype=torch.int32, device="cuda"))
    assert_right(got, x, w.transpose(-2, -1), torch.tensor((30, 30, 64)))
