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
    for width, parts, pad in ((130, 3, 2), (130, 9, 2), (4096, 7, 0)):
        run(TopKProblem(1, width, 100), replace(BLOCK, split=True, parts=parts), data("normal", 1, width), pad=pad)


def test_rows_that_are_shorter_than_a_vector():
    """No byte beyond them is read; that rows begin at multiples of a vector's size does not matter."""
    for p in (TopKProblem(1, 3, 2), TopKProblem(1, 7, 2, "f16")):
        assert "not read 16 at a time" in p.why_not(gfx950)
        p = replace(p, align=p.element.bytes)
        for config in {c.config.family: c.config for c in configurations(p, gfx950).kept}.values():
            run(p, config, data("normal", 1, p.width))


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
    small = TopKConfig("select", 512, 0, 256, 1, 8, 8, split=True, parts=5)
    for kind in ("normal", "descending", "constant", "special"):  # all of it is in one part, or some in each
        run(TopKProblem(1, 9003, 300), small, data(kind, 1, 9003), pad=1)
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


@pytest.mark.parametrize("most_k", [512, 2048])
def test_few_elements_where_a_thread_sorts_several(most_k):
    """Of the last part of a row, and of a k far below the largest that the code serves."""
    small = TopKConfig("select", most_k, 0, 256, 1, 8, 8)
    for width, k, parts in ((2048 + 100, 400, 2), (2048 + 3, 300, 2), (1500, 150, 1), (257, 257, 1)):
        config = replace(small, split=parts > 1, parts=parts)
        run(TopKProblem(1, width, k), config, data("ascending", 1, width), pad=-width % 4)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 3), width=st.integers(1, 5000), k=st.integers(1, 128), kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_shape(rows, width, k, kind, seed):
    p = TopKProblem(rows, width, min(k, width), align=16 if width >= 4 else 4)
    run(p, BLOCK, data(kind, rows, width, seed), pad=-width % 4)


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


# One of each kernel that the bench's suite runs first (rows, N, k), and of those of large k
SUITE = [(1, 128, 6), (4096, 128, 6), (1, 256, 8), (4096, 256, 8), (16, 8192, 8), (1, 32000, 50), (256, 32000, 50)]
SUITE += [(4096, 32000, 50), (1, 1000000, 100), (1, 8192, 600), (256, 32000, 2048)]
SHORT = [SUITE[n] for n in (0, 3, 4, 7, 8, 9)]


@pytest.mark.parametrize("dtype, shape", [
    *(("f32", s) for s in SUITE), *(("f16", s) for s in SHORT[:4]), *(("bf16", s) for s in SHORT[2:]),
])  # fmt: skip
def test_loads_are_wide_and_coalesced_and_lds_has_no_conflicts(dtype, shape):
    """Each line of x is moved once by 16-byte loads of neighbouring lanes (and a chunk again at the end, where there is
    no next one to fetch), single elements are not looked up, and in LDS no two lanes want one bank, whatever the data.
    Of rows that are walked, two chunks show the walk."""
    rows, width, k = shape
    config = replace(configurations(TopKProblem(rows, width, k, dtype), gfx950).kept[0].config, parts=1)
    chunk = config.workgroup_size * config.elements
    here = 1 if config.family in ("block", "select") else config.workgroup_size // config.lanes
    p = TopKProblem(here, width if config.most_width else 2 * chunk, k, dtype)
    for kind in ("normal", "ascending") if config.family == "select" else ("normal",):
        seen, once = counters(p, config, data(kind, here, p.width)), here * p.width * p.element.bytes
        spare = chunk * p.element.bytes if config.family in ("block", "select") else 0
        assert once <= seen["moved"] <= once + spare and seen["asked"] >= once and seen["wide"] * 64 * 16 >= once
        last = max(here, config.workgroup_size // 64)  # of a row's last elements: a line a row or a wave
        assert seen["narrow"] <= last, "single elements are looked up"
        assert seen["conflicts"] == 0 < seen["lds"] or config.family == "rounds"


@pytest.mark.parametrize("width, k, dtype", [(128, 6, "f32"), (250, 16, "f32"), (256, 8, "bf16")])
def test_lds_has_no_conflicts_whatever_is_in_short_rows(width, k, dtype):
    """Where a candidate goes depends on the data; which banks are wanted together does not."""
    offered = [c.config for c in configurations(TopKProblem(4096, width, k, dtype), gfx950).kept]
    config = next(c for c in offered if c.family == "rows")
    here = config.workgroup_size // config.lanes
    for seed, kind in enumerate(KINDS):
        seen = counters(TopKProblem(here, width, k, dtype), config, data(kind, here, width, seed), pad=-width % 8)
        assert seen["conflicts"] == 0 < seen["lds"], kind


@pytest.mark.parametrize("kind", ["descending", "constant", "few", "late"])
def test_lds_has_no_conflicts_whatever_is_in_long_rows(kind):
    seen = counters(TopKProblem(1, 8192, 100), BLOCK, data(kind, 1, 8192))
    assert seen["conflicts"] == 0 < seen["lds"]


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
