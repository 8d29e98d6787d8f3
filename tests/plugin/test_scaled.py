"""torch._scaled_mm in compiled functions: our candidates beside ATen's; scales that are not swizzled; bad input."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flykernels.dtypes import dtype as element_type
from inductor_plugin import private, requests, scaled
from templates.scaled_gemm.problem import ScaledGemmProblem
from templates.scaled_gemm.reference import bound, reference, wrong

from .conftest import compile_with, ours_ran, run_and_get_code

pytestmark = pytest.mark.usefixtures("prefer_ours")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def codes(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """FP8 of standard normal numbers, or random packed FP4 (`columns` counts numbers)."""
    if dtype == torch.float4_e2m1fn_x2:
        return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8).view(dtype)
    return torch.randn(rows, columns).to(dtype)


def mx_scales(rows: int, k: int) -> torch.Tensor:
    return torch.randint(121, 133, (rows, k // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)


def right(got: torch.Tensor, a, b, scale_a, scale_b, bias=None) -> bool:
    """Against float64 of the dequantised operands, rounded once."""
    from templates.scaled_gemm.arguments import problem_of

    p = problem_of(a, b, scale_a, scale_b, bias, str(got.dtype))
    raw = lambda x: x.contiguous().view(torch.uint8).numpy()
    of_scale = lambda s: s.view(torch.uint8).numpy() if p.scaling == "block" else s.numpy().ravel()
    extra = None if bias is None else bias.double().numpy()
    operands = (p, raw(a), raw(b.t()), of_scale(scale_a), of_scale(scale_b), extra)
    return not wrong(p, got.double().numpy(), reference(*operands), bound(*operands)).any()


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_fp8_of_one_scale_a_matrix_or_a_row(kind, out):
    a, b = codes(37, 64, FP8[0]), codes(48, 64, FP8[0]).t()
    scales = (torch.rand(()), torch.rand(())) if kind == "tensor" else (torch.rand(37, 1), torch.rand(1, 48))
    f = compile_with(lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=out))
    got, code = run_and_get_code(f, a, b, *scales)
    assert ours_ran(code) and got.dtype == out
    assert right(got, a, b, *scales)


def test_bias_and_mixed_formats():
    a, b, bias = codes(37, 64, FP8[0]), codes(48, 64, FP8[1]).t(), torch.randn(48).bfloat16()
    s, t = torch.rand(37, 1), torch.rand(1, 48)
    f = compile_with(lambda a, b, s, t, c: torch._scaled_mm(a, b, s, t, bias=c, out_dtype=torch.bfloat16))
    got, code = run_and_get_code(f, a, b, s, t, bias)
    assert ours_ran(code)
    assert right(got, a, b, s, t, bias)


@pytest.mark.parametrize("dtype", [*FP8, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("m", [16, 37])
def test_mx_blocks(m, dtype):
    """K = 512 and M = N = 16 is pytorch #196719's shape, M = 37 one whose scales are no multiple of a swizzled tile."""
    n, k = 16, 512
    a, b, s, t = codes(m, k, dtype), codes(n, k, dtype).t(), mx_scales(m, k), mx_scales(n, k)
    f = compile_with(lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=torch.bfloat16))
    got, code = run_and_get_code(f, a, b, s, t)
    assert ours_ran(code)
    assert right(got, a, b, s, t)


@pytest.mark.parametrize("dtype", [*FP8, torch.float4_e2m1fn_x2])
def test_what_is_measured_with_stays_within_f16(dtype):
    """A sum beyond f16's largest number looked like a wrong result, and the candidate was put away for good."""
    k = 1 << 14
    p = ScaledGemmProblem(64, k, element_type(str(dtype)).name, element_type(str(dtype)).name, out_dtype="f16")
    for scaling in ("block", "tensor"):
        p = replace(p, scaling=scaling)
        made = [mx_scales(64, k), mx_scales(64, k)] if scaling == "block" else [torch.rand(()), torch.rand(())]
        given = scaled.sane(p, [codes(64, k, dtype), codes(64, k, dtype).t(), *made])
        _, (x, y) = scaled.as_dense(p, given)
        assert (x @ y).abs().max() < torch.finfo(torch.float16).max / 4


def test_scales_that_lie_the_other_way_round_are_refused():
    a, b, t = codes(16, 96, FP8[0]), codes(48, 96, FP8[0]).t(), mx_scales(48, 96)
    turned = mx_scales(16, 96).t().contiguous()
    f = compile_with(lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=torch.bfloat16))
    with pytest.raises(Exception, match=r"scales of A are \(3, 16\).*\(16, 3\).*transpose them"):
        f(a, b, turned, t)
    m, k = 128, 8 * 32  # as many as the swizzled arrangement has, whose shape says nothing: no candidate of ours
    with pytest.raises(requests.NotEligible, match="128 x 8, not swizzled"):
        scaled._scaling(node(mx_scales(m, k).t().contiguous()), node(mx_scales(m, k)), m, m, k)
    assert scaled._scaling(node(mx_scales(m, k)), node(mx_scales(m, k)), m, m, k) == "block"


def node(x: torch.Tensor) -> SimpleNamespace:
    """What Inductor's node of a tensor is asked for."""
    return SimpleNamespace(get_dtype=lambda: x.dtype, get_size=lambda: list(x.shape))


def test_operands_of_two_widths_are_refused_in_words():
    """Inductor has no lowering for them; `ops.mx_matmul` takes them."""
    a, b = codes(16, 96, FP8[0]), codes(48, 96, torch.float4_e2m1fn_x2).t()
    f = compile_with(lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=torch.bfloat16))
    with pytest.raises(Exception, match="operands of one width"):
        f(a, b, mx_scales(16, 96), mx_scales(48, 96))


def second(a, b, s, t):
    """torch.nn.functional.scaled_mm, where this torch has it."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    block, plain = ScalingType.BlockWise1x32, SwizzleType.NO_SWIZZLE
    return scaled_mm(a, b, s, block, t, block, swizzle_a=plain, swizzle_b=plain, output_dtype=torch.bfloat16)


def lowered_second_version() -> bool:
    from torch._inductor.lowering import lowerings

    return any(getattr(op, "_opname", "") == "_scaled_mm_v2" for op in lowerings)


def test_second_version():
    """Where Inductor lowers it to a choice between candidates (2.13 on). Before, a graph breaks there, and the call is
    torch's own, which has no kernel for it on a CPU."""
    a, b, s, t = codes(37, 64, FP8[0]), codes(48, 64, FP8[0]).t(), mx_scales(37, 64), mx_scales(48, 64)
    if not lowered_second_version():
        for f in (second, compile_with(second)):
            with pytest.raises((NotImplementedError, ImportError)):
                f(a, b, s, t)
        return
    got, code = run_and_get_code(compile_with(second), a, b, s, t)
    assert ours_ran(code)
    assert right(got, a, b, s, t)


def test_second_version_of_other_recipes_is_torchs_own():
    """A recipe that says row-wise of E8M0 scales, or a swizzled one, is not taken for blocks of 32."""
    if not hasattr(torch.ops.aten, "_scaled_mm_v2"):
        return
    a, b, s, t = codes(37, 64, FP8[0]), codes(48, 64, FP8[0]).t(), mx_scales(37, 64), mx_scales(48, 64)
    mx, rows, plain, swizzled = [scaled.BLOCKWISE_1X32], [1], [0], [1]
    assert scaled.second_version(a, b, [s], mx, plain, [t], mx, plain)[2:4] == (s, t)
    for recipe, swizzle in ((rows, plain), (mx, swizzled)):
        assert scaled.second_version(a, b, [s], recipe, swizzle, [t], mx, plain) is None
    assert scaled.second_version(a, b, [s, s], mx, plain, [t], mx, plain) is None


@pytest.mark.parametrize(("arguments", "words"), [
    ("--dtype mxfp8", "eligible"),
    ("--dtype f8E5M2,f4E2M1FN --target gfx950", "eligible"),
    ("--dtype fp8 --scaling row --target sm90a", "eligible"),
    ("--dtype mxfp8 --target sm90a", "not eligible: f8E4M3FN and f8E4M3FN with scaling 'block'"),
    ("--dtype mxfp4 --scaling row", "not eligible: f4E2M1FN has a scale for every 32"),
    ("--dtype f8E4M3FNUZ", "240"),
    ("--dtype mxfp8 --k 500", "not a multiple of 32"),
    ("--dtype fp8 --scaling tensor --layout NN", "not eligible: scaled products are of one matrix A, row-major"),
    ("--dtype none-such", "not an element type"),
])  # fmt: skip
def test_explain(arguments, words):
    from click.testing import CliRunner

    from inductor_plugin.cli import main

    given = f"explain _scaled_mm --m 128 --n 256 {'' if '--k' in arguments else '--k 512'} {arguments}".split()
    done = CliRunner().invoke(main, given)
    assert words in " ".join(done.output.split()), done.output
    assert done.exit_code == (0 if words == "eligible" else 1)


def test_explain_finds_what_was_measured():
    from io import StringIO

    from rich.console import Console

    from inductor_plugin.scaled_explain import ScaledQuestion, answer

    a, b, s, t = codes(64, 96, FP8[0]), codes(48, 96, FP8[0]).t(), mx_scales(64, 96), mx_scales(48, 96)
    f = compile_with(lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=torch.bfloat16))
    run_and_get_code(f, a, b, s, t)
    said = StringIO()
    assert answer(ScaledQuestion(scaled.OP, 64, 48, 96, "mxfp8"), Console(file=said, width=200))
    assert "winner: flykernels" in said.getvalue()


def test_shapes_of_scales_while_tracing():
    """torch counts MX scales as if swizzled (pytorch #172627): with the plugin on, both counts pass, others fail."""
    private.teach_scaled_shapes()
    a, b = codes(37, 64, FP8[0]), codes(48, 64, FP8[0]).t()
    swizzled = torch.zeros(128 * 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor
        run = lambda s, t: torch._scaled_mm(fake(a), fake(b), fake(s), fake(t), out_dtype=torch.bfloat16)
        assert run(mx_scales(37, 64), mx_scales(48, 64)).shape == (37, 48)
        assert run(swizzled, swizzled).shape == (37, 48)
        for s, t in ((mx_scales(36, 64), mx_scales(48, 64)), (swizzled, mx_scales(48, 64))):
            with pytest.raises(RuntimeError, match="scal"):
                run(s, t)


def test_not_eligible_says_why(log):
    a, b, one = codes(32, 64, FP8[0]), codes(48, 64, FP8[0]).t(), torch.ones(())
    f = compile_with(lambda a, b: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16))
    torch._dynamo.mark_dynamic(b, 1)
    got, code = run_and_get_code(f, a, b)
    assert not ours_ran(code) and got.shape == (32, 48)
    assert "only M may be symbolic" in log.text


def test_operands_that_do_not_lie_as_built(log):
    """A call with other strides than compiled for goes to ATen, in words."""
    a, b, s, t = codes(32, 64, FP8[0]), codes(48, 64, FP8[0]).t(), torch.rand(32, 1), torch.rand(1, 48)
    from inductor_plugin.kernels import Spec, callable_for
    from templates.scaled_gemm.arguments import problem_of
    from templates.scaled_gemm.space import candidates

    p = problem_of(a, b, s, t)
    from flykernels.targets import x86

    call = callable_for(Spec(scaled.OP, "x86", p, candidates(p, x86).kept[0].config.key()))
    out = torch.empty(32, 48, dtype=torch.bfloat16)
    assert right(call(a, b, s, t, out=out), a, b, s, t)
    turned = a.view(torch.uint8).t().contiguous().t().view(a.dtype)
    want = out.clone()
    assert torch.allclose(call(turned, b, s, t, out=out).float(), want.float(), rtol=1e-2)
    assert "ATen serves this call" in log.text


def test_benchmark_operands_are_numbers():
    p_inputs = [codes(37, 64, FP8[1]), codes(48, 64, FP8[1]).t(), mx_scales(37, 64), mx_scales(48, 64)]
    from templates.scaled_gemm.arguments import problem_of

    made = scaled.sane(problem_of(*p_inputs), p_inputs)
    _, (x, y) = scaled.as_dense(problem_of(*p_inputs), made)
    assert np.isfinite(x.numpy()).all() and np.isfinite(y.numpy()).all()
    assert [t.stride() for t in made] == [t.stride() for t in p_inputs]


class Node:
    """An IR node of a tensor, as far as a request reads it."""

    def __init__(self, *size, dtype=FP8[0], stride=None):
        self.size, self.dtype, self.stride, self.offset = list(size), dtype, list(stride or (size[-1], 1)), 0
        self.device = torch.device("cuda", 0)

    get_dtype, get_size, get_stride = (lambda s: s.dtype), (lambda s: s.size), (lambda s: s.stride)
    get_layout = lambda self: self


@pytest.mark.parametrize("fast", [False, True, None])
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_request_on_an_h200(monkeypatch, kind, fast):
    """The kernel's problem follows use_fast_accum, scales, layouts; its candidates are for wgmma."""
    from types import SimpleNamespace

    from flykernels.targets import sm90a
    from inductor_plugin import devices
    from templates.scaled_gemm.space import candidates

    monkeypatch.setattr(devices, "device_for", lambda _: devices.DEVICES["cuda"])
    sizes = ((1, 1), (1, 1)) if kind == "tensor" else ((304, 1), (1, 256))
    scales = [Node(*s, dtype=torch.float32) for s in sizes]
    nodes = [Node(304, 512), Node(512, 256, dtype=FP8[1], stride=(1, 512)), *scales, Node(256, dtype=torch.bfloat16)]
    nodes[-1].stride = [1]
    given = {"out_dtype": torch.bfloat16} | ({} if fast is None else {"use_fast_accum": fast})
    aten = SimpleNamespace(name=scaled.OP, kwargs=given, input_nodes=nodes, layout=Node(304, 256, dtype=torch.bfloat16))
    p = scaled.request_from(aten).problem
    assert (p.scaling, p.fast_accum, p.bias, p.a_dtype, p.b_dtype) == (kind, bool(fast), "row", "f8E4M3FN", "f8E5M2")
    assert candidates(p, sm90a).kept and (p.align_a, p.align_b, p.align_c) == (16, 16, 16)
    nodes[0].stride = [520, 1]
    with pytest.raises(requests.NotEligible, match="TMA needs 16"):
        scaled.request_from(aten)


@pytest.mark.parametrize("fast", [False, True])
def test_atens_call_keeps_the_flag(monkeypatch, fast):
    from templates.scaled_gemm.problem import ScaledGemmProblem

    said = {}
    monkeypatch.setattr(torch, "_scaled_mm", lambda *x, **given: said.update(given) or torch.zeros(2, 16))
    p = ScaledGemmProblem(16, 16, scaling="tensor", fast_accum=fast)
    one = torch.ones(())
    scaled.aten(p)(codes(2, 16, FP8[0]), codes(16, 16, FP8[0]).t(), one, one, out=torch.empty(2, 16))
    assert said.get(scaled.FAST, False) is fast


def test_the_check_allows_what_wgmma_cuts_off_and_no_more():
    """2^-13 of the norms is right for FP8 on sm_90a and wrong in f32; a K tile that is missing is wrong in both."""
    from inductor_plugin import measure
    from inductor_plugin.kernels import Spec
    from templates.scaled_gemm.problem import ScaledGemmProblem

    p = ScaledGemmProblem(48, 1024, scaling="row", out_dtype="f32")
    inputs = [codes(32, 1024, FP8[0]), codes(48, 1024, FP8[0]).t(), torch.ones(32, 1), torch.ones(1, 48)]
    dense, operands = scaled.as_dense(p, inputs)
    exact = operands[0] @ operands[1]
    norms = operands[0].norm(dim=1, keepdim=True) * operands[1].norm(dim=0)
    on = lambda target: scaled.errors(Spec(scaled.OP, target, p, {}))
    off = exact + 2.0**-12 * norms
    measure.check(dense, operands, off, on("sm90a"))
    with pytest.raises(measure.Wrong):
        measure.check(dense, operands, off, on("x86"))
    with pytest.raises(measure.Wrong):
        measure.check(dense, operands, operands[0][:, 128:] @ operands[1][128:], on("sm90a"))


def test_rows_that_overlap_are_atens_on_a_gpu():
    """A stride under a row's length: tensor maps do not describe it, and gfx950's loads would read past the end."""
    from templates.scaled_gemm.arguments import problem_of

    a, b, s, t = codes(32, 64, FP8[0]), codes(48, 64, FP8[0]).t(), torch.rand(32, 1), torch.rand(1, 48)
    p, out = problem_of(a, b, s, t), torch.empty(32, 48, dtype=torch.bfloat16)
    assert not scaled.overlap(p, a, b, s, t, out)
    assert not scaled.overlap(p, a[:1].expand(1, 64), b, s[:1], t, out[:1])
    for over in (a.as_strided((16, 64), (32, 1)), a[:1].expand(32, 64)):
        assert scaled.overlap(p, over, b, s, t, out)
    assert scaled.overlap(p, a, b.t().as_strided((24, 64), (32, 1)).t(), s, t, out)
