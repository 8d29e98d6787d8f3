"""Scaled products as the plugin sees them: aten._scaled_mm, and _scaled_mm_v2 where Inductor lowers it to that call.

ATen's candidate is read for what is asked; the kernel is called, or ATen where operands do not lie as it was built for;
and for the comparison with ATen there is the dense product of the dequantised operands. MX blocks (one E8M0 scale for
32 numbers, not swizzled) have no kernel of ATen's on a CPU: there those dense products serve instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from flykernels.dtypes import dtype as element_type
from flykernels.dtypes import f4e2m1
from flykernels.microscaling import BLOCK
from templates.gemm.problem import GemmProblem
from templates.scaled_gemm.arguments import pointers, scalar_values
from templates.scaled_gemm.problem import ALIGN, ScaledGemmProblem

log = logging.getLogger(__name__)

OP, TEMPLATE, RUN_TIME_SIZE = "_scaled_mm", "scaled_gemm", "m"
PROBLEM = ScaledGemmProblem
BLOCKWISE_1X32 = 3  # torch.nn.functional.ScalingType.BlockWise1x32
FAST = "use_fast_accum"  # means something on sm_90a; elsewhere ours sums in f32, which is never less
SCALES = (118, 128)  # E8M0 bytes that are measured with: up to 1, so that no sum is beyond f16's largest number
READ = (FAST, "out_dtype")  # the type is the output's


# -- what is asked
def request_from(aten: Any) -> Any:
    """The request behind an autotuning call of _scaled_mm. NotEligible with the reason."""
    from . import private
    from .devices import device_for
    from .requests import NotEligible, Request, alignments, number, unit_stride

    why = private.stands_aside()
    if why:
        raise NotEligible(why)
    extra = {k: v for k, v in aten.kwargs.items() if k not in READ and v is not None}
    if extra:
        raise NotEligible(f"{aten.name} with {extra}")
    a, b, scale_a, scale_b, *rest = aten.input_nodes
    layout, device = aten.layout, device_for(aten.layout.device)
    kinds = [element_type(str(x.get_dtype())) for x in (a, b)]
    (m, ka), (kb, n) = (list(x.get_size()) for x in (a, b))
    m_, n_ = number(m), number(n)
    stored = [number(k) for k in (ka, kb)]
    depths = [(k or 0) * (2 if kind == f4e2m1 else 1) for k, kind in zip(stored, kinds, strict=True)]
    if n_ is None or None in stored or depths[0] != depths[1]:
        raise NotEligible(f"N={n}, K={ka} and {kb}: only M may be symbolic")
    if 0 in (m_, n_, depths[0]):
        raise NotEligible(f"M={m}, N={n}, K={ka}: nothing to multiply")
    for name, x, wanted in (("A", a, "row"), ("B", b, "col"), ("the output", None, "row")):
        size, stride = (layout.size, layout.stride) if x is None else (x.get_size(), x.get_stride())
        if unit_stride(size, stride) != wanted:
            raise NotEligible(f"{name} has strides {list(stride)}: it must be {wanted}-major")
    aligned = alignments(a.get_layout(), b.get_layout(), [layout])
    p = ScaledGemmProblem(
        n=n_, k=depths[0], a_dtype=kinds[0].name, b_dtype=kinds[1].name,
        scaling=_scaling(scale_a, scale_b, m_, n_, depths[0]), out_dtype=element_type(str(layout.dtype)).name,
        bias="row" if rest else "none", m_hint=m_ if m_ is not None else private.symbolic_hint(m),
        fast_accum=device.target == "sm90a" and bool(aten.kwargs.get(FAST)),
        **(aligned if device.target != "x86" else {}),
    )  # fmt: skip
    if rest and (
        [number(s) for s in rest[0].get_size()] != [n_] or element_type(str(rest[0].get_dtype())) != p.output_type
    ):
        raise NotEligible(
            f"bias is {rest[0].get_dtype()} {list(rest[0].get_size())}: ({n_},) of {layout.dtype} is taken"
        )
    why = p.why_not(device) or _why_not_here(p, device.target)
    if why:
        raise NotEligible(why)
    return Request(OP, p, "symbolic" if m_ is None else m_, 1, tuple(aten.input_nodes), layout)


def only_ours(request: Any) -> bool:
    """Whether ATen has no kernel: MX blocks on a CPU. Its candidate would end the user's compilation."""
    return request.problem.scaling == "block" and request.layout.device.type == "cpu"


def _why_not_here(p: ScaledGemmProblem, target: str) -> str | None:
    from templates.scaled_gemm import gfx950, sm90a

    templates: dict[str, Any] = {"gfx950": gfx950, "sm90a": sm90a}
    return None if target == "x86" else templates[target].why_not(p)


def errors(spec: Any) -> tuple[float, float]:
    """What a specification's sums may err by beyond f32's, see `sm90a.errors`."""
    from templates.scaled_gemm import sm90a

    return sm90a.errors(spec.problem) if spec.target == "sm90a" else (0.0, 0.0)


def _scaling(scale_a: Any, scale_b: Any, m: int | None, n: int, k: int) -> str:
    """Which scaling the scales' types and sizes say. NotEligible for others."""
    from .requests import NotEligible, number

    kinds = [str(s.get_dtype()) for s in (scale_a, scale_b)]
    sizes = [[number(x) for x in s.get_size()] for s in (scale_a, scale_b)]
    if kinds == ["torch.float8_e8m0fnu"] * 2:
        wanted = ((m, k // BLOCK), (n, k // BLOCK))
        count = lambda size: None if None in size else _product(size)
        for name, size, (rows, blocks) in zip(("A", "B"), sizes, wanted, strict=True):
            known = size[-1] == blocks if rows is None else count(size) == rows * blocks
            if not known or _turned(size, rows, blocks):
                raise NotEligible(f"scales of {name} are {size}: {rows} x {blocks}, not swizzled, are taken")
        return "block"
    if kinds != ["torch.float32"] * 2:
        raise NotEligible(f"scales are {kinds[0]} and {kinds[1]}")
    if all(_product(s) == 1 for s in sizes if None not in s) and None not in sizes[0]:
        return "tensor"
    if sizes == [[m, 1], [1, n]]:
        return "row"
    raise NotEligible(f"float32 scales of {sizes[0]} and {sizes[1]}: one each, or (M, 1) and (1, N), are taken")


def _turned(size: Sequence[Any], rows: Any, blocks: Any) -> bool:
    """Whether scales lie as (blocks, rows) where that is not (rows, blocks). (In an order that asks nothing of a
    symbolic size where scales lie as they should.)"""
    return len(size) == 2 and size[1] != blocks and size[0] == blocks and size[1] == rows


def _product(size: Sequence[int | None]) -> int:
    out = 1
    for s in size:
        out *= s or 0
    return out


def build(problem: ScaledGemmProblem, config: dict, target: str) -> Any:
    """Compiles one kernel in this process."""
    from templates.scaled_gemm.build import build_from_json

    return build_from_json(problem, config, target)


# -- the same as dense products
def dequantized(codes: Any, scales: Any) -> Any:
    """(rows, K) f32 of codes (rows, K) and float8_e8m0fnu scales (rows, K / 32)."""
    return plain(codes) * scales.float().reshape(codes.shape[0], -1).repeat_interleave(BLOCK, -1)


def plain(codes: Any) -> Any:
    """(rows, K) f32 of FP8 (rows, K) or packed FP4 (rows, K / 2)."""
    import torch

    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.float()
    from flykernels.microscaling import values

    table = torch.tensor(values(f4e2m1), dtype=torch.float32, device=codes.device)
    raw = codes.contiguous().view(torch.uint8).long()
    return torch.stack([table[raw & 15], table[raw >> 4]], -1).flatten(-2)


def as_dense(p: ScaledGemmProblem, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """(specification of the dense product, its operands A (M, K), B (K, N) and bias in f32) of a scaled one."""
    from .kernels import Spec

    a, b, scale_a, scale_b, *rest = inputs
    if p.scaling == "block":
        x, y = dequantized(a, scale_a), dequantized(b.t(), scale_b).t()
    else:
        x, y = plain(a) * scale_a.reshape(-1, 1), plain(b.t()).t() * scale_b.reshape(1, -1)
    dense = GemmProblem(n=p.n, k=p.k, dtype="f32", out_dtype=p.out_dtype, bias=p.bias, m_hint=p.m_hint)
    return Spec("mm" if p.bias == "none" else "addmm", "x86", dense, {}), [x, y, *rest]


def products(p: ScaledGemmProblem, inputs: Sequence[Any], out: Any) -> list[tuple[Any, list[Any], Any]]:
    """(specification, operands, result) of the one dense product that a scaled one is."""
    return [(*as_dense(p, inputs), out)]


def variants(p: ScaledGemmProblem) -> int:
    """How many kinds of inputs a measurement is the mean of."""
    return 1


def sane(p: ScaledGemmProblem, inputs: Sequence[Any], variant: int = 0) -> list[Any]:
    """Operands like `inputs` with finite numbers of moderate size: what a benchmark made may hold any bytes."""
    import torch

    out = []
    for i, x in enumerate(inputs):
        made = torch.empty_strided(x.shape, x.stride(), dtype=torch.uint8 if i < 2 else x.dtype, device=x.device)
        if i < 2:  # codes without the highest exponents
            made = made.copy_(torch.randint(0, 256, x.shape, device=x.device) & 0xBF).view(x.dtype)
        elif x.dtype == torch.float8_e8m0fnu:
            made = torch.randint(*SCALES, x.shape, device=x.device, dtype=torch.uint8).view(x.dtype)
        else:
            made.copy_(torch.rand(x.shape, device=x.device) + 0.5)
        out.append(made)
    return out


# -- calls
def aten(p: ScaledGemmProblem) -> Callable:
    """What ATen computes: callable(a, b, scale_a, scale_b, [bias], out=). Where it has no kernel on a CPU (MX blocks; a
    scale for each row, before 2.13): the dense product."""
    import torch

    def run(a: Any, b: Any, scale_a: Any, scale_b: Any, *rest: Any, out: Any) -> Any:
        if a.device.type == "cpu" and (p.scaling == "block" or (p.scaling == "row" and not _aten_scales_rows())):
            _, (x, y, *added) = as_dense(p, (a, b, scale_a, scale_b, *rest))
            return out.copy_(x @ y + added[0].float() if added else x @ y)
        bias = rest[0] if rest else None
        asked = {"bias": bias, "out_dtype": out.dtype, FAST: p.fast_accum}
        return out.copy_(torch._scaled_mm(a, b, scale_a, scale_b, **asked))

    return run


@cache
def _aten_scales_rows() -> bool:
    """Whether this torch multiplies FP8 with a scale for each row on a CPU."""
    import torch

    a, one = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), one, one.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def bind(code: Any, spec: Any) -> Callable:
    """callable(a, b, scale_a, scale_b, [bias], out=) running `code` or, where operands do not fit, ATen."""
    from flykernels.launch.driver import DriverError

    p = spec.problem
    if code.target == "x86":
        from flykernels.launch import host

        launch, fits = host.load(code).launcher(), _lies_as_built
    else:
        from flykernels.launch.current import Launcher

        launch, fits = Launcher(code), lambda *x: _lies_as_built(*x) and _aligned(*x) and not overlap(*x)
    fallback, width = aten(p), p.row_bytes("a")

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, *rest: Any, out: Any) -> Any:
        if a.shape[1] != width or not fits(p, a, b, scale_a, scale_b, out):
            log.warning("%s %s: operands are not laid out as compiled for; ATen serves this call", spec.op, spec.name)
            return fallback(a, b, scale_a, scale_b, *rest, out=out)
        tensors = dict(zip(pointers(p), (a, b, scale_a, scale_b, *rest, out), strict=True))
        try:
            launch(*(tensors[name].data_ptr() for name in pointers(p)), *scalar_values(a, b, out))
        except DriverError as e:
            if not e.out_of_memory:
                raise
            log.warning("%s %s: %s; ATen serves this call", spec.op, spec.name, e)
            return fallback(a, b, scale_a, scale_b, *rest, out=out)
        return out

    return call


def _lies_as_built(p: ScaledGemmProblem, a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any) -> bool:
    rows_of_scales = a.shape[0] * p.blocks if p.scaling == "block" else 1 if p.scaling == "tensor" else a.shape[0]
    return (
        a.stride(1) == 1 and b.stride(0) == 1 and (out.stride(1) == 1 or p.n == 1)
        and scale_a.numel() == rows_of_scales and scale_a.is_contiguous() and scale_b.is_contiguous()
    )  # fmt: skip


def _aligned(p: ScaledGemmProblem, a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any) -> bool:
    size = out.element_size()
    return (
        (a.data_ptr() | a.stride(0)) % ALIGN == 0 and (b.data_ptr() | b.stride(1)) % ALIGN == 0
        and (out.data_ptr() | out.stride(0) * size) % p.align_c == 0
        and (scale_a.data_ptr() | scale_b.data_ptr()) % 4 == 0
    )  # fmt: skip


def overlap(p: ScaledGemmProblem, a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any) -> bool:
    """Whether rows lie in each other's place: no tensor map describes that, and gfx950's loads take what follows the
    last row's beginning by a whole row's distance for part of it."""
    lines = ((a, 0), (b, 1), (out, 0))
    return any(x.shape[axis] > 1 and x.stride(axis) < x.shape[1 - axis] for x, axis in lines)


# -- shapes of results: torch counts the scales of MX blocks as if they were swizzled (pytorch #172627)
def meta_for(original: Callable, unpack: Callable) -> Callable:
    """A meta function that knows scales that are not swizzled, one for 32 numbers, and refuses those of MX blocks that
    are neither that many nor as many as the swizzled arrangement has; anything else is `original`'s.

    unpack(arguments...) -> (a, b, scale_a, scale_b, out dtype), or None to leave the call to `original`."""
    import torch

    def meta(*args: Any, **kwargs: Any) -> Any:
        found = unpack(*args, **kwargs)
        if found is not None:
            a, b, scale_a, scale_b, out_dtype = found
            mx = scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu and a.dim() == b.dim() == 2
            if mx and a.stride(1) == 1 and b.stride(0) == 1 and scale_a.is_contiguous() and scale_b.is_contiguous():
                per = [2 if x.dtype == torch.float4_e2m1fn_x2 else 1 for x in (a, b)]
                k, sizes = a.shape[1] * per[0], (a.shape[0], b.shape[1])
                counts = [scale_a.numel(), scale_b.numel()]
                if per[0] != per[1]:
                    raise RuntimeError(
                        f"A is {a.dtype} and B {b.dtype}: torch's scaled products take operands of one width. Do: "
                        "inductor_plugin.ops.mx_matmul(a, b, scale_a, scale_b), which takes any two"
                    )
                if a.shape[1] == b.shape[0] and k % BLOCK == 0:
                    if counts == [rows * (k // BLOCK) for rows in sizes]:
                        if counts != [swizzled(rows, k) for rows in sizes]:  # these may have any shape
                            _check_not_turned(scale_a, scale_b, sizes, k // BLOCK)
                        return a.new_empty(sizes, dtype=out_dtype or torch.bfloat16)
                    if counts != [swizzled(rows, k) for rows in sizes]:  # which not every torch finds
                        raise RuntimeError(
                            f"{counts[0]} and {counts[1]} scales for {sizes[0]} rows of A and {sizes[1]} columns of B, "
                            f"K = {k}: one for {BLOCK} numbers is wanted of both, or of both the swizzled arrangement"
                        )
        return original(*args, **kwargs)

    return meta


def _check_not_turned(scale_a: Any, scale_b: Any, sizes: tuple, blocks: Any) -> None:
    for name, scale, rows in (("A", scale_a, sizes[0]), ("B", scale_b, sizes[1])):
        if _turned(scale.shape, rows, blocks):
            raise RuntimeError(
                f"the scales of {name} are {tuple(scale.shape)}: they must be (rows, K / {BLOCK}) = {(rows, blocks)}. "
                "Do: transpose them and make them contiguous"
            )


def swizzled(rows: Any, k: Any) -> Any:
    """Scales of the swizzled arrangement: rows in whole 128, blocks in whole 4."""
    up = lambda x, to: (x + to - 1) // to * to
    return up(rows, 128) * up(k // BLOCK, 4)


def first_version(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, *_, **__) -> tuple:
    return a, b, scale_a, scale_b, out_dtype


def second_version(
    a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias=None, out_dtype=None, *_, **__
) -> tuple | None:
    """As F.scaled_mm passes them on (torch 2.13): lists of scales, of ScalingType's and SwizzleType's numbers.

    Only one E8M0 scale for 32 numbers, not swizzled, is answered here: of recipes of several scales, swizzled ones and
    all others torch's own function says what fits."""
    mx = [BLOCKWISE_1X32]
    single = len(scale_a) == len(scale_b) == 1 and not any(swizzle_a) and not any(swizzle_b)
    single = single and [int(x) for x in recipe_a] == mx and [int(x) for x in recipe_b] == mx
    return (a, b, scale_a[0], scale_b[0], out_dtype) if single else None
