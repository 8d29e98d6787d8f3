"""The order of workgroups on gfx950: every tile once, neighbours on one die; the functions are the kernels' own."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.targets import gfx950
from templates.gemm.order import grouped, on_dies, tile_of

DIES = gfx950.limits.dies


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.integers(1, 12), st.sampled_from([1, 2, 8]))
def test_every_tile_once(rows, columns, layers, group_m, dies):
    count = rows * columns * layers
    found = [tile_of(i, rows, columns, layers, group_m, dies) for i in range(count)]
    assert len(set(found)) == count
    assert all(0 <= z < layers and 0 <= r < rows and 0 <= c < columns for z, r, c in found)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 100, 255, 256, 257, 1000])
def test_each_die_gets_one_run_of_numbers(count):
    runs = defaultdict(list)
    for i in range(count):
        runs[i % DIES].append(on_dies(i, count, DIES))
    assert sorted(n for run in runs.values() for n in run) == list(range(count))
    for run in runs.values():
        assert run == list(range(run[0], run[0] + len(run)))
        assert count // DIES <= len(run) <= -(-count // DIES)


def test_a_die_reads_less_than_without_counting_dies():
    """32 x 32 tiles: the rows of A and columns of B that the 32 workgroups of one die read together."""
    rows = columns = 32
    plain, ours = (
        [tile_of(i, rows, columns, 1, group, dies)[1:] for i in range(0, 256, DIES)]
        for group, dies in ((8, 1), (8, DIES))
    )
    operands = lambda tiles: len({r for r, _ in tiles}) + len({c for _, c in tiles})
    assert operands(ours) == 8 + 4 < operands(plain) == 1 + 32


def test_a_group_goes_down_its_rows_first():
    assert [grouped(i, 3, 2, 2) for i in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
