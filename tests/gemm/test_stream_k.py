"""Stream-K's shares on ints: every K step of every tile once, in the order that adding up relies on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from templates.gemm.stream_k import Stream


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(0, 300), st.integers(1, 24), st.integers(1, 140))
def test_every_step_is_dealt_out_once(tiles, steps, groups):
    stream = Stream(tiles, steps, groups)
    done: dict = {}
    shares = [(g, stream.share(g, i)) for g in range(groups) for i in range(stream.count(g))]
    for group, s in shares:
        assert 0 <= s.tile < tiles and 0 <= s.first < s.end <= steps
        assert 0 <= s.number < s.of and s.owner + s.number == group
        for step in range(s.first, s.end):
            assert done.setdefault((s.tile, step), (group, s.number, s.of)) == (group, s.number, s.of)
            assert stream.owner((s.tile - stream.whole) * steps + step) == group or s.tile < stream.whole
    assert len(done) == tiles * steps
    for tile in range(tiles):  # parts follow each other along K, and all know how many there are
        parts = [done[tile, step] for step in range(steps)]
        numbers = [n for _, n, _ in parts]
        assert (
            numbers == sorted(numbers) and set(numbers) == set(range(parts[0][2])) and len({p[2] for p in parts}) == 1
        )


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.integers(1, 700), st.integers(1, 40), st.integers(1, 140))
def test_workgroups_are_equally_busy(tiles, steps, groups):
    stream = Stream(tiles, steps, groups)
    busy = [sum(s.end - s.first for s in (stream.share(g, i) for i in range(stream.count(g)))) for g in range(groups)]
    assert max(busy) - min(busy) <= 1
    for g in range(groups):  # of the tiles it shares with others, a workgroup ends one and begins one at most
        shared = [s for s in (stream.share(g, i) for i in range(stream.count(g))) if s.of > 1]
        assert sum(s.number == 0 for s in shared) <= 1 and sum(s.number > 0 for s in shared) <= 1
