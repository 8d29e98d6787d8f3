"""`flykernels warmup SHAPES`: its keys are those that Inductor asks for; it stops, goes on, writes what is whole."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch._inductor.utils import clear_caches

from inductor_plugin import devices, kernels, measuring, requests, settings, wanted, warmup, warmup_asked
from inductor_plugin.cli import main
from inductor_plugin.counters import counters
from inductor_plugin.measuring import Measuring
from tests.cache.making import code
from tests.plugin.conftest import compile_with, ours_ran, run_and_get_code
from tuning_cache import Store
from tuning_cache.shapes import Shape

MI350 = wanted.ELSEWHERE["gfx950"]
SHAPES = [
    Shape("mm", 8, 64, 32, bias="none"), Shape("mm", 1, 63, 130, layout="TN", bias="none"),
    Shape("mm", 7, 1, 5, layout="TT", bias="none"), Shape("mm", 12, 24, 20, dtype="f16", layout="NN", bias="none"),
    Shape("addmm", 9, 40, 12, bias="row"), Shape("addmm", 9, 40, 12, bias="full"),
    Shape("bmm", 6, 10, 14, batch=3, layout="NT", bias="none"), Shape("bmm", 1, 8, 8, batch=1, bias="none"),
    Shape("baddbmm", 5, 9, 20, batch=2, layout="TN", bias="row"),
]  # fmt: skip


def node(size, letter, device, dtype):
    tensor = torch.empty(size, dtype=dtype)
    tensor = tensor if letter == "N" else tensor.mT.contiguous().mT
    size, stride = list(tensor.shape), list(tensor.stride())
    layout = SimpleNamespace(size=size, stride=stride, offset=0, dtype=dtype, device=device)
    return SimpleNamespace(
        get_dtype=lambda: dtype, get_size=lambda: size, get_stride=lambda: stride, get_layout=lambda: layout
    )


def asked(shape: Shape, device: torch.device):
    """The key of what Inductor would ask for: real strides, read by requests.py."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[shape.dtype]
    lead = (shape.batch,) if shape.op in ("bmm", "baddbmm") else ()
    make = lambda rows, columns, letter: node((*lead, rows, columns), letter, device, dtype)
    a, b = make(shape.m, shape.k, shape.layout[0]), make(shape.k, shape.n, shape.layout[1])
    c = make(shape.m, shape.n, "N")
    bias = {"none": None, "row": node((shape.n,), "N", device, dtype), "full": c}[shape.bias]
    return requests.from_nodes(shape.op, a, b, bias, c.get_layout(), batched=bool(lead)).key


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_are_those_that_inductor_asks_for(shape, monkeypatch):
    assert wanted.problems_of(shape, "x86", devices.DEVICES["cpu"].description())[0].key == asked(
        shape, torch.device("cpu")
    )
    found = SimpleNamespace(
        gcnArchName="gfx950:sramecc+:xnack-", name="AMD Instinct MI350X", multi_processor_count=256, major=9, minor=5
    )
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    assert wanted.problems_of(shape, "gfx950", MI350)[0].key == asked(shape, torch.device("cuda", 0))


def shapes_file(tmp_path, *shapes):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(shapes))
    return str(path)


def cli(*args):
    return CliRunner().invoke(main, ["warmup", *args], catch_exceptions=False)


def travelled(tmp_path, monkeypatch, name):
    """The cache, exported, and imported where nothing was: what a new process on another machine would have."""
    run = lambda *args: CliRunner().invoke(main, ["cache", *args], catch_exceptions=False).exit_code
    bundle = str(tmp_path / f"{name}.tar.gz")
    assert run("export", bundle) == 0
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path / name))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"inductor {name}"))
    assert run("import", bundle) == 0
    clear_caches()
    torch._dynamo.reset()
    kernels._built.clear()
    counters.clear()


def test_from_a_bundle_inductor_compiles_nothing_and_with_measurements_measures_nothing(
    tmp_path, prefer_ours, monkeypatch
):
    path = shapes_file(tmp_path, {"op": "mm", "m": 5, "n": 24, "k": 40, "dtype": "f32", "layout": "NN"})
    done = cli(path, "--target", "x86", "--jobs", "1", "--compile-only")
    assert done.exit_code == 0 and "0 known before, 0 failed" in done.output
    again = cli(path, "--target", "x86", "--jobs", "1", "--compile-only")
    assert again.exit_code == 0 and "0 compiled" in again.output
    a, b = torch.randn(5, 40), torch.randn(40, 24)
    monkeypatch.setattr(kernels, "_build", lambda spec: pytest.fail("compiled"))  # as on a machine without MLIR
    for name, measured in (("compiled", True), ("measured", False)):
        travelled(tmp_path, monkeypatch, name)
        out, text = run_and_get_code(compile_with(torch.mm), a, b)
        assert ours_ran(text) and torch.allclose(out, a @ b, atol=1e-4)
        assert counters["compiles"] == 0 and (counters["benchmarks"] > 0) == measured


def test_gfx950_without_a_gpu(tmp_path, own_caches):
    path = shapes_file(tmp_path, {"m": 64, "n": 64, "k": 64}, {"m": 64, "n": 64, "k": 64, "dtype": "f32"})
    plan = cli(path, "--target", "gfx950", "--dry-run")
    assert plan.exit_code == 0 and "nothing was written" in plan.output and "not eligible" in plan.output
    assert not (own_caches / "flykernels").exists()
    done = cli(path, "--target", "gfx950", "--jobs", "1", "--budget", "1s")
    assert done.exit_code == 0 and "the time is up" in done.output
    entries = [settings.store().newest(k) for k in settings.store().all_keys()]
    assert len(entries) == 1 and entries[0].key.target == MI350 and entries[0].source == "compiled"
    held = settings.store().load(next(iter(entries[0].timings.values())).artefact)
    assert held.target == "gfx950" and held.spills == 0


def run(tmp_path, shapes, build, **options):
    problems = [wanted.problems_of(s, "gfx950", MI350)[0] for s in shapes]
    work = warmup.Run(problems, Store([tmp_path / "store"]), SimpleNamespace(count=1, build=build), **options)
    for _ in work.go():
        pass
    return work


@pytest.fixture
def few(monkeypatch):
    """Three candidates a problem, without the templates' search."""

    def candidates_of(problem, pool):
        if problem.problem.m_hint == 13:
            raise ValueError("an unlucky number of rows")
        return [kernels.Spec("mm", "gfx950", problem.problem, {"rank": r}) for r in range(3)]

    monkeypatch.setattr(warmup, "candidates_of", candidates_of)


def test_the_likeliest_of_all_problems_come_first(tmp_path, few):
    order = []

    def build(problem, config, target):
        order.append((problem.m_hint, config["rank"]))
        return code()

    work = run(tmp_path, [Shape("mm", m, 8, 8) for m in (1, 13, 2)], build)
    assert [rank for _, rank in order[:2]] == [0, 0] and sorted(order) == [(m, r) for m in (1, 2) for r in range(3)]
    assert work.tally == warmup.Tally(0, 6, 0) and list(work.refused.values()) == ["an unlucky number of rows"]


def test_stopped_and_resumed(tmp_path, few):
    built = []

    def build(problem, config, target):
        built.append((problem.m_hint, config["rank"]))
        return code(len(built))

    shapes = [Shape("mm", m, 8, 8) for m in (1, 2)]
    first = run(tmp_path, shapes, build, budget=0.0)
    assert first.stopped == "the time is up" and first.tally.compiled == 0 and built == []
    problems = [wanted.problems_of(s, "gfx950", MI350)[0] for s in shapes]
    work = warmup.Run(problems, Store([tmp_path / "store"]), SimpleNamespace(count=1, build=build))
    steps = work.go()
    next(steps)
    with pytest.raises(StopIteration):
        steps.throw(KeyboardInterrupt)
    assert work.stopped == "stopped" and 1 <= work.tally.compiled == len(built) < 6
    assert work.tally.left == 6 - work.tally.compiled
    second = run(tmp_path, shapes, build)
    assert second.tally == warmup.Tally(known=work.tally.compiled, compiled=work.tally.left)
    assert len(set(built)) == len(built) == 6
    assert run(tmp_path, shapes, lambda *_: pytest.fail("compiled again")).tally == warmup.Tally(known=6)


class Pool:
    """Compiles in no time, in this process."""

    count, began = 1, (0.0, 0.0)
    __enter__ = __exit__ = lambda *_: None

    def build(self, problem, config, target):
        return code(config["rank"])


def told(own_caches, few, **options):
    """(exit code, what was printed) of a warmup of one product for the CPU."""
    console = Console(file=io.StringIO(), width=200)
    asked = warmup_asked.from_shapes([Shape("mm", 1, 8, 8, dtype="f32", bias="none")], ["x86"])
    return warmup.run(asked, Pool(), console=console, **options), console.file.getvalue()


def test_stopped_while_it_measures(own_caches, few, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "lower", stopped)
    exit_code, text = told(own_caches, few)
    assert exit_code == 130 and "3 compiled" in text
    assert "stopped: problems are left to measure; run it again to go on" in text


def test_a_cache_that_cannot_be_written_is_no_success(own_caches, few, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path / "file"))
    exit_code, text = told(own_caches, few, compile_only=True)
    assert exit_code == 1 and "files could not be written: what they hold is lost" in text


def test_what_fails_is_said_and_tried_again(tmp_path, few):
    def build(problem, config, target):
        if config["rank"] == 1:
            raise RuntimeError("the assembler is gone")
        return code(config["rank"])

    first = run(tmp_path, [Shape("mm", 1, 8, 8)], build)
    assert first.tally.compiled == 2 and list(first.failed.values()) == ["the assembler is gone"]
    console = Console(file=io.StringIO(), width=200)
    assert (
        warmup._summary(first, Measuring([], first.store, {}), 1.0, 1.0, console) == 1
        and "assembler is gone" in console.file.getvalue()
    )
    assert run(tmp_path, [Shape("mm", 1, 8, 8)], lambda *_: code(1)).tally == warmup.Tally(known=2, compiled=1)


def test_measured_timings_stay(tmp_path, few):
    from tuning_cache import Timing

    problem = wanted.problems_of(Shape("mm", 1, 8, 8), "gfx950", MI350)[0]
    name = warmup.candidates_of(problem, None)[0].name
    Store([tmp_path / "store"]).update(problem.key, lambda e: e.with_timing(Timing(name, 7.0, {"rank": 0})))
    run(tmp_path, [Shape("mm", 1, 8, 8)], lambda *_: code(1))
    entry = Store([tmp_path / "store"]).lookup(problem.key)
    assert entry.timings[name].microseconds == 7.0 and entry.timings[name].artefact and entry.source == "measured"


def test_bad_input_is_refused_and_nothing_is_written(tmp_path, own_caches, monkeypatch):
    path = shapes_file(tmp_path, {"m": 1, "n": 1, "k": 1, "exec": "x"})
    refused = cli(path)
    assert refused.exit_code == 1 and "unknown exec" in refused.output and "Nothing was compiled" in refused.output
    assert cli(path, "--budget", "soon").exit_code == 2 and cli().exit_code == 2
    assert cli("--model", "some:model", "--eager").exit_code == 2 and cli(path, "--eager").exit_code == 1
    assert cli(path, "--target", "mi400").exit_code == 2 and cli(str(tmp_path / "none.yaml")).exit_code == 1
    monkeypatch.setenv("FLYKERNELS_MODE", "pinned")
    assert cli(shapes_file(tmp_path, {"m": 1, "n": 8, "k": 8})).exit_code == 1
    assert not (own_caches / "flykernels").exists()


def test_misses_are_recorded_and_the_record_is_taken(tmp_path, prefer_ours, monkeypatch):
    misses = tmp_path / "misses"
    monkeypatch.setenv("FLYKERNELS_RECORD", str(misses))
    monkeypatch.setenv("FLYKERNELS_MODE", "pinned")
    x, w, b = torch.randn(6, 40), torch.randn(24, 40), torch.randn(24)
    layer = lambda x, w, b: torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))
    compile_with(layer)(x, w, b)
    ops = [json.loads(line)["op"] for line in misses.read_text().splitlines()]
    assert ops == ["addmm", "addmm+gelu"]
    monkeypatch.delenv("FLYKERNELS_MODE")
    with torch._inductor.config.patch(max_autotune_gemm_backends="ATEN,FLYKERNELS"):
        done = cli(str(misses), "--jobs", "1")
    assert done.exit_code == 0 and "2 problems measured" in done.output and "not measured" not in done.output, (
        done.output
    )
    assert len(misses.read_text().splitlines()) == 2  # the warmup's own are no misses
    travelled(tmp_path, monkeypatch, "taken")
    monkeypatch.setattr(kernels, "_build", lambda spec: pytest.fail("compiled"))
    out, text = run_and_get_code(compile_with(layer), x, w, b)
    assert ours_ran(text) and torch.allclose(out, layer(x, w, b), atol=1e-4)
    assert counters["compiles"] == counters["benchmarks"] == 0 and len(misses.read_text().splitlines()) == 2


def test_records_of_other_machines(tmp_path, own_caches):
    def record(**target):
        problem = wanted.problems_of(Shape("mm", 8, 64, 32, bias="none"), "gfx950", MI350)[0].key.problem
        path = tmp_path / "misses"
        path.write_text(json.dumps({"format": 1, "op": "mm", "problem": problem, "target": target}) + "\n")
        return str(path)

    other = cli(record(arch="x86-64-v3", product="Z80", threads=2))
    assert other.exit_code == 1 and "recorded on another CPU" in other.output and "Nothing was compiled" in other.output
    unknown = cli(record(arch="gfx1100", product="RX", compute_units=96))
    assert unknown.exit_code == 1 and "no target has the architecture" in unknown.output
    plan = cli(record(arch="gfx950", product="AMD Instinct MI355X", compute_units=256), "--dry-run")
    assert plan.exit_code == 0 and "MI355X" in plan.output and "nothing was written" in plan.output
    none = cli(record(arch="gfx950", product="AMD Instinct MI355X", compute_units=256), "--target", "sm90a")
    assert none.exit_code == 1 and "for sm90a" in none.output
    assert not (own_caches / "flykernels").exists()


def test_scaled_products_and_epilogues_of_shapes():
    named = lambda shape, target="gfx950": [p.key.op for p in wanted.problems_of(shape, target, MI350)]
    gelu = Shape("addmm+gelu", 64, 64, 64, bias="row")
    assert named(gelu) == ["addmm", "addmm+gelu", "mm", "mm+gelu"] and named(gelu, "x86") == ["addmm", "addmm+gelu"]
    assert named(Shape("mm", 8, 8, 8, bias="none", residual=True)) == ["mm", "mm+none"]
    mx = Shape("scaled_mm", 32, 64, 128, "f8E4M3FN", b_dtype="f4E2M1FN", scaling="block", out_dtype="bf16", bias="none")
    (problem,) = wanted.problems_of(mx, "gfx950", MI350)
    assert problem.key.op == "_scaled_mm" and problem.problem.row_bytes("b") == 64 and problem.problem.align_a == 16
    assert str(problem) == "_scaled_mm 32x64x128 f8E4M3FN*f4E2M1FN scaled by block on gfx950"
    moe = Shape("grouped_mm", 16, 64, 128, "bf16", "NT", bias="none", groups=8)
    (problem,) = wanted.problems_of(moe, "gfx950", MI350)
    assert problem.key.op == "_grouped_mm" and problem.key.problem["tokens"] == 128 and problem.problem.b == "col"
    assert str(problem) == "_grouped_mm 8 groups of 128x64x128 bf16 NT on gfx950"
