"""F.grouped_mm in compiled functions: our candidates beside ATen's, all four forms, gradients, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inductor_plugin import grouped, kernels
from templates.grouped_gemm.arguments import problem_of
from templates.grouped_gemm.space import candidates

from .conftest import compile_with, ours_ran, run_and_get_code
from .grouped_case import assert_right

pytestmark = pytest.mark.usefixtures("prefer_ours")
BF16 = torch.bfloat16
SPLITS = {
    "uneven": (1, 0, 37, 5, 0, 13),
    "one": (0, 0, 0, 40, 0, 0),
    "single rows": (1, 1, 1, 1, 1, 1),
    "empty": (0, 0, 0, 0, 0, 0),
}


def rand(*size: int, dtype=BF16) -> torch.Tensor:
    return torch.randn(size, dtype=dtype)


def offs_of(sizes) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


TOKENS = 64  # some of which no group has
OPERANDS = {
    "m": (rand(TOKENS, 64), rand(6, 64, 48)),
    "m, the usual weight": (rand(TOKENS, 64), rand(6, 48, 64).transpose(-2, -1)),
    "n": (rand(6, 24, 64), rand(64, TOKENS)),
    "k": (rand(TOKENS, 24).t(), rand(TOKENS, 48)),
}


@pytest.mark.parametrize("form", OPERANDS)
def test_forms(form):
    """Compiled once, for groups of any size. Of an empty group's product over tokens there are zeros."""
    a, b = OPERANDS[form]
    function = compile_with(lambda a, b, offs: F.grouped_mm(a, b, offs=offs))
    _, code = run_and_get_code(function, a, b, offs_of(SPLITS["uneven"]))
    assert ours_ran(code)
    for sizes in SPLITS.values():
        offs = offs_of(sizes)
        got = function(a, b, offs)
        assert_right(got, a, b, offs)
        if form == "k":
            assert not got[[i for i, n in enumerate(sizes) if n == 0]].any()


def test_batches():
    a, b = rand(3, 16, 32), rand(3, 40, 32).transpose(-2, -1)
    got, code = run_and_get_code(compile_with(lambda a, b: F.grouped_mm(a, b)), a, b)
    assert ours_ran(code)
    assert_right(got, a, b)


def moe(x, w, offs):
    return F.grouped_mm(x, w.transpose(-2, -1), offs=offs)


def test_gradients_are_those_of_float64():
    """Of an expert without tokens exactly zero (pytorch #172439). What no group owns is NaN, and taints nothing."""
    function, code = compile_with(moe), ""
    for sizes in SPLITS.values():
        x, w, dy, offs = rand(TOKENS, 64), rand(6, 48, 64), rand(TOKENS, 48), offs_of(sizes)
        x[sum(sizes) :], dy[sum(sizes) :] = float("nan"), float("nan")
        x, w = x.requires_grad_(), w.requires_grad_()
        if not code:
            _, code = run_and_get_code(lambda x=x, w=w, offs=offs, dy=dy: with_backward(function, x, w, offs, dy))
            x.grad = w.grad = None
        y = with_backward(function, x, w, offs, dy)
        with torch.no_grad():
            assert_right(y, x, w.transpose(-2, -1), offs)
            assert_right(x.grad, dy, w, offs)
            assert_right(w.grad, dy.t(), x, offs)
            assert not w.grad[[i for i, n in enumerate(sizes) if n == 0]].any()
    assert code.count("= flykernels_bind(") == 3  # forward, and both gradients


def with_backward(function, x, w, offs, dy):
    y = function(x, w, offs)
    y.backward(dy)
    return y


def test_one_kernel_for_every_number_of_tokens():
    function = compile_with(moe)
    w = rand(6, 48, 64)
    for sizes in ((3, 4, 5, 6, 7, 8), (1, 0, 30, 2, 2, 2), (100, 0, 0, 0, 1, 20)):
        x, offs = rand(sum(sizes), 64), offs_of(sizes)
        torch._dynamo.mark_dynamic(x, 0)
        got, code = run_and_get_code(function, x, w, offs)
        assert_right(got, x, w.transpose(-2, -1), offs)
    assert ours_ran(code) or not code  # compiled once: nothing new after the first


def test_offs_that_are_nonsense_get_what_aten_makes_of_them(log):
    x, w, function = rand(10, 64), rand(3, 48, 64), compile_with(moe)
    _, code = run_and_get_code(function, x, w, offs_of((3, 3, 4)))
    assert ours_ran(code) and "ATen" not in log.text.split("candidates")[-1]
    for count, ends in enumerate(((5, 3, 10), (-1, 3, 10), (3, 3, 12)), 1):
        offs = torch.tensor(ends, dtype=torch.int32)
        assert torch.equal(function(x, w, offs), moe(x, w, offs))
        assert log.text.count("ATen serves this call") == count


@pytest.mark.parametrize(
    "a, b, offs",
    [
        (rand(10, 64), rand(3, 64, 48), torch.tensor([3, 5, 10])),  # i64
        (rand(10, 64), rand(3, 64, 48), None),
        (rand(10, 64), rand(3, 64, 48), torch.tensor([3, 10], dtype=torch.int32)),
        (rand(3, 10, 64), rand(3, 64, 48), torch.tensor([3, 5, 10], dtype=torch.int32)),
        (rand(224, 0), rand(4, 0, 256), torch.tensor([1, 2, 3, 224], dtype=torch.int32)),  # pytorch #192497
        (rand(10, 63), rand(3, 63, 48), torch.tensor([3, 5, 10], dtype=torch.int32)),
    ],
    ids=["offs of i64", "no offs", "too few groups", "offs of batches", "K = 0", "unaligned rows"],
)
def test_what_aten_refuses_is_refused_alike(a, b, offs):
    function = lambda a, b, offs: F.grouped_mm(a, b, offs=offs)
    with pytest.raises(Exception) as without:
        torch.compile(function)(a, b, offs)
    torch._dynamo.reset()
    with pytest.raises(type(without.value)) as with_us:
        compile_with(function)(a, b, offs)
    reason = lambda e: str(e.value).splitlines()[0][:60]
    assert reason(with_us) == reason(without)


def test_no_groups():
    a, b, offs = rand(10, 64), rand(0, 64, 48), torch.zeros(0, dtype=torch.int32)
    got, code = run_and_get_code(compile_with(lambda a, b, offs: F.grouped_mm(a, b, offs=offs)), a, b, offs)
    assert not ours_ran(code) and got.shape == (10, 48)


def test_reported_sizes():
    """pytorch #158042: 2-D by 2-D, A (512, 16512) column-major, 8 groups; smaller here, and torchtitan #1237's tail."""
    a, b, offs = rand(1032, 64).t(), rand(1032, 32), offs_of((129,) * 8)
    got, code = run_and_get_code(compile_with(lambda a, b, offs: F.grouped_mm(a, b, offs=offs)), a, b, offs)
    assert ours_ran(code)
    assert_right(got, a, b, offs)
    x, w = rand(40, 64), rand(3, 48, 64)
    x[30:] = float("nan")
    got = compile_with(moe)(x, w, offs_of((10, 0, 20)))
    assert_right(got[:30], x[:30], w.transpose(-2, -1), offs_of((10, 0, 20)))
    assert got[:30].isfinite().all()


def bound(a, b, offs):
    from flykernels.targets import x86

    p = problem_of(a, b, offs)
    return kernels.callable_for(kernels.Spec(grouped.OP, "x86", p, candidates(p, x86).kept[0].config.key()))


def test_operands_that_do_not_lie_as_built(log):
    a, b, offs = rand(20, 64), rand(3, 48, 64).transpose(-2, -1), offs_of((5, 0, 15))
    call, out = bound(a, b, offs), torch.empty(20, 48, dtype=BF16)
    assert_right(call(a, b, offs, out=out), a, b, offs)
    assert "ATen" not in log.text
    assert_right(call(a, b.contiguous(), offs, out=out), a, b, offs)
    assert "ATen serves this call" in log.text


def test_benchmarks_share_rows_out_in_several_ways():
    a, b, offs = rand(100, 64), rand(3, 48, 64).transpose(-2, -1), torch.tensor([7, -3, 1000], dtype=torch.int32)
    p = problem_of(a, b, offs)
    ends = []
    for variant in range(grouped.variants(p)):
        x, _, made = grouped.sane(p, (a, b, offs), variant)
        parts = list(grouped.products(p, (a, b, made), torch.zeros(100, 48)))
        assert x is a and sum(x.shape[0] for _, (x, _), _ in parts) == 100
        ends.append(made.tolist())
    assert ends == [[32, 64, 100], [56, 80, 100], [48, 48, 100]]
    a, b = rand(100, 24).t(), rand(100, 48)
    assert grouped.variants(problem_of(a, b, offs)) == 1  # evenly elsewhere: ATen asks for more there
    assert grouped.sane(problem_of(a, b, offs), (a, b, offs))[2].tolist() == [32, 64, 100]
