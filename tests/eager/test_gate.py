"""Who serves a call, and how that is decided: modes, cache, buckets, quarantine, switches, other processes,
commands."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from flykernels.launch import torch_door
from inductor_plugin import eager, eager_code, eager_gate, eager_rms_host, eager_topk, settings
from inductor_plugin.counters import counters
from tuning_cache import Entry

ROOT = Path(__file__).parents[2]
OVERRIDDEN = ("aten::rms_norm", "aten::_fused_rms_norm", "aten::topk", "aten::topk.values")  # and given back
norm = lambda x: F.rms_norm(x, x.shape[-1:])


def entries():
    found = [Entry.from_json(p.read_text()) for p in settings.store().directories[0].glob("entries/*/*.json")]
    return {e.key.op.removeprefix("eager "): e for e in found if "dtype" in e.key.problem}


def test_off_by_default_and_switched(prefer_ours):
    x = torch.randn(3, 64)
    before = "".join(map(torch._C._dispatch_dump, OVERRIDDEN))
    assert not eager.is_enabled() and eager.status() == {}
    with eager.enabled(["cpu"]):
        assert eager.is_enabled("cpu") and not eager.is_enabled("cuda")
        assert set(eager.status()["cpu"]) == set(eager.OPERATORS)
        norm(x)
        with eager.enabled(on=False):
            assert not eager.is_enabled()
        assert eager.is_enabled("cpu")
        with eager.enabled(["cpu"]):
            pass
        assert eager.is_enabled("cpu")
    assert not eager.is_enabled()
    after = "".join(map(torch._C._dispatch_dump, OVERRIDDEN))
    assert after == before
    with pytest.raises(ValueError, match="cpu, cuda"):
        eager.enable(["tpu"])


def test_an_exception_inside_switches_off_too(prefer_ours):
    with pytest.raises(KeyError), eager.enabled(["cpu"]):
        raise KeyError
    assert not eager.is_enabled()


def test_which_devices_are_meant(prefer_ours):
    """None of them is none, one by itself is one, and a name that is none says so; a context inside another leaves the
    kernels registered."""
    assert eager.enable([]) == {} and set(eager.enable("cpu")) == {"cpu"}
    doors = list(eager._installed["cpu"].doors)
    handles = [door._handles[:] for door in doors]
    with eager.enabled():
        pass
    assert [door._handles for door in doors] == handles and all(door.is_open for door in doors)
    eager.disable([])
    assert eager.is_enabled("cpu")
    for switch in (eager.enable, eager.disable):
        with pytest.raises(ValueError, match="devices gpu; known are cpu, cuda"):
            switch("gpu")
    eager.disable("cpu")
    assert not eager.is_enabled()


def test_the_original_is_reachable(on):
    x, weight = torch.randn(4, 64), torch.randn(64)
    ours = F.rms_norm(x, (64,), weight), torch.topk(x, 3)
    y, rstd = eager.original("aten::_fused_rms_norm", "cpu")(x, [64], weight, None)
    values, indices = eager.original("aten::topk", "cpu")(x, 3, -1, True, True)
    torch.testing.assert_close((y, values), (ours[0], ours[1][0]), rtol=1e-5, atol=1e-6)
    assert rstd.shape == (4, 1) and indices.dtype == torch.int64
    with eager.enabled(on=False):
        assert torch.equal(F.rms_norm(x, (64,), weight), y)
    with pytest.raises(ValueError, match="no kernel"):
        eager.original("aten::_fused_rms_norm_backward", "cpu")


def test_measured_once_a_bucket_and_kept(prefer_ours, launches):
    with eager.enabled(["cpu"]):
        norm(torch.randn(5, 100))
        torch.topk(torch.randn(5, 100), 7)
        measured, compiled = counters["benchmarks"], counters["compiles"]
        for rows, width, k in ((6, 96, 8), (8, 128, 5), (7, 68, 6)):
            norm(torch.randn(rows, width))
            torch.topk(torch.randn(rows, width), k)
        assert (counters["benchmarks"], counters["compiles"]) == (measured, compiled) and len(launches) >= 4
        norm(torch.randn(9, 100))
        assert counters["benchmarks"] == measured + 1
    found = entries()["topk"]
    assert found.key.problem == {
        "dtype": "f32", "largest": True, "layout": "last", "wide": True, "rows": 8, "width": 128, "k": 8,
    }  # fmt: skip
    assert (
        set(found.timings) == {eager_gate.ATEN, found.winner} and found.key.target["threads"] == torch.get_num_threads()
    )


def test_where_aten_wins_it_serves(prefer_aten, launches):
    with eager.enabled(["cpu"]):
        x = torch.randn(5, 100, requires_grad=True)
        norm(x.detach())
        norm(x)
        torch.topk(x, 7)
        checked = len(launches)  # while measuring
        y, (values, _) = norm(x), torch.topk(x, 7)
        assert type(y.grad_fn).__name__ != "FusedRmsNormBackward0"
        assert len(launches) == checked
    assert torch.equal(y, norm(x)) and torch.equal(values, torch.topk(x, 7).values)
    assert all(e.winner == eager_gate.ATEN for e in entries().values())


def test_real_measurements_choose_the_faster(log):
    """No times are made up: whatever wins here, the entry says so and the call is right."""
    x = torch.randn(64, 2048)
    with eager.enabled(["cpu"]):
        y = norm(x)
    torch.testing.assert_close(y, norm(x), rtol=1e-5, atol=1e-5)
    entry = entries()["rms_norm"]
    times = {name: t.microseconds for name, t in entry.timings.items()}
    assert all(0 < t < 1e6 for t in times.values()) and f"{entry.winner} wins" in log.text


def test_a_tie_is_atens():
    key = eager_gate.Key("eager test", {}, {}, {})
    used = []
    make = lambda: eager_gate.Candidate("ours", {}, "", lambda: used.append("ours"))
    original = eager_gate.interleaved
    try:
        for ours, winner in ((0.99, "ATen"), (0.90, "ours")):
            eager_gate.interleaved = lambda ways, run, wait, ours=ours: {"ATen": [1.0], "ours": [ours]}
            entry = eager_gate.contest(key, [make], int, lambda: used.append("ATen"), int)
            assert entry.winner == winner == used[-1]
    finally:
        eager_gate.interleaved = original


@pytest.mark.parametrize("op", ["rms_norm", "topk"])
def test_a_wrong_kernel_is_quarantined(prefer_ours, monkeypatch, op):
    """Its results are never seen by a caller."""
    if op == "rms_norm":
        kinds = [ctypes.c_void_p] * 3 + [ctypes.c_int32] + [ctypes.c_int64] * 4 + [ctypes.c_void_p, ctypes.c_int32]
        nothing = ctypes.CFUNCTYPE(None, *kinds)(lambda *_: None)  # results stay as they were allocated
        kernel = SimpleNamespace(call=nothing, workspace_bytes=0)
        monkeypatch.setattr(eager_rms_host.HostRMSNorm, "_kernel", lambda self, code: kernel)
        call = lambda: norm(torch.randn(4, 50))
    else:
        monkeypatch.setattr(eager_topk, "check", lambda *_: (_ for _ in ()).throw(eager_gate.Wrong("not ATen's")))
        call = lambda: torch.topk(torch.randn(4, 50), 3).values
    torch.manual_seed(0)
    with eager.enabled(["cpu"]):
        ours = call()
    torch.manual_seed(0)
    torch.testing.assert_close(ours, call(), rtol=0, atol=0)
    entry = entries()[op]
    assert entry.winner == eager_gate.ATEN
    assert any(t.quarantined and "Wrong" in t.quarantined for t in entry.timings.values())


def test_a_kernel_that_cannot_be_built_costs_nothing_else(prefer_ours, monkeypatch):
    def fails(*_):
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(eager_code, "_build", fails)
    eager_code.forget()
    with eager.enabled(["cpu"]):
        x = torch.randn(4, 50)
        y, (values, _) = norm(x), torch.topk(x, 3)
    assert torch.equal(y, norm(x)) and torch.equal(values, torch.topk(x, 3).values)
    assert all("no compiler" in str([t.quarantined for t in e.timings.values()]) for e in entries().values())


def test_running_out_of_memory_while_measuring_is_atens_turn(prefer_ours, monkeypatch):
    def full(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr(eager_rms_host.HostRMSNorm, "_measure", full)
    monkeypatch.setattr(eager_topk.CpuTopK, "_measure", full)
    with eager.enabled(["cpu"]):
        x = torch.randn(4, 50)
        y, (values, _) = norm(x), torch.topk(x, 3)
    assert torch.equal(y, norm(x)) and torch.equal(values, torch.topk(x, 3).values)


def test_pinned_measures_and_builds_nothing(monkeypatch, prefer_ours, launches):
    x, known = torch.randn(4, 50), torch.randn(4, 300)
    with eager.enabled(["cpu"]):
        expected = norm(known), torch.topk(known, 5)
    monkeypatch.setenv("FLYKERNELS_MODE", "pinned")
    settings._store.cache_clear()
    eager.forget()
    counters.clear()
    launches.clear()
    with eager.enabled(["cpu"]):
        y, top = norm(x), torch.topk(x, 3)
        assert not launches
        ours = norm(known), torch.topk(known, 5)
        assert len(launches) == 1
    assert counters["benchmarks"] == counters["compiles"] == 0
    assert torch.equal(y, norm(x)) and torch.equal(top[0], torch.topk(x, 3)[0])
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1][1], expected[1][1])


def test_pinned_strict_says_what_is_missing(monkeypatch, prefer_ours):
    known = torch.randn(4, 300)
    with eager.enabled(["cpu"]):
        norm(known)
        torch.topk(known, 5)
    monkeypatch.setenv("FLYKERNELS_MODE", "pinned-strict")
    eager.forget()
    with eager.enabled(["cpu"]):
        norm(known)
        torch.topk(known, 5)
        with pytest.raises(RuntimeError, match=r"pinned-strict.*warmup"):
            norm(torch.randn(4, 5000))
        for out in (None, (torch.empty(4, 5), torch.empty(4, 5, dtype=torch.int64))):
            with pytest.raises(RuntimeError, match=r"pinned-strict.*warmup"):
                torch.topk(torch.randn(4, 5000), 5, out=out)
        norm(torch.randn(4, 5).double())  # not ours to decide
        torch.topk(torch.randn(4, 5), 0)


MEASURED = {
    "rms_norm": lambda: F.rms_norm(torch.ones(4, 96), (96,), torch.ones(96)),
    "its gradient": lambda: F.rms_norm(torch.ones(4, 96, requires_grad=True), (96,)).sum().backward(),
    "topk": lambda: torch.topk(torch.ones(4, 96), 5),
    "topk of integers": lambda: torch.topk(torch.ones(4, 96, dtype=torch.int64), 5),
}


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("door", [True, False])
def test_measuring_draws_nothing_of_the_users(prefer_ours, monkeypatch, name, door):
    if not door:
        monkeypatch.setattr(eager, "_open_rms_norm", lambda *_: False)
    before = torch.get_rng_state()
    with eager.enabled(["cpu"]):
        MEASURED[name]()
    assert counters["benchmarks"] and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("function", [norm, lambda x: torch.topk(x, 3)[0]], ids=["rms_norm", "topk"])
def test_decisions_dropped_while_a_case_is_measured(prefer_ours, monkeypatch, function):
    """The measured calls are then unknown again: they must not wait for the lock that their own measurement holds."""
    monkeypatch.setattr(
        eager_gate, "interleaved", lambda ways, run, wait: {n: [(eager.forget(), run(), 1)[2]] for n, _ in ways}
    )
    x, found = torch.randn(4, 50), []
    with eager.enabled(["cpu"]):
        caller = threading.Thread(target=lambda: found.append(function(x)), daemon=True)
        caller.start()
        caller.join(60)
        assert found, "the call never came back"
    torch.testing.assert_close(found[0], function(x), rtol=1e-5, atol=1e-5)


def test_a_damaged_entry_is_decided_again(prefer_ours, own_cache):
    x = torch.randn(4, 50)
    with eager.enabled(["cpu"]):
        norm(x)
    for path in (own_cache / "flykernels").glob("entries/*/*.json"):
        path.write_bytes(path.read_bytes()[:100])
    settings._store.cache_clear()
    eager.forget()
    before = counters["benchmarks"]
    with eager.enabled(["cpu"]):
        norm(x)
    assert counters["benchmarks"] == before + 1


def test_a_lost_code_object_is_built_again(prefer_ours, own_cache, launches):
    x = torch.randn(4, 50)
    with eager.enabled(["cpu"]):
        y = norm(x)
    for path in (own_cache / "flykernels").glob("objects/*/*.fko"):
        path.unlink()
    settings._store.cache_clear()
    eager.forget()
    eager_code.forget()
    launches.clear()
    with eager.enabled(["cpu"]):
        assert torch.equal(norm(x), y) and launches


def test_a_torch_without_the_door_keeps_its_topk(monkeypatch, log):
    from flykernels.launch import host, torch_library

    def missing(*_):
        raise host.LaunchError("torch has no door")

    monkeypatch.setattr(torch_library, "libtorch", missing)
    monkeypatch.setattr(eager, "_made", {})
    with eager.enabled(["cpu"]):
        assert eager.status()["cpu"]["aten::topk"] == "ATen: torch has no door"
        assert torch.topk(torch.arange(9.0), 2).indices.tolist() == [8, 7]
    assert "stays ATen's" in log.text


PROGRAM = """
import json, sys, torch
from inductor_plugin import eager, eager_gate
from inductor_plugin.counters import counters
if {prefer}:
    eager_gate.interleaved = lambda ways, run, wait: {{n: [2.0 if n == "ATen" else 1.0] for n, _ in ways}}
torch.manual_seed(0)
x, w = torch.randn(6, 200, requires_grad=True), torch.randn(200, requires_grad=True)
if {enable}:
    eager.enable(["cpu"])
y = torch.nn.functional.rms_norm(x, (200,), w)
y.sum().backward()
with torch.inference_mode():
    z = torch.nn.functional.rms_norm(x, (200,), w)
values, indices = torch.topk(x, 9)
named = type(y.grad_fn).__name__
print(json.dumps({{
    "benchmarks": counters["benchmarks"], "compiles": counters["compiles"], "on": eager.is_enabled(), "node": named,
    "mlir": any(m.split(".")[0] in ("flydsl", "mlir") for m in sys.modules),
    "inductor": "torch._inductor" in sys.modules,
    "bits": [t.detach().contiguous().view(torch.int32).long().sum().item() for t in (y, z, values, x.grad, w.grad)],
}}))
"""


def run(program, folder, **environment):
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "FLYKERNELS_CACHE_DIR": str(folder / "flykernels"), **environment,
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr.strip(), done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_second_process_compiles_and_measures_nothing(tmp_path):
    first = run(PROGRAM.format(prefer=True, enable=True), tmp_path)
    assert first["benchmarks"] >= 3 and first["compiles"] >= 3 and first["node"] == "FusedRmsNormBackward0"
    for mode in ("tune", "pinned", "pinned-strict"):
        second = run(PROGRAM.format(prefer=False, enable=True), tmp_path, FLYKERNELS_MODE=mode)
        assert (second["benchmarks"], second["compiles"], second["mlir"], second["inductor"]) == (0, 0, False, False)
        assert second["bits"] == first["bits"] and second["node"] == "FusedRmsNormBackward0"


def test_the_environment_switches_it_on(tmp_path):
    program = PROGRAM.format(prefer=False, enable=False)
    pinned = {"FLYKERNELS_MODE": "pinned"}
    autoload = "import inductor_plugin; inductor_plugin._autoload()\n" + program
    assert not run(autoload, tmp_path, **pinned)["on"]
    assert run(autoload, tmp_path, FLYKERNELS_EAGER="1", **pinned)["on"]
    assert run(autoload, tmp_path, FLYKERNELS_EAGER="cpu", **pinned)["on"]
    assert not run(autoload, tmp_path, FLYKERNELS_EAGER="0", **pinned)["on"]


def test_warmup_and_explain(monkeypatch, prefer_ours):
    from click.testing import CliRunner

    from inductor_plugin.cli import main

    cli = lambda *arguments: CliRunner().invoke(main, list(arguments), env={"COLUMNS": "200"})
    sizes = ("--rows", "1,20", "--width", "96", "--k", "5", "--dtype", "bf16")
    told = cli("explain", "rms_norm", "--m", "20", "--n", "96", "--dtype", "bf16")
    assert told.exit_code == 0 and "measured when first met" in told.output
    done = cli("warmup", "--eager", *sizes)
    assert done.exit_code == 0 and "6 kernels measured, 0 cases known before" in done.output, done.output
    again = cli("warmup", "--eager", *sizes)
    assert "0 kernels measured, 6 cases known before" in again.output or "0 kernels measured" in again.output
    eager.forget()
    for question in (("rms_norm", "--gradient"), ("topk", "--k", "5")):
        told = cli("explain", question[0], "--m", "20", "--n", "96", "--dtype", "bf16", *question[1:])
        assert told.exit_code == 0 and "winner: flykernels" in told.output, told.output
        assert "PyTorch's own" in told.output
    assert "not eligible" in cli("explain", "topk", "--m", "4", "--n", "9", "--k", "10").output
    assert cli("explain", "topk", "--m", "4", "--n", "9", "--k", "10").exit_code == 1
    assert "not measured" in cli("explain", "rms_norm", "--m", "4", "--n", "4096", "--target", "gfx950").output
    assert cli("explain", "topk", "--n", "9").exit_code == 2 and cli("warmup").exit_code == 2
    assert cli("warmup", "--eager", "--rows", "0").exit_code == 2
    monkeypatch.setenv("FLYKERNELS_MODE", "pinned")
    refused = cli("warmup", "--eager", *sizes)
    assert refused.exit_code == 1 and "Unset it" in refused.output


def test_warmup_that_is_stopped_goes_on(monkeypatch, prefer_ours):
    from rich.console import Console

    from inductor_plugin import eager_warmup

    chosen = {
        "device": "cpu",
        "ops": ("topk",),
        "dtypes": ("f32",),
        "rows": (1, 2),
        "widths": (40,),
        "ks": (3,),
        "inference": False,
    }
    original, calls = eager_warmup.call, []

    def interrupted(case, device):
        calls.append(case)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(case, device)

    monkeypatch.setattr(eager_warmup, "call", interrupted)
    console = Console(record=True, width=150)
    assert eager_warmup.run(console, **chosen) == 130
    assert "1 of 2 calls are done" in console.export_text()
    assert eager_warmup.run(console, **chosen) == 0
    assert "1 kernels measured" in console.export_text()


def test_slots_hash_alike_in_both_languages(on):
    """What Python puts, machine code finds: no call is asked for twice."""
    door = eager._made["topk CPU"].door
    asked = []
    resolve, door._resolve = door._resolve, lambda *call: asked.append(call)
    try:
        x = torch.randn(3, 123)
        torch.topk(x, 17)
        (call,) = asked
        width, k, code, rows = call
        assert (width, k, rows) == (123, 17, 3)
        assert code == torch_door.code_of(torch_door.F32, True, True, 3, torch.get_num_threads())
        door.put(width, k, code, torch_door.ATEN)
        torch.topk(x, 17)
        assert len(asked) == 1
        torch.topk(x, 17, largest=False)
        assert asked[1][2] == torch_door.code_of(torch_door.F32, False, True, 3, torch.get_num_threads())
    finally:
        door._resolve = resolve
