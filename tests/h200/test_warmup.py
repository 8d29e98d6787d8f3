"""Warmup of a model for an H200: what is found without the GPU is what Inductor asks for on it; measured, nothing is
left to compile or to measure."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from click.testing import CliRunner
from torch._inductor.utils import clear_caches

from inductor_plugin import asked, kernels, lowering, settings, wanted
from inductor_plugin.cli import main
from inductor_plugin.counters import counters
from tests.plugin.conftest import compile_with, own_caches, run_and_get_code  # noqa: F401  # a fixture
from tests.plugin.models import Block

FACTORY = "tests.h200.test_warmup:block"


def block():
    model = Block(256, 1024).to(torch.bfloat16)
    model.scale = model.scale.bfloat16()
    return model, torch.randn(4, 64, 256, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def few_rivals(own_caches):  # noqa: F811
    with torch._inductor.config.patch(max_autotune_gemm_backends="ATEN,FLYKERNELS"):
        yield


def cli(*args):
    return CliRunner().invoke(main, ["warmup", *args], catch_exceptions=False)


def really_compiled():
    """(problems that a compilation on the GPU asks for, result, expected)."""
    settings._store.cache_clear()
    kernels._built.clear()
    clear_caches()
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, x = block()
    model, x = model.cuda().eval(), x.cuda()
    model.scale = model.scale.cuda()
    with torch.no_grad(), asked.listening(asked.Listener(decide=True)) as listener:
        out, _ = run_and_get_code(compile_with(model), x)
        return listener.requests, out, model(x)


def titles(requests):
    return sorted(wanted.title(r.key) for r in requests.values())


def test_without_the_gpu_the_same_problems_are_found(own_caches):  # noqa: F811
    program = lowering.from_factory(FACTORY, False, False, False)
    description = wanted.description_of("sm90a")
    there = lowering.lower(program, "sm90a", description, here=False)
    here = lowering.lower(program, "sm90a", description, here=True)
    assert not there.failed and not here.failed
    assert titles(there.requests) == titles(here.requests)
    real, out, expected = really_compiled()
    assert titles(real) == titles(here.requests) and set(real) == set(there.requests)
    assert torch.allclose(out.float(), expected.float(), atol=0.1)


def test_measured_ahead(own_caches, tmp_path, monkeypatch):  # noqa: F811
    done = cli("--model", FACTORY, "--target", "sm90a")
    print(done.output, file=sys.stderr)
    assert done.exit_code == 0 and "not measured" not in done.output, done.output
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor2"))
    monkeypatch.setattr(kernels, "_build", lambda spec: pytest.fail("compiled"))
    _, out, expected = really_compiled()
    assert counters["compiles"] == counters["benchmarks"] == 0 and counters["from cache"] > 0
    assert torch.allclose(out.float(), expected.float(), atol=0.1)


def test_shapes_are_measured(own_caches, tmp_path):  # noqa: F811
    shapes = [
        {"m": 64, "n": 1024, "k": 512}, {"op": "addmm+gelu", "m": 64, "n": 1024, "k": 512},
        {"op": "mm", "m": "symbolic", "hint": 32, "n": 512, "k": 512},
        {"op": "bmm", "batch": 3, "m": 64, "n": 64, "k": 64},
        {"op": "addmm", "m": 64, "n": 512, "k": 512, "residual": True},
    ]  # fmt: skip
    path = tmp_path / "s.json"
    path.write_text(json.dumps(shapes))
    done = cli(str(path), "--target", "sm90a")
    print(done.output, file=sys.stderr)
    decided = [e.key.op for e in map(settings.store().newest, settings.store().all_keys()) if e.winner]
    assert done.exit_code == 0 and {"mm", "addmm", "bmm"} <= set(decided), done.output
    assert any(op.endswith("+gelu") for op in decided) and any(op.endswith("+none") for op in decided)
