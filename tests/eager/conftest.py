"""A cache of its own for every test; eager operators on or off as the test says; measurements that ours wins at
once."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from inductor_plugin import eager, eager_code, eager_gate, settings
from inductor_plugin.counters import counters
from inductor_plugin.eager_rms_host import HostRMSNorm

collect_ignore = [  # what runs on a GPU, or on two
    name for name, devices in (("test_cuda.py", 1), ("test_two_gpus.py", 2)) if torch.cuda.device_count() < devices
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache of the test's own, nothing decided, eager operators off before and after."""
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path / "flykernels"))
    monkeypatch.delenv("FLYKERNELS_MODE", raising=False)
    monkeypatch.delenv("FLYKERNELS_EAGER", raising=False)
    settings._store.cache_clear()
    eager.disable()
    eager.forget()
    counters.clear()
    yield tmp_path
    eager.disable()
    eager.forget()
    settings._store.cache_clear()


@pytest.fixture
def prefer_ours(monkeypatch):
    """Every kernel that is right wins, without being timed. ATen still checks it."""

    def times(ways, run, wait):
        return {name: [2.0 if name == eager_gate.ATEN else 1.0] for name, _ in ways}

    for name in ("interleaved", "in_queue"):
        monkeypatch.setattr(eager_gate, name, times)


@pytest.fixture
def prefer_aten(monkeypatch):
    """Every measurement says ATen."""
    for name in ("interleaved", "in_queue"):
        monkeypatch.setattr(eager_gate, name, lambda ways, run, wait: {way: [1.0] for way, _ in ways})


@pytest.fixture
def on(prefer_ours):
    """Eager operators are ours."""
    with eager.enabled(["cpu"]):
        yield eager


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, logger="inductor_plugin")
    return caplog


@pytest.fixture
def launches(monkeypatch):
    """Which kernels of ours ran, from Python or behind RMSNorm's door on the CPU: a list that grows."""
    seen: list = []
    original = eager_code.launcher

    def counting(codes):
        launch = original(codes)

        def counted(*arguments):
            seen.append(codes[0].entry)
            return launch(*arguments)

        return counted

    monkeypatch.setattr(eager_code, "launcher", counting)
    loaded = HostRMSNorm._kernel

    def counting_kernel(self, code):
        kernel = loaded(self, code)

        def counted(*arguments):
            seen.append(code.entry)
            kernel.call(*arguments)

        return SimpleNamespace(call=type(kernel.call)(counted), workspace_bytes=kernel.workspace_bytes)

    monkeypatch.setattr(HostRMSNorm, "_kernel", counting_kernel)
    return seen


def both(function, *args):
    """(with eager operators on, with ATen): results, or (type, text) of what was raised."""

    def run():
        torch.manual_seed(1)
        try:
            return function(*args)
        except Exception as e:
            return type(e), str(e)

    with eager.enabled(["cpu"]):
        ours = run()
    with eager.enabled(["cpu"], on=False):
        return ours, run()
