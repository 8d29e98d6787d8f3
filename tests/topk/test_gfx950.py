"""TopK for gfx950 on the simulator: exact, with the checker silent, without spills, with wide loads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.sim.report import profile
from flykernels.targets import gfx950
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem
from templates.topk.space import configurations

from .case import KINDS, data
from .gpu_case import Launch, code_for, counters, run

BLOCK = TopKConfig("block", 128, 0, 256, 1, 16)
HELD = TopKConfig("block", 128, 8192, 512, 1, 16)  # a whole row in registers
SELECT = TopKConfig("select", 1024, 0, 1024, 1, 8, 2)
ROWS = TopKConfig("rows", 16, 256, 256, 16, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind):
    run(TopKProblem(37, 131, 6), ROWS, data(kind, 37, 131), pad=1)
    run(TopKProblem(37, 131, 6), replace(ROWS, family="rounds"), data(kind, 37, 131), pad=1)


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


@pytest.mark.parametrize("kind", ["normal", "constant", "special"])
def test_rows_that_are_held_whole(kind):
    held = replace(HELD, workgroup_size=128, most_width=2048)
    run(TopKProblem(2, 2001, 100), held, data(kind, 2, 2001), pad=3)
    run(TopKProblem(1, 2001, 100, "bf16", False, align=2), held, data(kind, 1, 2001), pad=3)
    held = replace(held, family="select", most_k=512, groups=8)
    run(TopKProblem(1, 2001, 500, "f16"), held, data(kind, 1, 2001), pad=7)


@pytest.mark.parametrize("groups", [1, 8])
def test_select_by_groups_of_equal_elements(groups):
    """More equal elements than a board has room for: the first positions are wanted, whatever group they are in."""
    small = TopKConfig("select", 512, 0, 256, 1, 8, groups)
    for kind in ("constant", "few", "ties"):
        run(TopKProblem(1, 3003, 300), small, data(kind, 1, 3003), pad=1)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 3), width=st.integers(1, 5000), k=st.integers(1, 128), kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_shape(rows, width, k, kind, seed):
    run(TopKProblem(rows, width, min(k, width)), BLOCK, data(kind, rows, width, seed), pad=-width % 4)


@pytest.mark.parametrize("p", [
    TopKProblem(1, 128, 6), TopKProblem(1, 1000, 10, "bf16"), TopKProblem(16, 32000, 50),
    TopKProblem(4096, 32000, 50, "f16"), TopKProblem(1, 100000, 1000),
    TopKProblem(1, 100000, 4096, "bf16"), TopKProblem(9, 777, 9, "f32", align=4),
])  # fmt: skip
def test_no_configuration_spills(p):
    kept = configurations(p, gfx950).kept
    assert kept
    for c in kept:
        code = code_for(p, c.config)
        assert code.spills == 0 and code.scratch_bytes == 0, f"{c.config}: {code.spills} spills"


def element_counts(dtype: str) -> dict[str, TopKConfig]:
    """A configuration of each family; a thread's loads have 16 bytes."""
    more = 1 if dtype == "f32" else 2
    return {
        "rows": replace(ROWS, elements=8, most_width=128), "rounds": TopKConfig("rounds", 16, 256, 256, 32, 8),
        "block": replace(BLOCK, elements=16 * more), "held": HELD,
        "select": replace(SELECT, elements=8),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("family", ["rows", "rounds", "block", "held", "select"])
def test_loads_are_wide_and_coalesced_and_lds_has_no_conflicts(family, dtype):
    """Each line of x is moved once by 16-byte loads of neighbouring lanes (and the first ones again at the end, where
    there is no next chunk to fetch). In LDS no two lanes want one bank, but for the sorting of large k: where a lane
    looks there is what the data says."""
    rows, width, k = {"rows": (16, 128, 6), "rounds": (16, 256, 6), "select": (1, 8192, 600)}.get(
        family, (1, 8192, 100)
    )
    p, config = TopKProblem(rows, width, k, dtype), element_counts(dtype)[family]
    seen = counters(p, config, data("normal", rows, width))
    once = rows * width * p.element.bytes
    spare = once // 2 if family in ("block", "select") else 0
    assert once <= seen["moved"] <= once + spare and seen["asked"] >= once and seen["wide"] * 64 * 16 >= once
    assert seen["conflicts"] <= (seen["lds"] // 4 if family == "select" else 0)


@pytest.mark.parametrize("family", ["rows", "rounds", "block", "held", "select"])
def test_the_timing_model_takes_every_family(family):
    """Waves part and meet again, and some end early."""
    p, config = TopKProblem(3, 120, 7), element_counts("f32")[family]
    launch = Launch(p, config, data("normal", 3, 120))
    report = profile(launch.code, launch.args, launch.grid)
    assert (
        report.timing["middle"].cycles > 0
        and report.result.counters.by_name["s_endpgm"] == launch.code.workgroup_size // 64
    )
