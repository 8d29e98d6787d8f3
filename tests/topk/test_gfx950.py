"""TopK for gfx950 on the simulator: exact, with the checker silent, without spills, with wide loads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.targets import gfx950
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem
from templates.topk.space import configurations

from .case import KINDS, data
from .gpu_case import code_for, counters, run

BLOCK = TopKConfig("block", 128, 0, 256, 1, 16)
SELECT = TopKConfig("select", 1024, 0, 1024, 1, 8)
ROWS = TopKConfig("rows", 16, 256, 256, 16, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind):
    run(TopKProblem(37, 131, 6), ROWS, data(kind, 37, 131), pad=1)


@pytest.mark.parametrize("width, k, dtype, largest, pad", [
    (7, 7, "f32", False, 1), (20, 16, "bf16", True, 4), (256, 16, "f16", False, 0), (100, 1, "f32", True, 0),
])  # fmt: skip
def test_rows_of_other_shapes(width, k, dtype, largest, pad):
    for kind in ("normal", "special", "few"):
        run(TopKProblem(5, width, k, dtype, largest), ROWS, data(kind, 5, width), pad=pad)


def test_rows_held_by_half_a_wave():
    config = TopKConfig("rows", 16, 1024, 256, 32, 32)
    for kind in ("normal", "nan"):
        run(TopKProblem(9, 1000, 10), config, data(kind, 9, 1000))


@pytest.mark.parametrize("kind", KINDS)
def test_block(kind):
    run(TopKProblem(1, 9003, 100), BLOCK, data(kind, 1, 9003), pad=1)


@pytest.mark.parametrize("width, k, dtype, largest, pad", [
    (300, 5, "f32", False, 0), (4100, 64, "f16", False, 4), (5001, 33, "bf16", True, 7), (128, 128, "f32", True, 0),
])  # fmt: skip
def test_block_of_other_shapes(width, k, dtype, largest, pad):
    config = replace(BLOCK, elements=16 if dtype == "f32" else 32)
    for kind in ("normal", "special", "ascending"):
        run(TopKProblem(2, width, k, dtype, largest), config, data(kind, 2, width), pad=pad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest", [True, False])
def test_block_in_parts(kind, largest):
    run(TopKProblem(2, 9003, 100, largest=largest), replace(BLOCK, split=True, parts=3), data(kind, 2, 9003), pad=1)


def test_parts_without_elements():
    for parts in (3, 9):
        run(TopKProblem(1, 130, 100), replace(BLOCK, split=True, parts=parts), data("normal", 1, 130), pad=2)


def test_rows_at_odd_places_and_dimensions_in_the_middle():
    run(TopKProblem(3, 1001, 64, "bf16", align=2), BLOCK, data("normal", 3, 1001), offset=2)
    run(TopKProblem(3, 1001, 64, "f32", align=4), BLOCK, data("special", 3, 1001))
    run(TopKProblem(6, 500, 10, layout="any"), BLOCK, data("normal", 6, 500), inner=3, pad=1)
    run(TopKProblem(6, 100, 10, layout="any"), replace(ROWS, elements=8, most_width=128), data("few", 6, 100), inner=3)


@pytest.mark.parametrize("kind", ["normal", "ascending", "few", "special"])
def test_select(kind):
    run(TopKProblem(1, 20001, 1000), SELECT, data(kind, 1, 20001), pad=3)


def test_select_in_parts_and_as_many_as_there_are():
    run(TopKProblem(1, 20001, 600), replace(SELECT, split=True, parts=2), data("normal", 1, 20001), pad=3)
    run(TopKProblem(1, 1000, 1000), SELECT, data("ties", 1, 1000))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 3), width=st.integers(1, 5000), k=st.integers(1, 128), kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_shape(rows, width, k, kind, seed):
    run(TopKProblem(rows, width, min(k, width)), BLOCK, data(kind, rows, width, seed), pad=-width % 4)


@pytest.mark.parametrize("p", [
    TopKProblem(1, 128, 6), TopKProblem(1, 1000, 10, "bf16"), TopKProblem(16, 32000, 50), TopKProblem(4096, 32000, 50, "f16"),
    TopKProblem(1, 100000, 1000), TopKProblem(1, 100000, 4096, "bf16"), TopKProblem(9, 777, 9, "f32", align=4),
])  # fmt: skip
def test_no_configuration_spills(p):
    kept = configurations(p, gfx950).kept
    assert kept
    for c in kept:
        code = code_for(p, c.config)
        assert code.spills == 0 and code.scratch_bytes == 0, f"{c.config}: {code.spills} spills"


@pytest.mark.parametrize("p, config", [
    (TopKProblem(16, 128, 6), replace(ROWS, elements=8, most_width=128)), (TopKProblem(1, 8192, 100), BLOCK),
    (TopKProblem(1, 8192, 100, "bf16"), replace(BLOCK, elements=32)),
])  # fmt: skip
def test_loads_are_wide_and_coalesced(p, config):
    """Each line of x is moved once by 16-byte loads of neighbouring lanes (and the first ones again at the end, where
    there is no next chunk to fetch)."""
    seen = counters(p, config, data("normal", p.rows, p.width))
    once = p.rows * p.width * p.element.bytes
    spare = 0 if config.family == "rows" else once // 2
    assert once <= seen["moved"] <= once + spare and seen["asked"] >= once and seen["wide"] * 64 * 16 >= once
    if config.family == "rows":
        assert seen["conflicts"] == 0
    else:  # a candidate has 8 bytes, and a search reads the half with the key: two lanes a bank
        assert seen["conflicts"] <= seen["lds"] // 4
