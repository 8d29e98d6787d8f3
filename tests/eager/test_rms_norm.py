"""F.rms_norm and nn.RMSNorm with eager operators on: results, gradients, layouts, dtypes, and what goes to ATen."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inductor_plugin import eager, eager_rms_call, ops
from templates.rms_norm import reference
from templates.rms_norm.problem import RMSNormProblem

from .conftest import both

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
DTYPES = list(NAMES)
ROOT = Path(__file__).parents[2]


def assert_right(y, x, weight, eps, axes=1):
    """Against float64, with the template's bound."""
    width = x.shape[-axes:].numel()
    flat, kind = x.reshape(-1, width), "none" if weight is None else NAMES[weight.dtype]
    p = RMSNormProblem(width, NAMES[x.dtype], kind)
    eps = 2.0**-23 if eps is None else eps
    want = reference.forward(flat, None if weight is None else weight.reshape(-1), None, eps)
    error = (y.reshape(-1, width).double() - want["y"]).abs()
    assert (error <= reference.bound(p, "y", want, width)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_forward(on, launches, dtype, weighted, eps):
    for shape in ((1, 1), (3, 5), (2, 7, 96), (4, 1, 4097), (300, 33)):
        x = (torch.randn(shape) * 3).to(dtype)
        weight = torch.randn(shape[-1]).to(dtype) if weighted else None
        before = len(launches)
        y = F.rms_norm(x, shape[-1:], weight, eps)
        assert len(launches) > before and y.shape == x.shape and y.dtype == dtype and y.is_contiguous()
        assert_right(y, x, weight, eps)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40), width=st.integers(1, 700), dtype=st.sampled_from(DTYPES), pad=st.integers(0, 9),
    offset=st.integers(0, 5), scale=st.sampled_from([1e-3, 1.0, 100.0]),
)  # fmt: skip
def test_any_shape_offset_and_row_stride(on, rows, width, dtype, pad, offset, scale):
    buffer = torch.full((rows * (width + pad) + offset,), torch.nan, dtype=dtype)
    x = buffer.as_strided((rows, width), (width + pad, 1), offset)
    x.copy_(torch.randn(rows, width) * scale)
    weight = torch.randn(width).to(dtype)
    assert_right(F.rms_norm(x, (width,), weight, 1e-6), x, weight, 1e-6)


def test_several_normalised_axes_are_one(on, launches):
    x, weight = torch.randn(5, 2, 3, 8), torch.randn(2, 3, 8)
    y = F.rms_norm(x, (2, 3, 8), weight)
    assert launches and y.shape == x.shape
    assert_right(y, x, weight, None, axes=3)
    out, rstd = torch.ops.aten._fused_rms_norm(x, [2, 3, 8], weight, None)
    with eager.enabled(on=False):
        _, expected = torch.ops.aten._fused_rms_norm(x, [2, 3, 8], weight, None)
    assert torch.equal(out, y) and rstd.shape == expected.shape == (5, 1, 1, 1)
    torch.testing.assert_close(rstd, expected)


def test_the_module_trains_as_with_aten(on, launches):
    model = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.RMSNorm(48), torch.nn.ReLU(), torch.nn.RMSNorm(48))
    other = copy.deepcopy(model)
    x = torch.randn(10, 24)

    def steps(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    ours = steps(model)
    assert launches
    with eager.enabled(on=False):
        theirs = steps(other)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["both", "x", "weight", "no weight"])
def test_gradients(on, launches, dtype, which):
    x = torch.randn(17, 3, 130).to(dtype).requires_grad_(which != "weight")
    weight = None if which == "no weight" else torch.randn(130).to(dtype).requires_grad_(which != "x")
    dy = torch.randn(17, 3, 130).to(dtype)
    wanted = [t for t in (x, weight) if t is not None and t.requires_grad]
    y = F.rms_norm(x, (130,), weight, 1e-5)
    ours = torch.autograd.grad(y, wanted, dy)
    assert type(y.grad_fn).__name__ == "FusedRmsNormBackward0" and len(launches) >= 2
    p = RMSNormProblem(
        130, NAMES[dtype], "none" if weight is None else NAMES[dtype], "backward", weight_gradient=weight is not None
    )
    flat = x.detach().reshape(-1, 130)
    rstd = (flat.double().pow(2).mean(-1) + 1e-5).rsqrt()
    want = reference.backward(flat, None if weight is None else weight.detach(), rstd, dy.reshape(-1, 130), None)
    for t, got in zip(wanted, ours):
        name = "dx" if t is x else "dweight"
        limit = reference.bound(p, name, want, 130 if t is x else 51)
        assert got.dtype == t.dtype and ((got.reshape(want[name].shape).double() - want[name]).abs() <= limit).all(), (
            name
        )


@pytest.mark.parametrize("width", [1, 2, 4])
def test_gradients_of_short_rows_are_ours(on, launches, log, width):
    """Their terms nearly cancel in many rows: what is left is rounding, which may be another than ATen's."""
    ops._on.cache_clear()
    x, weight = torch.randn(3000, width, requires_grad=True), torch.randn(width, requires_grad=True)
    for w in (weight, None):
        F.rms_norm(x, (width,), w, 1e-6).sum().backward()
        ops.add_rms_norm(x, x.detach() / 2, w, 1e-6)[0].sum().backward()
    assert "quarantined" not in log.text and len(launches) >= 8


def test_gradients_of_expanded_and_strided_upstream(on):
    x, weight = torch.randn(12, 40, requires_grad=True), torch.randn(40, requires_grad=True)
    y = F.rms_norm(x, (40,), weight)
    for dy in (
        torch.ones(()).expand(12, 40),
        torch.randn(40).expand(12, 40),
        torch.randn(40, 12).t(),
        torch.randn(12, 80)[:, ::2],
    ):
        ours = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        with eager.enabled(on=False):
            z = F.rms_norm(x, (40,), weight)
            torch.testing.assert_close(ours, torch.autograd.grad(z, (x, weight), dy), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape, axes", [((6, 1, 5), 2), ((6, 4, 1), 2), ((6, 1, 1), 2), ((1, 1, 7), 3), ((3, 1, 4, 1), 3)]
)
@pytest.mark.parametrize("door", [True, False])
def test_a_weight_with_axes_of_one_element(prefer_ours, monkeypatch, shape, axes, door):
    """Upstream lies densely, or not as kernels want it; the weight's gradient has the weight's shape in any case."""
    if not door:
        monkeypatch.setattr(eager, "_open_rms_norm", lambda *_: False)
    normalized = shape[-axes:]
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(normalized, requires_grad=True)
    for dy in (torch.randn(shape), torch.randn(()).expand(shape), torch.randn(*shape, 2)[..., 0]):
        step = lambda dy=dy: torch.autograd.grad(F.rms_norm(x, normalized, weight, 1e-5), (x, weight), dy)
        with eager.enabled(["cpu"]):
            ours = step()
        torch.testing.assert_close(ours, step(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("door", [True, False])
def test_a_graph_outlives_the_switch(prefer_ours, monkeypatch, door):
    """loss = model(x) with eager operators on, loss.backward() after: ATen has no gradient of the fused operator."""
    if not door:
        monkeypatch.setattr(eager, "_open_rms_norm", lambda *_: False)
    x, weight, dy = torch.randn(6, 40, requires_grad=True), torch.randn(40, requires_grad=True), torch.randn(6, 40)
    with eager.enabled(["cpu"]):
        y = F.rms_norm(x, (40,), weight)
    z = F.rms_norm(x, (40,), weight)
    assert "FusedRmsNorm" in type(y.grad_fn).__name__ and "FusedRmsNorm" not in type(z.grad_fn).__name__
    ours, aten = (torch.autograd.grad(t, (x, weight), dy) for t in (y, z))
    torch.testing.assert_close(ours, aten, rtol=1e-5, atol=1e-5)


def test_the_weights_gradient_is_the_same_every_time(on):
    x, weight = torch.randn(1000, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    dy = torch.randn(1000, 64)
    grad = lambda: torch.autograd.grad(F.rms_norm(x, (64,), weight), weight, dy)[0]
    first = grad()
    assert all(torch.equal(first, grad()) for _ in range(5))


def test_second_derivatives(on):
    x, weight = torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)

    def twice():
        dx, dw = torch.autograd.grad(F.rms_norm(x, (6,), weight, 1e-3).pow(3).sum(), (x, weight), create_graph=True)
        return torch.autograd.grad((dx.pow(2).sum() + dw.pow(2).sum()), (x, weight))

    ours = twice()
    with eager.enabled(on=False):
        torch.testing.assert_close(ours, twice(), rtol=1e-4, atol=1e-4)


def test_float64_is_atens_to_the_last_bit(on, launches):
    x, weight = torch.randn(5, 9).double().requires_grad_(), torch.randn(9).double().requires_grad_()
    calls = lambda: torch.autograd.grad(F.rms_norm(x, (9,), weight).sum(), (x, weight))
    ours = calls()
    with eager.enabled(on=False):
        assert all(map(torch.equal, ours, calls()))
    assert not launches
    assert torch.autograd.gradcheck(lambda x, w: F.rms_norm(x, (9,), w), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: F.rms_norm(x, (9,), w), (x, weight))


ATENS = {
    "float64": lambda: (torch.randn(4, 8).double(), (8,), None),
    "complex": lambda: (torch.randn(4, 8, dtype=torch.complex64), (8,), None),
    "integer": lambda: (torch.arange(32).view(4, 8), (8,), None),
    "0 rows": lambda: (torch.randn(0, 8), (8,), torch.ones(8)),
    "0 columns": lambda: (torch.randn(8, 0), (0,), torch.ones(0)),
    "transposed": lambda: (torch.randn(8, 4).t(), (8,), torch.ones(8)),
    "expanded": lambda: (torch.randn(8).expand(4, 8), (8,), torch.ones(8)),
    "strided columns": lambda: (torch.randn(4, 16)[:, ::2], (8,), torch.ones(8)),
    "uneven rows": lambda: (torch.randn(5, 6, 8)[:, :4], (8,), torch.ones(8)),
    "weight of float64": lambda: (torch.randn(4, 8), (8,), torch.ones(8).double()),
    "strided weight": lambda: (torch.randn(4, 8), (8,), torch.randn(16)[::2]),
    "wrong shape": lambda: (torch.randn(4, 8), (7,), torch.ones(7)),
    "empty shape": lambda: (torch.randn(4, 8), (), None),
    "wrong weight": lambda: (torch.randn(4, 8), (8,), torch.ones(7)),
    "0 axes": lambda: (torch.tensor(3.0), (1,), None),
    "channels last": lambda: (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), (5,), torch.ones(5)),
    "meta": lambda: (torch.randn(4, 8, device="meta"), (8,), torch.ones(8, device="meta")),
    "weight on meta": lambda: (torch.randn(4, 8), (8,), torch.ones(8, device="meta")),
}


@pytest.mark.parametrize("name", ATENS)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_what_kernels_do_not_take_is_atens(prefer_ours, launches, name):
    """Result with its dtype, strides and device, or error with its type and text."""
    x, shape, weight = ATENS[name]()
    ours, aten = both(lambda: F.rms_norm(x, shape, weight))
    assert not launches
    if isinstance(aten, tuple):
        assert ours == aten
        return
    assert (ours.shape, ours.dtype, ours.stride(), ours.device) == (aten.shape, aten.dtype, aten.stride(), aten.device)
    if aten.device.type == "cpu":
        assert torch.equal(ours, aten)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_weight_of_another_type(on, launches, dtype, weight_dtype):
    """ATen's rule: computed in f32, rounded once, to x's type; the gradient of the weight has the weight's."""
    x = torch.randn(9, 96).to(dtype).requires_grad_()
    weight, dy = torch.randn(96).to(weight_dtype).requires_grad_(), torch.randn(9, 96).to(dtype)

    def call():
        y = F.rms_norm(x, (96,), weight, 1e-5)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    ours, aten = both(call)
    assert len(launches) >= 2
    assert_right(ours[0].detach(), x.detach(), weight.detach(), 1e-5)
    for a, b in zip(ours, aten):
        step = max(torch.finfo(t.dtype).eps for t in (x, weight))
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=4 * step, atol=16 * step)


def test_what_aten_says_of_mixed_types_is_said(tmp_path):
    """Once a process, whoever serves the call, and also where the cache knows it."""
    code = """
import warnings, torch, torch.nn.functional as F
from inductor_plugin import eager, eager_gate
eager_gate.interleaved = lambda ways, run, wait: {n: [2.0 if n == "ATen" else 1.0] for n, _ in ways}
x, w = torch.randn(4, 64).bfloat16(), torch.randn(64)
with eager.enabled(["cpu"]), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        F.rms_norm(x, (64,), w)
print([str(s.message)[:14] for s in said])
"""
    for _ in range(2):
        env = os.environ | {"FLYKERNELS_CACHE_DIR": str(tmp_path / "shared")}
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
        assert ran.stdout.strip() == "['Mismatch dtype']", ran.stderr


def test_where_the_door_cannot_be_opened_python_serves(prefer_ours, launches, monkeypatch):
    """An older or newer torch: the same results, looked up in Python."""
    monkeypatch.setattr(eager, "_open_rms_norm", lambda *_: False)
    x, weight = torch.randn(5, 40, requires_grad=True), torch.randn(40, requires_grad=True)
    step = lambda: (lambda y: (y, *torch.autograd.grad(y.pow(2).sum(), (x, weight))))(F.rms_norm(x, (40,), weight))
    torch.testing.assert_close(*both(step), rtol=1e-5, atol=1e-5)
    assert len(launches) >= 2
    with torch.inference_mode():
        torch.testing.assert_close(*both(lambda: F.rms_norm(x, (40,), weight)), rtol=1e-5, atol=1e-5)
    double = lambda: F.rms_norm(x.double(), (40,), weight.double())
    assert torch.equal(*both(double))


ODD = {
    "a negative view": lambda x: torch._neg_view(x),
    "the imaginary part of a conjugate": lambda x: torch.complex(x, x).conj().imag,
    "a zero tensor": lambda x: torch._efficientzerotensor(x.shape),
    "a sparse tensor": lambda x: x.to_sparse(),
    "a sparse CSR tensor": lambda x: x.to_sparse_csr(),
    "MKL-DNN's layout": lambda x: x.to_mkldnn(),
    "a quantised tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "a nested tensor": lambda x: torch.nested.nested_tensor([x, x[:2]]),
    "a lazily cloned tensor": lambda x: torch._lazy_clone(x),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested")
def test_tensors_of_other_kinds(on, name):
    x, weight = torch.randn(4, 8), torch.randn(8)
    F.rms_norm(x, (8,), weight)  # ours
    odd = ODD[name](x)
    for inference in (False, True):
        with torch.inference_mode(inference):
            ours, aten = both(lambda: F.rms_norm(odd, (8,), weight))
        if isinstance(aten, tuple):
            assert ours == aten
        elif aten.layout is torch.strided and not aten.is_nested:
            torch.testing.assert_close(ours, aten, rtol=1e-5, atol=1e-5)
        else:
            assert (ours.layout, ours.is_nested) == (aten.layout, aten.is_nested)


def test_out_of_range_values_are_as_atens(on):
    for value in (torch.inf, -torch.inf, torch.nan, 3e38, 1e-40, 0.0):
        x = torch.randn(4, 33)
        x[1] = value
        ours, aten = both(lambda x=x: F.rms_norm(x, (33,)))
        torch.testing.assert_close(ours, aten, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_reports_of_others(on):
    """pytorch#141727: bf16 (2, 157, 4096); #186235: a misaligned view; FlyDSL#614: many rows of 128, 512, 1536;
    #190843: widths just past a power of two."""
    x, weight = torch.randn(2, 157, 4096).bfloat16(), torch.randn(4096).bfloat16()
    assert_right(F.rms_norm(x, (4096,), weight), x, weight, None)
    for dtype in DTYPES:
        buffer = torch.randn(8 * 256 + 1).to(dtype)
        view, weight = buffer[1:].view(8, 256), torch.randn(257).to(dtype)[1:]
        assert_right(F.rms_norm(view, (256,), weight), view, weight, None)
    for width in (128, 512, 1536):
        x = torch.randn(16384, width).bfloat16()
        assert_right(F.rms_norm(x, (width,)), x, None, None)
    for width in (4097, 8193, 16385):
        x, weight = torch.randn(3, width), torch.randn(width)
        assert_right(F.rms_norm(x, (width,), weight), x, weight, None)


def test_rows_far_apart(on, launches):
    """pytorch#191447: spans over 2 GiB; memory that is never touched takes no room."""
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    weight = torch.randn(64).bfloat16()
    y = F.rms_norm(x, (64,), weight, 1e-5)
    assert launches
    assert_right(y, x, weight, 1e-5)


def test_inference_mode_and_no_grad(on, launches):
    x, weight = torch.randn(4, 64), torch.randn(64, requires_grad=True)
    with torch.inference_mode():
        y = F.rms_norm(x, (64,), weight)
        assert y.is_inference()
    with torch.no_grad():
        z = F.rms_norm(x, (64,), weight)
    assert len(launches) >= 2 and torch.equal(y, z) and not z.requires_grad


@pytest.mark.parametrize("door", [True, False])
def test_a_gradient_beside_tensors_of_inference_mode(prefer_ours, monkeypatch, door):
    """What a frozen network computed in inference mode may be normalised by a weight that learns, as with ATen, which
    needs to keep the normalised alone."""
    if not door:
        monkeypatch.setattr(eager, "_open_rms_norm", lambda *_: False)
    with torch.inference_mode():
        x, frozen = torch.randn(4, 64), torch.randn(64)
    weight, input = torch.randn(64, requires_grad=True), torch.randn(4, 64, requires_grad=True)
    for operands in ((x, weight), (input, frozen), (x, frozen), (input, weight)):

        def step(operands=operands):
            y = F.rms_norm(operands[0], (64,), operands[1], 1e-5)
            return (y, *(torch.autograd.grad(y.sum(), weight) if operands[1] is weight else ()))

        ours, aten = both(step)
        if torch.is_tensor(aten[0]):
            torch.testing.assert_close(ours, aten, rtol=1e-5, atol=1e-5)
        else:
            assert ours == aten


def test_python_threads_share_plans(on):
    x, weight = torch.randn(64, 256), torch.randn(256)
    expected, wrong = F.rms_norm(x, (256,), weight), []
    for n in (1, 2, 4, 8, 16, 32):  # decided: while a case is measured, others may be served by ATen
        F.rms_norm(x[:n], (256,), weight)

    def work():
        for n in range(1, 30):
            if not torch.equal(F.rms_norm(x[:n], (256,), weight), expected[:n]):
                wrong.append(n)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_direct_calls_of_the_fused_operator_are_checked(on):
    """Nothing reads past a weight that is too short, though no caller of the fused operator has looked at it."""
    x = torch.randn(4, 64)
    short = both(lambda: torch.ops.aten._fused_rms_norm(x, [64], torch.ones(3), None))
    assert short[0] == short[1] and isinstance(short[0][1], str)
    _, rstd = torch.ops.aten._fused_rms_norm(x, [64], None, None)
    dy = torch.randn(4, 64)
    dx, dw = torch.ops.aten._fused_rms_norm_backward(dy, x, [64], rstd, None, [True, False])
    expected, _ = eager_rms_call.composed_backward(dy, x, [64], rstd, None, (True, False))
    torch.testing.assert_close(dx, expected)
    assert dw is None


def test_the_number_of_threads_may_change(on):
    x, weight, before = torch.randn(500, 200), torch.randn(200), torch.get_num_threads()
    expected = F.rms_norm(x, (200,), weight)
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert torch.equal(F.rms_norm(x, (200,), weight), expected)
    finally:
        torch.set_num_threads(before)
