"""A cache of its own for every test, and candidates of ours that always win: what they compute is what is seen."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

import inductor_plugin
from inductor_plugin import choices, install, kernels, measure, settings
from inductor_plugin.counters import counters


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    """Inductor's caches and ours, empty, under the test's own directory; the plugin on."""
    from torch._inductor.utils import clear_caches

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path / "flykernels"))
    monkeypatch.delenv("FLYKERNELS_MODE", raising=False)
    settings._store.cache_clear()
    kernels._built.clear()
    clear_caches()
    torch._dynamo.reset()
    counters.clear()
    once = lambda self, run, *_, **__: (run(), 1.0)[1]  # one run, 1 ms: these tests are not about speed
    monkeypatch.setattr(type(torch._inductor.runtime.benchmarking.benchmarker), "benchmark_cpu", once)
    assert inductor_plugin.enable()
    yield tmp_path
    inductor_plugin.disable()
    torch._dynamo.reset()


@pytest.fixture
def prefer_ours(monkeypatch):
    """Make Inductor believe that our candidates take a thousandth of their time. ATen still checks them."""
    monkeypatch.setattr(measure, "INERTIA", -0.999)


@pytest.fixture
def freezing():
    """A switch for Inductor's freezing, put back afterwards."""
    import contextlib

    with contextlib.ExitStack() as stack:
        yield lambda on=True: stack.enter_context(torch._inductor.config.patch(freezing=on))


@pytest.fixture
def seen(monkeypatch):
    """The lists of candidates that autotuning calls considered, as labels."""
    lists = []
    original = choices.offer

    def offer(given):
        result = original(given)
        lists.append([choices.label(c) for c in result])
        return result

    monkeypatch.setattr(choices, "offer", offer)
    return lists


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="inductor_plugin")
    return caplog


def compile_with(function, **options):
    """torch.compile with ATen's and our candidates."""
    named = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,FLYKERNELS", **options}
    return torch.compile(function, options=named)


def ours_ran(code: str) -> bool:
    """Whether generated code calls a kernel of ours."""
    return "flykernels_bind(" in code


def run_and_get_code(function, *args):
    """(result, all generated Python code)."""
    from torch._inductor.utils import run_and_get_code as run

    result, code = run(function, *args)
    return result, "\n".join(code)


def assert_close(actual, expected, k, size=None):
    """Within the error of f32 sums of `k` products and one rounding to the result's type.

    size: the largest sum of |products|, which the error of a sum grows with (default: the largest expected value). In
    f32 a sum of k terms errs by up to k eps size; errors are not all of one sign, so 8 sqrt(k) eps size is generous."""
    size = expected.abs().max() if size is None else size
    error = (actual.double() - expected).abs()
    sums = 8 * k**0.5 * torch.finfo(torch.float32).eps * size
    bound = torch.finfo(actual.dtype).eps * expected.abs() + sums + torch.finfo(actual.dtype).smallest_normal
    assert (error <= bound).all(), f"error {error.max():.3g}; bound {bound.flatten()[error.argmax()]:.3g}"


__all__ = ["assert_close", "compile_with", "install", "ours_ran", "run_and_get_code"]

collect_ignore = [] if importlib.util.find_spec("ray") else ["test_fleet.py"]
