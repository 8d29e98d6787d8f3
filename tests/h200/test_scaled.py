"""FP8 products of one scale a matrix or a row on an H200: formats, tails, tiles, offsets, accumulation, the plugin."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.codeobject import CodeObject
from flykernels.launch.current import Launcher
from flykernels.targets import sm90a
from inductor_plugin import measure, scaled
from inductor_plugin.kernels import Spec, callable_for
from templates.gemm.sm90a_config import Sm90aConfig as Config
from templates.scaled_gemm.arguments import pointers, scalar_values
from templates.scaled_gemm.build import build
from templates.scaled_gemm.problem import ScaledGemmProblem
from templates.scaled_gemm.sm90a import errors
from templates.scaled_gemm.space import candidates
from tests.plugin.conftest import compile_with, ours_ran, own_caches, run_and_get_code  # noqa: F401  # a fixture

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FP8 = {"f8E4M3FN": torch.float8_e4m3fn, "f8E5M2": torch.float8_e5m2}
NAN_CODE, GUARD = 0xFF, 64  # a NaN in both formats; elements around C that nobody may touch
BASE = ScaledGemmProblem(256, 512, scaling="row")
SMALL = Config(tile_m=64, tile_n=64, tile_k=128, stages=4, groups=(1, 1))
BIG = Config(tile_k=128, stages=4)
TILES = [  # (configuration, N, M)
    (SMALL, 200, 104),
    (Config(tile_m=16, tile_n=32, tile_k=256, groups=(1, 1), evict="b"), 256, 40),
    (Config(tile_m=32, tile_n=16, tile_k=256, groups=(1, 1)), 256, 40),
    (BIG, 256, 200),
    (replace(BIG, tile_n=192), 384, 136),
    (replace(BIG, tile_m=256, tile_n=96), 384, 264),
    (replace(BIG, tile_m=256, tile_n=64, persistent=True, tma_store=True, overlap="early"), 2048, 2104),
    (replace(SMALL, tile_m=128, tile_n=32), 200, 104),
    (replace(BIG, cluster=(2, 1)), 256, 384),
    (replace(BIG, cluster=(1, 2), overlap="late"), 256, 128),
    (replace(BIG, persistent=True, tma_store=True, overlap="early"), 2048, 2104),
    (replace(BIG, persistent=True, tma_store=True, cluster=(2, 1)), 2048, 2104),
    (replace(BIG, split_k=3), 256, 136),
    (replace(SMALL, split_k=2, k_cluster=True), 200, 104),
    (replace(BIG, stream_k=132), 2048, 600),
]


@cache
def compiled(p: ScaledGemmProblem, config: Config) -> CodeObject:
    return build(p, config, sm90a)


def codes(rows: int, k: int, kind: str, pad: int = 0, offset: int = 0, spread: float = 1.0) -> torch.Tensor:
    """(rows, K) of rounded normal numbers, rows `pad` bytes further apart, in memory of NaN."""
    whole = torch.full((offset + rows * (k + pad) + GUARD,), NAN_CODE, dtype=torch.uint8, device="cuda").view(FP8[kind])
    view = whole.as_strided((rows, k), (k + pad, 1), offset)
    made = (torch.randn(rows, k, device="cuda") * spread).to(FP8[kind])
    view.view(torch.uint8).copy_(made.view(torch.uint8))
    return view


def scales(count: int, offset: int = 0, size: float = 1.0) -> torch.Tensor:
    return (torch.rand(count + offset, device="cuda") * 2 + 0.1)[offset:] * size


def run(
    p: ScaledGemmProblem, config: Config, m: int, *, pads=(0, 0, 0), offsets=(0, 0, 0), shift=0, size=1.0, size_b=1.0,
    seed=0, made=None,
) -> float:  # fmt: skip
    """Runs the kernel twice; both alike, right in every element, nothing beside C written. Returns the largest error,
    as part of what it may be. shift: elements that scales and bias begin late; made: (A, B^T) instead of normal ones"""
    torch.manual_seed(seed)
    a, b = made or (codes(m, p.k, p.a_dtype, pads[0], offsets[0]), codes(p.n, p.k, p.b_dtype, pads[1], offsets[1]))
    counts = (1, 1) if p.scaling == "tensor" else (m, p.n)
    held = {"a": a, "b": b.t(), "scale_a": scales(counts[0], shift, size), "scale_b": scales(counts[1], shift, size_b)}
    out = TORCH[p.out_dtype]
    storage = torch.full((GUARD + offsets[2] + m * (p.n + pads[2]) + GUARD,), float("nan"), dtype=out, device="cuda")
    c = held["c"] = storage.as_strided((m, p.n), (p.n + pads[2], 1), GUARD + offsets[2])
    if p.bias == "row":
        held["bias"] = (torch.randn(p.n + shift, device="cuda") * size).to(out)[shift:]
    launch = Launcher(compiled(p, config))
    arguments = [held[n].data_ptr() for n in pointers(p)] + list(scalar_values(a, b.t(), c))
    results = []
    for _ in range(2):
        c.fill_(float("nan"))
        launch(*arguments)
        results.append(c.clone())
    torch.cuda.synchronize()

    x = a.double() * held["scale_a"].double().reshape(-1, 1)
    y = b.double() * held["scale_b"].double().reshape(-1, 1)
    exact = x @ y.t()
    want = exact + held["bias"].double() if "bias" in held else exact
    of_norms, of_result = errors(p)
    f32 = (8 * p.k**0.5 + 8) * 2.0**-24 * (x.abs() @ y.abs().t() + want.abs())  # sums in any order; scales and bias
    few = of_norms * x.norm(dim=1, keepdim=True) * y.norm(dim=1) + of_result * exact.abs()  # what wgmma cuts off
    bound = f32 + few + 2 * p.output_type.epsilon * want.abs() + torch.finfo(out).tiny
    error = (c.double() - want).abs()
    assert not torch.isnan(error).any(), f"{torch.isnan(error).sum().item()} elements of C were not written"
    worst = (error / bound).max().item()
    assert worst <= 1, f"{(error > bound).sum().item()} of {error.numel()} wrong, the worst {worst:.3g} times the bound"
    assert torch.equal(*results), "the same inputs gave two results"
    outside = torch.ones_like(storage, dtype=torch.bool)
    outside.as_strided(c.shape, c.stride(), c.storage_offset()).fill_(False)
    assert torch.isnan(storage[outside]).all(), "something beside C was written"
    return worst


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("config, n, m", TILES, ids=str)
def test_tiles(config, n, m, fast):
    run(replace(BASE, n=n, k=1536, fast_accum=fast), config, m)


@pytest.mark.parametrize("b", FP8)
@pytest.mark.parametrize("a", FP8)
@pytest.mark.parametrize("out", TORCH)
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_formats(a, b, out, scaling):
    p = replace(BASE, a_dtype=a, b_dtype=b, out_dtype=out, scaling=scaling)
    run(p, SMALL, 104)
    run(replace(p, bias="row"), BIG, 136, size=1e-3)
    run(replace(p, bias="row", fast_accum=True), SMALL, 40, size=100.0)


@pytest.mark.parametrize("m, n, k", [(1, 16, 16), (7, 8, 32), (104, 232, 144), (72, 264, 1008), (256, 128, 64)])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_tails_padding_and_offsets(m, n, k, scaling):
    p = replace(BASE, n=n, k=k, scaling=scaling, bias="row")
    for pads, offsets, shift in (((0, 0, 0), (0, 0, 0), 0), ((16, 32, 8), (16, 48, 8), 1)):
        run(p, SMALL, m, pads=pads, offsets=offsets, shift=shift)
        run(replace(p, fast_accum=True), BIG, m, pads=pads, offsets=offsets, shift=shift)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_scales_whose_product_is_beyond_f32(scaling):
    """Scales far from 1, whose product is subnormal or far from either; the sums times both are normal f32."""
    p = replace(BASE, scaling=scaling, out_dtype="f32")
    made = (codes(64, p.k, p.a_dtype, spread=60.0), codes(p.n, p.k, p.b_dtype, spread=60.0))
    for shares in ((2.0**-80, 2.0**-60), (2.0**80, 2.0**-90), (2.0**60, 2.0**40)):
        run(p, SMALL, 64, size=shares[0], size_b=shares[1], made=made)


def test_narrow_columns_of_c():
    for n, align in ((201, 2), (202, 4)):
        run(
            replace(BASE, n=n, align_c=align, bias="row"),
            SMALL,
            99,
            pads=(0, 0, align // 2),
            offsets=(0, 0, align // 2),
        )


def test_one_kernel_serves_every_m():
    for m in (1, 5, 64, 65, 1000):
        run(BASE, SMALL, m)


def test_issue_133334():
    """pytorch #133334: row-wise scales, (8352, 4096) x (1536, 4096)^T."""
    for fast in (False, True):
        p = ScaledGemmProblem(1536, 4096, scaling="row", m_hint=8352, fast_accum=fast)
        for candidate in candidates(p, sm90a).kept[:2]:
            run(p, candidate.config, 8352)


@pytest.mark.parametrize("m", [16, 64, 200, 1024])
@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
def test_all_candidates(m, fast):
    p = ScaledGemmProblem(1280, 2048, scaling="row", m_hint=m, fast_accum=fast)
    for candidate in candidates(p, sm90a).kept:
        run(p, candidate.config, m)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.data())
def test_drawn_problems_with_their_first_candidates(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    n, k, m = data.draw(st.integers(1, 600)), 16 * data.draw(st.integers(1, 60)), data.draw(st.integers(1, 600))
    p = ScaledGemmProblem(
        n, k, draw(*FP8), draw(*FP8), draw("tensor", "row"), draw(*TORCH), draw("none", "row"), m,
        fast_accum=draw(False, True),
    )  # fmt: skip
    p = replace(p, align_c=min(16, (n & -n) * p.output_type.bytes))
    for candidate in candidates(p, sm90a).kept[:2]:
        run(p, candidate.config, m)


def test_promoted_sums_keep_what_fast_ones_lose():
    """One large product, then small ones that wgmma cuts off beside it: all of them, or those of the first 128 of K."""
    k, m, n = 32768, 128, 128
    a, b = (torch.full((rows, k), code, dtype=torch.uint8, device="cuda") for rows, code in ((m, 0x01), (n, 0x38)))
    a[:, 0] = 0x78  # 256; the others are 2^-9, and B's 1
    a, b = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn)
    exact, one, lost = 256 + (k - 1) * 2.0**-9, torch.ones(1, device="cuda"), {}
    for fast in (False, True):
        p = ScaledGemmProblem(n, k, scaling="tensor", out_dtype="f32", fast_accum=fast)
        c = torch.full((m, n), float("nan"), device="cuda")
        held = {"a": a, "b": b.t(), "scale_a": one, "scale_b": one, "c": c}
        Launcher(compiled(p, BIG))(*(held[x].data_ptr() for x in pointers(p)), *scalar_values(a, b.t(), c))
        lost[fast] = ((c.double() - exact).abs() / exact).max().item()
    assert lost[False] <= 2.0**-10 and lost[True] >= 0.05, str(lost)


@pytest.mark.parametrize("kind", ["nan", "infinity"])
def test_numbers_that_are_none(kind):
    """NaN of A poisons its row of C, infinity (e5m2) gives infinity or NaN there; nothing else."""
    a, b = codes(100, 512, "f8E5M2"), codes(256, 512, "f8E4M3FN")
    a.view(torch.uint8)[7, 300] = 0x7E if kind == "nan" else 0x7C
    p = replace(BASE, a_dtype="f8E5M2")
    c = torch.zeros(100, 256, device="cuda", dtype=torch.bfloat16)
    held = {"a": a, "b": b.t(), "scale_a": scales(100), "scale_b": scales(256), "c": c}
    Launcher(compiled(p, SMALL))(*(held[x].data_ptr() for x in pointers(p)), *scalar_values(*(held[x] for x in "abc")))
    bad = ~torch.isfinite(c)
    assert bad[7].all() and bad.sum() == 256


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_scaled_mm_in_a_compiled_function(monkeypatch, kind, fast):
    monkeypatch.setattr(measure, "INERTIA", -0.999)
    m, n, k = 304, 256, 512
    a, b = codes(m, k, "f8E4M3FN"), codes(n, k, "f8E4M3FN")
    s, t = (scales(1), scales(1)) if kind == "tensor" else (scales(m)[:, None], scales(n)[None])
    call = lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=torch.bfloat16, use_fast_accum=fast)
    result, code = run_and_get_code(compile_with(call), a, b.t(), s, t)
    assert ours_ran(code) and f'"fast_accum":{str(fast).lower()}' in code
    want = (a.double() * s) @ (b.double() * t.reshape(-1, 1)).t()
    assert (result.double() - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("what", ["offset", "stride", "repeated rows", "column-major"])
def test_operands_that_tma_cannot_read_are_atens_call(monkeypatch, what):
    asked = []
    monkeypatch.setattr(scaled, "aten", lambda p: lambda *x, out: asked.append(x) or out)
    call = callable_for(Spec(scaled.OP, "sm90a", replace(BASE, scaling="tensor"), SMALL.key()))
    a, b, one = codes(64, 512, "f8E4M3FN"), codes(256, 512, "f8E4M3FN"), torch.ones((), device="cuda")
    out = torch.empty(64, 256, device="cuda", dtype=torch.bfloat16)
    exact = a.double() @ b.double().t()
    assert (call(a, b.t(), one, one, out=out).double() - exact).norm() <= 4e-3 * exact.norm() and not asked
    other = {
        "offset": codes(64, 512, "f8E4M3FN", offset=8), "stride": codes(64, 512, "f8E4M3FN", pad=8),
        "repeated rows": a[:1].expand(64, 512), "column-major": codes(512, 64, "f8E4M3FN").t(),
    }[what]  # fmt: skip
    call(other, b.t(), one, one, out=out)
    assert len(asked) == 1
