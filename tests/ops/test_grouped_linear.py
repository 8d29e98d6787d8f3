"""mxfp8_grouped_linear and mx_grouped_matmul: float64 of the quantised operands, gradients, bad input, compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inductor_plugin import ops, ops_grouped, ops_mx, scaled

FORMATS = list(ops_mx.FORMAT_DTYPES)
ERRORS = {torch.float8_e4m3fn: 0.055, torch.float8_e5m2: 0.11, torch.float4_e2m1fn_x2: 0.22}  # as tests/ops/test_mx.py
SIZES = {  # of as many groups and about as many tokens, so that they share kernels
    "uneven": (40, 0, 1, 100, 33),
    "empty ends": (0, 64, 70, 0, 0),
    "whole blocks": (32, 0, 96, 64, 0),
    "none": (0, 0, 0, 0, 0),
}


@pytest.fixture(autouse=True)
def seeded(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)


def offsets(sizes) -> torch.Tensor:
    return torch.tensor(np.cumsum(sizes), dtype=torch.int32)


def layer(sizes, k=96, n=64, dtype=torch.bfloat16, more=None):
    """x with `more` rows that no expert has (by default so many that there are 200), w, offs."""
    more = 200 - sum(sizes) if more is None else more
    x = torch.randn(sum(sizes) + more, k).to(dtype).requires_grad_()
    return x, torch.randn(len(sizes), n, k).to(dtype).requires_grad_(), offsets(sizes)


def parts(sizes):
    ends = np.cumsum(sizes)
    return [slice(int(e - s), int(e)) for e, s in zip(ends, sizes, strict=True)]


def grouped(x, w, sizes) -> torch.Tensor:
    """The layer in float64, differentiable; rows that no expert has are zeros."""
    outs = [x[t] @ w[g].t() for g, t in enumerate(parts(sizes))]
    return torch.cat([*outs, x[sum(sizes) :] @ torch.zeros_like(w[0]).t()])


def rounded(x: torch.Tensor, dtype) -> torch.Tensor:
    """float64 of x quantised in blocks along its last axis, filled up with zeros."""
    missing = -x.shape[-1] % 32
    lines = torch.nn.functional.pad(x.detach(), (0, missing)).flatten(0, -2)
    if not lines.numel():
        return x.detach().double()
    codes, scales = ops.mx_quantize(lines.contiguous(), dtype)
    return scaled.dequantized(codes, scales)[:, : x.shape[-1]].reshape(x.shape).double()


def of_quantised(x, w, dy, sizes, dtype):
    """(y, dx, dw) in float64 of operands quantised along what each product sums over, each expert's by themselves."""
    y, dx, dw = (torch.zeros(s, dtype=torch.float64) for s in (dy.shape, x.shape, w.shape))
    for g, t in enumerate(parts(sizes)):
        y[t] = rounded(x[t], dtype) @ rounded(w[g], dtype).t()
        dx[t] = rounded(dy[t], dtype) @ rounded(w[g].t(), dtype).t()
        dw[g] = rounded(dy[t].t(), dtype) @ rounded(x[t].t(), dtype).t()
    return y, dx, dw


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_layer_and_gradients(dtype, sizes):
    """Within one rounding of the quantised operands' products; within the formats' error of the unquantised ones."""
    x, w, offs = layer(sizes)
    y = ops.mxfp8_grouped_linear(x, w, offs, dtype)
    dy = torch.randn_like(y)
    got = (y, *torch.autograd.grad(y, (x, w), dy))
    exact = of_quantised(x, w, dy, sizes, dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    plain = grouped(*wide, sizes)
    unquantised = (plain, *torch.autograd.grad(plain, wide, dy.double()))
    for ours, theirs, layer_ in zip(got, exact, unquantised, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == torch.bfloat16
        assert ((ours.double() - theirs).norm() <= 2e-3 * theirs.norm()).item()
        assert ((ours.double() - layer_).norm() <= ERRORS[dtype] * layer_.norm()).item()
    used, empty = sum(sizes), [g for g, s in enumerate(sizes) if s == 0]
    assert not got[0][used:].any() and not got[1][used:].any(), "rows that no expert has"
    assert not got[2][empty].any(), "experts without tokens"


def test_one_read_of_whole_blocks_gives_the_same():
    sizes = SIZES["whole blocks"]
    x, w, offs = layer(sizes)
    results = []
    for promise in (False, True):
        y = ops.mxfp8_grouped_linear(x, w, offs, whole_blocks=promise)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (x, w))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_groups_are_filled_up():
    """Each group from a multiple of 32 on, zeros behind it, whatever lies past the last group."""
    x = torch.arange(1.0, 111).reshape(-1, 1)
    spread, ends = ops_grouped.spread_groups(x, offsets((40, 0, 1, 64)))
    assert ends.tolist() == [64, 64, 96, 160] and spread.shape[0] % 32 == 0
    want = torch.zeros(spread.shape)
    for at, t in ((0, slice(0, 40)), (64, slice(40, 41)), (96, slice(41, 105))):
        want[at : at + t.stop - t.start] = x[t]
    assert torch.equal(spread, want)


def test_a_block_does_not_mix_experts():
    """A neighbour's huge tokens leave an expert's gradient as it is."""
    x, w, offs = layer((40, 40), more=0)
    gradient = lambda x: torch.autograd.grad(ops.mxfp8_grouped_linear(x, w, offs).sum(), w)[0]
    calm = gradient(x)
    loud = x.detach().clone()
    loud[40:] *= 1e6
    assert torch.equal(gradient(loud.requires_grad_())[0], calm[0])


def test_only_the_gradients_that_are_asked_for():
    x, w, offs = layer((40, 3), n=50)
    with pytest.raises(ValueError, match="N = 50 is not a multiple of 32"):
        ops.mxfp8_grouped_linear(x, w, offs)
    (dw,) = torch.autograd.grad(ops.mxfp8_grouped_linear(x.detach(), w, offs).sum(), w)
    assert dw.shape == w.shape
    x, w, offs = layer((40, 3))
    (dx,) = torch.autograd.grad(ops.mxfp8_grouped_linear(x, w.detach(), offs).sum(), x)
    assert dx.shape == x.shape and dx[:43].any()


def test_gradients_have_no_gradients():
    x, w, offs = layer((40, 3))
    (dx,) = torch.autograd.grad(ops.mxfp8_grouped_linear(x, w, offs).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="have no gradients of their own"):
        dx.square().sum().backward()


def test_no_tokens():
    x, w, offs = layer((0, 0), more=0)
    y = ops.mxfp8_grouped_linear(x, w, offs)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert y.shape == (0, 64) and dx.shape == x.shape and not dw.any()


@pytest.mark.parametrize(("backend", "promise"), [("aot_eager", False), ("inductor", True)])
def test_compiled_whole(backend, promise):
    """(Inductor's generated C++ would take most of the time where groups are filled up.)"""
    x, w, offs = layer(SIZES["whole blocks"], more=0)
    use = lambda x, w, offs: ops.mxfp8_grouped_linear(x, w, offs, whole_blocks=promise)
    dy = torch.randn(192, 64).bfloat16()
    results = []
    for run in (use, torch.compile(use, fullgraph=True, backend=backend)):
        y = run(x, w, offs)
        results.append((y, *torch.autograd.grad(y, (x, w), dy)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_operator_is_well_formed():
    x, w, offs = layer((40, 3), more=0)
    a, scale_a = ops.mx_quantize(x.detach())
    (b, scale_b), _ = ops_grouped._weight_both_ways(w.detach(), torch.float8_e4m3fn, "floor", True)
    arguments = (a, b, scale_a, scale_b, offs, torch.bfloat16)
    torch.library.opcheck(torch.ops.flykernels.mx_grouped_matmul, arguments, test_utils=("test_faketensor",))


@pytest.mark.parametrize("form", ["m", "k"])
def test_what_serves_other_devices(form):
    """The same by torch's operators, as for GPUs without a kernel of ours."""
    x, w, offs = layer((40, 0, 30))
    if form == "m":
        (b, scale_b), *_ = ops_grouped._weight_both_ways(w.detach(), torch.float8_e4m3fn, "floor", False)
        operands = (*ops.mx_quantize(x.detach()), b, scale_b)
        a, scale_a, b, scale_b = operands
        out = torch.zeros(x.shape[0], 64)
    else:
        spread, offs = ops_grouped.spread_groups(x.detach(), offs)
        a, scale_a = ops.mx_quantize(spread, rows=False, columns=True)
        b, scale_b = a.t(), scale_a
        out = torch.zeros(3, 96, 96)
    p = ops_grouped.problem_of(a, b, scale_a, scale_b, offs, "float32")
    composed = ops_grouped._composed(p, a, b, scale_a, scale_b, offs, out)
    ours = ops.mx_grouped_matmul(a, b, scale_a, scale_b, offs, torch.float32)
    torch.testing.assert_close(ours, composed, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, o: (x, w, o.long()), "int32"),
        (lambda x, w, o: (x, w, o[:1]), "2 experts"),
        (lambda x, w, o: (x, w, o.reshape(1, 2)), "2 experts"),
        (lambda x, w, o: (x, w, o.to("meta")), "one device"),
        (lambda x, w, o: (x, w, o.flip(0)), "must not decrease"),
        (lambda x, w, o: (x, w, o - 50), "must not decrease"),
        (lambda x, w, o: (x, w, o + 500), "past the end"),
        (lambda x, w, o: (x[:, :40], w[:, :, :40], o), "K = 40 is not a multiple of 32"),
        (lambda x, w, o: (x[:, :0], w[:, :, :0], o), "nothing to multiply"),
        (lambda x, w, o: (x, w[:0], o[:0]), "nothing to multiply"),
        (lambda x, w, o: (x, w.transpose(1, 2), o), r"\(G, N, K\)"),
        (lambda x, w, o: (x, w.float(), o), "both bfloat16"),
        (lambda x, w, o: (x, w, o, torch.float8_e4m3fnuz), "MX formats"),
        (lambda x, w, o: (x, w, o, torch.float8_e4m3fn, "even"), "mode"),
    ],
)
def test_refuses_in_words(change, words):
    x, w, offs = layer((40, 3))
    with pytest.raises(ValueError, match=words):
        ops.mxfp8_grouped_linear(*change(x, w, offs))


def test_a_broken_promise_is_an_error_on_a_cpu():
    x, w, offs = layer((40, 3))
    y = ops.mxfp8_grouped_linear(x, w, offs, whole_blocks=True)  # tokens lie along rows: nothing is mixed yet
    with pytest.raises(ValueError, match="not a multiple of 32"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a, b, s, t, o: (a, b, s.view(torch.uint8).float(), t, o), "float8_e8m0fnu"),
        (lambda a, b, s, t, o: (a, b, s, t.flatten(0, 1), o), "not swizzled"),
        (lambda a, b, s, t, o: (a, b, s[:-1], t, o), "scales of A"),
        (lambda a, b, s, t, o: (a.t().contiguous().t(), b, s, t, o), "row-major"),
        (lambda a, b, s, t, o: (a, b.contiguous(), s, t, o), "column-major"),
        (lambda a, b, s, t, o: (a[:, :64], b, s, t, o), "64 numbers"),
        (lambda a, b, s, t, o: (a, b, s, t, torch.cat([o, o])[::2]), "neighbours"),
        (lambda a, b, s, t, o: (a, b[:1], s, t[:1], o), "1 groups"),
        (lambda a, b, s, t, o: (a, b, s, t, o.to("meta")), "one device"),
    ],
)
def test_matmul_refuses_in_words(change, words):
    x, w, offs = layer((40, 3), more=0)
    (b, t), *_ = ops_grouped._weight_both_ways(w.detach(), torch.float8_e4m3fn, "floor", False)
    a, s = ops.mx_quantize(x.detach())
    with pytest.raises((ValueError, RuntimeError), match=words):
        ops.mx_grouped_matmul(*change(a, b, s, t, offs))
