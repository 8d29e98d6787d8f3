"""A grouped linear layer trained with x86 kernels: output and gradients against float64, as autograd poses them."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from bench._grouped_suite import GROUPS, SHARES, SIZES_NK, TOKENS, sizes_of
from flykernels.launch import host
from flykernels.targets import x86
from templates.grouped_gemm.arguments import pointers, problem_of, scalar_values
from templates.grouped_gemm.build import build
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.space import candidates

from .case import SIZES, offsets


@cache
def kernel(p: GroupedGemmProblem) -> host.HostKernel:
    return host.load(build(p, candidates(p, x86, threads=2).kept[0].config, x86))


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Our product of these tensors; what no group owns is NaN."""
    p = problem_of(a, b, offs, tokens_hint=64)
    shape = {"m": (a.shape[0], b.shape[-1]), "k": (p.groups, a.shape[0], b.shape[-1])}[p.form]
    c = torch.full(shape, float("nan"), dtype=a.dtype)
    given = {"a": a, "b": b, "offs": offs, "c": c}
    kernel(p)(*(given[x].data_ptr() for x in pointers(p)), *scalar_values(p, a, b, c), threads=2)
    return c


class Grouped(torch.autograd.Function):
    """y = x w^T group by group, with the gradients that ATen's formula asks for."""

    @staticmethod
    def forward(ctx, x, w, offs):
        ctx.save_for_backward(x, w, offs)
        return grouped_mm(x, w.transpose(-2, -1), offs)

    @staticmethod
    def backward(ctx, grad):
        x, w, offs = ctx.saved_tensors
        return grouped_mm(grad, w, offs), grouped_mm(grad.t(), x, offs), None


@pytest.mark.parametrize("sizes", [*SIZES.values(), (16, 0, 257, 44, 0, 8)], ids=[*SIZES, "172439"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_gradients(sizes, dtype):
    """Empty groups' gradients are exactly zero; rows past offs[-1] have none, and theirs are not read (NaN here)."""
    make = torch.Generator().manual_seed(0)
    offs, (n, k) = offsets(sizes), (48, 72)
    own = int(offs[-1])
    x = torch.randn(own + 2, k, generator=make).to(dtype).requires_grad_()
    w = torch.randn(len(sizes), n, k, generator=make).to(dtype).requires_grad_()
    grad = torch.randn(own + 2, n, generator=make).to(dtype)
    with torch.no_grad():
        x[own:], grad[own:] = float("nan"), float("nan")
    y = Grouped.apply(x, w, offs)
    y.backward(grad)
    first = 0
    for g, end in enumerate(offs.tolist()):
        rows = slice(first, end)
        xs, ws, gs = (t.detach().double() for t in (x[rows], w[g], grad[rows]))
        for got, left, right in ((y[rows], xs, ws.t()), (x.grad[rows], gs, ws), (w.grad[g], gs.t(), xs)):
            bound = (left.abs() @ right.abs()).max() if left.numel() else 0.0
            step = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 64 * torch.finfo(dtype).eps
            assert ((got.double() - left @ right).abs() <= step * bound).all(), f"group {g} of {sizes}"
        first = end
    assert (w.grad[[i for i, size in enumerate(sizes) if size == 0]] == 0).all()
    assert y[own:].isnan().all() and x.grad[own:].isnan().all()


SUITE = [(g, tokens, share) for g in GROUPS for tokens in TOKENS for share in SHARES]


@pytest.mark.parametrize(("groups", "tokens", "share"), SUITE)
def test_the_suites_groups(groups, tokens, share):
    """Every sharing out of tokens that the benches time, with N and K of their weights divided by 64 or 128: output and
    gradients of the largest, the smallest and some other groups within the bound of their own sums, all written; of
    an empty group exactly zero."""
    sizes = sizes_of(groups, tokens, share)
    make = torch.Generator().manual_seed(groups)
    looked_at = {0, groups - 1, sizes.index(max(sizes)), sizes.index(min(sizes)), *range(1, groups, groups // 4)}
    less = 128 if tokens == max(TOKENS) else 64
    for n, k in ((n // less, k // less) for n, k in SIZES_NK[GROUPS.index(groups) % 2 :][:1]):
        draw = lambda *shape: torch.randn(*shape, generator=make).bfloat16()
        x, w, grad = draw(sum(sizes), k).requires_grad_(), draw(groups, n, k).requires_grad_(), draw(sum(sizes), n)
        y = Grouped.apply(x, w, offsets(sizes))
        y.backward(grad)
        assert not w.grad[[i for i, size in enumerate(sizes) if size == 0]].any()
        assert all(t.isfinite().all() for t in (y, x.grad, w.grad))
        first = 0
        for g, size in enumerate(sizes):
            rows = slice(first, first := first + size)
            if g not in looked_at:
                continue
            xs, ws, gs = (t.detach().double() for t in (x[rows], w[g], grad[rows]))
            for got, left, right in ((y[rows], xs, ws.t()), (x.grad[rows], gs, ws), (w.grad[g], gs.t(), xs)):
                bound = left.norm(dim=1, keepdim=True) * right.norm(dim=0, keepdim=True)  # of sums of products
                error = (got.double() - left @ right).abs()
                assert (error <= torch.finfo(torch.bfloat16).eps * bound).all(), f"group {g} of {sizes}"
