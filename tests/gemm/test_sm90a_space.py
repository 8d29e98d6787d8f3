"""Which configurations sm_90a offers for a problem: few, each with a reason, all within the hardware's limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.targets import sm90a
from templates.gemm import space_sm90a
from templates.gemm.build import build
from templates.gemm.problem import GemmProblem
from templates.gemm.space import OTHERS, TILE, VARIANTS, candidates
from templates.gemm.space_sm90a import KEPT, limit

NT = GemmProblem(4096, 4096, "bf16", "bf16", b="col")
SHAPES = [(m, n, k) for m in (16, 64, 256, 1024, 4096) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336))]


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_a_few_with_reasons(m, n, k):
    space = candidates(replace(NT, n=n, k=k, m_hint=m), sm90a)
    assert 4 <= len(space.kept) <= KEPT
    configs = [c.config for c in space.kept]
    assert len(set(configs)) == len(configs)
    assert all(c.reason for c in space.kept) and all(d.reason for d in space.dropped)
    # B that is read once leaves L2 first; where several read it or L2 holds it, whether it should is to be measured
    once = m <= 64 and n * k * 2 > sm90a.limits.l2_bytes
    assert {c.evict for c in configs} == ({"b"} if once else {"none", "b"} if m <= 256 else {"none"})


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_every_problem_that_is_served_has_candidates(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    align = draw(2, 4, 8, 16)
    p = GemmProblem(
        data.draw(st.integers(1, 20000)), data.draw(st.integers(1, 20000)), draw("bf16", "f16"), draw("bf16", "f32"),
        draw("row", "col", "any"), draw("row", "col", "any"), draw(False, True), draw("none", "row", "full"),
        draw("none", "gelu"), draw(False, True), False, data.draw(st.integers(1, 20000)), align, align, 4,
    )  # fmt: skip
    space = candidates(p, sm90a)
    assert 1 <= len(space.kept) <= KEPT
    for c in space.kept:
        assert limit(p, c.config, sm90a.limits) is None
        assert (c.config.kind == "mma") == (align < 16 or "any" in (p.a, p.b))


def test_what_is_not_served():
    for p in (replace(NT, dtype="f32", out_dtype="f32"), replace(NT, packed_b=True)):
        space = candidates(p, sm90a)
        assert not space.kept and space.dropped[0].reason


@pytest.mark.parametrize("m", [16, 256, 4096])
def test_candidates_compile_without_spills(m):
    p = replace(NT, m_hint=m, bias="row", activation="silu")
    for c in candidates(p, sm90a).kept[:4]:
        assert build(p, c.config, sm90a).spills == 0


@pytest.mark.parametrize("m, n, k", [(16, 4096, 4096), (256, 14336, 4096), (4096, 4096, 14336)])
def test_the_likeliest_tile_is_tried_in_more_variants_than_others(m, n, k):
    p = GemmProblem(n, k, "bf16", "bf16", "row", "col", m_hint=m)
    all_of_them, space = space_sm90a.candidates(p, sm90a), candidates(p, sm90a)
    tile = lambda c: tuple(getattr(c.config, x) for x in TILE)
    tiles = [tile(c) for c in space.kept]
    assert space.kept[0] == all_of_them.kept[0] and tiles.count(tiles[0]) <= VARIANTS
    assert set(tiles) == {tile(c) for c in all_of_them.kept}
    assert all(tiles.count(t) <= OTHERS for t in set(tiles) - {tiles[0]})
    assert len(space.kept) + len(space.dropped) == len(all_of_them.kept) + len(all_of_them.dropped)


def test_sanitizers_see_each_kernel_do_everything_it_does():
    """What `python -m bench h200 --part sanitizer` runs."""
    from bench._h200_sanitize import STREAMING, WRAPS, kernels

    found = kernels()
    offered = {str(replace(c.config, evict="none", group_m=1)) for m, n, k in SHAPES
               for c in candidates(replace(NT, n=n, k=k, m_hint=m), sm90a).kept}  # fmt: skip
    assert {name.partition(": ")[2] for name in (x.name for x in found)} >= offered
    for x in found:
        c, p = x.config, x.problem
        tiles = -(-x.m // c.tile_m) * -(-p.n // c.tile_n)
        assert x.m > c.tile_m * c.cluster[0] and x.m % c.tile_m and p.n > c.tile_n * c.cluster[1] and p.n % c.tile_n
        assert p.n % 8 == p.k % 8 == 0 and p.k % c.tile_k
        groups = c.stream_k or x.workgroups or tiles
        assert c.stream_k in (0, STREAMING) and tiles >= groups
        rounds = tiles // groups if x.workgroups else 1
        assert rounds * (c.steps(p) // c.split_k) >= WRAPS * c.stages and limit(p, c, sm90a.limits) is None
