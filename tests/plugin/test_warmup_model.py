"""`flykernels warmup --model`: every problem of a model, without weights or GPU, under the keys Inductor looks up."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from torch._inductor.utils import clear_caches

from inductor_plugin import asked, kernels, lowering, settings, wanted
from inductor_plugin.cli import main
from inductor_plugin.counters import counters
from tests.plugin import models
from tests.plugin.conftest import compile_with, ours_ran, run_and_get_code

GPUS = ("gfx950", "sm90a")


@pytest.fixture(autouse=True)
def few_rivals():
    """C++ templates take g++ seconds each."""
    with torch._inductor.config.patch(max_autotune_gemm_backends="ATEN,FLYKERNELS"):
        yield


def cli(*args):
    return CliRunner().invoke(main, ["warmup", "--jobs", "1", *args], catch_exceptions=False)


def as_if_new(monkeypatch, tmp_path):
    """What a process that finds only our cache has."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor2"))
    settings._store.cache_clear()
    kernels._built.clear()
    clear_caches()
    torch._dynamo.reset()
    counters.clear()


def compiled(factory):
    """(problems that a real compilation asked for, by digest; its code)."""
    model, inputs = factory()
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.no_grad(), asked.listening(asked.Listener(decide=True)) as listener:
        out, code = run_and_get_code(compile_with(model.eval()), *arguments)
        expected = model(*arguments)
    assert torch.allclose(out, expected, atol=1e-4)
    return listener.requests, code


def test_the_compilation_finds_every_problem_compiled_and_measured(tmp_path, prefer_ours, monkeypatch):
    done = cli("--model", "tests.plugin.models:block")
    assert done.exit_code == 0 and "not measured" not in done.output, done.output
    warmed = {key.digest: settings.store().newest(key) for key in settings.store().all_keys()}
    assert sorted(e.key.op for e in warmed.values()) == [
        "addmm",
        "addmm",
        "addmm+gelu",
        "addmm+none",
        "bmm",
        "bmm",
        "mm",
    ]
    assert all(e.winner and all(t.artefact for t in e.timings.values() if t.config) for e in warmed.values())
    monkeypatch.setattr(kernels, "_build", lambda spec: pytest.fail("compiled"))
    as_if_new(monkeypatch, tmp_path)
    requests, code = compiled(models.block)
    assert set(requests) == set(warmed) and ours_ran(code)
    assert counters["compiles"] == counters["benchmarks"] == 0
    again = cli("--model", "tests.plugin.models:block")
    assert (
        again.exit_code == 0
        and "0 compiled" in again.output
        and "0 problems measured, 7 decided before" in again.output
    )


def test_compiled_without_measuring_and_frozen(tmp_path, prefer_ours, monkeypatch, freezing):
    done = cli("--model", "tests.plugin.models:linear", "--freezing", "--compile-only")
    assert done.exit_code == 0, done.output
    warmed = {key.digest: settings.store().newest(key) for key in settings.store().all_keys()}
    assert len(warmed) == 2 and all(e.key.problem["packed_b"] and not e.winner for e in warmed.values())
    monkeypatch.setattr(kernels, "_build", lambda spec: pytest.fail("compiled"))
    as_if_new(monkeypatch, tmp_path)
    freezing()
    requests, code = compiled(models.linear)
    assert set(requests) == set(warmed) and ours_ran(code)
    assert counters["compiles"] == 0 and counters["benchmarks"] > 0


def lowered(factory, target, **options):
    name = f"tests.plugin.models:{factory.__name__}"
    program = lowering.from_factory(name, **{"training": False, "dynamic": False, "freezing": False, **options})
    return lowering.lower(program, target, wanted.description_of(target), target == "x86")


@pytest.mark.parametrize("target", GPUS)
def test_gpus_that_are_not_here(target):
    seen = lowered(models.named, target)
    assert not seen.failed
    problems = [wanted.of_heard(r, target, wanted.ELSEWHERE[target]) for r in seen.requests.values()]
    ops = {p.key.op for p in problems}
    assert {"bmm", "mm"} <= ops and any(op.endswith("+gelu") for op in ops)
    assert all(p.key.target == wanted.ELSEWHERE[target] and p.problem.dtype == "bf16" for p in problems)
    assert all(p.problem.why_not(p) is None for p in problems)
    assert any(p.key.problem["m"] == "symbolic" and p.problem.m_hint == 32 for p in problems)
    assert torch.version.hip is None and not torch.cuda.is_available()  # as it was


def test_training_asks_for_more():
    forward = lowered(models.block, "x86").requests
    both = lowered(models.block, "x86", training=True).requests
    layouts = {(r.problem.a, r.problem.b) for r in both.values()}
    assert len(both) > len(forward) and ("col", "row") in layouts  # a weight's gradient: x^T dy


def test_no_weights_are_made():
    before = torch.get_default_dtype()
    seen = lowered(models.huge, "gfx950")
    assert [r.problem.k for r in seen.requests.values()] == [1 << 20] and torch.get_default_dtype() == before


BAD = {
    "tests.plugin.models": "not module:factory",
    "no_such_module:f": "No module named",
    "tests.plugin.models:missing": "missing",
    "tests.plugin.models:alone": "not \\(model, example inputs\\)",
    "tests.plugin.models:__name__": "str, not a function",
    "tests.plugin.models:nothing": "asks for nothing that templates serve",
    "tests.plugin.models:broken": "RuntimeError: no such checkpoint",
}


@pytest.mark.parametrize("name", BAD)
def test_models_that_cannot_be_looked_at(name, own_caches):
    refused = cli("--model", name)
    assert refused.exit_code == 1 and not (own_caches / "flykernels").exists()
    import re

    assert re.search(BAD[name], " ".join(refused.output.split())), refused.output
