"""The GEMM template on an H200: layouts, tails, tiles, clusters, shared tiles, epilogues, drawn shapes, candidates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.launch.current import Launcher
from flykernels.targets import sm90a
from templates.gemm.arguments import pointers, scalar_values
from templates.gemm.problem import ACTIVATIONS, GemmProblem
from templates.gemm.sm90a_config import Sm90aConfig as Config
from templates.gemm.space import candidates

from .gemm_case import compiled, run

BASE = GemmProblem(256, 512, "bf16", "bf16", b="col")
LAYOUTS = {"NN": ("row", "row"), "NT": ("row", "col"), "TN": ("col", "row"), "TT": ("col", "col")}
SMALL = Config(tile_m=64, tile_n=64, stages=4, groups=(1, 1))
CHAINED = 40  # products after each other
COPIED = Config("mma", 64, 64, 64, 3, (1, 1))
GATHERED = Config("mma", 64, 64, 32, 2, (1, 1))
TILES = [  # (configuration, N, M)
    (SMALL, 200, 104),
    (Config(stages=3), 256, 200),
    (Config(tile_n=256), 256, 136),
    (Config(tile_m=64, tile_n=96, groups=(1, 1)), 192, 64),
    (Config(tile_m=64, tile_n=112, groups=(1, 1)), 224, 64),
    (Config(tile_m=16, tile_n=32, tile_k=128, groups=(1, 1), evict="b", keep=3), 256, 40),
    (Config(tile_m=32, tile_n=64, tile_k=128, groups=(1, 1)), 256, 40),
    (Config(tile_m=64, tile_n=128, groups=(1, 2), stages=3), 256, 128),
    (Config(tile_m=256, tile_n=128, stages=3), 256, 256),
    (Config(tile_n=320, groups=(1, 2), stages=3), 640, 128),
    (Config(stages=3, cluster=(2, 1)), 256, 384),
    (Config(stages=3, cluster=(1, 2)), 256, 128),
    (Config(stages=3, cluster=(2, 2)), 384, 384),
    (replace(SMALL, cluster=(1, 4), stages=3), 512, 64),
    (replace(SMALL, persistent=True), 2048, 1024),
    (Config(persistent=True, cluster=(2, 1)), 2048, 2104),
    (replace(SMALL, tile_n=128, persistent=True, beside=2), 2048, 2104),
    (Config(tile_n=256, tma_store=True), 256, 136),
    (Config(persistent=True, tma_store=True, tile_n=192), 1920, 2000),
    (Config(persistent=True, tma_store=True, cluster=(1, 2)), 2048, 2104),
    (Config(stages=3, split_k=3), 256, 136),
    (replace(SMALL, tile_n=128, stream_k=132), 512, 200),
    (Config(stream_k=132), 2048, 600),
    (replace(SMALL, overlap="early"), 256, 64),
    (replace(SMALL, split_k=2, k_cluster=True), 200, 104),
    (Config(stages=6, split_k=2, k_cluster=True, overlap="late"), 256, 200),
    (Config(stages=6, tile_n=96, split_k=3, k_cluster=True), 256, 200),
    (Config(tile_m=256, tile_n=128, stages=2, split_k=4, k_cluster=True), 256, 304),
    (Config(stages=3, cluster=(1, 2), overlap="late"), 256, 128),
    (Config(stages=3, split_k=3, overlap="early"), 256, 136),
    (Config(persistent=True, tma_store=True, overlap="early"), 2048, 2104),
    (replace(SMALL, split_k=2, k_cluster=True, overlap="early", evict="b", keep=2), 200, 104),
]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("config, n, m", TILES, ids=lambda x: str(x))
def test_tiles(layout, config, n, m):
    run(replace(BASE, n=n, a=layout[0], b=layout[1]), config, m)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("k, m", [(136, 104), (8, 8), (1000, 72), (64, 256)])
def test_tails_and_padding(layout, k, m):
    p = replace(BASE, n=232, k=k, a=layout[0], b=layout[1])
    for pads in ((0, 0, 0), (8, 16, 24)):
        run(p, SMALL, m, pads=pads)


@pytest.mark.parametrize("m", [1, 7, 33])
@pytest.mark.parametrize("k", [1, 100])
def test_rows_need_only_be_apart_by_16_bytes(m, k):
    run(replace(BASE, k=k), SMALL, m, pads=(-k % 8, -k % 8, 0))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("align, config", [(4, COPIED), (8, replace(COPIED, tile_m=128, groups=(2, 1))), (2, GATHERED)])
def test_operands_that_tma_cannot_read(layout, align, config):
    p = replace(BASE, n=208 + align // 2, k=144 + align // 2, a=layout[0], b=layout[1], align_a=align, align_b=align)
    run(replace(p, align_c=align), config, 104 + align // 2)
    run(replace(p, align_c=align, dtype="f16", out_dtype="f16"), config, 40 + align // 2, offsets=(align // 2,) * 3)


def test_no_contiguous_axis():
    p = replace(BASE, a="any", b="any", align_a=2, align_b=2)
    run(p, GATHERED, 99)
    run(replace(p, batched=True, bias="row", activation="gelu", residual=True), GATHERED, 99)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "config",
    [
        Config(stages=3),
        Config(stages=3, tma_store=True, persistent=True),
        COPIED,
        Config(stages=4, split_k=2, k_cluster=True),
    ],
    ids=str,
)
def test_epilogues(activation, config):
    p = replace(BASE, activation=activation, align_a=4 if config is COPIED else 16)
    run(replace(p, bias="row"), config, 136)
    run(replace(p, bias="row", residual=True), config, 136, pads=(0, 0, 8))
    run(replace(p, residual=True), config, 136)


@pytest.mark.parametrize("p", [
    replace(BASE, bias="full"),
    replace(BASE, bias="full", batched=True, residual=True),
    replace(BASE, out_dtype="f32", residual=True),
    replace(BASE, out_dtype="f16"),
    replace(BASE, n=201, align_c=2, bias="row", residual=True),
    replace(BASE, n=202, align_c=4, bias="row", residual=True),
])  # fmt: skip
def test_outputs(p):
    run(p, Config(stages=3), 136, pads=(0, 0, 3 if p.align_c == 2 else 2 if p.align_c == 4 else 0))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_batches_and_broadcast(layout):
    p = replace(BASE, batched=True, a=layout[0], b=layout[1])
    for config in (Config(stages=3), Config(stages=3, persistent=True, tma_store=True)):
        run(p, config, 104)
        run(p, config, 104, broadcast=True)
    run(replace(p, k=1024), Config(stages=3, split_k=2), 104)
    run(replace(p, k=1024), Config(stages=5, split_k=2, k_cluster=True), 104)
    run(replace(p, k=640), Config(stream_k=132), 304)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_scales(scale):
    run(BASE, SMALL, 128, scale=scale)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.data())
def test_drawn_problems_with_their_first_candidates(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    a, b = draw("row", "col"), draw("row", "col")
    align = draw(16, 16, 16, 8, 4, 2)
    step = align // 2
    n, k, m = (step * data.draw(st.integers(1, 600 // step)) for _ in range(3))
    p = GemmProblem(
        n, k, draw("bf16", "f16"), "bf16", a, b, draw(False, True), draw("none", "row"), draw("none", "silu"),
        draw(False, True), False, m, align, align, align,
    )  # fmt: skip
    for candidate in candidates(p, sm90a).kept[:3]:
        run(p, candidate.config, m, batch=2)


@pytest.mark.parametrize("m", [16, 64, 256, 1024])
@pytest.mark.parametrize("n, k", [(4096, 1024), (1024, 4096)])
def test_all_candidates(m, n, k):
    p = replace(BASE, n=n, k=k, m_hint=m)
    for candidate in candidates(p, sm90a).kept:
        run(p, candidate.config, m)


OVERLAPPING = [
    Config(tile_m=16, tile_n=32, tile_k=128, groups=(1, 1), stages=6, evict="b", keep=2),
    Config(tile_m=64, tile_n=64, groups=(1, 1), split_k=2),
    Config(stream_k=132, stages=3),
    Config(tile_m=64, tile_n=64, groups=(1, 1), split_k=2, k_cluster=True, stages=6),
    Config(tile_m=64, tile_n=64, groups=(1, 1)),  # there is room for several kernels side by side
    Config(tile_m=64, tile_n=64, groups=(1, 1), cluster=(1, 4)),
    Config(persistent=True, tma_store=True),
]


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("config", OVERLAPPING, ids=str)
def test_a_kernel_that_overlaps_sees_all_that_the_one_before_wrote(config, operand, captured):
    """A chain, one operand of each product what the one before wrote, back and forth between two buffers: what it gives
    without overlap."""
    p = replace(BASE, n=1024, k=1024, activation="relu", residual=True)
    m = 1024 if operand == "b" else 16 if config.tile_m == 16 else 200
    torch.manual_seed(0)
    x, w = (torch.randn(rows, 1024, device="cuda").to(torch.bfloat16) for rows in (m, 1024))
    w *= 0.7 * p.k**-0.5
    results = []
    for overlap in ("none", "late", "early"):
        launch = Launcher(compiled(p, replace(config, overlap=overlap)))
        buffers = [torch.zeros_like(x), torch.zeros_like(x)]

        def chain(launch=launch, buffers=buffers):
            buffers[0].copy_(x)
            for i in range(CHAINED):
                a, c = buffers[i % 2], buffers[1 - i % 2]
                held = {"a": a, "b": w.t()} if operand == "a" else {"a": w, "b": a.t()}
                held |= {"c": c, "residual": x}
                launch(*[held[n].data_ptr() for n in pointers(p)], *scalar_values(p, **held))

        chain()
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain()
            for _ in range(5):
                graph.replay()
        results.append(buffers[CHAINED % 2].clone())
    assert torch.isfinite(results[0]).all() and results[0].any()
    assert all(torch.equal(results[0], r) for r in results)


def test_one_kernel_serves_every_m():
    for m in (1, 5, 64, 65, 1000):
        run(BASE, SMALL, m)


def test_empty():
    code = compiled(BASE, SMALL)
    x = torch.zeros(64, device="cuda", dtype=torch.bfloat16)
    Launcher(code)(x.data_ptr(), x.data_ptr(), x.data_ptr(), 0, 512, 512, 256)
    torch.cuda.synchronize()
    assert not x.any()
