"""MXFP8 and MXFP4 products of an MoE layer's experts, forward and backward.

    y = mxfp8_grouped_linear(x, w, offs)          # x (T, K), w (G, N, K), offs (G,) int32: where experts' tokens end
    c = mx_grouped_matmul(a, b, scale_a, scale_b, offs)

The operator is torch.ops.flykernels.mx_grouped_matmul once this module is imported. Nothing asks the device for the
groups' sizes, so a GPU's graphs can be captured.

Groups and blocks. What the weight's gradient sums over are tokens, and 32 numbers share a scale. A block of two
experts' tokens would round one's by the other's largest, so each expert's tokens are filled up with zeros to whole
blocks before they are quantised along columns: a copy of at most T + 31 G rows, whose size depends on shapes alone.
Callers whose groups all are multiples of 32 (training frameworks pad tokens so) say `whole_blocks=True`: nothing is
copied, and one read of x, as one of dy, gives the codes along rows and along columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flykernels.microscaling import BLOCK
from templates.grouped_gemm.scaled.arguments import POINTERS, problem_of, scalar_values

from . import devices, eager_code
from .ops_mx import (
    FORMAT_DTYPES,
    INPUT_DTYPES,
    Named,
    differentiable_once,
    filled,
    mx_pairs,
    on_one_device,
    without_gradients,
)
from .scaled import dequantized

_library = torch.library.Library("flykernels", "FRAGMENT")
_library.define(
    "mx_grouped_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, ScalarType out_dtype) -> Tensor"
)


def mxfp8_grouped_linear(
    x: Any, w: Any, offs: Any, dtype: Any = torch.float8_e4m3fn, mode: str = "floor", *, whole_blocks: bool = False
) -> Any:
    """x[t] w[g]^T for each token t of expert g, x and w quantised to MX blocks along K: for training too.

    x     (T, K) bf16, fp16 or f32; expert g has rows offs[g - 1] .. offs[g] - 1, the first one from row 0 on
    w     (G, N, K), x's dtype
    offs  (G,) int32 on x's device, not decreasing, 0 .. T
    dtype, mode   as mx_quantize takes them: float8_e4m3fn, float8_e5m2 or float4_e2m1fn_x2; "floor" or "round_up"
    whole_blocks  promises that every expert has a multiple of 32 tokens, which saves the backward pass a copy of x and
                  dy. Broken, the weight's gradient is that of offs rounded down to multiples of 32 (an error on a CPU)

    (T, N) in x's dtype. Rows that no expert has are zeros, as are their gradients; so is the gradient of the weight of
    an expert without tokens. Gradients are those of the unquantised product (rounding passes them unchanged), computed
    from operands quantised along what they sum over: dx = Q(dy) Q(w), dw = Q(dy)^T Q(x). K must be a multiple of 32; so
    must N if x's gradient is asked for. Gradients have no gradients: asking for those is a RuntimeError. ValueError in
    words for what does not fit. On a GPU offs are not looked at: those that decrease or leave 0 .. T are cut as
    GroupedGemmProblem says."""
    _check(x, w, offs, dtype)
    x, w = without_gradients(x, w)
    return _GroupedLinear.apply(x, w, offs, dtype, mode, whole_blocks)


def mx_grouped_matmul(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, out_dtype: Any = torch.bfloat16) -> Any:
    """(A scales_a) (B scales_b) for each group, summed in f32: (T, N), or (G, M, N), in out_dtype.

    a (T, K), b (G, K, N), scales (T, K / 32) and (G, N, K / 32); or a (M, T), b (T, N), scales (M, T / 32) and
    (N, T / 32), offs multiples of 32. A row-major, B column-major, of any MX formats; scales float8_e8m0fnu, not
    swizzled. Rows that no group has are zeros. ValueError that says what is wrong. Not differentiable."""
    return torch.ops.flykernels.mx_grouped_matmul(a, b, scale_a, scale_b, offs, out_dtype)


def _check(x: Any, w: Any, offs: Any, dtype: Any) -> None:
    name = "mxfp8_grouped_linear"
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(f"{name}: x is {tuple(x.shape)} and w {tuple(w.shape)}: they must be (T, K) and (G, N, K)")
    if x.dtype != w.dtype or x.dtype not in INPUT_DTYPES:
        raise ValueError(f"{name}: x is {x.dtype} and w {w.dtype}: both bfloat16, float16 or float32")
    on_one_device(name, x=x, w=w, offs=offs)
    if dtype not in FORMAT_DTYPES:
        raise ValueError(f"{name}: dtype is {dtype}; MX formats are {', '.join(map(str, FORMAT_DTYPES))}")
    if offs.dtype != torch.int32:
        raise ValueError(f"{name}: offs are {offs.dtype}: they must be int32. Do: offs.to(torch.int32)")
    if tuple(offs.shape) != (w.shape[0],):
        raise ValueError(f"{name}: offs are {tuple(offs.shape)} and w has {w.shape[0]} experts: one value for each")
    if 0 in w.shape:
        raise ValueError(f"{name}: w is {tuple(w.shape)}: there is nothing to multiply")
    if w.shape[2] % BLOCK:
        raise ValueError(f"{name}: K = {w.shape[2]} is not a multiple of {BLOCK}: pad x and w with zeros along K")
    if torch.is_grad_enabled() and x.requires_grad and w.shape[1] % BLOCK:
        raise ValueError(
            f"{name}: N = {w.shape[1]} is not a multiple of {BLOCK}, which x's gradient sums over: pad w with rows of "
            "zeros, or detach x"
        )


class _GroupedLinear(torch.autograd.Function):
    """y = Q(x) Q(w)^T; dx = Q(dy) Q(w), dw = Q(dy)^T Q(x), each quantised along what it sums over."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, offs: Any, dtype: Any, mode: str, whole_blocks: bool) -> Any:
        wants_x, wants_w = ctx.needs_input_grad[:2]
        offs = offs.contiguous()
        codes, scales, across, ends = _both_ways(x, offs, dtype, mode, True, wants_w, whole_blocks)
        (w_codes, w_scales), *w_across = _weight_both_ways(w, dtype, mode, wants_x)
        y = mx_grouped_matmul(codes, w_codes, scales, w_scales, offs, x.dtype)
        ctx.save_for_backward(offs, ends, *across, *(t for pair in w_across for t in pair))
        ctx.wants, ctx.how = (wants_x, wants_w), (dtype, mode, whole_blocks)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Any) -> tuple:
        wants_x, wants_w = ctx.wants
        dtype, mode, whole_blocks = ctx.how
        offs, ends, *saved = ctx.saved_tensors
        x_across = [saved.pop(0), saved.pop(0)] if wants_w else None
        dx = dw = None
        codes, scales, across, _ = _both_ways(dy, offs, dtype, mode, wants_x, wants_w, whole_blocks, ends)
        if wants_x:
            dx = mx_grouped_matmul(codes, saved[0], scales, saved[1], offs, dy.dtype)
        if x_across is not None:
            dw = mx_grouped_matmul(across[0], x_across[0].t(), across[1], x_across[1], ends, dy.dtype)
        return dx, dw, None, None, None, None


def _both_ways(
    x: Any, offs: Any, dtype: Any, mode: str, rows: bool, columns: bool, whole_blocks: bool, ends: Any = None
) -> tuple[Any, Any, list, Any]:
    """(codes, scales along rows, [codes, scales] along columns, where groups end in those) of tokens x."""
    x = x.contiguous()
    if not columns:
        codes, scales = mx_pairs(x, dtype, mode, True, False)[0] if rows else (None, None)
        return codes, scales, [], None
    if whole_blocks:
        pairs = mx_pairs(filled(x), dtype, mode, rows, True)
        codes, scales = (t[: x.shape[0]] for t in pairs[0]) if rows else (None, None)
        return codes, scales, list(pairs[-1]), offs
    codes, scales = mx_pairs(x, dtype, mode, True, False)[0] if rows else (None, None)
    spread, ends = spread_groups(x, offs, ends)
    return codes, scales, list(mx_pairs(spread, dtype, mode, False, True)[0]), ends


def spread_groups(x: Any, offs: Any, ends: Any = None) -> tuple[Any, Any]:
    """(x with each group's rows filled up with zeros to a multiple of 32, where groups end in it).

    ends: those of an earlier call with the same offs. Rows: as many as any sizes of T rows in G groups can need."""
    count = x.shape[0]
    until = offs.clamp(0, count).cummax(0).values
    begin = torch.nn.functional.pad(until[:-1], (1, 0))
    if ends is None:
        ends = (((until - begin + (BLOCK - 1)) // BLOCK).cumsum(0) * BLOCK).to(torch.int32)
    row = torch.arange((count + (BLOCK - 1) * offs.shape[0]) // BLOCK * BLOCK, dtype=torch.int32, device=x.device)
    group = torch.searchsorted(ends, row, right=True).clamp(max=offs.shape[0] - 1)
    source = row - torch.nn.functional.pad(ends[:-1], (1, 0))[group] + begin[group]
    missing = torch.nn.functional.pad(x, (0, 0, 0, 1))  # row `count`: zeros
    return missing[torch.where(source < until[group], source, count)], ends


def _weight_both_ways(w: Any, dtype: Any, mode: str, columns: bool) -> list[tuple[Any, Any]]:
    """[(codes (G, K, N), scales (G, N, K / 32)) along K, (codes (G, N, K), scales (G, K, N / 32)) along N], both as
    views of what one read gave: all experts' rows make one matrix, and N is whole blocks."""
    groups, n, _ = w.shape
    (codes, scales), *across = mx_pairs(w.reshape(groups * n, -1), dtype, mode, True, columns)
    found = [(codes.unflatten(0, (groups, n)).transpose(1, 2), scales.unflatten(0, (groups, n)))]
    for codes_t, scales_t in across:  # (K, G N), (K, G N / 32)
        found.append(
            (codes_t.unflatten(1, (groups, -1)).permute(1, 2, 0), scales_t.unflatten(1, (groups, -1)).transpose(0, 1))
        )
    return found


# -- the operator
def _matmul(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, out_dtype: Any) -> Any:
    from flykernels import targets
    from templates.grouped_gemm.scaled.build import KERNELS
    from templates.grouped_gemm.scaled.space import candidates

    on_one_device("mx_grouped_matmul", A=a, B=b, scale_a=scale_a, scale_b=scale_b, offs=offs)
    p = problem_of(a, b, scale_a, scale_b, offs, str(out_dtype))
    if offs.device.type == "cpu":
        look_at(offs, a.shape[0] if p.form == "m" else a.shape[1] * p.per_byte("a"), p.unit)
    make = (
        torch.zeros if p.form == "m" else torch.empty
    )  # rows that no group has; every element of a gradient is written
    out = make((a.shape[0], p.n) if p.form == "m" else (p.groups, p.m, p.n), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:  # nothing to sum over
        return out.zero_()
    target = {"cpu": "x86", "hip": "gfx950"}.get(devices.kind_of(a.device))
    why = p.why_not(Named(target or "gfx950"))
    if why is not None:
        raise ValueError(f"mx_grouped_matmul: {why}")
    threads = torch.get_num_threads() if target == "x86" else 1
    p = replace(p, tokens_hint=1 << (p.tokens_hint - 1).bit_length())  # so many kernels are built, not one for every T
    kept = candidates(p, getattr(targets, target), threads).kept if target in KERNELS else []
    if target is None or not kept:
        return _composed(p, a, b, scale_a, scale_b, offs, out)
    launch = eager_code.launcher(eager_code.codes_for("grouped_gemm.scaled", p, kept[0].config.key(), target))
    tensors = dict(zip(POINTERS, (a, b, scale_a, scale_b, offs, out), strict=True))
    launch(*(tensors[name].data_ptr() for name in POINTERS), *scalar_values(p, a, b, scale_a, scale_b, out))
    return out


def look_at(offs: Any, tokens: int, unit: int) -> None:
    """ValueError for offs in this machine's memory that make no sense."""
    before = 0
    for g, end in enumerate(offs.tolist()):
        if end < before:
            raise ValueError(f"offs[{g}] is {end} and the group before ends at {before}: offs must not decrease")
        if end > tokens:
            raise ValueError(f"offs[{g}] is {end}, past the end: there are {tokens} tokens")
        if end % unit:
            raise ValueError(
                f"offs[{g}] is {end}, not a multiple of {unit}: a block of {unit} tokens has one scale, and would mix "
                "two groups"
            )
        before = end


def _composed(p: Any, a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, out: Any) -> Any:
    """The same by torch's operators, in f32: what serves devices without a kernel of ours."""
    x = dequantized(a, scale_a)
    row = torch.arange(x.shape[0] if p.form == "m" else x.shape[1], dtype=torch.int32, device=a.device)
    group = torch.searchsorted((offs // p.unit * p.unit).cummax(0).values, row, right=True)
    for g in range(p.groups):
        mine = group == g
        if p.form == "m":
            y = dequantized(b[g].t(), scale_b[g])
            out.copy_(torch.where(mine[:, None], x.where(mine[:, None], 0) @ y.t(), out.float()))
        else:
            y = dequantized(b.t(), scale_b)
            out[g] = x.where(mine, 0) @ y.where(mine, 0).t()
    return out


def _fake_matmul(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, out_dtype: Any) -> Any:
    """Shapes are checked as far as they are known; addresses are not yet."""
    on_one_device("mx_grouped_matmul", A=a, B=b, scale_a=scale_a, scale_b=scale_b, offs=offs)
    torch._check(
        a.dim() == 2 and b.dim() in (2, 3), lambda: "mx_grouped_matmul: A must be a matrix, B one or a stack of them"
    )
    torch._check(offs.dim() == 1 and offs.dtype == torch.int32, lambda: "mx_grouped_matmul: offs must be (G,) int32")
    per = [2 if x.dtype == torch.float4_e2m1fn_x2 else 1 for x in (a, b)]
    torch._check(
        a.shape[1] * per[0] == b.shape[-2] * per[1],
        lambda: f"mx_grouped_matmul: A has {a.shape[1] * per[0]} numbers to sum over and B {b.shape[-2] * per[1]}",
    )
    n = b.shape[-1]
    shape = (a.shape[0], n) if b.dim() == 3 else (offs.shape[0], a.shape[0], n)
    return torch.empty(shape, dtype=out_dtype, device=a.device)


for _key in ("CPU", "CUDA"):
    _library.impl("mx_grouped_matmul", _matmul, _key)
torch.library.register_fake("flykernels::mx_grouped_matmul", _fake_matmul, lib=_library)
