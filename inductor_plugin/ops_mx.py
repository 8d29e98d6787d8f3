"""MXFP8 and MXFP4 for users: quantise, multiply, and a linear layer of both.

    y = scaled_linear(x, w)                                   # x (..., K), w (N, K); gradients pass rounding unchanged
    codes, scales = mx_quantize(x)                            # blocks of 32 along rows
    c = mx_matmul(codes, codes_w.t(), scales, scales_w)       # torch's BlockWise1x32, not swizzled

The operators are torch.ops.flykernels.mx_quantize and mx_matmul once this module is imported; compiled graphs call them
as they are. Kernels of ours serve CPU, gfx950 and (the quantiser) sm_90a; elsewhere the same numbers come of torch's
operators.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from flykernels.dtypes import dtype as element_type
from flykernels.microscaling import BLOCK, FORMATS
from templates.quantize.arguments import outputs, shapes
from templates.quantize.problem import MODES, QuantizeProblem
from templates.scaled_gemm.arguments import pointers, problem_of, scalar_values

from . import devices, eager_code, private
from .scaled import dequantized, overlap

log = logging.getLogger(__name__)

FORMAT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_library = torch.library.Library("flykernels", "FRAGMENT")
_library.define("mx_quantize(Tensor x, ScalarType dtype, str mode, bool rows, bool columns) -> Tensor[]")
_library.define(
    "mx_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype) -> Tensor"
)


def mx_quantize(
    x: Any, dtype: Any = torch.float8_e4m3fn, mode: str = "floor", *, rows: bool = True, columns: bool = False
) -> tuple[Any, ...]:
    """(codes, scales) of blocks of 32 along rows, (codes, scales) along columns, or both, from one read of x.

    x        (M, N) bf16, fp16 or f32
    dtype    float8_e4m3fn, float8_e5m2, or float4_e2m1fn_x2 (two numbers an element, so half as many columns)
    mode     "floor" or "round_up": see templates.quantize.problem
    rows     codes (M, N), scales (M, N / 32) float8_e8m0fnu; N a multiple of 32
    columns  codes (N, M), scales (N, M / 32), transposed: ready to be summed over M; M a multiple of 32

    ValueError for what does not fit. Not differentiable: `scaled_linear` is."""
    return tuple(torch.ops.flykernels.mx_quantize(x, dtype, mode, rows, columns))


def mx_matmul(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, out_dtype: Any = torch.bfloat16) -> Any:
    """(A scales_a) (B scales_b) + bias: (M, N) in out_dtype (bfloat16, float16, float32), summed in f32.

    a (M, K) row-major, b (K, N) column-major, of any MX formats; scales (M, K / 32) and (N, K / 32) float8_e8m0fnu,
    contiguous and not swizzled; bias (N,) of out_dtype. ValueError that says what is wrong. Not differentiable."""
    return torch.ops.flykernels.mx_matmul(a, b, scale_a, scale_b, bias, out_dtype)


def scaled_linear(x: Any, w: Any, bias: Any = None, dtype: Any = torch.float8_e4m3fn, mode: str = "floor") -> Any:
    """x w^T + bias with both quantised to MX blocks along K: a linear layer's product, for training too.

    x     (..., K) bf16, fp16 or f32
    w     (N, K), x's dtype
    bias  (N,), x's dtype
    dtype, mode  as mx_quantize takes them

    The result has x's dtype. Gradients are those of the unquantised layer (rounding passes them unchanged), computed
    from operands quantised along the axis that they are summed over: x^T and w from the same read as the forward's, dy
    along both axes. K must be a multiple of 32; so must N if x's gradient is asked for. Rows of x are filled up with
    zeros where w's gradient is. Gradients have no gradients: asking for those is a RuntimeError. ValueError for what
    does not fit."""
    _check_linear(x, w, bias, dtype)
    lines = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = _ScaledLinear.apply(*without_gradients(lines, w, bias), dtype, mode)
    return y.reshape(*x.shape[:-1], w.shape[0])


def without_gradients(*tensors: Any) -> tuple:
    """The tensors; where no gradients are recorded, detached: a Function is asked for those of parameters even then.
    Not those with a tangent, which would be lost without a word: a Function says that it has none."""
    if torch.is_grad_enabled():
        return tensors
    return tuple(t if t is None or has_tangent(t) else t.detach() for t in tensors)


def has_tangent(x: Any) -> bool:
    """Whether forward-mode differentiation looks at a tensor."""
    return forward_ad.unpack_dual(x).tangent is not None


def on_one_device(name: str, **tensors: Any) -> None:
    """ValueError where tensors are on several: a kernel would read addresses of another, or none would run."""
    devices = {of: t.device for of, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        shown = ", ".join(f"{of} on {device}" for of, device in devices.items())
        raise ValueError(f"{name}: {shown}: all on one device are wanted")


def _check_linear(x: Any, w: Any, bias: Any, dtype: Any) -> None:
    on_one_device("scaled_linear", x=x, w=w, bias=bias)
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"scaled_linear: x is {tuple(x.shape)} and w {tuple(w.shape)}: they must be (..., K) and (N, K)"
        )
    if x.dtype != w.dtype or x.dtype not in INPUT_DTYPES:
        raise ValueError(f"scaled_linear: x is {x.dtype} and w {w.dtype}: both bfloat16, float16 or float32")
    if w.shape[1] % BLOCK:
        raise ValueError(
            f"scaled_linear: K = {w.shape[1]} is not a multiple of {BLOCK}: pad x and w with zeros along K"
        )
    if bias is not None and (tuple(bias.shape) != (w.shape[0],) or bias.dtype != x.dtype):
        raise ValueError(
            f"scaled_linear: bias is {bias.dtype} {tuple(bias.shape)}: {x.dtype} ({w.shape[0]},) is wanted"
        )
    if dtype not in FORMAT_DTYPES:
        raise ValueError(f"scaled_linear: dtype is {dtype}; MX formats are {', '.join(map(str, FORMAT_DTYPES))}")
    if torch.is_grad_enabled() and x.requires_grad and w.shape[0] % BLOCK:
        raise ValueError(
            f"scaled_linear: N = {w.shape[0]} is not a multiple of {BLOCK}, which x's gradient sums over: pad w with "
            "rows of zeros, or detach x"
        )


class _NoSecond(torch.autograd.Function):
    """Passes gradients on; theirs are an error. `marked` requires one, so that they do too, whatever they came of."""

    @staticmethod
    def forward(ctx: Any, marked: Any, *gradients: Any) -> tuple:
        return tuple(g if g is None else g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple:
        raise RuntimeError(
            "gradients of products of MX blocks have no gradients of their own: rounding has none. Do: compute what is "
            "differentiated twice with torch.nn.functional.linear"
        )


def differentiable_once(backward: Callable) -> Callable:
    """backward(ctx, dy) whose results, where their graph is recorded, say that they are not differentiable.

    torch's once_differentiable says so only where dy is, and lets w's part in x's gradient go without a word."""

    def once(ctx: Any, dy: Any) -> tuple:
        recorded = torch.is_grad_enabled()
        with torch.no_grad():
            found = backward(ctx, dy)
        return _NoSecond.apply(torch.ones((), requires_grad=True), *found) if recorded else found

    return once


class _ScaledLinear(torch.autograd.Function):
    """y = Q(x) Q(w)^T + b; dx = Q(dy) Q(w), dw = Q(dy)^T Q(x), each quantised along what it sums over."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, bias: Any, dtype: Any, mode: str) -> Any:
        wants_x, wants_w = ctx.needs_input_grad[:2]
        whole = x.shape[0]
        rows = filled(x) if wants_w else x
        along, *across = mx_pairs(rows, dtype, mode, True, wants_w)
        weight, *weight_across = mx_pairs(w, dtype, mode, True, wants_x)
        codes, scales = (t[:whole] for t in along)
        y = mx_matmul(codes, weight[0].t(), scales, weight[1], bias, x.dtype)
        ctx.save_for_backward(*(t for pair in (*across, *weight_across) for t in pair))
        ctx.wants, ctx.dtype, ctx.mode = (wants_x, wants_w), dtype, mode
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Any) -> tuple:
        wants_x, wants_w = ctx.wants
        saved = list(ctx.saved_tensors)
        x_across = (saved.pop(0), saved.pop(0)) if wants_w else None
        w_across = (saved.pop(0), saved.pop(0)) if wants_x else None
        whole, dy = dy.shape[0], dy.contiguous()
        dx = dw = None
        pairs = mx_pairs(filled(dy) if wants_w else dy, ctx.dtype, ctx.mode, wants_x, wants_w) if any(ctx.wants) else []
        if w_across is not None:
            codes, scales = (t[:whole] for t in pairs.pop(0))
            dx = mx_matmul(codes, w_across[0].t(), scales, w_across[1], None, dy.dtype)
        if x_across is not None:
            codes, scales = pairs.pop(0)
            dw = mx_matmul(codes, x_across[0].t(), scales, x_across[1], None, dy.dtype)
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, None, None


def mx_pairs(x: Any, dtype: Any, mode: str, rows: bool, columns: bool) -> list[tuple[Any, Any]]:
    """What mx_quantize gives, in pairs (codes, scales)."""
    flat = mx_quantize(x, dtype, mode, rows=rows, columns=columns)
    return list(zip(flat[::2], flat[1::2]))


def filled(x: Any) -> Any:
    """x with rows of zeros to a multiple of 32."""
    missing = -x.shape[0] % BLOCK
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


# -- the operators
def _quantize_problem(x: Any, dtype: Any, mode: str, rows: bool, columns: bool, consumer: str) -> QuantizeProblem:
    """ValueError in words for what cannot be quantised so."""
    if x.dim() != 2 or x.dtype not in INPUT_DTYPES:
        raise ValueError(f"mx_quantize: x is {x.dtype} {tuple(x.shape)}: a matrix of bfloat16, float16 or float32")
    if dtype not in FORMAT_DTYPES:
        raise ValueError(f"mx_quantize: dtype is {dtype}; MX formats are {', '.join(map(str, FORMAT_DTYPES))}")
    if mode not in MODES:
        raise ValueError(f"mx_quantize: mode is {mode!r}; there are {', '.join(MODES)}")
    size = x.element_size()
    at = (x.data_ptr() if not _is_fake(x) else 16) | (x.stride(0) * size if x.shape[0] > 1 else 16)
    p = QuantizeProblem(
        n=x.shape[1], dtype=element_type(str(x.dtype)).name, format=element_type(str(dtype)).name, rows=rows,
        columns=columns, mode=mode, consumer=consumer, align_x=max(size, min(16, at & -at)),
    )  # fmt: skip
    return p


def _is_fake(x: Any) -> bool:
    return private.is_fake(x) or x.device.type == "meta"


def _results(p: QuantizeProblem, x: Any, dtype: Any) -> list[Any]:
    """Empty codes and scales of a problem."""
    kinds = [dtype if name.startswith("codes") else torch.float8_e8m0fnu for name in outputs(p)]
    return [
        torch.empty(size, dtype=torch.uint8, device=x.device).view(kind)
        for size, kind in zip(shapes(p, x.shape[0]).values(), kinds, strict=True)
    ]


def _fake_quantize(x: Any, dtype: Any, mode: str, rows: bool, columns: bool) -> list[Any]:
    p = _quantize_problem(x, dtype, mode, rows, columns, "gfx950")
    kinds = [dtype if name.startswith("codes") else torch.float8_e8m0fnu for name in outputs(p)]
    sizes = shapes(p, x.shape[0]).values()
    return [torch.empty(size, dtype=kind, device=x.device) for size, kind in zip(sizes, kinds, strict=True)]


def _quantize(x: Any, dtype: Any, mode: str, rows: bool, columns: bool) -> list[Any]:
    if x.dim() == 2 and ((x.stride(1) != 1 and x.shape[1] > 1) or (x.stride(0) < x.shape[1] and x.shape[0] > 1)):
        x = x.contiguous()  # rows that overlap too: no tensor map describes them
    kind = devices.kind_of(x.device)
    target = {"cpu": "x86", "hip": "gfx950", "cuda": "sm90a"}.get(kind)
    p = _quantize_problem(x, dtype, mode, rows, columns, "" if target not in (None, "x86") else "gfx950")
    out = _results(p, x, dtype)
    if x.numel() == 0:
        return out
    why = f"device {x.device}" if target is None else p.why_not(Named(target))
    if why is None and target is not None:
        from flykernels import targets
        from templates.quantize.build import default

        config = default(p, getattr(targets, target))
        launch = eager_code.launcher(eager_code.codes_for("quantize", p, config.key(), target))
        launch(x.data_ptr(), *(t.data_ptr() for t in out), x.shape[0], x.stride(0))
        return out
    if target is not None:
        raise ValueError(f"mx_quantize: {why}")
    sides = ([x] if rows else []) + ([x.t()] if columns else [])
    for i, lines in enumerate(sides):
        for t, made in zip(out[2 * i : 2 * i + 2], composed_quantize(lines, p), strict=True):
            t.view(torch.uint8).copy_(made)
    return out


class Named:
    """What `why_not` asks of a target: its name."""

    def __init__(self, name: str):
        self.name = name


def composed_quantize(x: Any, p: QuantizeProblem) -> tuple[Any, Any]:
    """(codes, scales) as bytes of blocks along rows, by torch's operators: what serves where no kernel does."""
    kind, f = p.output_type, FORMATS[p.output_type]
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    bits = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    fraction = int((kind.largest / 2.0**f.largest_exponent - 1) * 2**23)
    top = bits + (2**23 - 1 - fraction if p.round_up else 0)
    byte = ((top >> 23) - f.largest_exponent).clamp(min=0)
    finite = bits < 0x7F800000
    scaled = torch.where(finite, blocks * ((254 - byte) << 23).view(torch.float32), 0).clamp(
        -kind.largest, kind.largest
    )
    scales = torch.where(finite, byte, 255).squeeze(-1).to(torch.uint8)
    scaled = scaled.flatten(-2)
    if f.per_byte == 1:
        return scaled.to(getattr(torch, str(kind.torch))).view(torch.uint8), scales
    half = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
    half[1::2] = torch.nextafter(half[1::2], torch.zeros_like(half[1::2]))  # ties that go up
    code = torch.bucketize(scaled.abs().contiguous(), half).to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 3)
    return code[..., 0::2] | code[..., 1::2] << 4, scales


def _matmul(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: Any) -> Any:
    from flykernels import targets
    from templates.scaled_gemm import gfx950
    from templates.scaled_gemm.space import candidates

    on_one_device("mx_matmul", A=a, B=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    p = problem_of(a, b, scale_a, scale_b, bias, str(out_dtype))
    if p.scaling != "block":
        raise ValueError(f"mx_matmul: scales are {scale_a.dtype}: one float8_e8m0fnu for 32 numbers is wanted")
    m, bias = a.shape[0], bias if bias is None else bias.contiguous()
    out = torch.empty((m, p.n), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    kind = devices.kind_of(a.device)
    target = {"cpu": "x86", "hip": "gfx950"}.get(kind)
    why = p.why_not(Named(target or "gfx950"))
    if why is not None and p.k:
        raise ValueError(f"mx_matmul: {why}")
    not_lying_so = target == "gfx950" and (gfx950.why_not(p) or overlap(p, a, b, scale_a, scale_b, out))
    if target is None or p.k == 0 or not_lying_so:
        return out.copy_(composed_matmul(a, b, scale_a, scale_b, bias))
    threads = torch.get_num_threads() if target == "x86" else 1
    p = problem_for_rows(p, m)
    config = candidates(p, getattr(targets, target), threads).kept[0].config
    launch = eager_code.launcher(eager_code.codes_for("scaled_gemm", p, config.key(), target))
    tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias, "c": out}
    launch(*(tensors[name].data_ptr() for name in pointers(p)), *scalar_values(a, b, out))
    return out


def problem_for_rows(p: Any, m: int) -> Any:
    """The problem with M hinted to the next power of two: so many kernels are built, not one for every M."""
    from dataclasses import replace

    return replace(p, m_hint=1 << (m - 1).bit_length())


def composed_matmul(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> Any:
    """f32 product of the dequantised operands, by torch's operators."""
    x = dequantized(a, scale_a) @ dequantized(b.t(), scale_b).t()
    return x if bias is None else x + bias.float()


def _fake_matmul(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: Any) -> Any:
    """Shapes are checked as the kernel does, for any number of rows; addresses are not known yet."""
    on_one_device("mx_matmul", A=a, B=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    per = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    per_b = 2 if b.dtype == torch.float4_e2m1fn_x2 else 1
    torch._check(a.dim() == 2 and b.dim() == 2, lambda: "mx_matmul: A and B must be matrices")
    torch._check(
        a.shape[1] * per == b.shape[0] * per_b,
        lambda: f"mx_matmul: A has K = {a.shape[1] * per} and B {b.shape[0] * per_b}",
    )
    for name, rows, scale in (("A", a.shape[0], scale_a), ("B", b.shape[1], scale_b)):
        want = rows * (a.shape[1] * per // BLOCK)
        torch._check(
            scale.numel() == want,
            lambda name=name, scale=scale, want=want: f"mx_matmul: {name} has {scale.numel()} scales, not {want}",
        )
    return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)


for _key in ("CPU", "CUDA"):
    _library.impl("mx_quantize", _quantize, _key)
    _library.impl("mx_matmul", _matmul, _key)
torch.library.register_fake("flykernels::mx_quantize", _fake_quantize, lib=_library)
torch.library.register_fake("flykernels::mx_matmul", _fake_matmul, lib=_library)
