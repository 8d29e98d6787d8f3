"""What looks at operators or runs them otherwise keeps working, and sees what it saw before: compile, fake and meta
tensors, functorch, forward mode, dispatch modes, subclasses, autocast, checkpoints, deterministic mode."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from inductor_plugin import eager

norm = lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-5)
top = lambda x, w: torch.topk(x * w, 3)[0]
BOTH = pytest.mark.parametrize("function", [norm, top], ids=["rms_norm", "topk"])


@pytest.fixture
def operands():
    return torch.randn(6, 40), torch.randn(40)


def same(call):
    """A call with eager operators on and with ATen's agrees."""
    with eager.enabled(["cpu"]):
        ours = call()
    with eager.enabled(["cpu"], on=False):
        torch.testing.assert_close(ours, call(), rtol=1e-5, atol=1e-5)


TRANSFORMS = {
    "grad": lambda f: grad(lambda x, w: f(x, w).sum()),
    "vmap": lambda f: vmap(f, (0, None)),
    "vmap of both": lambda f: lambda x, w: vmap(f)(x, w.expand_as(x)),
    "vmap of grad": lambda f: vmap(grad(lambda x, w: f(x, w).sum()), (0, None)),
    "grad of vmap": lambda f: grad(lambda x, w: vmap(f, (0, None))(x, w).sum()),
    "jvp": lambda f: lambda x, w: jvp(lambda x: f(x, w), (x,), (x.cos(),)),
    "vjp": lambda f: lambda x, w: vjp(f, x, w)[1](torch.ones_like(f(x, w))),
    "jacrev": lambda f: jacrev(f),
    "jacfwd": lambda f: jacfwd(f),
    "grad of grad": lambda f: grad(lambda x, w: grad(lambda x: f(x, w).pow(3).sum())(x).pow(2).sum()),
}


@BOTH
@pytest.mark.parametrize("name", TRANSFORMS)
def test_functorch(prefer_ours, operands, function, name):
    same(lambda: TRANSFORMS[name](function)(*operands))


def test_hessian_of_rms_norm(prefer_ours):
    x, w = torch.randn(5), torch.randn(5)
    same(lambda: hessian(lambda x: norm(x, w).pow(2).sum())(x))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("door", [True, False])
def test_forward_mode(prefer_ours, operands, function, dtype, door, monkeypatch):
    if not door:
        monkeypatch.setattr(eager, "_open_rms_norm", lambda *_: False)
    x, w = (t.to(dtype) for t in operands)

    def call(x_too, w_too):
        with forward_ad.dual_level():
            out = function(forward_ad.make_dual(x, x.sin()) if x_too else x, forward_ad.make_dual(w, w) if w_too else w)
            primal, tangent = forward_ad.unpack_dual(out)
            assert tangent is not None
            return primal.clone(), tangent.clone()

    for which in ((True, False), (False, True), (True, True)):
        same(lambda which=which: call(*which))


def test_forward_mode_through_a_model_of_bf16(on):
    model, x = (
        torch.nn.Sequential(torch.nn.RMSNorm(16), torch.nn.Linear(16, 4)).bfloat16(),
        torch.randn(3, 16).bfloat16(),
    )
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.sin()))).tangent
    assert tangent.dtype == torch.bfloat16


def test_forward_over_reverse(prefer_ours, operands):
    x, w = operands
    same(lambda: jvp(grad(lambda x: norm(x, w).pow(2).sum()), (x,), (x.cos(),)))


def test_functional_call(prefer_ours):
    module, x = torch.nn.RMSNorm(16), torch.randn(4, 16)
    new = {"weight": torch.randn(16)}
    same(lambda: functional_call(module, new, (x,)))


class Recorder(TorchDispatchMode):
    def __init__(self):
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@BOTH
@pytest.mark.parametrize("gradient", [False, True])
def test_a_dispatch_mode_sees_the_same_operators(prefer_ours, operands, function, gradient):
    x, w = operands
    x.requires_grad_(gradient)

    def call():
        x.grad = None
        with Recorder() as mode:
            y = function(x, w)
            if gradient:
                y.sum().backward()
        return mode.seen

    with eager.enabled(["cpu"]):
        function(x, w)  # decided: a plan is there
        ours = call()
    with eager.enabled(["cpu"], on=False):
        assert ours == call() and ours


@BOTH
def test_make_fx_traces_the_same_graph(prefer_ours, operands, function):
    from torch.fx.experimental.proxy_tensor import make_fx

    with eager.enabled(["cpu"]):
        function(*operands)
        ours = make_fx(function)(*operands).code
    with eager.enabled(["cpu"], on=False):
        assert ours == make_fx(function)(*operands).code


@BOTH
def test_fake_and_meta_tensors(on, operands, function):
    from torch._subclasses import FakeTensor, FakeTensorMode

    function(*operands)
    with FakeTensorMode() as mode:
        out = function(*(mode.from_tensor(t) for t in operands))
        assert type(out) is FakeTensor and out.device.type == "cpu"
        made = function(torch.empty(6, 40, requires_grad=True), torch.empty(40))
        assert made.requires_grad
    out = function(*(t.to("meta") for t in operands))
    assert out.device.type == "meta" and out.shape == function(*operands).shape


@BOTH
def test_symbolic_sizes(prefer_ours, function):
    """While tracing, sizes that are symbols stay symbols, as with ATen."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    real = torch.randn(6, 40), torch.randn(40)

    def call():
        with FakeTensorMode(shape_env=ShapeEnv()) as mode, enable_python_dispatcher():
            x, w = (mode.from_tensor(t, static_shapes=False) for t in real)
            return str(function(x, w).shape)

    with eager.enabled(["cpu"]):
        ours = call()
    with eager.enabled(["cpu"], on=False):
        assert ours == call() and "s" in ours


def test_compile_with_dynamic_shapes(prefer_ours, operands):
    """As often as with ATen, and no symbol becomes a number."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def compiles():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(norm, backend=counter, fullgraph=True, dynamic=True)
        for rows, width in ((6, 40), (3, 40), (5, 20), (2, 8)):
            x, w = torch.randn(rows, width, requires_grad=True), torch.randn(width)
            y = compiled(x, w)
            torch.testing.assert_close(y, norm(x, w), rtol=1e-5, atol=1e-5)
            y.sum().backward()
        return counter.frame_count

    with eager.enabled(["cpu"]):
        ours = compiles()
    assert ours == compiles()
    torch._dynamo.reset()


def test_deferred_initialisation(on):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.RMSNorm(16))
    assert model(torch.empty(2, 8, device="meta")).device.type == "meta"
    model.to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.ones_(p)
    x = torch.randn(2, 8)
    same(lambda: model(x).detach())


@BOTH
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(prefer_ours, operands, function, backend, launches):
    x, w = operands
    with eager.enabled(["cpu"]):
        expected = function(x, w)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, w), expected, rtol=1e-5, atol=1e-5)
        y = compiled(x.clone().requires_grad_(), w)
        y.sum().backward()
        torch.testing.assert_close(compiled(x[:4], w), expected[:4], rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_compile_and_eager_of_bf16_agree(on):
    """pytorch#141727: one rounding of bf16 apart at most, where their results are up to 4."""
    x, w = torch.randn(2, 157, 4096).bfloat16(), torch.ones(4096).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: F.rms_norm(x, (4096,), w))(x, w)
    eager_result = F.rms_norm(x, (4096,), w)
    step = torch.finfo(torch.bfloat16).eps * eager_result.float().abs()
    assert ((compiled.float() - eager_result.float()).abs() <= step).all()
    torch._dynamo.reset()


TABLES = {
    "the usual table": lambda: None,
    "all that can stay whole": dict,
    "another composition": lambda: {torch.ops.aten.rms_norm.default: lambda x, shape, weight=None, eps=None: x * 3},
}


@pytest.mark.parametrize("name", TABLES)
def test_export(prefer_ours, name):
    """The program is the same, and so is what it is decomposed into."""
    module, x = torch.nn.RMSNorm(8), torch.randn(4, 8)
    rows = ({0: torch.export.Dim("rows", min=2)},)
    texts = []
    for state in (True, False):
        with eager.enabled(["cpu"], on=state):
            expected = module(x)
            program = torch.export.export(module, (x,), dynamic_shapes=rows)
            decomposed = program.run_decompositions(TABLES[name]())
            texts.append((str(program.graph), str(decomposed.graph)))
            torch.testing.assert_close(program.module()(x), expected)
            torch.testing.assert_close(decomposed.module()(x), x * 3 if name == "another composition" else expected)
    assert texts[0] == texts[1]


class Logged(torch.Tensor):
    seen: ClassVar[list] = []

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        unwrap = lambda t: t.as_subclass(torch.Tensor) if isinstance(t, Logged) else t
        with torch._C._DisableTorchDispatch() if hasattr(torch._C, "_DisableTorchDispatch") else torch.no_grad():
            return function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


@BOTH
def test_subclasses_see_the_same_operators(prefer_ours, operands, function):
    x, w = operands

    def call():
        Logged.seen = []
        with torch.no_grad():
            function(x.as_subclass(Logged), w)
        return list(Logged.seen)

    with eager.enabled(["cpu"]):
        function(x, w)
        ours = call()
    with eager.enabled(["cpu"], on=False):
        assert ours == call() and ours


@BOTH
def test_a_torch_function_subclass_keeps_its_type(on, operands, function):
    class Named(torch.Tensor):
        pass

    x, w = operands
    assert type(function(x.as_subclass(Named), w)) is Named


def test_autocast(prefer_ours, operands):
    x, w = operands

    def call():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = norm(x @ torch.eye(40), w.bfloat16())
            return y, torch.topk(y, 3).values

    with eager.enabled(["cpu"]):
        ours = call()
    with eager.enabled(["cpu"], on=False):
        aten = call()
    assert [t.dtype for t in ours] == [t.dtype for t in aten]
    torch.testing.assert_close(ours, aten, rtol=1e-2, atol=1e-2)


def test_checkpoints_and_hooks(prefer_ours, operands):
    from torch.utils.checkpoint import checkpoint

    x, w = operands[0].requires_grad_(), operands[1].requires_grad_()

    def call():
        y = checkpoint(norm, x, w, use_reentrant=False)
        out = torch.autograd.grad(y.pow(2).sum(), (x, w))
        with torch.autograd.graph.save_on_cpu():
            return (*out, *torch.autograd.grad(norm(x, w).pow(2).sum(), (x, w)))

    same(call)


def test_deterministic_mode(on, operands, launches):
    torch.use_deterministic_algorithms(True)
    try:
        x, w = operands
        y, v = norm(x, w), top(x, w)
        assert launches
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(y, norm(x, w)) and torch.equal(v, top(x, w))


def test_torchscript_records_atens_operators(on, operands):
    traced = torch.jit.trace(lambda x, w: (norm(x, w), torch.topk(x, 3)), operands)
    assert "aten::rms_norm" in str(traced.graph) and "aten::topk" in str(traced.graph)
    torch.testing.assert_close(traced(*operands)[0], norm(*operands))


def test_multithreaded_backward(prefer_ours):
    x = torch.randn(8, 32, requires_grad=True)
    ws = [torch.randn(32, requires_grad=True) for _ in range(4)]
    same(lambda: torch.autograd.grad(sum(norm(x, w).sum() for w in ws), (x, *ws)))
