"""The main job, for real: a sentence encoder (MiniLM-L6) over real sentences - eager, max-autotune, and with us.

Three processes: one compiles both ways from empty caches and runs them side by side, batch by batch; a second must be
served wholly from what the first left in the cache; this one shows progress, then compiles the model's GEMM shapes to
gfx950 code objects. Everything measured is measured on the CPU; the gfx950 rows are compiled, not run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .common import Report, parser

SENTENCES = 512  # at least 500; 16 batches
COSINE = 0.9999  # at least, to eager f32: any sentence's
ROOT = Path(__file__).parents[1]


def sentences(count: int) -> list[str]:
    """Real English sentences of 6 to 24 words, from the language reference that ships with every Python."""
    from pydoc_data import topics

    found: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", "\n\n".join(topics.topics.values())):
        if re.search(r"^\s*(>>>|\.\.|::|\|)", paragraph, re.M):
            continue  # code and tables
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
            prose = re.fullmatch(r"[A-Z][\w\s,;:'\"()\-/.`*=\[\]<>]+[.!?]", sentence)
            if prose and 6 <= len(sentence.split()) <= 24:
                found[sentence] = None
    if len(found) < count:
        raise RuntimeError(f"this Python's documentation has {len(found)} sentences; needed: {count}")
    return list(found)[:count]


def main(argv: list[str]) -> int:
    options = parser("demo", "the whole path on a real model")
    options.add_argument(
        "--quick", action="store_true", help="without Inductor's C++ templates, which are slow to compile"
    )
    options.add_argument("--keep", type=Path, help="directory for the caches and results (default: a temporary one)")
    given = options.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="flykernels-demo-") as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return _run(folder, given.quick, given.json)


def _run(folder: Path, quick: bool, json_file: Path | None) -> int:
    start = time.perf_counter()
    text = folder / "sentences.txt"
    text.write_text("\n".join(sentences(SENTENCES)) + "\n")
    with _progress() as progress:
        cold = _worker("cold", folder, text, quick, progress)
        with ThreadPoolExecutor(1) as beside:  # done before the warm process has imported what it needs
            compiled = beside.submit(lambda: list(_on_gfx950(folder, progress)))
            warm = _worker("warm", folder, text, quick, progress)
            gfx950 = compiled.result()
    report = Report("demo", "measured on CPU")
    shape_rows(report, folder, cold["cpp_template_us"])
    _result_rows(report, cold, warm)
    for row in gfx950:
        report.row(**row)
    report.note(
        "gfx950 rows are code objects compiled here: nothing ran on an MI350. Everything else: measured on CPU."
    )
    report.note(f"{SENTENCES} sentences in batches of {cold['batch']}; {time.perf_counter() - start:.0f} s in all")
    rate = cold["sentences_per_second"]
    report.bar("sentences/s, ours / max-autotune", rate["ours"] / rate["max-autotune"], at_least=1.0)
    report.bar("least cosine to eager f32", min(*cold["cosine"].values(), warm["cosine"]), at_least=COSINE)
    report.bar("benchmarks in the warm process", warm["benchmarks"], at_most=0)
    report.bar("compiles in the warm process", warm["compiles"], at_most=0)
    return report.close(json_file)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _worker(mode: str, folder: Path, text: Path, quick: bool, progress: Progress) -> dict[str, Any]:
    """Run bench/_demo_worker.py; its lines of JSON move the bar, the last one is the result."""
    task = progress.add_task(f"{mode:7}", total=None, note="starting")
    command = [
        sys.executable,
        "-m",
        "bench._demo_worker",
        mode,
        str(folder),
        str(text),
        *(["--quick"] if quick else []),
    ]
    errors = folder / f"{mode}.log"
    with (
        errors.open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as worker,
    ):
        result = None
        assert worker.stdout is not None
        for line in worker.stdout:
            message = json.loads(line)
            result = message.get("result", result)
            if "note" in message:
                progress.update(task, note=message["note"], completed=message["done"], total=message["total"])
                if not progress.console.is_terminal:
                    print(f"{mode}: {message['note']}", file=sys.stderr, flush=True)
    if worker.returncode or result is None:
        raise RuntimeError(f"the {mode} process failed:\n{errors.read_text()[-4000:]}")
    progress.update(task, note="done", completed=1, total=1)
    return result


def entries(folder: Path) -> list[Any]:
    """The cache's entries for GEMMs, largest products first."""
    from tuning_cache import Entry

    found = [Entry.from_json(p.read_text()) for p in (folder / "flykernels").glob("entries/*/*.json")]
    size = lambda e: -e.key.problem["m"] * e.key.problem["n"] * e.key.problem["k"]
    return sorted(found, key=lambda e: (size(e), e.key.op, e.key.problem["residual"]))


def shape_rows(report: Report, folder: Path, cpp_us: dict[str, float]) -> None:
    """Every GEMM shape of the model: ATen, C++ template, ours, the winner. A product followed by an epilogue stands
    again in rows of its own: there ours is one kernel, and "chain" the best product with the epilogue as a pass."""
    for entry in entries(folder):
        problem, best = entry.key.problem, {}
        shape = f"{problem['m']}x{problem['n']}x{problem['k']}"
        if entry.key.op == "_mkl_linear" and shape in cpp_us:
            best["cpp"] = cpp_us[shape]
        for timing in entry.timings.values():
            kind = timing.name.split()[0]
            if timing.microseconds is not None:
                best[kind] = min(best.get(kind, float("inf")), timing.microseconds)
        winner = str(entry.winner).split()[0]
        show = lambda kind: f"{best[kind]:.0f}" if kind in best else "-"
        report.row(
            operation=operation(entry),
            M=problem["m"], N=problem["n"], K=problem["k"],
            ATen_us=show("aten"), Cpp_us=show("cpp"), chain_us=show("unfused"), ours_us=show("flykernels"),
            winner={"flykernels": "ours", "unfused": "the chain"}.get(winner, winner),
        )  # fmt: skip


def operation(entry: Any) -> str:
    """What an entry's kernel computes, in words; "linear" is MKL's product with a packed, frozen weight."""
    base, _, activation = entry.key.op.partition("+")
    name = base.replace("_mkl_linear", "linear")
    if activation and entry.key.problem["bias"] != "none":
        name += " + bias"
    if activation not in ("", "none"):
        name += f" + {activation}"
    return name + (" + residual" if entry.key.problem["residual"] else "")


def _result_rows(report: Report, cold: dict[str, Any], warm: dict[str, Any]) -> None:
    rates = cold["sentences_per_second"]
    for way, compile_key in (("eager", None), ("max-autotune", "max-autotune"), ("ours", "ours")):
        report.row(
            way=way,
            sentences_per_s=rates[way],
            ratio_to_max_autotune=rates[way] / rates["max-autotune"],
            compile_and_tune_s=cold["seconds"][compile_key] if compile_key else 0.0,
            second_process_s=warm["seconds"] if way == "ours" else "-",
            least_cosine_to_eager=cold["cosine"].get(way, 1.0),
        )


def _on_gfx950(folder: Path, progress: Progress) -> Iterator[dict[str, Any]]:
    """The model's GEMM shapes, in bf16, as gfx950 code objects."""
    from flykernels.targets import gfx950
    from templates.gemm.build import build
    from templates.gemm.problem import GemmProblem
    from templates.gemm.space import candidates

    shapes = dict.fromkeys((e.key.problem["m"], e.key.problem["n"], e.key.problem["k"]) for e in entries(folder))
    task = progress.add_task("gfx950 ", total=len(shapes), note="compiling")
    for m, n, k in shapes:
        problem = GemmProblem(n=n, k=k, dtype="bf16", out_dtype="bf16", b="col", bias="row", m_hint=m)
        chosen = candidates(problem, gfx950).kept[0]
        start = time.perf_counter()
        code = build(problem, chosen.config, gfx950)
        progress.update(task, advance=1, note=f"{n} x {k}")
        yield {
            "gfx950": f"bf16 M={m} N={n} K={k}",
            "tile": "x".join(str(getattr(chosen.config, f"tile_{axis}")) for axis in "mnk"),
            "VGPRs": code.registers, "AGPRs": code.agprs, "SGPRs": code.sgprs,
            "LDS_bytes": code.shared_bytes, "spills": code.spills,
            "object_bytes": len(code.binary), "compile_s": time.perf_counter() - start,
        }  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
