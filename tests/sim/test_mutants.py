"""One-change mutations must be noticed: found by the checker, wrong in the result, or shown to be harmless. A sample;
all
of them are in `python -m bench sim`."""

from collections import Counter

import pytest

from bench.simcases import mutate, own_cases, triton_cases

CASES = {
    "HTI": (lambda: own_cases.hti(K=256), 10),
    "triton matmul": (lambda: triton_cases.matmul("bf16", 200, 136, 256, (128, 128, 64), 4), 7),
    "triton scan": (lambda: triton_cases.scan(3, 1000), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_mutants(name):
    make, step = CASES[name]
    case = make()
    loaded, hits, watch = mutate.survey(case)
    mutants = list(mutate.mutants(loaded, hits, watch))
    assert {m.kind for m in mutants} >= {"wait removed", "barrier removed"}
    tally = Counter()
    for m in mutants[::step]:
        verdict = mutate.verdict(case, m, limit=4)
        assert verdict != "missed", f"{m.kind}: {m.what}"
        tally[verdict] += 1
    caught = tally["found"] + tally["wrong"] + tally["refused"]
    assert caught >= 0.5 * sum(tally.values())  # the rest is shown to be harmless, above


def test_a_wait_state_less_is_found():
    case = triton_cases.softmax("f32", 3, 300, 1)
    loaded, hits, watch = mutate.survey(case)
    shorter = [m for m in mutate.mutants(loaded, hits, watch) if m.kind == "wait state removed"]
    assert len(shorter) >= 3 and {mutate.verdict(case, m) for m in shorter} == {"found"}


def test_a_place_in_lds_that_is_not_set_is_noticed():
    case = own_cases.hti(K=256)
    loaded, hits, watch = mutate.survey(case)
    kept = [m for m in mutate.mutants(loaded, hits, watch) if m.kind == "M0 kept"]
    assert len(kept) >= 4 and {mutate.verdict(case, m) for m in kept[:4]} <= {"found", "wrong"}
