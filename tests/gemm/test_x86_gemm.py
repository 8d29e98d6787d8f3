"""The x86 GEMM against f64: shapes, layouts, strides, types, epilogues, threads, special values."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.targets import x86
from templates.gemm.arguments import scalar_values
from templates.gemm.build import build
from templates.gemm.packing import pack_b
from templates.gemm.problem import ACTIVATIONS, DTYPES, LAYOUTS, GemmProblem
from templates.gemm.space import candidates
from tests.gemm.x86_case import TORCH, check, guarded, kernel, launch, operands


def first(p: GemmProblem, threads: int = 1):
    return candidates(p, x86, threads).kept[0].config


@st.composite
def cases(draw):
    """A problem, one of its candidates, and now and then that candidate with small blocks, so that loops go round."""
    dtype = draw(st.sampled_from(DTYPES))
    packed = draw(st.booleans())
    p = GemmProblem(
        n=draw(st.integers(1, 70)),
        k=draw(st.integers(1, 150)),
        dtype=dtype,
        out_dtype=draw(st.sampled_from(("f32", dtype))),
        a=draw(st.sampled_from(LAYOUTS)),
        b=draw(st.sampled_from(LAYOUTS)),
        batched=False if packed else draw(st.booleans()),
        bias=draw(st.sampled_from(("none", "row", "full"))),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        residual=draw(st.booleans()),
        packed_b=packed,
        m_hint=draw(st.sampled_from((1, 2, 5, 16, 200))),
    )
    config = draw(st.sampled_from([c.config for c in candidates(p, x86, draw(st.integers(1, 3))).kept]))
    if draw(st.booleans()):
        config = replace(
            config,
            k_block=32,
            m_block=config.rows * 2,
            tile_m=config.rows * draw(st.integers(2, 5)),
            tile_n=config.columns * draw(st.integers(1, 3)),
        )
    return p, config


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cases(), st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(0, 9), st.sampled_from((1e-3, 1, 30)))
def test_drawn(case, row_counts, pad, scale):
    p, config = case
    for m in row_counts:
        batch = m % 3 + 1
        check(p, config, m, threads=2, batch=batch, scale=scale, pad=pad, seed=m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layouts", [(a, b) for a in LAYOUTS for b in LAYOUTS])
def test_every_layout_and_candidate(dtype, layouts):
    for m in (1, 33):
        p = GemmProblem(n=53, k=77, dtype=dtype, out_dtype=dtype, a=layouts[0], b=layouts[1], m_hint=m)
        for candidate in candidates(p, x86, 2).kept[:2]:
            check(p, candidate.config, m, threads=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_kernel_serves_every_m(dtype):
    p = GemmProblem(n=40, k=64, dtype=dtype, out_dtype=dtype, b="col", bias="row", m_hint=16)
    for m in (0, 1, 2, 3, 15, 16, 17, 64, 65, 130):
        check(p, first(p, 2), m, threads=2)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 200), (200, 1), (7, 3), (8, 8), (4096, 5), (3, 4096)])
def test_edges_of_n_and_k(n, k):
    for b in ("row", "col"):
        check(GemmProblem(n=n, k=k, b=b, m_hint=5), first(GemmProblem(n=n, k=k, b=b, m_hint=5)), 5)


def test_batches_share_an_operand_by_stride_zero():
    p = GemmProblem(n=24, k=40, batched=True, m_hint=6)
    found = operands(p, 6, batch=3)
    one = found["b"].view[:1]
    found["b"].view = one.expand(3, -1, -1)
    launch(p, first(p, 2), found, threads=2)
    exact = found["a"].view.double() @ one.double()
    assert (found["c"].view.double() - exact).abs().max() < 1e-4


def test_operands_may_be_the_same_memory():
    p = GemmProblem(n=32, k=32, b="col", residual=True, m_hint=32)
    found = operands(p, 32)
    found["b"].view, found["residual"].view = found["a"].view.t(), found["a"].view
    launch(p, first(p), found)
    a = found["a"].view.double()
    assert (found["c"].view.double() - (a @ a.t() + a)).abs().max() < 1e-4


@pytest.mark.parametrize("batched", [False, True])
def test_nothing_to_do_writes_nothing(batched):
    p = GemmProblem(n=8, k=8, batched=batched)
    found = operands(p, 0, batch=2)
    launch(p, first(p, 2), found, threads=2)
    assert found["c"].intact()
    if batched:
        found = operands(p, 4, batch=2)
        found = {n: replace(g, view=g.view[:0]) for n, g in found.items()}
        launch(p, first(p, 2), found, threads=2)
        assert found["c"].intact()


def test_as_many_threads_as_one_likes_give_the_same_bits():
    p = GemmProblem(n=100, k=90, b="col", m_hint=50)
    for config in (
        replace(c.config, tile_n=c.config.columns, tile_m=c.config.rows) for c in candidates(p, x86, 2).kept
    ):
        results = []
        for threads in (1, 2, 3, 7):
            found = operands(p, 50)
            launch(p, config, found, threads)
            results.append(found["c"].view.clone())
        assert all(torch.equal(results[0], r) for r in results[1:])


def test_python_threads_run_one_kernel_at_once():
    p = GemmProblem(n=96, k=300, b="row", m_hint=64)
    config = replace(first(p), pack_a=True, k_block=64)  # with workspace of all kinds
    kernel(p, config)
    wrong = []

    def work(seed):
        for i in range(20):
            try:
                check(p, config, 64, threads=2, seed=seed * 100 + i)
            except AssertionError as e:
                wrong.append(e)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# -- special values
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_go_where_torch_lets_them(dtype, activation):
    p = GemmProblem(n=21, k=19, dtype=dtype, out_dtype=dtype, b="col", activation=activation, m_hint=9)
    act = {
        "none": lambda x: x,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }[activation]
    for candidate in candidates(p, x86, 1).kept:
        found = operands(p, 9)
        found["a"].view[2, 3] = float("nan")
        found["a"].view[4, 18] = float("inf")
        found["b"].view[0, 20] = float("-inf")
        launch(p, candidate.config, found)
        want = act(found["a"].view.float() @ found["b"].view.float())
        got = found["c"].view.float()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[want.isinf()], want[want.isinf()])
        assert got[want.isfinite()].isfinite().all()


@pytest.mark.parametrize("out", ["bf16", "f16"])
def test_rounding_is_torchs_for_every_kind_of_number(out):
    """K = 1 and B = 1 give A itself, rounded. All exponents, ties, near-ties, subnormals, infinities and NaNs."""
    drop = 16 if out == "bf16" else 13
    top = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, (1 << (drop - 1)) - 1, 1 << (drop - 1), (1 << (drop - 1)) + 1, (1 << drop) - 1])
    patterns = (top[:, None] + low).flatten()
    values = (patterns - (patterns >> 31 << 32)).to(torch.int32).view(torch.float32)
    p = GemmProblem(n=1, k=1, out_dtype=out, m_hint=128)
    found = {
        "a": guarded(values[:, None]),
        "b": guarded(torch.ones(1, 1)),
        "c": guarded(torch.zeros(len(values), 1, dtype=TORCH[out])),
    }
    launch(p, first(p), found)
    got, want = found["c"].view[:, 0], values.to(TORCH[out])
    same = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan()) | ((got == 0) & (want == 0))
    assert same.all(), values[~same][:5]


def test_a_sum_too_large_becomes_infinite_in_f16():
    p = GemmProblem(n=8, k=64, dtype="f16", out_dtype="f16", m_hint=3)
    found = operands(p, 3)
    found["a"].view.fill_(100.0)
    found["b"].view.fill_(100.0)
    launch(p, first(p), found)
    assert (found["c"].view == float("inf")).all()


# -- what is refused, and how
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 0}, "empty"),
        ({"k": 0}, "empty"),
        ({"dtype": "i32"}, "i32"),
        ({"activation": "swish"}, "swish"),
        ({"a": "diagonal"}, "diagonal"),
        ({"packed_b": True, "batched": True}, "batch"),
        ({"n": 2**31}, "2147483647"),
    ],
)
def test_what_is_not_eligible_says_why(change, says):
    p = replace(GemmProblem(n=8, k=8), **change)
    assert says in p.why_not(x86)
    assert candidates(p, x86, 2).kept == [] and says in candidates(p, x86, 2).dropped[0].reason
    with pytest.raises(ValueError, match="no GEMM kernel"):
        build(p, first(GemmProblem(n=8, k=8)), x86)


def test_packing_wants_the_problems_shape():
    p = GemmProblem(n=8, k=8, packed_b=True)
    with pytest.raises(ValueError, match=r"\(8, 8\)"):
        pack_b(p, first(p), torch.ones(9, 8))


def test_the_space_is_small_and_gives_reasons():
    for m in (1, 3, 16, 100, 1000):
        for b in LAYOUTS:
            for dtype in DTYPES:
                p = GemmProblem(n=1536, k=384, dtype=dtype, b=b, m_hint=m)
                space = candidates(p, x86, 2)
                assert 1 <= len(space.kept) <= 6
                assert all(c.reason for c in space.kept) and all(d.reason for d in space.dropped)
                assert len({c.config for c in space.kept}) == len(space.kept)
                assert candidates(p, x86, 2) == space


def test_scalar_values_are_named_strides():
    p = GemmProblem(n=3, k=2, a="any", b="col", bias="full", residual=True, batched=True)
    t = lambda *shape: torch.empty(*shape)
    got = scalar_values(
        p,
        a=t(5, 4, 4)[:, :, ::2],
        b=t(5, 3, 2).transpose(1, 2),
        bias=t(1, 1, 3).expand(5, 4, 3),
        residual=t(5, 4, 3),
        c=t(5, 4, 7)[:, :, :3],
    )
    assert got == (4, 4, 2, 2, 0, 1, 3, 7, 5, 16, 6, 0, 12, 28)
