"""What eager operators missed in production is recorded, and measured by `flykernels warmup FILE`."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from rich.console import Console

from inductor_plugin import eager, eager_warmup, ops, settings
from inductor_plugin.cli import main
from inductor_plugin.counters import counters
from tuning_cache.record import read

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@pytest.fixture(params=DEVICES)
def device(request, prefer_ours):
    return request.param


def calls(device: str) -> None:
    """Of each operator: with and without gradients, weights of another type, other orders, layouts and addresses."""
    draw = lambda *size, dtype=torch.float32: torch.randn(*size, device=device).to(dtype)
    F.rms_norm(draw(4, 96), (96,))
    F.rms_norm(draw(5, 100, dtype=torch.bfloat16), (100,), draw(100, dtype=torch.bfloat16))
    x, weight = draw(6, 64).requires_grad_(), draw(64).requires_grad_()
    F.rms_norm(x, (64,), weight).sum().backward()
    F.rms_norm(x, (64,), weight.detach()).sum().backward()
    if device != "cpu":  # where cases tell addresses apart
        F.rms_norm(draw(7, 72, dtype=torch.float16)[:, :65], (65,), draw(65, dtype=torch.float16))
    torch.topk(draw(4, 300), 5)
    torch.topk(draw(300, 8, dtype=torch.bfloat16), 3, 0, largest=False)
    torch.topk(draw(4 * 128 + 1)[1:].view(4, 128), 7)
    torch.topk(draw(256)[::2], 5)
    for dtype in (torch.int64, torch.uint8, torch.float64) if device == "cpu" else ():  # GPUs' kernels take no others
        torch.topk(draw(4, 120).mul(9).abs().to(dtype), 5)
    total = ops.add_rms_norm(x, draw(6, 64), weight)
    torch.autograd.grad(total[0].sum(), (x, weight))
    torch.autograd.grad(sum(t.sum() for t in ops.add_rms_norm(x, draw(6, 64))), x)


def warmup(*arguments: str):
    return CliRunner().invoke(main, ["warmup", *arguments], env={"COLUMNS": "200"})


def new_process() -> None:
    eager.forget()
    ops._on.cache_clear()
    settings._store.cache_clear()
    counters.clear()


def test_what_was_missed_is_measured_ahead_of_the_next_run(tmp_path, monkeypatch, device):
    record = tmp_path / "misses"
    monkeypatch.setenv("FLYKERNELS_RECORD", str(record))
    monkeypatch.setenv("FLYKERNELS_MODE", "pinned")
    ops._on.cache_clear()
    with eager.enabled([device]):
        calls(device)
        calls(device)
    missed = [json.loads(line) for line in record.read_text().splitlines()]
    assert len({json.dumps(m) for m in missed}) == len(missed) >= 6
    assert {m["op"] for m in missed} >= {"eager rms_norm", "eager topk"}
    assert counters["benchmarks"] == 0

    monkeypatch.setenv("FLYKERNELS_MODE", "tune")
    new_process()
    planned = warmup("--eager", str(record), "--dry-run")
    assert planned.exit_code == 0 and f"{len(missed)} eager cases to measure on {device}" in planned.output
    assert "eager cases are left out" in warmup("--eager", str(record), "--compile-only").output
    console = Console(record=True, width=200)
    assert eager_warmup.run_recorded(read(record)[0], console, seconds=0.0) == 0
    assert f"{len(missed)} calls are left" in console.export_text()
    done = warmup(str(record))
    assert done.exit_code == 0 and "another case" not in done.output, done.output
    assert record.read_text().count("\n") == len(missed)  # a warmup's own calls are no misses
    assert (
        f"0 eager cases to measure on {device}, {len(missed)} decided before" in warmup("--eager", str(record)).output
    )

    monkeypatch.setenv("FLYKERNELS_MODE", "pinned-strict")  # a miss would be an error
    new_process()
    with eager.enabled([device]):
        calls(device)
    assert counters["benchmarks"] == 0 and counters["from cache"] >= len(missed) - 1
    assert record.read_text().count("\n") == len(missed)


def test_what_cannot_be_measured_here_is_left_out_with_a_reason(tmp_path, device):
    case = {"dtype": "f32", "largest": True, "layout": "last", "wide": True, "rows": 4, "width": 64, "k": 4}
    line = {"format": 1, "op": "eager topk", "problem": case, "target": eager.description(device)}
    elsewhere = {**line, "target": {**line["target"], "product": "another"}}
    absurd = {**line, "problem": {**case, "rows": 1 << 30, "width": 1 << 30}}
    path = tmp_path / "misses"
    path.write_text("\n".join(map(json.dumps, (elsewhere, absurd))))
    done = warmup(str(path))
    assert done.exit_code == 1 and "recorded on another machine" in done.output and "elements" in done.output
    assert "Nothing was compiled" in done.output and not (tmp_path / "flykernels" / "entries").exists()
    path.write_text(json.dumps({**line, "problem": {**case, "k": 4096, "width": 4}}))  # no call is such
    assert warmup(str(path)).exit_code == 1
    product = {"op": "mm", "m": 4, "n": 8, "k": 8, "dtype": "f32"}
    (tmp_path / "shapes.json").write_text(json.dumps([product]))
    assert "no eager operator" in warmup("--eager", str(tmp_path / "shapes.json")).output
