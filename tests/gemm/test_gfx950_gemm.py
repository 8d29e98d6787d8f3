"""The gfx950 GEMM on the simulator: right, and no wait, barrier or address out of order."""

from __future__ import annotations

import re
from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.gemm import gfx950 as template
from templates.gemm.build import build
from templates.gemm.gfx950_config import Gfx950Config, direct_bytes, read_conflicts, swizzle
from templates.gemm.problem import ACTIVATIONS, GemmProblem
from templates.gemm.space import candidates

from .gfx950_case import compiled, run

SMALL = Gfx950Config(64, 64, 64, 3, (2, 2))
LAYOUTS = [(a, b) for a in ("row", "col") for b in ("row", "col")]


def problem(**kw) -> GemmProblem:
    return GemmProblem(**{"n": 64, "k": 192, "dtype": "bf16", "out_dtype": "bf16", **kw})


def fitting(p: GemmProblem, cfg: Gfx950Config) -> Gfx950Config:
    return cfg if direct_bytes(p) else replace(cfg, stages=2)


@pytest.mark.parametrize("a, b", LAYOUTS)
@pytest.mark.parametrize("shape", ["16x16x32", "32x32x16"])
def test_whole_tiles_in_all_layouts(a, b, shape):
    run(problem(a=a, b=b), replace(SMALL, shape=shape), 64)


@pytest.mark.parametrize("a, b", LAYOUTS)
@pytest.mark.parametrize("k", [200, 203])
def test_tails_in_m_n_and_k(a, b, k):
    """Four workgroups, three of them cut off; rows padded so that they start at multiples of 16 bytes."""
    m, n = 100, 88
    pads = [-(k if layout == along else size) % 8 for layout, along, size in ((a, "row", m), (b, "col", n))]
    run(problem(a=a, b=b, n=n, k=k, align_c=2), SMALL, m, pads=(*pads, 3))


@pytest.mark.parametrize("k", [1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257])
def test_every_kind_of_k(k):
    run(problem(k=k, b="col", align_a=2, align_b=2), fitting(problem(align_a=2), SMALL), 20)
    run(problem(k=k, b="col"), SMALL, 20, pads=(-k % 8, -k % 8, 0))


@pytest.mark.parametrize("align", [2, 4, 8])
@pytest.mark.parametrize("a, b", LAYOUTS)
def test_rows_that_start_anywhere(a, b, align):
    """Narrow loads, or none straight into LDS; C's rows start anywhere too."""
    k, n, m = 130, 36, 38
    step = align // 2
    pads = [-(k if layout == along else size) % step for layout, along, size in ((a, "row", m), (b, "col", n))]
    p = problem(a=a, b=b, n=n, k=k, align_a=align, align_b=align, align_c=2)
    run(p, fitting(p, SMALL), m, pads=(*pads, 1))


@pytest.mark.parametrize("a, b", [("any", "row"), ("row", "any"), ("any", "any"), ("any", "col")])
def test_operands_without_a_contiguous_axis(a, b):
    p = problem(a=a, b=b, n=40, k=70, align_a=2, align_b=2)
    run(p, fitting(p, SMALL), 33, pads=(3, 1, 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", ["none", "row", "full"])
def test_epilogues(activation, bias):
    p = problem(n=72, dtype="f16", out_dtype="f32", bias=bias, activation=activation, residual=bias != "row")
    run(p, SMALL, 50, scale=0.3)


@pytest.mark.parametrize("out", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_types_and_scales(dtype, out, scale):
    run(problem(dtype=dtype, out_dtype=out, k=64, b="col"), SMALL, 64, scale=scale)


def test_one_kernel_serves_every_m():
    p = problem(n=64, k=64, b="col")
    code = compiled(p, SMALL)
    for m in (1, 15, 63, 64, 65, 130):
        run(p, SMALL, m, code=code, seed=m)


@pytest.mark.parametrize("a, b", [("row", "col"), ("col", "row")])
def test_batches(a, b):
    run(problem(a=a, b=b, n=72, k=96, batched=True, residual=True, bias="full"), SMALL, 40, batch=3)


@pytest.mark.parametrize(
    "config",
    [
        Gfx950Config(128, 128, 64, 3, (2, 2)),
        Gfx950Config(128, 128, 64, 3, (2, 2), "32x32x16"),
        Gfx950Config(256, 128, 64, 3, (4, 2)),
        Gfx950Config(128, 256, 64, 2, (2, 4)),
        Gfx950Config(16, 64, 128, 3, (1, 4)),
        Gfx950Config(32, 128, 128, 2, (1, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("a, b", [("row", "col"), ("col", "row")])
def test_the_tile_family(config, a, b):
    """Two workgroups of a larger grid: an inner one and the last, whose rows and columns end inside."""
    m, n = 2 * config.tile_m - 8, 2 * config.tile_n - 24
    run(problem(a=a, b=b, n=n, k=5 * config.tile_k - 16), config, m, workgroups=[(0, 0, 0), (3, 0, 0)])


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 90), st.integers(1, 90), st.integers(1, 200), st.sampled_from(LAYOUTS), st.sampled_from([2, 4, 16]),
    st.sampled_from(["bf16", "f16"]), st.sampled_from(ACTIVATIONS), st.integers(0, 2**16),
)  # fmt: skip
def test_any_shape(m, n, k, layouts, align, dtype, activation, seed):
    a, b = layouts
    step = align // 2
    pads = [-(k if layout == along else size) % step for layout, along, size in ((a, "row", m), (b, "col", n))]
    p = problem(
        a=a, b=b, n=n, k=k, dtype=dtype, out_dtype=dtype, activation=activation, align_a=align, align_b=align, align_c=2
    )
    run(p, fitting(p, SMALL), m, pads=(*pads, seed % 3), seed=seed)


# -- what it costs, and what is said of it
@pytest.mark.parametrize("m, n, k, kw", [
    (4096, 4096, 4096, {"b": "col"}), (16, 4096, 4096, {"b": "col"}), (128, 1536, 384, {"activation": "gelu"}),
    (100, 50, 77, {"align_a": 2, "align_b": 2, "align_c": 2}), (512, 4096, 4096, {"a": "col", "align_a": 4}),
])  # fmt: skip
def test_candidates_compile_quickly_and_fit(m, n, k, kw):
    p = problem(n=n, k=k, m_hint=m, **kw)
    space = candidates(p, gfx950)
    assert 1 <= len(space.kept) <= 12 and all(c.reason for c in space.kept) and all(d.reason for d in space.dropped)
    for candidate in space.kept:
        start = process_time()  # this process's own: other load on the machine does not count
        code = build(p, candidate.config, gfx950)
        assert process_time() - start < 1.5, (str(candidate.config), code.seconds)
        assert code.spills == 0 and code.scratch_bytes == 0, str(candidate.config)
        assert code.shared_bytes == candidate.config.lds_bytes(p) <= 160 * 1024
        waves = -(-code.workgroup_size // (64 * 4))
        assert code.registers <= gfx950.limits.registers // waves


@pytest.mark.parametrize("config", [
    Gfx950Config(128, 128, 64, 2, (2, 2)), Gfx950Config(128, 128, 64, 2, (2, 2), "32x32x16"),
    Gfx950Config(128, 128, 64, 2, (2, 4), schedule="four"),
], ids=str)  # fmt: skip
def test_epilogues_of_elements_one_by_one_fit_too(config):
    """Each element of C has its own mask, of bias and residual too: no spills, and right."""
    p = problem(n=131, k=128, b="col", bias="full", activation="gelu", residual=True, align_a=4, align_b=4, align_c=2)
    code = compiled(p, config)
    assert code.spills == 0 and code.scratch_bytes == 0
    run(p, config, 77, pads=(0, 0, 1), code=code)


def test_the_same_problem_gives_the_same_bytes():
    p = problem()
    assert build(p, SMALL, gfx950).to_bytes() == build(p, SMALL, gfx950).to_bytes()


def test_main_loop_of_direct_loads_waits_only_as_planned():
    """128x128x64 with 3 stages: the next tile's 8 loads may be in flight, and no wait of the compiler's says fewer."""
    text = compiled(problem(n=256, k=1024, b="col"), Gfx950Config()).text
    loop = re.findall(r"^(\.LBB\d+_\d+):.*?s_cbranch_\w+ \1$", text, re.M | re.S)
    assert loop, "there is no main loop"
    body = text[text.index(loop[0] + ":") : text.index("s_cbranch_scc", text.index(loop[0] + ":"))]
    assert re.findall(r"vmcnt\((\d+)\)", body) == ["8"]
    assert body.count("v_mfma") == 32 and body.count("lds") >= 8


@pytest.mark.parametrize("gone", [r"s_waitcnt vmcnt\(\d+\).*", r"s_barrier"])
def test_without_a_wait_or_barrier_the_simulator_objects(gone):
    """The checker is not blind to this kernel: each kind of synchronisation is needed."""
    p, cfg = problem(n=64, k=512, b="col"), SMALL
    code = compiled(p, cfg)
    first_loop = code.text.index(".LBB0_")
    broken = code.text[:first_loop] + re.sub(gone, "s_nop 0", code.text[first_loop:])
    assert broken != code.text
    a, b, c = (np.zeros(s, np.uint16) for s in ((64, 512), (64, 512), (64, 64)))
    result = run_on_sim(
        broken, [a, b, c, *(np.int64(x) for x in (64, 512, 512, 64))], grid=(1, 1, 1), block=(256, 1, 1)
    )
    assert result.findings


@pytest.mark.parametrize("shape", ["16x16x32", "32x32x16"])
@pytest.mark.parametrize("rows", [32, 64, 128, 256])
@pytest.mark.parametrize("contiguous_k", [True, False])
def test_swizzles_leave_no_bank_conflicts(shape, rows, contiguous_k):
    atom = gfx950.atoms[problem().input_type, shape]
    for which in "ab":
        chosen = swizzle(atom, which, rows, 64, contiguous_k)
        assert read_conflicts(atom, which, rows, 64, contiguous_k, chosen) == 1


@pytest.mark.parametrize(
    "kw, word", [({"dtype": "f32"}, "f32"), ({"packed_b": True}, "packed"), ({"align_a": 3}, "align_a")]
)
def test_what_is_not_eligible_says_why(kw, word):
    p = problem(**kw)
    space = candidates(p, gfx950)
    assert not space.kept and word in space.dropped[0].reason
    with pytest.raises(ValueError, match=word):
        build(p, SMALL, gfx950)


def test_run_time_strides_have_a_limit():
    assert template.why_not(problem(), {"a_row": 1 << 20}) is None
    assert "a_row" in template.why_not(problem(), {"a_row": 1 << 24})
