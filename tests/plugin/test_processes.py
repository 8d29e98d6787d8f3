"""Across processes: the second one compiles and measures nothing, workers measure, and importing torch stays cheap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inductor_plugin.counters import counters

from .conftest import compile_with, run_and_get_code

ROOT = Path(__file__).parents[2]

MODEL = """
import json, sys, torch
torch.manual_seed(0)
layer, last = torch.nn.Linear(64, 96), torch.nn.Linear(96, 32)
x = torch.randn(40, 64)
function = lambda x: last(torch.nn.functional.gelu(layer(x)))
import inductor_plugin
from torch._inductor.runtime.benchmarking import benchmarker
timed, original = [], type(benchmarker).benchmark_cpu
type(benchmarker).benchmark_cpu = lambda self, *a, **k: timed.append(1) or original(self, *a, **k)
if {prefer}:
    from inductor_plugin import measure
    measure.INERTIA = -0.999
with torch.no_grad():
    compiled = torch.compile(function, options=dict(max_autotune=True, max_autotune_gemm_backends="ATEN,FLYKERNELS"))
    out = compiled(x)
    assert torch.allclose(out, function(x), atol=1e-5)
from inductor_plugin.counters import counters
from torch._dynamo.utils import counters as dynamo
print(json.dumps({{
    "benchmarks": counters["benchmarks"], "compiles": counters["compiles"],
    "timed": len(timed),
    "fx_hits": dynamo["inductor"]["fxgraph_cache_hit"],
    "mlir": "flydsl" in sys.modules or "mlir" in sys.modules,
    "bits": out.view(torch.int32).sum().item(),
}}))
"""


def run(program: str, folder: Path, **environment) -> dict:
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "FLYKERNELS_CACHE_DIR": str(folder / "flykernels"), **environment,
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_second_process_compiles_and_measures_nothing(tmp_path):
    first = run(MODEL.format(prefer=True), tmp_path)
    assert first["benchmarks"] > 0 and first["compiles"] > 0
    second = run(MODEL.format(prefer=False), tmp_path)
    assert (second["benchmarks"], second["compiles"], second["timed"]) == (0, 0, 0)
    assert second["fx_hits"] >= 1 and not second["mlir"]
    assert second["bits"] == first["bits"]  # pytorch#99949: tuning must not change results from run to run


def test_without_inductors_caches_our_cache_still_decides_and_needs_no_mlir(tmp_path):
    run(MODEL.format(prefer=True), tmp_path)
    import shutil

    shutil.rmtree(tmp_path / "inductor")
    second = run(MODEL.format(prefer=False), tmp_path)
    assert (second["benchmarks"], second["compiles"], second["timed"]) == (0, 0, 0)
    assert not second["mlir"]


def test_candidates_are_measured_in_inductors_worker(prefer_ours):
    a, b = torch.randn(16, 16), torch.randn(16, 16)
    with torch._inductor.config.patch(autotune_in_subproc=True):
        out, _ = run_and_get_code(compile_with(lambda a, b: a @ b), a, b)
    assert torch.allclose(out, a @ b, atol=1e-5)
    assert counters["benchmarks"] == 0  # they happened elsewhere, and were recorded:
    from inductor_plugin import settings

    (path,) = settings.store().directories[0].glob("entries/*/*.json")
    timings = json.loads(path.read_text())["entry"]["timings"]
    assert [t for t in timings.values() if t["config"] and isinstance(t["microseconds"], float)]


def test_the_environment_alone_switches_it_on(tmp_path):
    program = """
import json, torch
from torch._inductor.utils import run_and_get_code
a, b = torch.randn(64, 64), torch.randn(64, 64)
import logging
seen = []
logging.getLogger("inductor_plugin.choices").setLevel(logging.INFO)
handler = logging.Handler(); handler.emit = lambda r: seen.append(r.getMessage())
logging.getLogger("inductor_plugin.choices").addHandler(handler)
torch.compile(lambda a, b: a @ b, mode="max-autotune-no-cudagraphs")(a, b)
print(json.dumps({"offered": any("candidates" in s for s in seen)}))
"""
    backends = {"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN,FLYKERNELS"}
    assert run(program, tmp_path, **backends)["offered"]
    assert not run(program, tmp_path, TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS="ATEN")["offered"]
    assert not run(program, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **backends)["offered"]


def test_importing_torch_loads_nothing_of_inductor_or_mlir(tmp_path):
    program = """
import json, sys, torch
heavy = ("torch._inductor", "flydsl", "mlir", "templates", "tuning")
print(json.dumps([m for m in sys.modules if m.startswith(heavy)]))
"""
    assert run(program, tmp_path) == []


@pytest.mark.parametrize("word", ["mm", "addmm+gelu", "bmm"])
def test_explain_on_the_command_line(tmp_path, word):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "FLYKERNELS_CACHE_DIR": str(tmp_path),
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "inductor_plugin.cli", "explain", word, "--m", "64", "--n", "384", "--k", "384"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "eligible" in done.stdout and "it would be measured" in done.stdout, done.stderr
    done = subprocess.run([*command, "--dtype", "float64"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "not eligible" in done.stdout


def test_the_command_line_has_the_simulator():
    from click.testing import CliRunner

    from inductor_plugin.cli import main

    listed = CliRunner().invoke(main, ["--help"])
    assert "explain" in listed.output and "sim" in listed.output
    assert "--timeline" in CliRunner().invoke(main, ["sim", "--help"]).output


def test_without_torch(tmp_path):
    """A machine that has no torch can ask what it may compile; what needs torch says so."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "FLYKERNELS_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", "from inductor_plugin.cli import main; main()"]
    size = ["--m", "64", "--n", "512", "--k", "384"]
    run = lambda *words: subprocess.run([*command, *words], env=env, capture_output=True, text=True, timeout=120)
    asked = run("explain", "mm", *size, "--dtype", "bf16", "--target", "gfx950")
    assert asked.returncode == 0 and "no gfx950 device here" in asked.stdout, asked.stderr
    refused = run("explain", "topk", *size)
    assert refused.returncode == 1 and "needs PyTorch" in refused.stderr and "Traceback" not in refused.stderr


def test_enable_before_inductor_is_imported_waits_for_it(tmp_path):
    program = """
import json, sys, torch, inductor_plugin
ok = inductor_plugin.enable()
early = "torch._inductor.compile_fx" in sys.modules
import torch._inductor.compile_fx
from torch._inductor import config
named = config.max_autotune_gemm_backends
inductor_plugin.disable()
print(json.dumps([ok, early, named, config.max_autotune_gemm_backends]))
"""
    ok, early, named, after = run(program, tmp_path)
    assert ok and not early and "FLYKERNELS" in named and "FLYKERNELS" not in after
