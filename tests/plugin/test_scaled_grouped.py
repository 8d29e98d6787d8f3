"""torch._scaled_grouped_mm and F.scaled_grouped_mm in compiled functions: ours where ATen has no kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inductor_plugin import lower_scaled_grouped, scaled_grouped
from inductor_plugin.lower_scaled_grouped import plain_scales, up
from templates.grouped_gemm.scaled.arguments import problem_of
from templates.grouped_gemm.scaled.reference import reference
from templates.scaled_gemm.reference import wrong

from .conftest import compile_with, ours_ran, run_and_get_code
from .test_scaled import codes, mx_scales

pytestmark = pytest.mark.usefixtures("prefer_ours")
E4M3 = torch.float8_e4m3fn
SIZES = (1, 0, 37, 5, 0, 13)
TOKENS = 64  # some of which no group has
HAS_SECOND = hasattr(torch.ops.aten, "_scaled_grouped_mm_v2")


def offs_of(sizes) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def right(got: torch.Tensor, a, b, scale_a, scale_b, offs) -> bool:
    """Against float64 of the dequantised operands, rounded once; scales (rows, blocks) or f32."""
    p = problem_of(a, b, scale_a, scale_b, offs, str(got.dtype))
    raw = lambda x: x.contiguous().view(torch.uint8).numpy()
    of_scale = (lambda s: s.numpy()) if p.scaling == "row" else raw
    exact, allowed = reference(p, raw(a), raw(b.transpose(-2, -1)), of_scale(scale_a), of_scale(scale_b), offs.numpy())
    mine, got = ~np.isnan(exact), got.double().numpy()
    return bool(np.isfinite(got[mine]).all()) and not (wrong(p, got, exact, allowed) & mine).any()


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """(rows, blocks) as cuBLAS wants them, filled up to tiles of 128 x 4, flat: the layout as its picture reads, not as
    plain_scales computes it."""
    rows, blocks = scales.shape
    full = torch.zeros(up(rows, 128), up(blocks, 4), dtype=torch.uint8)
    full[:rows, :blocks] = scales.view(torch.uint8)
    tiles = full.reshape(len(full) // 128, 4, 32, full.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


def forward_operands(k: int = 96, n: int = 48):
    a, b = codes(TOKENS, k, E4M3), codes(6 * n, k, E4M3).reshape(6, n, k).transpose(-2, -1)
    scale_a, scale_b = mx_scales(TOKENS, k), mx_scales(6 * n, k).reshape(6, n, k // 32)
    return a, b, scale_a, scale_b, offs_of(SIZES)


def by_groups_of_rows(scale: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Swizzled group by group, as torch wants the scales of (T, K)."""
    parts = [swizzled(part) for part in scale[: offs[-1]].tensor_split(offs[:-1].long())]
    return torch.cat(parts).reshape(-1, up(scale.shape[1], 4))


def first(a, b, s, t, offs):
    return torch._scaled_grouped_mm(a, b, s, t, offs, out_dtype=torch.bfloat16)


def test_a_scale_for_each_row_and_column():
    a, b, *_, offs = forward_operands()
    s, t = torch.rand(TOKENS), torch.rand(6, 48)
    got, code = run_and_get_code(compile_with(first), a, b, s, t, offs)
    assert ours_ran(code) and got.dtype == torch.bfloat16
    assert right(got, a, b, s, t, offs)


@pytest.mark.parametrize(("rows", "k"), [(48, 96), (200, 256)])
def test_plain_scales(rows, k):
    """Of operands whose rows have groups, of stacks, and where what is summed over has groups."""
    a, b, s, t, offs = forward_operands(k, rows)
    raw = lambda x: x.view(torch.uint8)
    own = int(offs[-1])
    got = plain_scales(by_groups_of_rows(s, offs), a, offs, True, False)
    assert torch.equal(raw(got)[:own], raw(s)[:own])
    assert torch.equal(raw(plain_scales(torch.stack([swizzled(x) for x in t]), b, None, False, True)), raw(t))
    a, b, s, t, offs = gradient_operands(rows, rows + 90)
    own = int(offs[-1]) // 32
    for x, scale, across in ((a, s, False), (b, t, True)):
        got = plain_scales(by_groups_of_blocks(scale, offs), x, offs, False, across)
        assert torch.equal(raw(got)[:, :own], raw(scale)[:, :own])


def test_mx_blocks_are_taken_apart():
    a, b, s, t, offs = forward_operands()
    swizzled_b = torch.stack([swizzled(x) for x in t])
    got, code = run_and_get_code(compile_with(first), a, b, by_groups_of_rows(s, offs), swizzled_b, offs)
    assert ours_ran(code)
    assert right(got, a, b, s, t, offs)


def gradient_operands(m: int = 24, n: int = 40):
    """Of the weight's gradient: tokens, in blocks of 32, have groups."""
    tokens, offs = TOKENS * 32, offs_of(SIZES) * 32
    return codes(m, tokens, E4M3), codes(n, tokens, E4M3).t(), mx_scales(m, tokens), mx_scales(n, tokens), offs


def by_groups_of_blocks(scale: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    ends = (offs // 32).tolist()
    parts = [swizzled(scale[:, x:y]) for x, y in zip([0, *ends], ends, strict=False) if y > x]
    return torch.cat(parts).reshape(up(len(scale), 128), -1)


def test_mx_gradient_of_the_weight():
    a, b, s, t, offs = gradient_operands()
    wide = [by_groups_of_blocks(x, offs) for x in (s, t)]
    got, code = run_and_get_code(compile_with(first), a, b, *wide, offs)
    assert ours_ran(code)
    assert right(got, a, b, s, t, offs)
    assert not got[[i for i, size in enumerate(SIZES) if size == 0]].any()


def test_one_kernel_for_every_number_of_tokens():
    function = compile_with(first)
    _, b, *_ = forward_operands()
    for sizes in ((3, 4, 5, 6, 7, 8), (1, 0, 30, 2, 2, 2)):
        a, offs = codes(sum(sizes), 96, E4M3), offs_of(sizes)
        torch._dynamo.mark_dynamic(a, 0)
        s, t = torch.rand(sum(sizes)), torch.rand(6, 48)
        torch._dynamo.mark_dynamic(s, 0)
        assert right(function(a, b, s, t, offs), a, b, s, t, offs)


def second(recipe: str, swizzle: str):
    from torch.nn.functional import ScalingType, SwizzleType, scaled_grouped_mm

    how, where = getattr(ScalingType, recipe), getattr(SwizzleType, swizzle)
    return lambda a, b, s, t, offs: scaled_grouped_mm(a, b, s, how, t, how, where, where, offs=offs)


@pytest.mark.parametrize("which", ["row", "swizzled", "plain gradient", "plain FP4"])
def test_the_public_function(which):
    """F.scaled_grouped_mm, which torch 2.13 cannot trace by itself; older ones have none."""
    if not HAS_SECOND:
        assert not hasattr(torch.nn.functional, "scaled_grouped_mm")
        return
    a, b, s, t, offs = gradient_operands() if "gradient" in which else forward_operands(128)
    function, given = second("BlockWise1x32", "NO_SWIZZLE"), (s, t)
    if which == "row":
        s, t = torch.rand(TOKENS), torch.rand(6, 48)
        function, given = second("RowWise", "NO_SWIZZLE"), (s, t)
    elif which == "swizzled":
        given = by_groups_of_rows(s, offs), torch.stack([swizzled(x) for x in t])
        function = second("BlockWise1x32", "SWIZZLE_32_4_4")
    elif which == "plain FP4":
        a = codes(TOKENS, 128, torch.float4_e2m1fn_x2)
        b = codes(6 * 48, 128, torch.float4_e2m1fn_x2).reshape(6, 48, 64).transpose(-2, -1)
    got, code = run_and_get_code(compile_with(function), a, b, *given, offs)
    assert ours_ran(code)
    assert right(got, a, b, s, t, offs)


def test_nonsense_in_offs_is_an_error():
    """ATen has no kernel that would say what becomes of it."""
    a, b, *_ = forward_operands()
    s, t, function = torch.rand(TOKENS), torch.rand(6, 48), compile_with(first)
    for offs, words in (((5, 3, 9, 9, 9, 9), "must not decrease"), ((5, 5, 5, 5, 5, 99), "past the end")):
        with pytest.raises(ValueError, match=words):
            function(a, b, s, t, torch.tensor(offs, dtype=torch.int32))


def test_too_few_scales_are_an_error():
    a, _, s, _, offs = forward_operands()
    with pytest.raises(ValueError, match="swizzled, each group filled up"):
        plain_scales(by_groups_of_rows(s, offs)[:256], a, offs, True, False)


@pytest.mark.parametrize("change", ["bf16", "offs of i64", "3-D by 2-D", "scales of another type", "no offs"])
def test_what_torch_refuses_is_refused_alike(change):
    a, b, *_, offs = forward_operands()
    s, t = torch.rand(TOKENS), torch.rand(6, 48)
    if change == "bf16":
        a = a.bfloat16()
    elif change == "offs of i64":
        offs = offs.long()
    elif change == "3-D by 2-D":
        a, b, s, t = b.transpose(-2, -1), a.t(), t, s
    elif change == "scales of another type":
        s = s.double()
    elif change == "no offs":
        offs = None
    with pytest.raises(Exception) as without:
        torch.compile(first)(a, b, s, t, offs)
    torch._dynamo.reset()
    with pytest.raises(type(without.value)) as with_us:
        compile_with(first)(a, b, s, t, offs)
    reason = lambda e: str(e.value).splitlines()[0][:60]
    assert reason(with_us) == reason(without)


def test_operands_that_do_not_lie_as_built(log):
    """Where ATen has nothing, dense products serve."""
    from flykernels.targets import x86
    from inductor_plugin import kernels
    from templates.grouped_gemm.scaled.space import candidates

    a, b, s, t, offs = forward_operands()
    p = problem_of(a, b, s, t, offs)
    call = kernels.callable_for(kernels.Spec(scaled_grouped.OP, "x86", p, candidates(p, x86).kept[0].config.key()))
    out = torch.empty(TOKENS, 48, dtype=torch.bfloat16)
    assert right(call(a, b, s, t, offs, out=out), a, b, s, t, offs) and "serve" not in log.text
    assert right(call(a, b.contiguous(), s, t, offs, out=out), a, b, s, t, offs)
    assert "dense products serve" in log.text


def test_second_version_is_read_only_for_what_the_first_says():
    if not HAS_SECOND:
        return
    read, offs = lower_scaled_grouped.as_first, offs_of(SIZES)
    assert read([1], [1], [], [2], [1], [], offs).scale_b == 2
    assert read([1], [3], [0], [2], [3], [0], offs).plain and not read([1], [3], [1], [2], [3], [1], offs).plain
    for wrong_call in (
        ([1, 1], [3], [0], [2], [3], [0], offs), ([1], [2], [0], [2], [2], [0], offs),
        ([1], [3], [1], [2], [3], [0], offs), ([1], [1], [1], [2], [1], [1], offs),
        ([1], [3], [0], [2], [3], [0], None), ([1], [3], [0], [2], [3], [0], offs, "bias"),
    ):  # fmt: skip
        assert read(*wrong_call) is None
