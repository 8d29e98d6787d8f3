"""The grouped GEMM template on an H200: forms, layouts, groups of any size, tails, tiles, offs that are nonsense."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from templates.grouped_gemm.problem import GroupedGemmProblem as Problem
from templates.grouped_gemm.sm90a_config import GroupedSm90aConfig as Config

from .grouped_case import compiled, run

FORMS = {
    "m": Problem("m", 8, n=256, k=320),
    "n": Problem("n", 8, m=136, k=320),
    "k": Problem("k", 8, m=136, n=256),
    "batch": Problem("batch", 8, n=256, k=320),
}
LAYOUTS = {"NN": ("row", "row"), "NT": ("row", "col"), "TN": ("col", "row"), "TT": ("col", "col")}
UNEVEN = (1, 0, 130, 5, 0, 0, 64, 17)
SMALL = Config(tile_m=64, tile_n=64, stages=4, groups=(1, 1))
TILES = [
    SMALL,
    Config(tile_m=16, tile_n=64, tile_k=128, stages=4, groups=(1, 1), evict="b", queued=False),
    Config(tile_m=32, tile_n=128, stages=6, groups=(1, 1), overlap="early"),
    Config(tile_m=64, tile_n=256, stages=4, groups=(1, 2)),
    Config(stages=4, overlap="late"),
    Config(tile_n=256, stages=3),
    Config(tile_m=192, tile_n=96, stages=4, groups=(3, 1)),
    Config(tile_m=64, tile_n=96, stages=4, groups=(1, 1), beside=2),
]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", TILES, ids=str)
def test_tiles(form, layout, config):
    run(replace(FORMS[form], a=layout[0], b=layout[1]), config, UNEVEN, past=3, tokens=None)


BY_TMA = [
    Config(tile_n=256, stages=4, tma_store=True),
    Config(tile_n=192, stages=3, tma_store=True),
    Config(tile_m=64, tile_n=64, stages=4, groups=(1, 1), tma_store=True),
]


@pytest.mark.parametrize("config", BY_TMA, ids=str)
@pytest.mark.parametrize("form, layout", [("m", "NT"), ("m", "NN"), ("k", "TN"), ("batch", "NT"), ("batch", "TT")])
def test_stores_by_tma(form, layout, config):
    """Whole tiles leave by TMA, others as ever, one after the other through the same shelves."""
    a, b = LAYOUTS[layout]
    p = replace(FORMS[form], a=a, b=b)
    many = (130, 256, 0, 17, 300, 128, 1, 512)
    run(p, config, many, past=7, tokens=200 if form == "batch" else None)
    wide = replace(p, n=1000, m=p.m and 264, out_dtype="f32" if form == "k" else "bf16")
    run(wide, config, many, pads=(0, 0, 8), tokens=72 if form == "batch" else None)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(200, 72), (8, 8), (264, 1000), (201, 77)])
def test_tails_and_padding(form, layout, size):
    p = replace(FORMS[form], a=layout[0], b=layout[1])
    wide, deep = size
    p = {
        "m": replace(p, n=wide, k=deep), "n": replace(p, m=wide, k=deep), "k": replace(p, m=deep, n=wide),
        "batch": replace(p, n=wide, k=deep),
    }[form]  # fmt: skip
    for pads in ((0, 0, 0), (8, 16, 24)):
        run(p, SMALL, UNEVEN, past=5, pads=pads)


SIZES = {
    "even": (64,) * 8,
    "empty": (0,) * 8,
    "single rows": (1,) * 8,
    "one group": (0, 0, 0, 300, 0, 0, 0, 0),
    "first and last": (70, 0, 0, 0, 0, 0, 0, 70),
    "aligned": (8, 16, 0, 64, 128, 8, 0, 24),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("form", ["m", "n", "k"])
def test_groups(form, sizes):
    run(FORMS[form], TILES[4], sizes, past=9)
    run(FORMS[form], TILES[1], sizes)


@pytest.mark.parametrize("groups", [1, 2, 31, 33, 64, 200, 512])
@pytest.mark.parametrize("form", FORMS)
def test_many_groups(form, groups):
    generator = torch.Generator().manual_seed(groups)
    sizes = torch.randint(0, 40, (groups,), generator=generator).tolist()
    p = replace(FORMS[form], groups=groups)
    run(p, SMALL, sizes, past=1)
    run(p, TILES[5], sizes)


@pytest.mark.parametrize("form", ["m", "n", "k"])
@pytest.mark.parametrize("offs", [(-5, 3, 3, 9), (10, 4, 2, 50), (20, 80, 200, 90), (0, 0, 0, 0)], ids=str)
def test_offs_that_are_nonsense_stay_within_the_operands(form, offs):
    run(replace(FORMS[form], groups=4), SMALL, offs=offs, tokens=100)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2])
def test_types_and_scales(dtype, scale):
    for form, p in FORMS.items():
        run(replace(p, dtype=dtype, out_dtype=dtype), SMALL, UNEVEN, scale=scale)
        if form == "k":
            run(replace(p, dtype=dtype, out_dtype="f32"), SMALL, UNEVEN, scale=scale)


def test_what_was_reported():
    """Splits of pytorch #172439 (zero-size groups), sizes of #158042 (2-D by 2-D, K 16512)."""
    splits = (162, 0, 2577, 446, 0, 83)
    run(Problem("m", 6, n=768, k=2048), TILES[5], splits)
    run(Problem("k", 6, m=2048, n=768, a="col", b="row"), TILES[5], splits)
    run(Problem("k", 8, m=512, n=256, a="col", b="row"), TILES[5], (2064,) * 8)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data())
def test_drawn_problems(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    form, groups = draw(*FORMS), data.draw(st.integers(1, 12))
    p = replace(FORMS[form], groups=groups, a=draw("row", "col"), b=draw("row", "col"), dtype=draw("bf16", "f16"))
    size = lambda x: data.draw(st.integers(1, 300)) if getattr(p, x) else 0
    p = replace(p, m=size("m"), n=size("n"), k=size("k"))
    sizes = data.draw(st.lists(st.integers(0, 150), min_size=groups, max_size=groups))
    run(p, draw(*TILES), sizes, past=draw(0, 0, 13), tokens=data.draw(st.integers(1, 200)) if form == "batch" else None)


def test_in_a_graph_with_other_groups_each_time():
    """offs are read when the graph runs."""
    from flykernels.launch.current import Launcher
    from templates.grouped_gemm.arguments import scalar_values

    p = FORMS["m"]
    rand = lambda *size: torch.randn(size, device="cuda", dtype=torch.bfloat16)
    a, b, c = rand(300, 320), rand(8, 256, 320).transpose(-2, -1), rand(300, 256)
    offs = torch.zeros(8, dtype=torch.int32, device="cuda")
    launch = Launcher(compiled(p, SMALL))
    call = lambda: launch(a.data_ptr(), b.data_ptr(), offs.data_ptr(), c.data_ptr(), *scalar_values(p, a, b, c))
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for sizes in (UNEVEN, (300, 0, 0, 0, 0, 0, 0, 0), (37,) * 8):
        ends = torch.tensor(sizes).cumsum(0)
        offs.copy_(ends)
        c.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        first = 0
        for g, end in enumerate(ends.tolist()):
            want = a[first:end].double() @ b[g].double()
            assert torch.allclose(c[first:end].double(), want, atol=0.5, rtol=1e-2)
            first = end
        assert torch.isnan(c[first:]).all()


def test_no_tokens_is_no_launch():
    code = compiled(FORMS["m"], SMALL)
    assert code.grid_for({"tokens": 0}) == (0,) and code.grid_for({"tokens": 1}) == (132,)
