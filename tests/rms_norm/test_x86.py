"""RMSNorm on the CPU, forward and backward: against float64, and where values are not finite against ATen."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.launch import host
from flykernels.targets import x86
from templates.rms_norm.arguments import eps_bits
from templates.rms_norm.config import X86Config
from templates.rms_norm.problem import DTYPES, RMSNormProblem, eps_or_default
from templates.rms_norm.x86_rows import LARGE

from .case import EPS, GUARD, TORCH, Guarded, call, check, codes, operands, run

CONFIG = X86Config()
LANES = 8
WIDTHS = (1, 3, LANES - 1, LANES, 2 * LANES, 4 * LANES + 1, 64, 1000, 4097)
TAILS = (4097, 8193, 16385)  # pytorch#190843


def problem(dtype="f32", weight="none", **more) -> RMSNormProblem:
    return RMSNormProblem(None, dtype, weight, align=TORCH[dtype].itemsize, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", (*DTYPES, "none"))
@pytest.mark.parametrize("residual", (False, True))
def test_forward(dtype, weight, residual):
    for width in WIDTHS:
        run(problem(dtype, weight, residual=residual, rstd=True), CONFIG, x86, 5, width, offset=1, pad=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", (*DTYPES, "none"))
@pytest.mark.parametrize("residual", (False, True))
def test_backward(dtype, weight, residual):
    p = problem(dtype, weight, direction="backward", residual=residual, weight_gradient=weight != "none")
    for width in WIDTHS:
        run(p, CONFIG, x86, 5, width, offset=1, pad=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_without_a_weight_gradient(dtype):
    p = problem(dtype, dtype, direction="backward")
    for width in (3, 16, 1000):
        run(p, CONFIG, x86, 7, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", (1e-4, 1e-2, 50.0))
@pytest.mark.parametrize("width", TAILS)
def test_scales(dtype, scale, width):
    run(problem(dtype, dtype), CONFIG, x86, 3, width, scale=scale)


@pytest.mark.parametrize("rows, width", [(1, 262144), (16384, 128), (16384, 512), (16384, 1536), (2 * 157, 4096)])
def test_reported_shapes(rows, width):
    """The widest row; FlyDSL#614; pytorch#141727 (there eager and compiled code differed by 0.0078)."""
    run(problem("bf16", "bf16"), CONFIG, x86, rows, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, aligned", [(4096, True), (4096, False), (1032, True)])
def test_results_larger_than_caches(dtype, width, aligned):
    """Rows whose vectors are aligned go past the caches, others do not; GUARD elements are whole cache lines."""
    rows = LARGE // (TORCH[dtype].itemsize * width) + 1
    for more in ({}, {"direction": "backward", "weight_gradient": True}):
        p = problem(dtype, dtype, **more)
        made = operands(p, rows, width)
        if not aligned:
            name = "dx" if more else "y"
            made[name] = Guarded(made[name].view, offset=3)
        call(p, CONFIG, x86, made)
        check(p, made)


@given(
    st.integers(1, 40), st.integers(1, 300), st.sampled_from(DTYPES), st.sampled_from((*DTYPES, "none")),
    st.booleans(), st.booleans(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape(rows, width, dtype, weight, residual, back, offset, pad, seed):
    more = {"direction": "backward", "weight_gradient": weight != "none"} if back else {"rstd": True}
    run(problem(dtype, weight, residual=residual, **more), CONFIG, x86, rows, width, offset=offset, pad=pad, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("width", (5, 16, 40, 1001))
def test_special_values_are_atens(dtype, weighted, width):
    """Rows with NaN, infinities, zeros, subnormal and huge numbers; NaN and infinity in the weight."""
    kind = TORCH[dtype]
    largest, smallest = torch.finfo(kind).max, torch.finfo(kind).smallest_normal
    x = torch.randn(12, width, generator=torch.Generator().manual_seed(0)).to(kind)
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"), largest, smallest / 2, 0.0, -0.0)):
        x[row, width // 2] = value
    x[7], x[8], x[9], x[10] = 0, largest, smallest, -0.0
    w = torch.randn(width, generator=torch.Generator().manual_seed(1)).to(kind)
    w[0], w[-1] = float("nan"), float("inf")
    for eps in (EPS, 0.0, None):
        made = operands(problem(dtype, dtype if weighted else "none"), 12, width)
        made["x"].view.copy_(x)
        if weighted:
            made["weight"].view.copy_(w)
        call(problem(dtype, dtype if weighted else "none"), CONFIG, x86, made, eps=eps_or_default(eps))
        want = F.rms_norm(x, (width,), w if weighted else None, eps)
        got = made["y"].view
        assert torch.equal(got.isnan(), want.isnan())
        step = 4 * torch.finfo(kind).eps  # the sums' orders differ, so the last bits of rstd do
        torch.testing.assert_close(got, want, rtol=step, atol=step * smallest, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_none_is_float32s_epsilon(dtype):
    """ATen takes it from the type it computes in; bf16's own would be 65536 times that."""
    x = (torch.randn(4, 64) * 1e-4).to(TORCH[dtype])
    made = operands(problem(dtype), 4, 64)
    made["x"].view.copy_(x)
    call(problem(dtype), CONFIG, x86, made, eps=eps_or_default(None))
    step = 4 * torch.finfo(x.dtype).eps  # as above
    torch.testing.assert_close(made["y"].view, F.rms_norm(x, (64,)), rtol=step, atol=0)
    assert eps_bits(eps_or_default(None)) == 0x34000000


def test_a_nan_payload_in_a_wide_weight_stays_a_nan():
    """0x7fffffff would round up to -0 if bf16's rounding thought it a number."""
    made = operands(problem("bf16", "f32"), 2, 40)
    made["weight"].view.view(torch.int32).fill_(0x7FFFFFFF)
    call(problem("bf16", "f32"), CONFIG, x86, made)
    assert bool(made["y"].view.isnan().all())


@pytest.mark.parametrize("dtype", ("f32", "bf16"))
def test_gradients_against_autograd_in_float64(dtype):
    rows, width = 23, 129
    made = operands(problem(dtype, dtype, residual=True, rstd=True), rows, width, seed=3)
    call(problem(dtype, dtype, residual=True, rstd=True), CONFIG, x86, made)
    back = problem(dtype, dtype, direction="backward", residual=True, weight_gradient=True)
    grads = operands(back, rows, width, seed=4)
    for name, source in (("x", "sum"), ("weight", "weight"), ("rstd", "rstd")):
        grads[name].view.copy_(made[source].view)
    call(back, CONFIG, x86, grads)
    total = made["sum"].view.double().requires_grad_()
    weight = made["weight"].view.double().requires_grad_()
    y = F.rms_norm(total, (width,), weight, EPS)
    y.backward(grads["dy"].view.double())
    step = 4 * torch.finfo(TORCH[dtype]).eps
    want = total.grad + grads["dsum"].view.double()
    torch.testing.assert_close(grads["dx"].view.double(), want, rtol=step, atol=step)
    torch.testing.assert_close(grads["dweight"].view.double(), weight.grad, rtol=step, atol=step * rows**0.5)


def test_the_weight_gradient_depends_on_parts_alone():
    p = problem("f32", "f32", direction="backward", weight_gradient=True)
    first, again, others = (operands(p, 101, 77) for _ in range(3))
    for made in (first, again):
        call(p, CONFIG, x86, made, threads=2, parts=3)
    call(p, CONFIG, x86, others, threads=1, parts=3)
    bits = lambda made: made["dweight"].view.view(torch.int32)
    assert torch.equal(bits(first), bits(again)) and torch.equal(bits(first), bits(others))


def test_no_rows():
    made = operands(problem("f32", "f32", rstd=True), 0, 8)
    call(problem("f32", "f32", rstd=True), CONFIG, x86, made)
    assert made["y"].intact()
    p = problem("f32", "bf16", direction="backward", weight_gradient=True)
    made = operands(p, 0, 8)
    call(p, CONFIG, x86, made)
    assert bool((made["dweight"].view == 0).all())


def test_an_expanded_gradient():
    """dy of a sum over rows is one row with stride 0."""
    p = problem("f32", "f32", direction="backward", weight_gradient=True)
    made = operands(p, 9, 50)
    one = torch.randn(50)
    expanded, made["dy"].view = made["dy"], one.expand(9, 50)
    call(p, CONFIG, x86, made)
    expanded.view = expanded.buffer.as_strided((9, 50), (50, 1), GUARD)
    expanded.view.copy_(one.expand(9, 50))
    expanded.before = expanded.buffer.clone()
    check(p, made)


def test_rows_far_apart():
    """Spans over 2 GiB (pytorch#191447), as views of memory that is never touched."""
    far, width = 1 << 30, 64
    memory = torch.empty(far + width)  # 4 GiB of addresses; only the pages that are written exist
    x = memory.as_strided((2, width), (far, 1))
    x.copy_(torch.randn(2, width))
    p = problem("f32")
    made = operands(p, 2, width)
    made["x"].view, made["x"].before = x, made["x"].buffer
    call(p, CONFIG, x86, made)
    torch.testing.assert_close(made["y"].view, F.rms_norm(x, (width,), None, EPS))


def test_several_python_threads_at_a_time():
    p = problem("bf16", "bf16", rstd=True)
    wrong = []

    def work(seed):
        try:
            for _ in range(20):
                run(p, CONFIG, x86, 64, 256, seed=seed)
        except AssertionError as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_one_object_serves_all_widths():
    (code,) = codes(problem("f32", "f32"), CONFIG, x86)
    assert problem("f32", "f32").canonical(x86) == RMSNormProblem(4096, "f32", "f32", rows_hint=77).canonical(x86)
    assert [a.name for a in code.arguments] == ["x", "weight", "y", "eps", "rows", "width", "x_row", "parts"]
    assert all(a.kind != "f32" for a in code.arguments), "floats would keep Python from the fast way in"
    assert host.load(code).launcher().__class__.__name__ == "builtin_function_or_method"
