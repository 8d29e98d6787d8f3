"""mx_quantize, mx_matmul, scaled_linear: bytes against the numpy reference, gradients, bad input, compiled graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from flykernels.dtypes import dtype as element_type
from inductor_plugin import ops, ops_mx
from templates.quantize.problem import MODES, QuantizeProblem
from templates.quantize.reference import reference

FORMATS = list(ops_mx.FORMAT_DTYPES)
ERRORS = {torch.float8_e4m3fn: 0.055, torch.float8_e5m2: 0.11, torch.float4_e2m1fn_x2: 0.22}


@pytest.fixture(autouse=True)
def seeded(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)


def numpy_of(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_quantize_is_the_reference(dtype, mode):
    x = torch.randn(64, 96).bfloat16()
    x[3, 40] = float("inf")
    p = QuantizeProblem(n=96, format=element_type(str(dtype)).name, columns=True, mode=mode, consumer="gfx950")
    want = reference(p, numpy_of(x)).values()
    got = ops.mx_quantize(x, dtype, mode, columns=True)
    assert got[0].dtype == dtype and got[1].dtype == torch.float8_e8m0fnu
    for t, expected in zip(got, want, strict=True):
        assert (t.view(torch.uint8).numpy() == expected).all()
    composed = ops_mx.composed_quantize(x, p)  # what serves devices without a kernel
    for t, expected in zip(composed, got[:2], strict=True):
        assert torch.equal(t, expected.view(torch.uint8))


def test_quantize_of_transposed_and_sliced_input():
    x = torch.randn(96, 128)
    for view in (x.t(), x[:, 32:96], x[::2]):
        assert torch.equal(
            ops.mx_quantize(view)[0].view(torch.uint8), ops.mx_quantize(view.clone())[0].view(torch.uint8)
        )


@pytest.mark.parametrize("a", FORMATS)
@pytest.mark.parametrize("b", FORMATS)
def test_matmul_of_any_formats(a, b):
    x, w = torch.randn(37, 96), torch.randn(50, 96)
    (qx, sx), (qw, sw) = ops.mx_quantize(x, a), ops.mx_quantize(w, b)
    bias = torch.randn(50).bfloat16()
    got = ops.mx_matmul(qx, qw.t(), sx, sw, bias)
    want = ops_mx.composed_matmul(qx, qw.t(), sx, sw, bias)
    assert ((got.float() - want).norm() / want.norm()).item() < 2.2e-3


@pytest.mark.parametrize("rows", [64, 37])
@pytest.mark.parametrize("dtype", FORMATS)
def test_linear_and_its_gradients(dtype, rows):
    """Against the unquantised layer: the error of two operands whose steps are 2^-mantissa of their size."""
    x, w, bias = (torch.randn(*s, requires_grad=True) for s in ((2, rows, 128), (96, 128), (96,)))
    y = ops.scaled_linear(x, w, bias, dtype)
    dy = torch.randn_like(y)
    got = (y, *torch.autograd.grad(y, (x, w, bias), dy))
    exact = torch.nn.functional.linear(x, w, bias)
    want = (exact, *torch.autograd.grad(exact, (x, w, bias), dy))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert ((ours - theirs).norm() / theirs.norm()).item() < ERRORS[dtype]
    assert torch.equal(got[3], want[3])  # bias: not quantised
    assert ((got[0] - want[0]).norm() / want[0].norm()).item() > ERRORS[dtype] / 8, "nothing was quantised"


def test_only_the_gradients_that_are_asked_for():
    x, w = torch.randn(40, 64, requires_grad=True), torch.randn(50, 64)  # N of no whole blocks is fine for w's alone
    with pytest.raises(ValueError, match="N = 50 is not a multiple of 32"):
        ops.scaled_linear(x, w)
    y = ops.scaled_linear(x.detach(), w.requires_grad_())
    y.sum().backward()
    assert w.grad is not None and w.grad.shape == w.shape


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: as while tracing
@pytest.mark.parametrize("rows", [32, 0])
def test_rows_of_no_whole_blocks_are_refused_while_tracing_too(device, rows):
    x = torch.zeros(rows, 50, device=device)
    with pytest.raises(ValueError, match="N = 50 is not a multiple of 32"):
        ops.mx_quantize(x)
    codes, scales = ops.mx_quantize(x, rows=False, columns=True)
    assert codes.shape == (50, rows) and scales.shape == (50, rows // 32)


def test_training_goes_down():
    w = torch.zeros(32, 64, requires_grad=True)
    x, target = torch.randn(96, 64), torch.randn(96, 32)
    losses = []
    for _ in range(8):
        loss = (ops.scaled_linear(x, w) - target).square().mean()
        (g,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w -= 8 * g
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0] and np.isfinite(losses).all()


def test_empty():
    x, w, bias = (torch.randn(*s, requires_grad=True) for s in ((0, 64), (32, 64), (32,)))
    y = ops.scaled_linear(x, w, bias)
    assert y.shape == (0, 32)
    dx, *others = torch.autograd.grad(y.sum(), (x, w, bias))
    assert dx.shape == x.shape and not any(g.any() for g in others)
    assert torch.equal(ops.scaled_linear(torch.randn(2, 3, 0), torch.randn(32, 0), bias), bias.expand(2, 3, 32))


def test_a_bias_may_have_any_stride():
    x, w, numbers = torch.randn(40, 64), torch.randn(48, 64), torch.randn(96)
    for bias in (numbers[::2], numbers[:1].expand(48)):
        assert torch.equal(ops.scaled_linear(x, w, bias), ops.scaled_linear(x, w, bias.clone()))


def test_nothing_is_prepared_for_gradients_where_none_are_recorded():
    x, w = torch.randn(40, 64, requires_grad=True), torch.randn(50, 64, requires_grad=True)
    with torch.no_grad():  # 40 rows and N = 50 are no whole blocks
        assert torch.equal(ops.scaled_linear(x, w), ops.scaled_linear(x.detach(), w.detach()))


@pytest.mark.parametrize("power", [1, 2])
def test_gradients_have_no_gradients(power):
    """Of y itself too, though what comes into the backward pass then depends on nothing."""
    x, w = torch.randn(40, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    (dx,) = torch.autograd.grad(ops.scaled_linear(x, w).pow(power).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="have no gradients of their own"):
        dx.square().sum().backward()


def test_compiled_whole():
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    want = ops.scaled_linear(x, w)
    got = torch.compile(ops.scaled_linear, backend="aot_eager", fullgraph=True)(x, w)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), w)[0] for y in (got, want)))


def test_operators_are_well_formed():
    x = torch.randn(64, 64)
    (codes, scales), (other, others) = ops.mx_quantize(x), ops.mx_quantize(torch.randn(32, 64))
    torch.library.opcheck(
        torch.ops.flykernels.mx_quantize, (x, torch.float8_e4m3fn, "floor", True, True),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    arguments = (codes, other.t(), scales, others, None, torch.bfloat16)  # (torch's own schema test does not know FP8)
    torch.library.opcheck(torch.ops.flykernels.mx_matmul, arguments, test_utils=("test_faketensor",))


def quantized(rows=64, cols=128):
    return ops.mx_quantize(torch.randn(rows, cols))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a, b, s, t: (a, b, s.view(torch.uint8).float(), t), "both float8_e8m0fnu"),
        (lambda a, b, s, t: (a, b, t, s), "other operand's number"),
        (lambda a, b, s, t: (a, b, swizzled(s), t), "swizzled arrangement"),
        (lambda a, b, s, t: (a, b, s.t().contiguous(), t), "transpose them"),
        (lambda a, b, s, t: (a, b, s.t().contiguous().t(), t), "must be contiguous"),
        (lambda a, b, s, t: (a.t().contiguous().t(), b, s, t), "row-major"),
        (lambda a, b, s, t: (a, b.contiguous(), s, t), "column-major"),
        (lambda a, b, s, t: (a[:, :96], b, s, t), "K = 96 and B 128"),
        (lambda a, b, s, t: (a.view(torch.uint8).view(torch.float8_e4m3fnuz), b, s, t), "240"),
        (lambda a, b, s, t: (a.float(), b, s, t), "a_dtype|A is"),
    ],
)
def test_matmul_refuses_in_words(change, words):
    (a, s), (b, t) = quantized(64), quantized(32)
    with pytest.raises((ValueError, RuntimeError), match=words):
        ops.mx_matmul(*change(a, b.t(), s, t))


@pytest.mark.parametrize("elsewhere", range(5))
def test_operands_on_two_devices_are_refused(elsewhere):
    (a, s), (b, t) = quantized(64), quantized(32)
    given = [a, b.t(), s, t, torch.zeros(32, dtype=torch.bfloat16)]
    given[elsewhere] = given[elsewhere].to("meta")
    with pytest.raises(ValueError, match=r"mx_matmul.*one device"):
        ops.mx_matmul(*given)


def test_forward_mode_is_refused_where_no_gradient_is_recorded_too():
    """Its tangents would be lost without a word."""
    x, w = torch.randn(4, 32), torch.randn(32, 32)
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded), forward_ad.dual_level():
            with pytest.raises(NotImplementedError, match="jvp"):
                ops.scaled_linear(forward_ad.make_dual(x, x), w)
            assert ops.scaled_linear(x, w).shape == (4, 32)


def swizzled(s: torch.Tensor) -> torch.Tensor:
    return torch.zeros(128 * 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.zeros(32, 40),), "N = 40"),
        ((torch.zeros(32, 64).double(),), "float64"),
        ((torch.zeros(32, 64), torch.float8_e4m3fnuz), "MX formats"),
        ((torch.zeros(32, 64), torch.float8_e4m3fn, "even"), "mode"),
        ((torch.zeros(64),), "matrix"),
    ],
)
def test_quantize_refuses_in_words(arguments, words):
    with pytest.raises(ValueError, match=words):
        ops.mx_quantize(*arguments)


def test_columns_of_no_whole_blocks():
    with pytest.raises(ValueError, match="M = 40"):
        ops.mx_quantize(torch.zeros(40, 64), columns=True)


def test_linear_refuses_in_words():
    x, w = torch.zeros(4, 40), torch.zeros(32, 40)
    with pytest.raises(ValueError, match="K = 40"):
        ops.scaled_linear(x, w)
    with pytest.raises(ValueError, match=r"scaled_linear.*one device"):
        ops.scaled_linear(x, w.to("meta"))
    with pytest.raises(ValueError, match="must be"):
        ops.scaled_linear(x, torch.zeros(32, 64))
    with pytest.raises(ValueError, match="both bfloat16"):
        ops.scaled_linear(x, w.double())
    with pytest.raises(ValueError, match="bias"):
        ops.scaled_linear(torch.zeros(4, 64), torch.zeros(32, 64), torch.zeros(4))
