"""The last round on a GPU: who takes part, whose time counts, what is recorded. Times are made up: there is no GPU."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from inductor_plugin import choices, devices, gpu_timing, install, kernels, private, runoff, settings
from templates.gemm.problem import GemmProblem
from tuning_cache import Key, Timing

PASS_MS = 0.002


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
    for i in range(runoff.OURS + 2):
        made = choices.Choice.__new__(choices.Choice)
        made.spec, made.name = kernels.Spec("mm", "sm90a", p, {"tile_m": 64 + i}), "ours"
        made.request = SimpleNamespace(key=key, op="mm", m=16)
        made.layout = SimpleNamespace(device=torch.device("cuda", 0))
        made.bmreq = SimpleNamespace(calls=calls_of(made), bytes=1 << 20, output_tensor_meta=None)
        ours.append(made)
    aten = names.ExternKernelCaller.__new__(names.ExternKernelCaller)
    aten.name = "mm"
    others = [aten, *(Template(i) for i in range(4))]
    timings = {c: 0.03 + 0.001 * i for i, c in enumerate(ours)} | {c: 0.02 + 0.001 * i for i, c in enumerate(others)}
    true = {}
    monkeypatch.setattr(devices, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(private, "calls", lambda choice, sane, count: calls_of(choice)(count))
    pair = lambda t: t if isinstance(t, gpu_timing.Pair) else gpu_timing.Pair(t, t)

    def in_turns(makers, size, variants=1, likely=None):
        measured.append(len(makers))
        times = [pair(true.get(m(1)[0](), 0.015)) for m in makers]
        few = likely(times) if likely else []
        return [t if i in few or not few else None for i, t in enumerate(times)]

    measured = true["measured"] = []
    monkeypatch.setattr(gpu_timing, "in_turns", in_turns)
    monkeypatch.setattr(runoff, "_decided", {})
    monkeypatch.setattr(runoff, "_together", {})
    monkeypatch.setattr(runoff, "_pass", lambda held: gpu_timing.Pair(PASS_MS, PASS_MS))
    monkeypatch.setattr(choices, "with_artefact", lambda spec: spec)
    return timings, true, ours, aten, key


def test_the_finalists_are_timed_side_by_side_and_the_winner_is_recorded(contest, log):
    timings, true, ours, _, key = contest
    true[ours[1].spec.name] = 0.010
    settled = runoff.settle(dict(timings))
    assert "left out" not in log.text, log.text
    assert min(settled, key=settled.get) is ours[1] and settled[ours[1]] == pytest.approx(0.0102)
    assert all(t > runoff.BEHIND_MS for c, t in settled.items() if c is not ours[1])  # whatever is taken in of others
    entry = settings.store().lookup(key)
    assert entry.winner == ours[1].spec.name and entry.timings["aten mm"].microseconds == 15.0


@pytest.mark.parametrize("cold, hot, wins", [(0.010, 0.0149, True), (0.010, 0.0151, False), (0.0151, 0.010, False)])
def test_what_wins_in_one_state_must_not_lose_in_the_other(contest, cold, hot, wins):
    timings, true, ours, _, _ = contest
    true[ours[2].spec.name] = gpu_timing.Pair(cold, hot)
    settled = runoff.settle(dict(timings))
    assert (min(settled, key=settled.get) is ours[2]) == wins


def test_what_inductor_s_kernel_takes_in_is_for_inductor_to_see(contest):
    timings, true, ours, aten, key = contest
    template = next(c for c in timings if isinstance(c, Template))
    true |= {ours[2].spec.name: 0.010, choices.label(template): 0.0115, "aten mm": 0.011}
    settled = runoff.settle(dict(timings))
    assert min(settled, key=settled.get) is ours[2] and settled[template] > runoff.BEHIND_MS
    for made in ours:
        made.followed = True
    settled = runoff.settle(dict(timings))  # a pass more than the template's is more than ours are faster
    assert min(settled, key=settled.get) is ours[2] and settings.store().lookup(key).winner == ours[2].spec.name
    # so all stand on the scale of its own times, beside which it will put the template's with what it takes in
    assert settled[aten] == pytest.approx(min(timings[c] for c in timings if c not in ours))
    assert settled[template] == pytest.approx(settled[aten] * 0.0115 / 0.011)
    assert settled[ours[2]] == pytest.approx(settled[aten] * 0.0102 / 0.011)
    assert all(settled[c] > runoff.BEHIND_MS for c in ours if c is not ours[2])


def test_where_inductor_s_own_win_its_times_stay_on_its_scale(contest):
    timings, true, ours, aten, _ = contest
    templates = [c for c in timings if isinstance(c, Template)]
    true |= {c.spec.name: 0.02 for c in ours} | {"aten mm": 0.012, choices.label(templates[1]): 0.010}
    settled = runoff.settle(dict(timings))
    assert settled[templates[1]] == pytest.approx(0.020) and min(settled, key=settled.get) is templates[1]
    assert settled[aten] == pytest.approx(0.024)
    assert settled[templates[3]] == pytest.approx(0.030)  # took no part: not before those that did (0.015 was quick)


def test_equal_layers_of_a_model_are_settled_once(contest):
    timings, true, ours, _, key = contest
    true[ours[1].spec.name] = 0.010
    first = runoff.settle(dict(timings))
    assert runoff.decided(timings) and len(true["measured"]) == 1
    true[ours[1].spec.name] = 0.020
    assert runoff.settle(dict(timings)) == first and len(true["measured"]) == 1
    install._record(dict(timings), "mm", [], list(timings))  # Inductor's own times, which name another winner
    assert settings.store().lookup(key).winner == ours[1].spec.name
    failed = dict(timings) | {next(c for c in timings if isinstance(c, Template)): math.inf}
    assert runoff.settle(failed) != first and len(true["measured"]) == 2
    gone = {c: t for c, t in failed.items() if math.isfinite(t)}  # Inductor tells of those that fail once
    assert runoff.settle(gone).items() <= runoff.settle(failed).items() and len(true["measured"]) == 2
    without = {c: t for c, t in timings.items() if c is not ours[1]}  # other candidates: another question
    assert min(runoff.settle(dict(without)), key=runoff.settle(dict(without)).get) is not ours[1]
    assert len(true["measured"]) == 3
    for made in ours:
        made.followed = True
    runoff.settle(dict(timings))
    assert len(true["measured"]) == 4


@pytest.mark.parametrize("best, close", [(0.02, False), (0.0155, True), (0.005, True)])
def test_only_close_contests_are_timed_at_length(contest, best, close):
    _, _, ours, aten, _ = contest
    times = {**dict.fromkeys(ours, 0.02), aten: 0.015, ours[1]: best}
    named = runoff._close({c: gpu_timing.Pair(t, t) for c, t in times.items()})
    assert ({aten, ours[1]} <= set(named)) == close and bool(named) == close
    assert len(named) <= runoff.CLOSE_OURS + runoff.CLOSE_OTHERS


def test_who_loses_in_neither_state_takes_part(contest):
    """Even where many others are faster in the mean."""
    _, _, ours, aten, _ = contest
    uneven, even = gpu_timing.Pair(0.008, 0.0155), gpu_timing.Pair(0.0139, 0.0139)
    named = runoff._close({**dict.fromkeys(ours, uneven), ours[4]: even, aten: gpu_timing.Pair(0.015, 0.015)})
    assert ours[4] in named and aten in named


def test_times_of_the_last_round_replace_those_of_ours_in_the_cache(contest):
    timings, true, ours, _, key = contest
    for made in ours:
        timing = Timing(made.spec.name, 30.0, made.spec.config, "digest")
        settings.store().update(key, lambda entry, timing=timing: entry.with_timing(timing))
    true[ours[1].spec.name] = gpu_timing.Pair(0.016, 0.009)
    runoff.settle(dict(timings))
    kept = settings.store().lookup(key).timings
    assert kept[ours[1].spec.name].microseconds == pytest.approx(12.0)
    assert kept[ours[1].spec.name].artefact == "digest" and kept[ours[-1].spec.name].microseconds == 30.0


def test_times_of_single_calls_do_not_stand_beside_those_of_many(contest):
    """An epilogue's candidates are timed in a row; the product's that the last round left out were not."""
    timings, true, ours, _, key = contest
    true[ours[1].spec.name] = 0.020
    alone = {choices.label(c): t * 1e3 for c, t in timings.items()} | {ours[-1].spec.name: 9.0}
    assert runoff.comparable(key, alone) == alone  # nobody was timed here
    runoff.settle(dict(timings))
    found = runoff.comparable(key, alone)
    timed = runoff._together[key.digest]
    assert "aten mm" in timed and len(timed) < len(alone) and all(found[name] == alone[name] for name in timed)
    assert found[ours[-1].spec.name] == max(alone[name] for name in timed) > 9.0


def test_a_tie_is_aten_s_and_who_took_no_part_cannot_win(contest):
    timings, true, ours, aten, key = contest
    true |= {choices.label(c): 0.04 for c in timings if c is not aten} | {"aten mm": 0.035, ours[0].spec.name: 0.0349}
    settled = runoff.settle(dict(timings))
    assert min(settled, key=settled.get) is aten and settings.store().lookup(key).winner == "aten mm"
    assert settled[aten] == timings[aten] and all(settled[c] > settled[aten] for c in settled if c is not aten)


@pytest.mark.parametrize("why", ["ours failed", "nobody else", "capturing", "in another process", "on a CPU", "raises"])
def test_where_there_is_nothing_to_decide_nothing_changes(contest, monkeypatch, why):
    timings, _, ours, _, key = contest
    if why == "ours failed":
        timings |= dict.fromkeys(ours, math.inf)
    elif why == "nobody else":
        timings = {c: t for c, t in timings.items() if c in ours}
    elif why == "capturing":
        monkeypatch.setattr(devices, "capturing", lambda: True)
    elif why == "in another process":
        monkeypatch.setattr(private, "tunes_elsewhere", lambda: True)
    elif why == "on a CPU":
        ours[0].layout.device = torch.device("cpu")
    else:

        def no_memory(makers, *_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(gpu_timing, "in_turns", no_memory)
    assert runoff.settle(dict(timings)) == timings and not runoff.decided(timings)
    assert settings.store().lookup(key) is None


def test_with_an_epilogue_ours_are_measured_in_the_same_way(contest, monkeypatch):
    _, true, ours, _, key = contest
    for made in ours:
        timing = Timing(made.spec.name, 9.0, made.spec.config)
        settings.store().update(key, lambda entry, timing=timing: entry.with_timing(timing))
    true |= {ours[0].spec.name: 0.012, ours[1].spec.name: 0.011}
    given = {c: 0.02 + 0.001 * i for i, c in enumerate(ours)} | {ours[-1]: math.inf}
    settled = runoff.among_ours(dict(given))
    assert min(settled, key=settled.get) is ours[1] and settled[ours[1]] == pytest.approx(0.011 * 1.02)
    assert settled[ours[-2]] == given[ours[-2]] and math.isinf(settled[ours[-1]])
    kept = {name: t.microseconds for name, t in settings.store().lookup(key).timings.items()}
    assert kept[ours[1].spec.name] == 11.0 and kept[ours[-1].spec.name] == 9.0  # in place of a single call's
    monkeypatch.setattr(private, "tunes_elsewhere", lambda: True)
    assert runoff.among_ours(dict(given)) == given and runoff.among_ours({}) == {}


def test_with_an_epilogue_only_the_best_configurations_are_tried(contest):
    from inductor_plugin import fused_choice

    _, _, ours, _, key = contest
    for i, made in enumerate(ours):
        timing = Timing(made.spec.name, 10.0 - i, made.spec.config)
        settings.store().update(key, lambda entry, timing=timing: entry.with_timing(timing))
    specs = [kernels.Spec("mm+gelu", "sm90a", ours[0].spec.problem, c.spec.config) for c in ours]
    entry = settings.store().lookup(key)
    alone = {t.name: t.microseconds for t in entry.timings.values()}
    kept = fused_choice._likely(specs, entry, alone)
    assert [s.config["tile_m"] for s in kept] == [64 + i for i in range(len(ours))][-fused_choice.LIKELY :]
    other = [kernels.Spec("mm+gelu", "sm90a", ours[0].spec.problem, {"tile_m": 7})]
    assert fused_choice._likely(other, entry, alone) == other


class Event:
    """A torch.cuda.Event of a GPU whose time is told by a counter."""

    now = 0.0

    def __init__(self, enable_timing):
        self.at = math.nan

    def record(self):
        self.at = Event.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


def test_times_are_of_the_calls_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_timing, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_timing, "FLUSHED", 64)
    occupied = []
    monkeypatch.setattr(private, "occupy_gpu", occupied.append)

    def takes(milliseconds):
        Event.now += milliseconds

    made = []

    class Graph:
        def __init__(self, calls):
            self.calls = calls

        def replay(self):
            for call in self.calls:
                call()

    monkeypatch.setattr(gpu_timing, "graph_of", Graph)
    monkeypatch.setattr(gpu_timing, "_side_stream", nullcontext)

    def maker(cold, hot):
        return lambda count: made.append(count) or [lambda: takes(hot), *[lambda: takes(2 * cold - hot)] * (count - 1)]

    assert gpu_timing.alone(lambda: takes(0.25)) == pytest.approx(0.25)
    assert gpu_timing.alone(lambda: time.sleep(0.02) or takes(0.25)) == pytest.approx(0.25)  # a pause of Python's
    assert max(occupied) <= gpu_timing.MOST * gpu_timing.LATE_MOST * gpu_timing.GIGAHERTZ * 1e9
    found = gpu_timing.in_turns([maker(0.5, 0.5), maker(0.125, 0.0625)], size=32)
    assert made == [2, 2]
    some = gpu_timing.in_turns(
        [maker(0.5, 0.5), maker(0.125, 0.0625)], 32, 1, lambda quick: [quick.index(min(quick, key=lambda t: t.mean))]
    )
    assert some[0] is None and some[1].mean == pytest.approx(found[1].mean)
    assert gpu_timing.in_turns([maker(0.5, 0.5)], 32, 1, lambda quick: []) == [gpu_timing.Pair(0.5, 0.5)]
    assert found[0] == gpu_timing.Pair(0.5, 0.5) and (found[1].cold, found[1].hot) == pytest.approx((0.125, 0.0625))
    assert gpu_timing.Pair(0.9, 0.4).mean == pytest.approx(0.6)


def test_candidates_of_inductor_s_run_on_tensors_of_their_own():
    """What private.calls takes for granted of ATen's candidates."""
    seen = {}

    def look(given):
        aten = next(c for c in given if isinstance(c, private.load().names.ExternKernelCaller))
        runs = private.calls(aten, lambda tensors, _: tensors, 2)
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


def test_whether_something_follows_that_inductor_would_take_in():
    from tests.plugin.conftest import compile_with

    seen = []

    def look(given):
        seen.append(private.pointwise_follows())
        return given

    hooks = private.load().names.get_algorithm_selector_cache().preprocessing_fns
    hooks.insert(0, look)
    a, b, c = torch.randn(20, 32), torch.randn(32, 48), torch.randn(48, 16)
    try:
        for function in (lambda a, b, c: a @ b, lambda a, b, c: torch.relu(a @ b), lambda a, b, c: (a @ b) @ c):
            torch._dynamo.reset()
            compile_with(function)(a, b, c)
        torch._dynamo.reset()
        compile_with(lambda a, b, c: (a @ b).view(4, 5, 48) * 2)(a, b, c)
    finally:
        hooks.remove(look)
    assert seen == [False, True, False, False, True]
