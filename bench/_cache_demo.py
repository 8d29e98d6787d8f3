"""`bench cache --part demo`: the demo's model, served from bundles that were made ahead, on a machine without MLIR."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from ._cache_bundle import Machine
from ._demo_worker import BATCH, WARM_BATCHES
from .common import Report
from .demo import COSINE, sentences


def demo(report: Report) -> None:
    """A machine with MLIR compiles all candidates of the model and measures nothing; a second has its bundle and
    measures; a third has the second's winners."""
    with tempfile.TemporaryDirectory(prefix="flykernels-bench-") as name:
        folder = Path(name)
        text = folder / "sentences.txt"
        text.write_text("\n".join(sentences(BATCH * WARM_BATCHES)) + "\n")
        builder = Machine(folder / "builder", compiler=True)
        model = ("--model", "bench._demo_worker:factory", "--freezing", "--target", "x86")
        print(builder.flykernels("warmup", *model, "--compile-only").splitlines()[-2], flush=True)
        compiled, measured = folder / "compiled.tar.gz", folder / "measured.tar.gz"
        print(builder.flykernels("cache", "export", compiled).strip(), flush=True)
        first, second = (Machine(folder / name, compiler=False) for name in ("first", "second"))
        print(first.flykernels("cache", "import", compiled).strip(), flush=True)
        tuned = _run(report, "compiled only", first, text)
        print(first.flykernels("cache", "export", measured, "--winners").strip(), flush=True)
        print(second.flykernels("cache", "import", measured).strip(), flush=True)
        served = _run(report, "with measurements", second, text)
    report.bar("demo: kernels compiled from a bundle without measurements", tuned["compiles"], at_most=0)
    report.bar("demo: candidates measured there (so they were there)", tuned["benchmarks"], at_least=1)
    report.bar("demo: kernels compiled from a bundle with measurements", served["compiles"], at_most=0)
    report.bar("demo: candidates measured there", served["benchmarks"], at_most=0)
    report.bar("demo: problems that the cache decided", served["from_cache"], at_least=1)
    report.bar("demo: processes that had MLIR", sum(x["mlir"] is not None for x in (tuned, served)), at_most=0)
    report.bar("demo: least cosine to eager f32", min(tuned["cosine"], served["cosine"]), at_least=COSINE)
    report.bar("demo: results that differ between the two", float(tuned["results"] != served["results"]), at_most=0)


def _run(report: Report, name: str, machine: Machine, text: Path) -> dict:
    """What a process of the demo says of itself; its cache lies in the machine's folder."""
    lines = machine.run("bench._demo_worker", "warm", machine.folder, text).splitlines()
    found = json.loads(lines[-1])["result"]
    counts = {key: found[key] for key in ("compiles", "benchmarks", "from_cache", "seconds", "cosine")}
    report.row(demo_from_a_bundle=name, mlir=str(found["mlir"]), **counts)
    return found
