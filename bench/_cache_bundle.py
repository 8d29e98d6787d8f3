"""`bench cache --part bundle`: a bundle made ahead, without measuring, serves a machine that has no MLIR."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ._cache_serve import without_compiler
from .common import Report

ROOT = Path(__file__).parents[1]
SHAPES = [
    {"op": "mm", "m": 64, "n": 1024, "k": 512, "dtype": "f32", "layout": "NT"},
    {"op": "mm", "m": 256, "n": 512, "k": 1024, "dtype": "bf16", "layout": "NT"},
    {"op": "mm", "m": 8, "n": 384, "k": 1536, "dtype": "f32", "layout": "NN"},
]
DENSE = ROOT / "bench" / "dense15.yaml"
ERROR_MOST = {"f32": 1e-5, "bf16": 1e-2}  # relative, in the norm: a few roundings of the type


class Machine:
    """A directory of its own for every cache, and the environment that goes with it. compiler: it has MLIR;
    gpu: it sees the GPUs that are here."""

    def __init__(self, folder: Path, compiler: bool, gpu: bool = True):
        self.folder = folder
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        path = path if compiler else [str(without_compiler(folder / "no-mlir")), *path]
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "FLYKERNELS_CACHE_DIR": str(folder / "flykernels"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            **({} if gpu else {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}),
        }

    def run(self, *command: Any) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)], env=self.env, cwd=ROOT, text=True, capture_output=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def flykernels(self, *arguments: Any) -> str:
        return self.run("inductor_plugin.cli", *arguments)

    def serve(self, shapes: Path, device: str) -> dict:
        return json.loads(self.run("bench._cache_serve", shapes, device).splitlines()[-1])


def bundle(report: Report, device: str = "cpu", shapes: Path | None = None, made: Path | None = None) -> None:
    """device  where the products run: "cpu" or "cuda"
    shapes  the products; default: SHAPES, on GPUs dense15
    made    a bundle of their candidates that was made elsewhere; default: made here, with MLIR, without seeing a GPU"""
    with tempfile.TemporaryDirectory(prefix="flykernels-bench-") as name:
        folder = Path(name)
        if shapes is None:
            shapes = DENSE if device != "cpu" else folder / "shapes.json"
            if device == "cpu":
                shapes.write_text(json.dumps(SHAPES))
        if made is None:
            builder = Machine(folder / "builder", compiler=True, gpu=False)
            target = "x86" if device == "cpu" else "sm90a"
            warm = builder.flykernels("warmup", shapes, "--target", target, "--compile-only")
            print(warm.splitlines()[-2], flush=True)
            made = folder / "compiled.tar.gz"
            print(builder.flykernels("cache", "export", made).strip(), flush=True)
        first = Machine(folder / "first", compiler=False)
        print(first.flykernels("cache", "import", made).strip(), flush=True)
        compiled = first.serve(shapes, device)
        _row(report, "compiled only", compiled)
        measured = folder / "measured.tar.gz"
        print(first.flykernels("cache", "export", measured, "--winners").strip(), flush=True)
        second = Machine(folder / "second", compiler=False)
        print(second.flykernels("cache", "import", measured).strip(), flush=True)
        served = second.serve(shapes, device)
        _row(report, "with measurements", served)
    report.bar("kernels compiled from a bundle without measurements", compiled["compiles"], at_most=0)
    report.bar("candidates measured there (so they were there)", compiled["benchmarks"], at_least=1)
    report.bar("kernels compiled from a bundle with measurements", served["compiles"], at_most=0)
    report.bar("candidates measured there", served["benchmarks"], at_most=0)
    report.bar("products that the cache decided", served["from_cache"], at_least=len(served["products"]))
    report.bar("processes that had MLIR", sum(x["mlir"] is not None for x in (compiled, served)), at_most=0)
    errors = [p["error"] / ERROR_MOST[p["shape"].split()[2]] for x in (compiled, served) for p in x["products"]]
    report.bar("largest error over its bound", max(errors), at_most=1)


def _row(report: Report, name: str, found: dict) -> None:
    counts = {key: found[key] for key in ("compiles", "benchmarks", "from_cache", "seconds")}
    report.row(bundle=name, mlir=str(found["mlir"]), products=len(found["products"]), **counts)
