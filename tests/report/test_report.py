"""`flykernels report`: what it reads off a cache, what it says of origins, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import socket
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from inductor_plugin import report, report_page, settings
from inductor_plugin.cli import main
from tests.report.making import CPU, cache, put, timing
from tuning_cache import Accept, Store, export, import_
from tuning_cache.shapes import Shape


def test_times_winners_and_totals(tmp_path):
    found = report.collect(cache(tmp_path / "c"), 100)
    assert found.problems == len(found.lines) == 6
    first = found.lines[0]
    assert (first.best("ours"), first.best("ATen"), first.best("C++"), first.best("Triton")) == (640, 960, 768, None)
    assert first.saved == 128 and first.ours_won and first.label == "measured on CPU" and first.origin == "made here"
    assert first.flops == 2 * 64 * 64 * 32 and first.bytes == 4 * (64 * 32 + 32 * 64 + 64 * 64)
    labels = {line.label for line in found.lines}
    assert labels == {"measured on CPU", "measured on H200", report.UNMEASURED}
    cpu = found.totals["measured on CPU", "A CPU & more, 2 threads"]
    assert (cpu.problems, cpu.ours, cpu.rivals_us, cpu.saved_us) == (2, 2, 780, 130) and math.isclose(cpu.geomean, 1.2)
    gpu = found.totals["measured on H200", "NVIDIA H200"]
    assert (gpu.ours, gpu.saved_us, gpu.geomean) == (0, 0, None)


def test_the_most_saving_are_kept_and_all_are_counted(tmp_path):
    found = report.collect(cache(tmp_path / "c"), 2)
    assert [line.saved for line in found.lines] == [128, 2] and found.problems == 6
    assert "4 more" in report_page.page(found)


def test_where_an_entry_is_from(tmp_path):
    export(cache(tmp_path / "c"), tmp_path / "b.tar.gz")
    import_(Store([tmp_path / "here"]), tmp_path / "b.tar.gz", Accept())
    layered = Store([tmp_path / "mine", tmp_path / "here"])
    put(layered, Shape("mm", 5, 64, 32, "f32", bias="none"), "x86", CPU, [timing("flykernels", 1.0)], "flykernels")
    origins = {line.origin for line in report.collect(Store([tmp_path / "here"]), 100).lines}
    assert origins == {"imported"}
    mixed = {line.origin for line in report.collect(layered, 100).lines}
    assert mixed == {"made here", f"layer {tmp_path / 'here'}"}


@pytest.mark.parametrize("ours, aten", [(1e-300, 1e300), (0.0, 5.0), (5e-324, 1.7e308), (3.0, 5.0)])
@pytest.mark.parametrize("odd", [{"m": 10**400}, {"m": [1], "batch": {}}, {"dtype": ["x"]}, {"m_hint": {}}])
def test_one_odd_entry_spoils_no_report(tmp_path, odd, ours, aten):
    store = cache(tmp_path / "c")
    usual = put(store, Shape("mm", 3, 64, 32, "f32"), "x86", CPU, [timing("aten mm", 1.0)], "aten mm")
    times = {t.name: t for t in (timing("flykernels t", ours), timing("aten mm", aten))}
    for problem in (odd, {}):
        key = replace(usual, problem={**usual.problem, "n": 640, **problem})
        store.update(key, lambda e: replace(e, winner="flykernels t", timings=times))
    found = report.collect(store, 100)
    assert found.problems == 9
    report.show(found, Console(file=io.StringIO()))
    assert "flykernels report" in report_page.page(replace(found, lines=found.lines[:2]))


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYKERNELS_CACHE_DIR", str(tmp_path / "c"))
    settings._store.cache_clear()
    cache(tmp_path / "c")
    figures = tmp_path / "f.json"
    figures.write_text(json.dumps({"bench": "x", "label": "simulated", "rows": [{"ours_us": 1.5}], "bars": []}))
    run = lambda *args: CliRunner().invoke(main, ["report", *args], catch_exceptions=False)
    done = run(str(tmp_path / "r.html"), "--figures", str(figures))
    assert done.exit_code == 0 and "measured on H200" in done.output and "130.0" in done.output
    text = (tmp_path / "r.html").read_text()
    assert "<svg" in text and "bench x" in text and "not performance" in text
    figures.write_text(json.dumps({"bench": "x", "label": "measured on MI350", "rows": []}))
    refused = run(str(tmp_path / "s.html"), "--figures", str(figures))
    assert refused.exit_code == 1 and "label" in refused.output and not (tmp_path / "s.html").exists()
    assert run("--no-page").exit_code == 0
    assert "cannot be written" in run(str(tmp_path / "none" / "r.html")).output


def test_an_empty_cache_has_a_page_too(tmp_path):
    text = report_page.page(report.collect(Store([tmp_path / "none"]), 10))
    assert "No product in the cache was measured yet" in text


def test_the_page_fetches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("went to the network"))
    text = report_page.page(report.collect(cache(tmp_path / "c"), 100))
    outside = [
        x
        for x in ("src=", "url(http", "@import", "<link", "fetch(", "import(")
        if x in text.replace('<link rel="icon" href="data:,">', "")
    ]
    assert outside == []
