"""The plugin end to end on an H200: candidates of ours beside ATen's, checked, chosen, captured, served from the cache.

Ours are made to win (they are still checked against ATen), so that what they compute is what is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from inductor_plugin import devices, kernels, measure, settings
from inductor_plugin.counters import counters
from tests.plugin.conftest import compile_with, ours_ran, own_caches, run_and_get_code  # noqa: F401  # a fixture

ROOT = Path(__file__).parents[2]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def prefer_ours(monkeypatch):
    monkeypatch.setattr(measure, "INERTIA", -0.999)
    yield
    torch.cuda.synchronize()


def rand(*size: int, dtype=BF16) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=dtype)


def assert_close(actual, expected, k, dtype=BF16):
    """expected in f64; |products| of standard normal numbers sum to about k."""
    error = (actual.double() - expected).abs()
    eps = torch.finfo(dtype).eps
    bound = 2 * eps * expected.abs() + eps * k**0.5 * 0.1 + 2 * k * torch.finfo(torch.float32).eps
    assert (error <= bound).all(), f"error {error.max():.3g}; bound {bound.flatten()[error.argmax()]:.3g}"


def nt(m, n, k, dtype=BF16):
    return rand(m, k, dtype=dtype), rand(n, k, dtype=dtype).t()


LAYOUTS = {
    "NN": lambda m, n, k: (rand(m, k), rand(k, n)),
    "NT": lambda m, n, k: (rand(m, k), rand(n, k).t()),
    "TN": lambda m, n, k: (rand(k, m).t(), rand(k, n)),
    "TT": lambda m, n, k: (rand(k, m).t(), rand(n, k).t()),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("m, n, k", [(64, 512, 256), (16, 1024, 4096), (200, 264, 72)])
def test_mm(layout, m, n, k):
    a, b = LAYOUTS[layout](m, n, k)
    result, code = run_and_get_code(compile_with(lambda a, b: a @ b), a, b)
    assert ours_ran(code)
    assert_close(result, a.double() @ b.double(), k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_addmm_bmm_and_baddbmm(dtype):
    a, b = nt(96, 256, 512, dtype)
    bias, batch = rand(256, dtype=dtype), rand(3, 96, 512, dtype=dtype)
    wide = rand(3, 512, 256, dtype=dtype)
    for function, arguments in (
        (torch.addmm, (bias, a, b)), (torch.bmm, (batch, wide)),
        (torch.baddbmm, (rand(3, 1, 256, dtype=dtype), batch, wide)),
    ):  # fmt: skip
        result, code = run_and_get_code(compile_with(lambda *x, f=function: f(*x)), *arguments)
        assert ours_ran(code), function.__name__
        assert_close(result, function(*(x.double() for x in arguments)), 512, dtype)


ACTIVATIONS = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu, "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("m", [16, 256])
def test_linear_bias_activation_in_one_kernel(name, m):
    activate = ACTIVATIONS[name]
    x, w, bias = rand(m, 512), rand(1024, 512), rand(1024)
    function = lambda x, w, bias: activate(F.linear(x, w, bias))
    result, code = run_and_get_code(compile_with(function), x, w, bias)
    assert ours_ran(code) and "triton_poi" not in code  # nothing is left for a kernel of Inductor's
    assert_close(result, function(x.double(), w.double(), bias.double()), 512)
    assert any("+" in op for op in seen_operations())


def seen_operations() -> list[str]:
    store = settings.store()
    files = (Path(store.directories[0]) / "entries").glob("*/*.json")
    return [json.loads(f.read_text())["entry"]["key"]["op"] for f in files]


def test_linear_and_residual_in_one_kernel():
    x, w, residual = rand(64, 512), rand(1024, 512), rand(64, 1024)
    function = lambda x, w, residual: F.linear(x, w) + residual
    result, code = run_and_get_code(compile_with(function), x, w, residual)
    assert ours_ran(code)
    assert_close(result, function(x.double(), w.double(), residual.double()), 512)


def test_a_layer_forward_and_backward():
    layer = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128)).cuda().to(BF16)
    x = rand(128, 256).requires_grad_()
    compiled = compile_with(layer)
    compiled(x).sum().backward()
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x).sum().backward()
    for mine, theirs in zip(grads, (p.grad for p in layer.parameters())):
        assert (mine - theirs).float().norm() <= 0.02 * theirs.float().norm() + 1e-3
    assert counters["benchmarks"] > 0


def test_a_symbolic_m_is_one_kernel():
    w = rand(512, 256)
    function = compile_with(lambda x: F.linear(x, w))
    for m in (64, 65, 1, 500):
        x = rand(m, 256)
        torch._dynamo.mark_dynamic(x, 0) if m > 1 else None
        assert_close(function(x), x.double() @ w.double().t(), 256)


def test_views_of_one_buffer_and_offsets():
    whole = rand(3 * 64, 256)
    function = lambda whole: (whole[:64] @ whole[64:128].t(), whole[128:] @ whole[:64].t())
    results, code = run_and_get_code(compile_with(function), whole)
    assert ours_ran(code)
    for result, expected in zip(results, function(whole.double())):
        assert_close(result, expected, 256)


def test_what_tma_cannot_read_at_run_time_is_aten_s(log_text):
    function = compile_with(lambda a, b: a @ b)
    a, b = nt(64, 256, 128)
    function(a, b)
    misaligned = rand(64 * 128 + 1)[1:].view(64, 128)
    assert_close(function(misaligned, b), misaligned.double() @ b.double(), 128)


def test_one_row_has_no_next_one(log_text):
    """Inductor gives an axis of one element any stride, such as 0."""
    x, w, scale = rand(1, 1, 256), rand(512, 256), rand(256)
    function = lambda x, w, scale: F.linear(F.rms_norm(x, (256,), scale, 1e-5), w)
    result, code = run_and_get_code(compile_with(function), x, w, scale)
    assert ours_ran(code) and "not laid out" not in log_text.text
    exact = function(x.double(), w.double(), scale.double())
    assert (result.double() - exact).norm() < 2 * torch.finfo(BF16).eps * exact.norm()  # x is rounded once more between


def test_a_bias_that_begins_between_words():
    x, w, whole = rand(64, 512), rand(1024, 512), rand(1025)
    handed, cut = compile_with(F.linear), compile_with(lambda x, w, whole: F.linear(x, w, whole[1:]))
    exact = F.linear(x.double(), w.double(), whole[1:].double())
    handed(x, w, whole[:1024])
    for result in (handed(x, w, whole[1:]), cut(x, w, whole)):
        assert_close(result, exact, 512)


@pytest.fixture
def log_text(caplog):
    import logging

    caplog.set_level(logging.INFO, logger="inductor_plugin")
    return caplog


# -- graphs, streams


class Chain(torch.nn.Module):
    """Small M and large K: kernels that share tiles have a workspace."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)

    def forward(self, x):
        return self.down(F.silu(self.up(x))) + x


@pytest.fixture
def chain():
    return Chain().cuda().to(BF16).requires_grad_(False)


def near(model, x, y):
    exact = Chain().cuda().double().requires_grad_(False)
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    expected = exact(x.double())
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("m", [1, 16, 256])
def test_cuda_graph_trees(chain, m):
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,FLYKERNELS", "triton.cudagraphs": True}
    compiled = torch.compile(chain, options=options)
    for _ in range(6):
        x = rand(m, 1024)
        assert near(chain, x, compiled(x)) < 5e-3
    assert counters["benchmarks"] > 0


def test_a_graph_that_the_user_captures(chain):
    compiled, x = compile_with(chain), rand(16, 1024)
    compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x)
    for _ in range(3):
        x.copy_(rand(16, 1024))
        graph.replay()
        assert near(chain, x, y) < 5e-3


def test_streams_side_by_side(chain):
    compiled = compile_with(chain)
    xs = [rand(16, 1024) for _ in range(4)]
    compiled(xs[0])
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(50):
        ys = []
        for x, stream in zip(xs, streams):
            with torch.cuda.stream(stream):
                ys.append(compiled(x))
        torch.cuda.synchronize()
        assert all(torch.equal(y, compiled(x)) for x, y in zip(xs, ys))


# -- measuring


def test_tuning_in_a_process_of_its_own():
    a, b = nt(64, 512, 256)
    with torch._inductor.config.patch(autotune_in_subproc=True):
        result, _ = run_and_get_code(compile_with(lambda a, b: a @ b), a, b)
    assert_close(result, a.double() @ b.double(), 256)
    (op,) = seen_operations()
    assert op == "mm"


def test_no_memory_for_benchmarks(log_text):
    a, b = nt(4096, 8192, 4096)
    a[:64] @ b  # cuBLAS has its workspace
    function = compile_with(lambda a, b: a @ b)
    total = torch.cuda.get_device_properties(0).total_memory
    devices.free_memory()
    used = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((used + (80 << 20)) / total)  # C fits, a second set of operands does not
    try:
        result = function(a, b)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "no memory" in log_text.text or "every candidate failed" in log_text.text
    assert_close(result[:64], a[:64].double() @ b.double(), 4096)


def test_a_wrong_kernel_is_quarantined_and_aten_serves(monkeypatch):
    real = kernels.callable_for

    def off_by_one(spec):
        call = real(spec)

        def wrong(*inputs, out):
            call(*inputs, out=out)
            out[0, 0] += 4
            return out

        return wrong

    monkeypatch.setattr(kernels, "callable_for", off_by_one)
    a, b = nt(64, 512, 256)
    result, code = run_and_get_code(compile_with(lambda a, b: a @ b), a, b)
    assert not ours_ran(code)
    assert_close(result, a.double() @ b.double(), 256)


PROGRAM = """
import json, os, sys
if os.environ.get("WITHOUT_COMPILER"):  # neither to be imported nor found, wherever it is installed
    sys.modules["flydsl"] = None
import torch, torch.nn.functional as F
import inductor_plugin
from inductor_plugin import measure
from inductor_plugin.counters import counters
inductor_plugin.enable()
measure.INERTIA = -0.999
timed = []
from torch._inductor.runtime.benchmarking import benchmarker
kind = type(benchmarker)
original = kind.benchmark_gpu
kind.benchmark_gpu = lambda self, *a, **k: timed.append(1) or original(self, *a, **k)
torch.manual_seed(0)
x, w, bias = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((64, 512), (1024, 512), (1024,)))
f = torch.compile(lambda x: F.gelu(F.linear(x, w, bias)) @ w,
                  options={"max_autotune": True, "max_autotune_gemm_backends": "ATEN,FLYKERNELS"})
y = f(x)
exact = F.gelu(F.linear(x.double(), w.double(), bias.double())) @ w.double()
try:
    import flydsl
    mlir = True
except ImportError:
    mlir = False
error = ((y.double() - exact).norm() / exact.norm()).item()
print(json.dumps({"timed": len(timed), "compiles": counters["compiles"], "from_cache": counters["from cache"],
                  "error": error, "mlir": mlir}))
"""


def run_program(folder: Path, inductor: str, without_compiler: bool = False) -> dict:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path), "FLYKERNELS_CACHE_DIR": str(folder / "ours"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / inductor),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its processes take longer to start and to end than the work takes
    }  # fmt: skip
    if without_compiler:
        env["WITHOUT_COMPILER"] = "1"
        there = lambda d: not (Path(d) / "ptxas").exists()
        env["PATH"] = os.pathsep.join(d for d in env["PATH"].split(os.pathsep) if there(d))
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_measures_and_compiles_nothing_with_or_without_a_compiler(tmp_path):
    cold = run_program(tmp_path, "a")
    assert cold["compiles"] > 0 and cold["timed"] > 0 and cold["error"] < 5e-3
    warm = run_program(tmp_path, "a")  # Inductor's own cache holds the graph
    assert (warm["compiles"], warm["timed"]) == (0, 0) and warm["error"] < 5e-3
    again = run_program(tmp_path, "b")  # ours alone
    assert (again["compiles"], again["timed"]) == (0, 0) and again["from_cache"] > 0 and again["error"] < 5e-3
    bare = run_program(tmp_path, "c", without_compiler=True)
    assert not bare["mlir"] and (bare["compiles"], bare["timed"]) == (0, 0) and bare["error"] < 5e-3
    assert bare["from_cache"] > 0
