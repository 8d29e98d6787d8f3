"""torch.ops.flykernels.add_rms_norm: results, gradients, errors, fakes, compile, and where ATen's operators serve
it."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

from inductor_plugin import ops
from templates.rms_norm import reference
from templates.rms_norm.problem import RMSNormProblem

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@pytest.fixture(autouse=True)
def nothing_decided(prefer_ours):
    ops._on.cache_clear()


def assert_right(found, x, residual, weight, eps):
    y, total = found
    width = x.shape[-1] if weight is None else weight.numel()
    flat = lambda t: t.detach().reshape(-1, width)
    p = RMSNormProblem(width, NAMES[x.dtype], "none" if weight is None else NAMES[weight.dtype], residual=True)
    want = reference.forward(flat(x), None if weight is None else weight.detach().reshape(-1), flat(residual), eps)
    assert torch.equal(total, x + residual) and total.is_contiguous() and y.is_contiguous() and y.dtype == x.dtype
    assert ((flat(y).double() - want["y"]).abs() <= reference.bound(p, "y", want, width)).all()


@pytest.mark.parametrize("dtype", list(NAMES))
@pytest.mark.parametrize("weight_dtype", [None, *NAMES])
def test_forward(launches, dtype, weight_dtype):
    for shape in ((1, 1), (3, 5), (2, 7, 96), (4, 1025)):
        x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        weight = None if weight_dtype is None else torch.randn(shape[-1]).to(weight_dtype)
        assert_right(ops.add_rms_norm(x, residual, weight, 1e-6), x, residual, weight, 1e-6)
    assert launches


def test_layouts(launches):
    base = torch.randn(6, 5, 64)
    for x, residual in (
        (base, base.flip(0)),
        (base[:, :, 1:33], base[:, :, 3:35]),
        (base.transpose(0, 1), base.transpose(0, 1) * 2),
    ):
        weight = torch.randn(x.shape[-1])
        assert_right(ops.add_rms_norm(x, residual, weight, 1e-5), x, residual, weight, 1e-5)
    x, weight = torch.randn(3, 4, 8), torch.randn(4, 8)
    assert_right(ops.add_rms_norm(x, x * 3, weight, 1e-5), x, x * 3, weight, 1e-5)
    empty = ops.add_rms_norm(torch.empty(0, 8), torch.empty(0, 8))
    assert [t.shape for t in empty] == [(0, 8)] * 2


@pytest.mark.parametrize("dtype", [*NAMES, torch.float64])
@pytest.mark.parametrize("used", ["both", "y", "sum"])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients(dtype, used, weighted):
    x, residual = (torch.randn(9, 70).to(dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(70).to(dtype).requires_grad_() if weighted else None
    wanted = [t for t in (x, residual, weight) if t is not None]
    dy, dsum = torch.randn(9, 70).to(dtype), torch.randn(9, 70).to(dtype)

    def gradients(y, total):
        outs, grads = {"both": ((y, total), (dy, dsum)), "y": (y, dy), "sum": (total, dsum)}[used]
        return torch.autograd.grad(outs, wanted, grads, allow_unused=True)

    ours = gradients(*ops.add_rms_norm(x, residual, weight, 1e-5))
    wide = [t.detach().double().requires_grad_() for t in wanted]
    total = wide[0] + wide[1]
    weight64 = wide[2] if weighted else None
    keep = dy, dsum
    dy, dsum = dy.double(), dsum.double()
    names = {"both": ((F.rms_norm(total, (70,), weight64, 1e-5), total), (dy, dsum)),
             "y": (F.rms_norm(total, (70,), weight64, 1e-5), dy), "sum": (total, dsum)}[used]  # fmt: skip
    want = torch.autograd.grad(*names[:1], wide, *names[1:], allow_unused=True)
    dy, dsum = keep
    step = 4 * torch.finfo(dtype).eps
    for got, expected in zip(ours, want):
        expected = torch.zeros_like(wide[2]) if expected is None else expected
        # x + residual was rounded before it was normalised
        assert (got.double() - expected).abs().max() <= step * max(1.0, expected.abs().max().item()) * 4


def test_gradcheck():
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    function = lambda *operands: ops.add_rms_norm(*operands, 1e-2)
    assert torch.autograd.gradcheck(function, (make(3, 4), make(3, 4), make(4)))
    assert torch.autograd.gradgradcheck(function, (make(3, 4), make(3, 4), make(4)))
    assert torch.autograd.gradcheck(lambda x, r: ops.add_rms_norm(x, r), (make(3, 4), make(3, 4)))


def test_second_derivatives_through_a_kernel():
    x, residual, weight = torch.randn(3, 6, requires_grad=True), torch.randn(3, 6), torch.randn(6, requires_grad=True)

    def twice(function):
        y = function(x, residual, weight)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), (x, weight))

    ours = twice(lambda *o: ops.add_rms_norm(*o, 1e-3)[0])
    torch.testing.assert_close(ours, twice(lambda x, r, w: F.rms_norm(x + r, (6,), w, 1e-3)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recorded", [True, False])
def test_forward_mode(dtype, recorded):
    """Tangents are those of ATen's operators, also by functorch's jvp, and where no gradient is recorded."""
    draw = lambda *shape: torch.randn(*shape).to(dtype)
    primals, tangents = (draw(3, 8), draw(3, 8), draw(8)), (draw(3, 8), draw(3, 8), draw(8))
    ours = lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-3)
    theirs = lambda x, r, w: (F.rms_norm(x + r, (8,), w, 1e-3), x + r)

    def dual(function, which):
        with torch.set_grad_enabled(recorded), forward_ad.dual_level():
            given = [forward_ad.make_dual(p, t) if n in which else p for n, (p, t) in enumerate(zip(primals, tangents))]
            return [forward_ad.unpack_dual(y).tangent for y in function(*given)]

    close = lambda a, b: torch.testing.assert_close(a, b, rtol=3e-2 if dtype == torch.bfloat16 else 1e-4, atol=3e-2)
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        close(dual(ours, which), dual(theirs, which))
    close(torch.func.jvp(ours, primals, tangents), torch.func.jvp(theirs, primals, tangents))


@pytest.mark.parametrize(
    "operands, said",
    [
        ((torch.ones(3, 4), torch.ones(4)), "one shape"),
        ((torch.ones(3, 4), torch.ones(3, 4).double()), "one dtype"),
        ((torch.ones(3, 4), torch.ones(3, 4), torch.ones(3)), "last axes"),
        ((torch.tensor(1.0), torch.tensor(1.0)), "at least one axis"),
        ((torch.ones(3, 4).int(), torch.ones(3, 4).int()), "floating point"),
    ],
)
def test_errors(operands, said):
    for made in (operands, [t.to("meta") for t in operands]):
        with pytest.raises(RuntimeError, match=f"add_rms_norm.*{said}"):
            ops.add_rms_norm(*made)


def test_the_operators_contracts():
    """Schemas, fakes, autograd registration and AOT dispatch, as PyTorch's own checker sees them."""
    x, residual, weight = (torch.randn(*s, requires_grad=True) for s in ((5, 32), (5, 32), (32,)))
    forward = torch.ops.flykernels.add_rms_norm_forward.default
    torch.library.opcheck(forward, (x, residual, weight, 1e-6))
    torch.library.opcheck(forward, (x, residual, None, None))
    torch.library.opcheck(forward, (x.detach().double(), residual.detach().double(), None, 0.1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(launches, dynamic):
    weight = torch.randn(48, requires_grad=True)
    torch._dynamo.reset()

    def block(x, residual):
        y, total = ops.add_rms_norm(x * 2, residual, weight, 1e-6)
        return y.relu(), total

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        x, residual = torch.randn(rows, 48, requires_grad=True), torch.randn(rows, 48)
        got, want = compiled(x, residual), block(x, residual)
        torch.testing.assert_close(got, want)
        ours, theirs = (torch.autograd.grad(sum(t.sum() for t in out), (x, weight)) for out in (got, want))
        torch.testing.assert_close(ours, theirs)
    assert launches
    torch._dynamo.reset()


def test_vmap_has_a_clear_answer():
    """No batching rule: functorch says so in its own words, and does not compute something else."""
    x = torch.randn(2, 3, 8)
    try:
        y, total = torch.func.vmap(lambda x: ops.add_rms_norm(x, x))(x)
    except RuntimeError as e:
        assert "vmap" in str(e) or "batch" in str(e)
        return
    assert_right((y, total), x, x, None, 2.0**-23)
