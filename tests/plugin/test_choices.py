"""What users do: torch.compile a function that multiplies matrices, with our candidates in the list and winning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inductor_plugin.counters import counters

from .conftest import assert_close, compile_with, ours_ran, run_and_get_code

TYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("prefer_ours")


def operand(rows, columns, layout, dtype, scale=1.0):
    """A matrix in one of the layouts a user may hand over, with NaN around it where it has surroundings."""
    if layout == "T":
        return (torch.randn(columns, rows) * scale).to(dtype).t()
    if layout == "padded":  # row stride 16 longer, one column in: rows are misaligned
        whole = torch.full((rows, columns + 17), float("nan"))
        whole[:, 1 : columns + 1] = torch.randn(rows, columns) * scale
        return whole.to(dtype)[:, 1 : columns + 1]
    if layout == "strided":
        whole = torch.full((rows * 2, columns * 3), float("nan"))
        whole[::2, ::3] = torch.randn(rows, columns) * scale
        return whole.to(dtype)[::2, ::3]
    return (torch.randn(rows, columns) * scale).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("a_layout, b_layout", [("N", "N"), ("N", "T"), ("T", "N"), ("T", "T"), ("padded", "strided")])
def test_mm(dtype, a_layout, b_layout):
    a, b = operand(37, 65, a_layout, dtype), operand(65, 50, b_layout, dtype)
    out, code = run_and_get_code(compile_with(lambda a, b: a @ b), a, b)
    assert ours_ran(code)
    assert_close(out, a.double() @ b.double(), 65)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_addmm_with_a_row_and_a_full_bias(dtype):
    a, b = operand(33, 40, "N", dtype), operand(40, 24, "T", dtype)
    for bias in (torch.randn(24).to(dtype), torch.randn(33, 24).to(dtype), torch.randn(24, 33).to(dtype).t()):
        torch._dynamo.reset()
        out, code = run_and_get_code(compile_with(torch.addmm), bias, a, b)
        assert ours_ran(code)
        assert_close(out, bias.double() + a.double() @ b.double(), 40)


def test_addmm_scalars():
    a, b, bias = torch.randn(8, 16), torch.randn(16, 8), torch.full((8,), float("nan"))
    out, code = run_and_get_code(compile_with(lambda c, a, b: torch.addmm(c, a, b, beta=0)), bias, a, b)
    assert_close(out, a.double() @ b.double(), 16)  # beta = 0 ignores a NaN bias
    torch._dynamo.reset()
    bias = torch.randn(8)
    out, code = run_and_get_code(compile_with(lambda c, a, b: torch.addmm(c, a, b, alpha=2)), bias, a, b)
    assert not ours_ran(code)
    assert_close(out, bias.double() + 2 * (a.double() @ b.double()), 16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_bmm_and_baddbmm(dtype):
    a, b = torch.randn(3, 17, 20).to(dtype), torch.randn(3, 9, 20).to(dtype).transpose(1, 2)
    out, code = run_and_get_code(compile_with(torch.bmm), a, b)
    assert ours_ran(code)
    assert_close(out, a.double() @ b.double(), 20)
    torch._dynamo.reset()
    c = torch.randn(3, 17, 9).to(dtype)
    out, code = run_and_get_code(compile_with(torch.baddbmm), c, a, b)
    assert_close(out, c.double() + a.double() @ b.double(), 20)


def test_linear_forward_and_backward():
    layer = torch.nn.Linear(48, 32)
    x = torch.randn(5, 7, 48, requires_grad=True)
    (compiled_out := compile_with(layer)(x)).square().sum().backward()
    grads = [x.grad.clone(), layer.weight.grad.clone(), layer.bias.grad.clone()]
    assert counters["benchmarks"] > 0
    for p in (x, layer.weight, layer.bias):
        p.grad = None
    layer(x).square().sum().backward()
    assert torch.allclose(compiled_out, layer(x), atol=1e-5)
    for got, want in zip(grads, (x.grad, layer.weight.grad, layer.bias.grad)):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_inference_of_tensors_that_require_grad():
    a, b = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    for context in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        with context():
            assert_close(compile_with(lambda a, b: a @ b)(a, b), a.detach().double() @ b.detach().double(), 16)


def test_frozen_weights_are_packed_ahead(freezing):
    freezing()
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 40)).eval()
    x = torch.randn(50, 64)
    with torch.no_grad():
        out, code = run_and_get_code(compile_with(model), x)
        assert ours_ran(code) and "flykernels_packed" in code
        assert torch.allclose(out, model(x), atol=1e-5)


def test_frozen_weights_that_are_parts_of_something_larger(freezing):
    """Where in its storage a weight begins counts, and so does which part of it a product takes."""
    freezing()
    whole, x = torch.randn(48, 48), torch.randn(9, 24)
    weight = torch.nn.Parameter(whole[24:, 5:37], requires_grad=False)
    model = torch.nn.Module()
    model.weight = weight
    model.forward = lambda x: (x @ model.weight[:, :16], x @ model.weight[:, 16:], F.linear(x, model.weight[:, 1:25]))
    with torch.no_grad():
        out, code = run_and_get_code(compile_with(model), x)
    assert ours_ran(code) and "flykernels_packed" in code
    for y, w in zip(out, (weight[:, :16], weight[:, 16:], weight[:, 1:25].t()), strict=True):
        assert_close(y, x.double() @ w.double(), 24)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_another_model_of_the_same_shape_has_its_own_frozen_weights(freezing, dtype):
    """Inductor takes a frozen graph from its cache whatever the weights are."""
    freezing()
    for _ in range(2):
        model, x = torch.nn.Linear(24, 40, dtype=dtype).eval(), torch.randn(9, 24).to(dtype)
        torch._dynamo.reset()
        with torch.no_grad():
            out, code = run_and_get_code(compile_with(model), x)
        assert ours_ran(code) and "flykernels_packed" in code
        assert_close(out, F.linear(x.double(), model.weight.double(), model.bias.double()), 24)


def test_one_kernel_serves_a_symbolic_m(seen):
    weight = torch.randn(24, 32)
    function = compile_with(lambda x: F.linear(x, weight))
    for m in (8, 3, 64, 1, 129):
        x = torch.randn(m, 32)
        torch._dynamo.maybe_mark_dynamic(x, 0) if m == 1 else torch._dynamo.mark_dynamic(x, 0)
        assert_close(function(x), x.double() @ weight.double().t(), 32)
    assert sum(any(name.startswith("flykernels") for name in names) for names in seen) <= 2  # M = 1 is its own graph


@pytest.mark.parametrize("which", ["n", "k"])
def test_symbolic_n_or_k_is_left_to_aten(which, log):
    a, b = torch.randn(8, 16), torch.randn(16, 24)
    if which == "n":
        torch._dynamo.mark_dynamic(b, 1)
    else:
        torch._dynamo.mark_dynamic(a, 1)
        torch._dynamo.mark_dynamic(b, 0)
    out, code = run_and_get_code(compile_with(lambda a, b: a @ b), a, b)
    assert not ours_ran(code)
    assert_close(out, a.double() @ b.double(), 16)
    assert "only M may be symbolic" in log.text


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (1, 4097, 3), (4097, 2, 1), (2, 3, 4097), (1, 1, 513)])
def test_tails(m, n, k):
    a, b = torch.randn(m, k), torch.randn(k, n)
    out, _ = run_and_get_code(compile_with(lambda a, b: torch.mm(a, b)), a, b)
    assert_close(out, a.double() @ b.double(), k)


@settings(derandomize=True, deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    m=st.integers(1, 70), n=st.integers(1, 70), k=st.integers(1, 70),
    layouts=st.tuples(*[st.sampled_from(["N", "T", "padded", "strided"])] * 2),
    dtype=st.sampled_from(TYPES), scale=st.sampled_from([0.1, 1.0, 8.0]),
)  # fmt: skip
def test_any_shape(m, n, k, layouts, dtype, scale):
    torch._dynamo.reset()
    a, b = operand(m, k, layouts[0], dtype, scale), operand(k, n, layouts[1], dtype, scale)
    out = compile_with(lambda a, b: torch.mm(a, b))(a, b)
    assert_close(out, a.double() @ b.double(), k, (a.double().abs() @ b.double().abs()).max())


# -- with an epilogue

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["plain", "frozen"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_linear_and_activation_become_one_kernel(name, frozen, freezing):
    freezing(frozen)
    layer, following = torch.nn.Linear(32, 48), torch.nn.Linear(48, 40)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.following = layer, following

        def forward(self, x):
            return self.following(ACTIVATIONS[name](self.layer(x)))

    model, x = Model().eval(), torch.randn(4, 10, 32)
    with torch.no_grad():
        out, code = run_and_get_code(compile_with(model), x)
        assert f'"activation":"{name}"' in code
        assert "extern_kernels" not in code.split("async_compile.wait")[1]  # neither product is ATen's
        assert "cpp_fused" not in code  # and no loop of its own is left for the activation
        assert torch.allclose(out, model(x), atol=1e-5)


def test_bf16_activation_and_residual():
    w, x, r = (torch.randn(s).bfloat16() for s in ((48, 32), (20, 32), (20, 48)))
    function = lambda x, r: r + F.silu(F.linear(x, w))
    out, code = run_and_get_code(compile_with(function), x, r)
    assert '"activation":"silu"' in code and '"residual":true' in code
    assert_close(out, (r.double() + F.silu(x.double() @ w.double().t())), 32)


def test_a_value_that_is_needed_before_its_activation_is_not_fused():
    w, x = torch.randn(48, 32), torch.randn(20, 32)
    function = lambda x: ((y := F.linear(x, w)), F.gelu(y))
    (plain, active), code = run_and_get_code(compile_with(function), x)
    assert '"activation":"gelu"' not in code
    assert torch.allclose(active, F.gelu(plain), atol=1e-6)


def test_what_ends_a_chain_may_be_the_weight_of_the_next():
    """The first product with its activation is one kernel too, and its bare product is computed nowhere."""
    x, a, b = torch.randn(20, 48), torch.randn(48, 32), torch.randn(32, 40)
    out, code = run_and_get_code(compile_with(lambda x, a, b: F.relu(x @ F.relu(a @ b))), x, a, b)
    assert code.count("= flykernels_bind(") == 2 == code.count('"activation":"relu"')
    assert_close(out, F.relu(x.double() @ F.relu(a.double() @ b.double())), 48 + 32, size=500.0)


def test_a_bias_whose_elements_are_no_neighbours_is_not_read_as_if_they_were():
    """Nor does the kernel that a dense bias got serve it: the cache's key says nothing of a row bias's stride."""
    w, x, numbers = torch.randn(32, 48), torch.randn(16, 32), torch.randn(96)
    function = lambda x, w, bias: F.relu(torch.addmm(bias, x, w))
    for bias in (numbers[:48], numbers[::2], numbers[:1].expand(48)):
        torch._dynamo.reset()
        out, code = run_and_get_code(compile_with(function), x, w, bias)
        assert ('"activation":"relu"' in code) == (bias.stride() == (1,))
        assert_close(out, F.relu(bias.double() + x.double() @ w.double()), 32)


def test_a_product_of_another_type_keeps_nobody_from_being_fused():
    w, x, z = torch.randn(32, 48), torch.randn(16, 32), torch.randn(8, 8, dtype=torch.complex64)
    (out, _), code = run_and_get_code(compile_with(lambda x, z: (F.relu(x @ w), torch.mm(z, z))), x, z)
    assert '"activation":"relu"' in code
    assert_close(out, F.relu(x.double() @ w.double()), 32)


def test_a_symbolic_number_that_is_added_is_no_residual(log):
    w, x = torch.randn(32, 48), torch.randn(16, 32)
    function = compile_with(lambda x, n: F.relu(x @ w) + n)
    for n in (3, 4):  # the second is a symbol
        assert_close(function(x, n), F.relu(x.double() @ w.double()) + n, 32)
    assert "no fused candidates" not in log.text


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_an_operand_that_is_computed_lies_as_the_kernel_expects_it(batch, log):
    """Inductor would decide later that relu(x) had better lie as x does, and every call would be ATen's."""
    x, w = torch.randn(*batch, 40, 33), torch.randn(*batch, 40, 24)
    out, code = run_and_get_code(compile_with(lambda x, w: F.relu(x.mT) @ w), x, w)
    assert ours_ran(code) and "ATen serves" not in log.text
    assert_close(out, F.relu(x.mT.double()) @ w.double(), 40)


def test_operands_written_in_place_before_the_activation():
    """Inductor writes into x between the product and relu (in training it keeps their order): the product of what x was
    before is meant."""
    w, new = torch.randn(32, 48), torch.randn(2, 32)

    def function(x, at):
        x = x * 2
        y = x @ w
        x[at] = new
        return F.relu(y), x

    x, at = torch.randn(16, 32, requires_grad=True), torch.tensor([1, 3])
    out, _ = compile_with(function)(x, at)
    assert_close(out.detach(), F.relu(x.detach().double() * 2 @ w.double()), 32)


def test_an_activation_that_only_looks_like_one_is_not_fused():
    w, x = torch.randn(48, 32), torch.randn(20, 32)
    nearly_gelu = lambda y: y * 0.5 * (1 + torch.erf(y * 0.70710677))
    out = compile_with(lambda x: nearly_gelu(F.linear(x, w)))(x)
    assert torch.allclose(out, nearly_gelu(F.linear(x, w)), atol=1e-5)


@pytest.mark.parametrize("name", ["none", *ACTIVATIONS])
def test_a_bias_that_is_added_apart_belongs_to_the_product(name):
    """On a GPU Inductor turns addmm into mm and an addition, which the next loop could take in."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from inductor_plugin import fusion, private

    activate = ACTIVATIONS.get(name, lambda x: x)
    function = lambda x, w, bias: activate(bias + torch.mm(x, w))
    table = private.load().names.select_decomp_table()
    x, w, bias = torch.randn(20, 32), torch.randn(32, 48), torch.randn(48)
    graph = make_fx(function, decomposition_table=table, tracing_mode="fake")(x, w, bias).graph
    ((gemm, activation, residual, last),) = fusion.chains(graph)
    assert (gemm.base, activation, residual) == ("mm", name, None)
    assert gemm.bias.meta["val"].shape == (48,) and next(iter(last.users)).op == "output"
    wide = make_fx(lambda x, w, r: torch.mm(x, w) + r, decomposition_table=table, tracing_mode="fake")
    ((gemm, _, residual, _),) = fusion.chains(wide(x, w, torch.randn(20, 48)).graph)
    assert gemm.bias is None and residual is not None
