"""Eager operators where there are several GPUs (collected only there): on one that is not the current one, on both at
once, and what one of them may not decide for the other."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from inductor_plugin import eager

from .test_cuda import assert_norm, assert_topk, first_guess, on, winners

__all__ = ["first_guess", "on"]  # fixtures
ELSEWHERE = "cuda:1"


def norm_with_gradients(device, rows=64, width=1024):
    x = torch.randn(rows, width, device=device, requires_grad=True)
    w = torch.randn(width, device=device, requires_grad=True)
    y = F.rms_norm(x, (width,), w, 1e-5)
    return x, w, y, torch.autograd.grad(y, (x, w), torch.ones_like(y))


def test_a_device_that_is_not_the_current_one(on):
    """First met there, and served there: results and gradients lie on it, and the current device stays."""
    assert torch.cuda.current_device() == 0
    x, w, y, gradients = norm_with_gradients(ELSEWHERE)
    assert_norm(y.detach(), x.detach(), w.detach())
    assert_topk(x.detach(), 5)
    assert {t.device for t in (y, *gradients)} == {torch.device(ELSEWHERE)} and torch.cuda.current_device() == 0
    assert "ATen" not in winners("rms_norm") | winners("rms_norm_backward")
    with eager.enabled(["cuda"], on=False):
        z = F.rms_norm(x, (1024,), w, 1e-5)
        torch.testing.assert_close(gradients, torch.autograd.grad(z, (x, w), torch.ones_like(z)), rtol=1e-4, atol=1e-4)


def test_the_current_stream_of_each(on):
    """Work is ordered by the stream that is current on its own device."""
    streams = [torch.cuda.Stream(device) for device in range(2)]
    for n in range(2):
        norm_with_gradients(f"cuda:{n}")
    for _ in range(20):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                x = torch.randn(64, 1024, device=stream.device) * 2
                w = torch.ones(1024, device=stream.device)
                found.append((x, w, F.rms_norm(x, (1024,), w, 1e-5)))
        for stream in streams:
            stream.synchronize()
        for x, w, y in found:
            assert_norm(y, x, w)


def test_graphs_on_the_other_device(on):
    norm_with_gradients(ELSEWHERE)
    with torch.cuda.device(1):
        x, w = torch.randn(64, 1024, device=ELSEWHERE), torch.randn(1024, device=ELSEWHERE)
        F.rms_norm(x, (1024,), w, 1e-5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = F.rms_norm(x, (1024,), w, 1e-5)
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
    assert_norm(y, x, w)


def test_a_weight_elsewhere_is_atens_error(on):
    x = torch.randn(64, 1024, device="cuda:0")
    errors = []
    for state in (True, False):
        with eager.enabled(["cuda"], on=state), pytest.raises(RuntimeError) as error:
            F.rms_norm(x, (1024,), torch.randn(1024, device=ELSEWHERE))
            torch.cuda.synchronize()
        errors.append(str(error.value).split("\n")[0])
    assert errors[0] == errors[1]


def test_threads_each_with_a_device(on):
    """Met for the first time on both at once."""
    wrong = []

    def work(n):
        with torch.cuda.device(n):
            for width in (512, 1024, 2048):
                x, w, y, _ = norm_with_gradients(f"cuda:{n}", 32, width)
                try:
                    assert_norm(y.detach(), x.detach(), w.detach())
                except AssertionError as e:
                    wrong.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_data_parallel(on):
    model = torch.nn.DataParallel(torch.nn.RMSNorm(1024).cuda(), device_ids=[0, 1])
    x = torch.randn(64, 1024, device="cuda:0")
    model(x).sum().backward()
    assert_norm(model(x).detach(), x, model.module.weight.detach(), torch.finfo(torch.float32).eps)
    assert model.module.weight.grad is not None
