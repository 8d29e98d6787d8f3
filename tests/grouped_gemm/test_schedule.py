"""Who does which tile, what offs mean, and what is refused: no kernel is compiled here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.targets import gfx950, x86
from templates.grouped_gemm.arguments import problem_of, scalar_values, scalars
from templates.grouped_gemm.build import build, build_from_json
from templates.grouped_gemm.config import GroupedConfig
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.reference import bounds
from templates.grouped_gemm.schedule import turns, walk
from templates.grouped_gemm.space import candidates


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(1, 40), st.integers(0, 700), st.sampled_from([1, 8]))
def test_every_tile_is_done_once_and_shares_are_even(units, tiles, dies):
    workgroups = 8 * units
    done = [[walk(t, w, workgroups, tiles, dies) for t in range(turns(tiles, workgroups))] for w in range(workgroups)]
    mine = [[i for i in tiles_of if i < tiles] for tiles_of in done]
    assert sorted(i for m in mine for i in m) == list(range(tiles))
    counts = [len(m) for m in mine]
    assert max(counts) - min(counts) <= 1


def test_a_die_does_neighbouring_tiles():
    """Workgroup w runs on die w % 8; in a whole turn its tiles are one stretch of the line."""
    mine = sorted(walk(2, w, 256, 1000, 8) for w in range(0, 256, 8))
    assert mine == list(range(512, 512 + 32))


def test_bounds():
    assert bounds([3, 3, 9], 12).tolist() == [0, 3, 3, 9]
    assert bounds([8, 4, 20, 28], 24).tolist() == [0, 8, 8, 20, 24]
    assert bounds([-5, 4, -1], 3).tolist() == [0, 0, 3, 3]


def tensors():
    x, w = torch.zeros(30, 16, dtype=torch.bfloat16), torch.zeros(4, 24, 16, dtype=torch.bfloat16)
    return x, w.transpose(-2, -1), torch.tensor([1, 2, 3, 30], dtype=torch.int32)


def test_problem_of_an_moe_layer():
    """The usual weight, (G, N, K).transpose(-2, -1), is column-major."""
    x, w, offs = tensors()
    p = problem_of(x, w, offs)
    assert p == GroupedGemmProblem("m", 4, n=24, k=16, a="row", b="col", tokens_hint=30)
    assert dict(zip(scalars(p), scalar_values(p, x, w, x.new_zeros(30, 24)))) == {
        "tokens": 30, "a_row": 16, "b_col": 16, "c_row": 24, "b_group": 384,
    }  # fmt: skip
    assert problem_of(x.t(), x[:, :8], offs).form == "k"
    turned = problem_of(w.transpose(-2, -1), x.t(), offs)
    assert turned.form == "n" and turned.flipped.form == "m" and turned.flipped.flipped == turned
    assert problem_of(w.transpose(-2, -1), w).form == "batch"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, o: (x, w, None), "offs are missing"),
        (lambda x, w, o: (x, w, o.long()), "int32"),
        (lambda x, w, o: (x, w, o[:, None]), "one dimension"),
        (lambda x, w, o: (x, w, o[:3]), "4 and 3 groups"),
        (lambda x, w, o: (x, w, o.to("meta")), "on meta and A on cpu"),
        (lambda x, w, o: (x, w, torch.stack([o, o], 1)[:, 0]), "neighbours"),
        (lambda x, w, o: (w, w.transpose(-2, -1), o), "pass none"),
        (lambda x, w, o: (x[:, :8], w, o), "last size"),
        (lambda x, w, o: (x.half(), w, o), "one type"),
        (lambda x, w, o: (x[0], w, o), "dimensions"),
    ],
)
def test_what_is_no_grouped_product_is_told(change, words):
    with pytest.raises(ValueError, match=words):
        problem_of(*change(*tensors()))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"groups": 0}, "nothing to multiply"),
        ({"groups": 513}, "at most 512"),
        ({"form": "x"}, "form is 'x'"),
        ({"n": 0}, "empty product"),
        ({"m": 5}, "must be 0 here"),
        ({"dtype": "f8E4M3FN"}, "dtype"),
        ({"align_b": 3}, "power of two"),
    ],
)
def test_why_not(more, words):
    p = GroupedGemmProblem(**{"form": "m", "groups": 4, "n": 24, "k": 16, **more})
    for target in (x86, gfx950):
        assert words in p.why_not(target)
        assert candidates(p, target).kept == []
        with pytest.raises(ValueError, match=words):
            build(p, None, target)


def test_configurations_survive_json():
    p = GroupedGemmProblem("m", 4, n=24, k=16)
    config = candidates(p, gfx950).kept[0].config
    assert GroupedConfig(**config.key()) == config
    code = build_from_json(p, candidates(p, x86).kept[0].config.key(), "x86")
    assert code.target == "x86" and [a.name for a in code.arguments][:4] == ["a", "b", "offs", "c"]


def test_f32_is_not_for_gfx950():
    assert "f32" in candidates(GroupedGemmProblem("m", 4, n=24, k=16, dtype="f32"), gfx950).dropped[0].reason


@pytest.mark.parametrize("groups", [8, 64])
def test_balance_of_skewed_groups(groups):
    """The bench's count of what the busiest workgroup does, for sizes like 1, 1/2, 1/3 ..."""
    from bench._grouped_suite import sizes_of
    from bench.gfx950_grouped import loads

    sizes = np.array(sizes_of(groups, 1024, "zipf"))
    assert sizes.sum() == groups * 1024 and (np.diff(np.sort(sizes)) >= 0).all()
    for p in (
        GroupedGemmProblem("m", groups, n=2048, k=4096),
        GroupedGemmProblem("k", groups, m=2048, n=4096, a="col", b="row"),
    ):
        found, least = loads(p, sizes, 128, 256, 256)
        assert found.max() <= 1.05 * least
