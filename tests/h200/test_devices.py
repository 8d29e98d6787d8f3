"""Several GPUs in one process: each compiles, measures and launches for itself. Collected where there are two."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from inductor_plugin import measure
from inductor_plugin.counters import counters
from tests.plugin.conftest import compile_with, ours_ran, own_caches, run_and_get_code  # noqa: F401  # a fixture

BF16 = torch.bfloat16
DEVICES = range(2)
ROUNDS = 30


@pytest.fixture(autouse=True)
def prefer_ours(monkeypatch):
    monkeypatch.setattr(measure, "INERTIA", -0.999)
    with torch.cuda.device(0):
        yield
    for i in DEVICES:
        torch.cuda.synchronize(i)


def rand(*size: int, device: int) -> torch.Tensor:
    return torch.randn(size, device=f"cuda:{device}").to(BF16)


def off(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> float:
    exact = F.silu(x.double() @ w.double().t()) @ v.double().t()
    return ((y.double() - exact).norm() / exact.norm()).item()


def two_products(x, w, v):
    """Few rows and a long K: kernels that share tiles have a workspace, which each device needs for itself."""
    return F.silu(x @ w.t()) @ v.t()


def operands(device: int) -> list[torch.Tensor]:
    shapes = ((16, 1024), (4096, 1024), (1024, 4096))
    return [rand(*s, device=device) * (1 if i == 0 else s[1] ** -0.5) for i, s in enumerate(shapes)]


def test_tensors_of_a_device_that_is_not_the_current_one():
    for device in reversed(DEVICES):
        given = operands(device)
        y, code = run_and_get_code(compile_with(two_products), *given)
        assert ours_ran(code) and y.device.index == device and torch.cuda.current_device() == 0
        assert off(y, *given) < 5e-3


def test_what_one_device_has_measured_serves_the_other_of_its_kind():
    compile_with(two_products)(*operands(0))
    measured = counters["benchmarks"]
    assert measured > 0
    torch._dynamo.reset()
    given = operands(1)
    y, code = run_and_get_code(compile_with(two_products), *given)
    assert ours_ran(code) and off(y, *given) < 5e-3
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert counters["benchmarks"] == measured


def test_both_at_once_from_threads_of_their_own():
    compiled = compile_with(two_products)
    given = [operands(i) for i in DEVICES]
    for g in given:
        compiled(*g)
    wrong: list[str] = []

    def work(device: int) -> None:
        with torch.cuda.device(device):
            x, w, v = given[device]
            for _ in range(ROUNDS):
                x = rand(16, 1024, device=device)
                error = off(compiled(x, w, v), x, w, v)
                if not error < 5e-3:
                    wrong.append(f"cuda:{device}: {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in DEVICES]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_graph_on_each():
    compiled = compile_with(two_products)
    for device in DEVICES:
        with torch.cuda.device(device):
            x, w, v = operands(device)
            compiled(x, w, v)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # the default one is of one device
                y = compiled(x, w, v)
            for _ in range(3):
                x.copy_(rand(16, 1024, device=device))
                graph.replay()
                assert off(y, x, w, v) < 5e-3
