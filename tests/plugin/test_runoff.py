"""The last round on a GPU: who takes part, whose time counts, what is recorded. Times are made up: there is no GPU."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from inductor_plugin import choices, gpu_timing, kernels, private, runoff, settings
from templates.gemm.problem import GemmProblem
from tuning_cache import Key, Timing


class Template:
    """Stands for one of Triton's."""

    def __init__(self, number: int):
        self.name, self.description = f"triton_mm_{number}", f"BLOCK_M={number}"


def calls_of(choice):
    return lambda count: [lambda: choices.label(choice)] * count


@pytest.fixture
def contest(monkeypatch):
    """(timings, true times by label): ours, ATen and Triton on a device that is called a GPU."""
    names = private.load().names
    p = GemmProblem(64, 32, "bf16", "bf16", "row", "col")
    key = Key("mm", p.key(), {"arch": "sm_90"}, {})
    ours = []
    for i in range(5):
        made = choices.Choice.__new__(choices.Choice)
        made.spec, made.name = kernels.Spec("mm", "sm90a", p, {"tile_m": 64 + i}), "ours"
        made.request = SimpleNamespace(key=key, op="mm", m=16)
        made.layout = SimpleNamespace(device=torch.device("cuda", 0))
        made.bmreq = SimpleNamespace(calls=calls_of(made), bytes=1 << 20)
        ours.append(made)
    aten = names.ExternKernelCaller.__new__(names.ExternKernelCaller)
    aten.name = "mm"
    others = [aten, *(Template(i) for i in range(4))]
    timings = {c: 0.03 + 0.001 * i for i, c in enumerate(ours)} | {c: 0.02 + 0.001 * i for i, c in enumerate(others)}
    true = {}
    monkeypatch.setattr(private, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(private, "calls", lambda choice, sane, count: calls_of(choice)(count))
    monkeypatch.setattr(gpu_timing, "in_turns", lambda makers, _: [true.get(m(1)[0](), 0.015) for m in makers])
    monkeypatch.setattr(choices, "with_artefact", lambda spec: spec)
    return timings, true, ours, aten, key


def test_the_finalists_are_timed_side_by_side_and_the_winner_is_recorded(contest, log):
    timings, true, ours, aten, key = contest
    true[ours[1].spec.name] = 0.010
    settled = runoff.settle(dict(timings))
    assert "left out" not in log.text, log.text
    assert min(settled, key=settled.get) is ours[1] and settled[ours[1]] == pytest.approx(0.0102)
    assert settled[aten] == 0.015
    assert settled[ours[4]] == timings[ours[4]]  # took no part
    entry = settings.store().lookup(key)
    assert entry.winner == ours[1].spec.name and entry.timings["aten mm"].microseconds == 15.0


def test_a_tie_is_aten_s_and_who_took_no_part_cannot_win(contest):
    timings, true, ours, aten, key = contest
    true |= {choices.label(c): 0.04 for c in timings if c is not aten} | {"aten mm": 0.035, ours[0].spec.name: 0.0349}
    settled = runoff.settle(dict(timings))
    assert min(settled, key=settled.get) is aten and settings.store().lookup(key).winner == "aten mm"
    assert all(settled[c] >= 0.035 for c in settled)


@pytest.mark.parametrize("why", ["ours failed", "nobody else", "capturing", "in another process", "on a CPU", "raises"])
def test_where_there_is_nothing_to_decide_nothing_changes(contest, monkeypatch, why):
    timings, _, ours, _, key = contest
    if why == "ours failed":
        timings |= dict.fromkeys(ours, math.inf)
    elif why == "nobody else":
        timings = {c: t for c, t in timings.items() if c in ours}
    elif why == "capturing":
        monkeypatch.setattr(private, "capturing", lambda: True)
    elif why == "in another process":
        monkeypatch.setattr(private, "tunes_elsewhere", lambda: True)
    elif why == "on a CPU":
        ours[0].layout.device = torch.device("cpu")
    else:

        def no_memory(makers, size):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(gpu_timing, "in_turns", no_memory)
    assert runoff.settle(dict(timings)) == timings
    assert settings.store().lookup(key) is None


def test_with_an_epilogue_ours_are_measured_in_the_same_way(contest, monkeypatch):
    _, true, ours, _, _ = contest
    true |= {ours[0].spec.name: 0.012, ours[1].spec.name: 0.011}
    given = {c: 0.02 + 0.001 * i for i, c in enumerate(ours)} | {ours[4]: math.inf}
    settled = runoff.among_ours(dict(given))
    assert min(settled, key=settled.get) is ours[1] and settled[ours[1]] == pytest.approx(0.011 * 1.02)
    assert settled[ours[3]] == given[ours[3]] and math.isinf(settled[ours[4]])
    monkeypatch.setattr(private, "tunes_elsewhere", lambda: True)
    assert runoff.among_ours(dict(given)) == given and runoff.among_ours({}) == {}


def test_with_an_epilogue_only_the_best_configurations_are_tried(contest):
    from inductor_plugin import fused_choice

    _, _, ours, _, key = contest
    for i, made in enumerate(ours):
        timing = Timing(made.spec.name, 10.0 - i, made.spec.config)
        settings.store().update(key, lambda entry, timing=timing: entry.with_timing(timing))
    specs = [kernels.Spec("mm+gelu", "sm90a", ours[0].spec.problem, c.spec.config) for c in ours]
    kept = fused_choice._likely(specs, settings.store().lookup(key))
    assert [s.config["tile_m"] for s in kept] == [65, 66, 67, 68]
    other = [kernels.Spec("mm+gelu", "sm90a", ours[0].spec.problem, {"tile_m": 7})]
    assert fused_choice._likely(other, settings.store().lookup(key)) == other


class Event:
    """A torch.cuda.Event of a GPU whose time is told by a counter."""

    now = 0.0

    def __init__(self, enable_timing):
        self.at = math.nan

    def record(self):
        self.at = Event.now

    def elapsed_time(self, end):
        return end.at - self.at


def test_times_are_of_the_calls_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_timing, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_timing, "FLUSHED", 64)

    def takes(milliseconds):
        Event.now += milliseconds

    made = []

    def maker(milliseconds):
        return lambda count: made.append(count) or [lambda: takes(milliseconds)] * count

    assert gpu_timing.alone(lambda: takes(0.25)) == pytest.approx(0.25)
    assert gpu_timing.in_turns([maker(0.5), maker(0.125)], size=16) == pytest.approx([0.5, 0.125])
    assert made == [4] * 2 * gpu_timing.ROUNDS


def test_candidates_of_inductor_s_run_on_tensors_of_their_own():
    """What private.calls takes for granted of ATen's candidates."""
    seen = {}

    def look(given):
        aten = next(c for c in given if isinstance(c, private.load().names.ExternKernelCaller))
        runs = private.calls(aten, lambda tensors: tensors, 2)
        seen["results"] = [run() for run in runs]
        return given

    hooks = private.load().names.get_algorithm_selector_cache().preprocessing_fns
    hooks.insert(0, look)
    try:
        from tests.plugin.conftest import compile_with

        compile_with(lambda bias, a, b: torch.addmm(bias, a, b))(
            torch.randn(48), torch.randn(20, 32), torch.randn(32, 48)
        )
    finally:
        hooks.remove(look)
    first, second = seen["results"]
    assert first.shape == second.shape == (20, 48) and first.data_ptr() != second.data_ptr()
