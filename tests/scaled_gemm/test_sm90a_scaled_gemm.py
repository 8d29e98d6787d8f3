"""The FP8 GEMM on sm_90a without a GPU: what is compiled, that ptxas neither spills nor serialises, what is offered."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flykernels.codeobject import CodeObject
from flykernels.lang import TraceError
from flykernels.targets import sm90a
from flykernels.targets.sm90a import find_ptxas
from templates.gemm.sm90a_config import Sm90aConfig as Config
from templates.scaled_gemm.arguments import SCALARS, pointers
from templates.scaled_gemm.build import build, build_from_json
from templates.scaled_gemm.problem import ScaledGemmProblem
from templates.scaled_gemm.sm90a import SUMS_MOST, errors, limit
from templates.scaled_gemm.sm90a_sums import PROMOTE
from templates.scaled_gemm.space import candidates

P = ScaledGemmProblem(4096, 4096, scaling="row")
SMALL = Config(tile_m=64, tile_n=64, tile_k=128, stages=4, groups=(1, 1))
BIG = Config(tile_k=128, stages=4)
CASES = {
    "small M": (P, Config(tile_m=16, tile_n=32, tile_k=256, stages=12, groups=(1, 1), evict="b", overlap="early")),
    "as many sums as fit": (P, replace(BIG, tile_n=192, persistent=True, overlap="early")),
    "two blocks of rows a warpgroup": (P, replace(BIG, tile_m=256, tile_n=96, persistent=True, overlap="early")),
    "C by TMA": (P, replace(BIG, tile_n=96, persistent=True, tma_store=True)),
    "fast": (
        replace(P, fast_accum=True, bias="row"),
        replace(BIG, tile_n=256, persistent=True, tma_store=True, cluster=(2, 1)),
    ),
    "e5m2, a matrix": (replace(P, a_dtype="f8E5M2", b_dtype="f8E5M2", scaling="tensor", out_dtype="f16"), BIG),
    "mixed, f32": (replace(P, b_dtype="f8E5M2", out_dtype="f32", bias="row"), SMALL),
    "C one by one": (replace(P, n=4095, align_c=2), SMALL),
    "split": (P, replace(SMALL, split_k=4)),
    "split in a cluster": (P, replace(SMALL, split_k=2, k_cluster=True)),
    "streamed": (P, replace(BIG, stream_k=132)),
}
SHORT = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}


@pytest.mark.parametrize("p, config", CASES.values(), ids=CASES)
def test_compiles(p, config):
    code = build(p, config, sm90a)
    used = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", code.text))
    assert used == {f"m64n{config.columns}k32.f32.{SHORT[p.a_dtype]}.{SHORT[p.b_dtype]}"}
    assert code.spills == 0
    if find_ptxas():
        assert 0 < code.registers <= 255 and code.scratch_bytes == 0 and code.binary[:4] == b"\x7fELF"
    assert [a.name for a in code.arguments][: len(pointers(p)) + len(SCALARS)] == [*pointers(p), *SCALARS]
    assert [t.name for t in code.tensor_maps] == ["a_map", "b_map", *(["c_map"] if config.tma_store else [])]
    assert code.overlaps == (config.overlap != "none") and code.cluster == config.launched_cluster
    assert CodeObject.from_bytes(code.to_bytes()) == code
    assert build_from_json(p, config.key(), "sm90a") == code


def groups(text: str) -> list[int]:
    """wgmma instructions of each group, in the order of the text."""
    found = re.findall(r"wgmma\.(mma_async|commit_group)", text)
    out, count = [], 0
    for name in found:
        count += name == "mma_async"
        if name == "commit_group":
            out, count = [*out, count], 0
    return out


@pytest.mark.parametrize("depth", [128, 256])
def test_sums_are_promoted_unless_fast(depth):
    """So many instructions' sums are begun anew each time; fast ones go on through a whole K tile, and to the next."""
    config = replace(SMALL, tile_k=depth)
    promoted, fast = (build(replace(P, fast_accum=f), config, sm90a).text for f in (False, True))
    assert set(groups(promoted)) == {PROMOTE // 32} and set(groups(fast)) == {depth // 32}
    zero = r"wgmma\.wait_group\.sync\.aligned\s+0"
    assert len(re.findall(zero, promoted)) == len(groups(promoted)) and len(re.findall(zero, fast)) == 1
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1", fast)
    begun = re.findall(r"wgmma\.commit_group.*?wgmma\.wait_group", promoted, re.DOTALL)
    assert len(begun) == len(groups(promoted)) and not any("add.f32" in part for part in begun)  # sums are read later
    assert promoted.count("add.f32") and not fast.count("add.f32")


@pytest.mark.parametrize("p, words", [
    (replace(P, scaling="block"), "without scales for blocks"),
    (replace(P, a_dtype="f4E2M1FN", b_dtype="f4E2M1FN", scaling="block"), "f4E2M1FN"),
    (replace(P, align_a=8), "TMA needs 16"),
    (replace(P, a_dtype="f8E4M3FNUZ"), "240"),
])  # fmt: skip
def test_not_served(p, words):
    space = candidates(p, sm90a)
    assert not space.kept and words in space.dropped[0].reason
    with pytest.raises(ValueError, match=words):
        build(p, SMALL, sm90a)


@pytest.mark.parametrize("config, words", [
    (replace(SMALL, tile_k=64), "multiples of 128"),
    (replace(BIG, tile_n=256), f"At most {SUMS_MOST}"),
    (replace(SMALL, kind="mma"), "only wgmma"),
])  # fmt: skip
def test_configurations_that_do_not_fit(config, words):
    assert words in limit(P, config)
    with pytest.raises((ValueError, TraceError), match=words):
        build(P, config, sm90a)


@pytest.mark.parametrize("m", [1, 16, 64, 200, 1024, 8352])
@pytest.mark.parametrize("n, k", [(1536, 4096), (1, 16), (14336, 4096), (200, 1008)])
def test_what_is_offered_fits(m, n, k):
    for fast in (False, True):
        p = ScaledGemmProblem(n, k, scaling="row", m_hint=m, fast_accum=fast, align_c=16 if n > 1 else 2)
        space = candidates(p, sm90a)
        assert space.kept and all(limit(p, c.config) is None for c in space.kept)
        assert all(c.config.tile_k % PROMOTE == 0 for c in space.kept)
        assert len({c.config for c in space.kept}) == len(space.kept)


def test_fast_sums_leave_registers_for_larger_tiles():
    largest = lambda fast: max(c.config.sums for c in candidates(replace(P, m_hint=8192, fast_accum=fast), sm90a).kept)
    assert largest(False) <= SUMS_MOST < largest(True)


def test_errors_grow_with_what_wgmma_adds_up_alone():
    promoted, fast = errors(P), errors(replace(P, fast_accum=True))
    assert promoted[0] == fast[0] and fast[1] == promoted[1] * (P.k // PROMOTE)
    assert errors(replace(P, k=32))[1] < promoted[1]
