"""torch.compiler.save_cache_artifacts() carries what is ours along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import clear_caches
from torch.compiler import _cache as torchs

from inductor_plugin import artifacts, kernels, settings
from inductor_plugin.counters import counters
from tests.plugin.conftest import compile_with, ours_ran, run_and_get_code


@pytest.fixture(autouse=True)
def fresh():
    torchs.CacheArtifactManager.clear()
    yield
    torchs.CacheArtifactManager.clear()


def elsewhere(tmp_path, monkeypatch, name):
    """As a process on another machine."""
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path / name))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"inductor {name}"))
    clear_caches()
    torch._dynamo.reset()
    kernels._built.clear()
    counters.clear()


def test_kernels_and_decisions_travel_with_torchs_artifacts(tmp_path, prefer_ours, monkeypatch):
    a, b = torch.randn(5, 40), torch.randn(40, 24)
    _, text = run_and_get_code(compile_with(torch.mm), a, b)
    assert ours_ran(text)
    saved, info = torch.compiler.save_cache_artifacts()
    assert info.artifacts["flykernels"] and info.artifacts["inductor"]
    elsewhere(tmp_path, monkeypatch, "second")
    monkeypatch.setattr(kernels, "_build", lambda spec: pytest.fail("compiled"))
    torchs.CacheArtifactManager.clear()
    assert torch.compiler.load_cache_artifacts(saved).artifacts["flykernels"] == info.artifacts["flykernels"]
    out = compile_with(torch.mm)(a, b)
    assert torch.allclose(out, a @ b, atol=1e-4) and counters["compiles"] == counters["benchmarks"] == 0
    (entry,) = (e for _, e in settings.store().entries())
    assert settings.store().load(entry.best().artefact) is not None
    # And on: a process whose graph came from Inductor's cache passes on the kernel that it calls.
    saved, info = torch.compiler.save_cache_artifacts()
    assert entry.best().artefact in info.artifacts["flykernels"]
    elsewhere(tmp_path, monkeypatch, "third")
    torch.compiler.load_cache_artifacts(saved)
    assert settings.store().load(entry.best().artefact) is not None


def test_nothing_is_noted_where_nothing_of_ours_won_or_is_not_wanted(prefer_ours, monkeypatch):
    monkeypatch.setenv("FLYKERNELS_ARTIFACTS", "0")
    compile_with(torch.mm)(torch.randn(5, 40), torch.randn(40, 24))
    _, info = torch.compiler.save_cache_artifacts()
    assert not info.artifacts["flykernels"]


def test_torch_knows_the_kind_as_soon_as_it_is_imported():
    program = "import torch.compiler._cache as c, sys; print('flykernels' in c.CacheArtifactFactory._artifact_types, "
    program += "'torch._inductor' in sys.modules, 'tuning_cache' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "True False False\n"


NONE = [b"", b"{}", b"[]", b"\xff", json.dumps({"entry": None, "objects": {"a": "b"}}).encode()]


@pytest.mark.parametrize("content", NONE)
def test_artifacts_that_are_none_of_ours_are_passed_over(tmp_path, content, caplog):
    assert artifacts.register()
    torchs.CacheArtifactFactory.create("flykernels", "x", content).populate_cache()
    assert "passed over" in caplog.text and not list(settings.store().entries())
