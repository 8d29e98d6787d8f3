"""Scaled grouped products as the plugin sees them: aten._scaled_grouped_mm, and _scaled_grouped_mm_v2 where
lower_scaled_grouped.py turns it into that call; scales of MX blocks come as that file has put them, not swizzled.

ATen has kernels for NVIDIA GPUs alone. Elsewhere ours are all there are: a call whose operands do not lie as they were
compiled for is served by one dense product a group, of the dequantised operands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from templates.gemm.problem import LARGEST, GemmProblem
from templates.grouped_gemm.reference import bounds
from templates.grouped_gemm.scaled.arguments import ALIGN, POINTERS, WORD, scalar_values
from templates.grouped_gemm.scaled.problem import ScaledGroupedProblem

from . import grouped, scaled

log = logging.getLogger(__name__)

OP, TEMPLATE, RUN_TIME_SIZE = "_scaled_grouped_mm", "grouped_gemm", "tokens"
PROBLEM = ScaledGroupedProblem
OFFS = 4  # position among the operands
FORMS = {(2, 3): "m", (2, 2): "k"}


# -- what is asked
def request_from(aten: Any) -> Any:
    """The request behind an autotuning call of _scaled_grouped_mm. NotEligible with the reason."""
    from flykernels.dtypes import dtype as element_type

    from . import private
    from .devices import device_for
    from .requests import NotEligible, Request, alignments, number, unit_stride

    why = private.stands_aside()
    if why:
        raise NotEligible(why)
    extra = {k: v for k, v in aten.kwargs.items() if k not in scaled.READ and v is not None}
    if extra or len(aten.input_nodes) != OFFS + 1:
        raise NotEligible(
            f"{aten.name} with {extra or f'{len(aten.input_nodes)} tensors'}: A, B, scales, offs are read"
        )
    a, b, scale_a, scale_b, offs = aten.input_nodes
    layout, device = aten.layout, device_for(aten.layout.device)
    ranks = len(a.get_size()), len(b.get_size())
    if ranks not in FORMS:
        raise NotEligible(f"operands of {ranks} axes: (T, K) by (G, K, N) and (M, T) by (T, N) have kernels")
    if device.target == "sm90a":
        raise NotEligible("sm_90a has no scaled grouped kernels of ours; ATen and Triton serve it")
    form = FORMS[ranks]
    kinds = [element_type(str(x.get_dtype())) for x in (a, b)]
    (m, ka), n = a.get_size(), b.get_size()[-1]
    per = 2 if kinds[0].bits == 4 else 1
    tokens = m if form == "m" else ka
    sizes = {name: number(size) for name, size in (("m", m), ("n", n), ("k", ka)) if name != form}
    groups = number(offs.get_size()[0])
    if None in sizes.values() or groups is None:
        raise NotEligible(f"M={m}, N={n}, K={ka}, {groups} groups: only the tokens' axis may be symbolic")
    if form == "m":
        sizes["k"] *= per  # type: ignore[operator]
    tokens_ = number(tokens)
    if tokens_ == 0:
        raise NotEligible("no tokens: nothing to multiply")
    for name, x, wanted in (("A", a, "row"), ("B", b, "col"), ("the output", None, "row")):
        size, stride = (layout.size, layout.stride) if x is None else (x.get_size(), x.get_stride())
        if unit_stride(size[-2:], stride[-2:]) != wanted:
            raise NotEligible(f"{name} has strides {list(stride)}: it must be {wanted}-major")
    aligned = alignments(a.get_layout(), b.get_layout(), [layout])
    hint = tokens_ if tokens_ is not None else private.symbolic_hint(tokens)
    p = ScaledGroupedProblem(
        form, groups, **{**sizes, form: 0}, a_dtype=kinds[0].name, b_dtype=kinds[1].name,  # type: ignore[arg-type]
        out_dtype=element_type(str(layout.dtype)).name, tokens_hint=hint * (per if form == "k" else 1),
        align_scales=1 if form == "k" else WORD, scaling=_scaling(form, ranks, scale_a, scale_b),
        **(aligned if device.target != "x86" else {}),
    )  # fmt: skip
    why = p.why_not(device) or _why_not_here(p, device.target)
    if why:
        raise NotEligible(why)
    named = "symbolic" if tokens_ is None else tokens_
    return Request(OP, p, named, 1, tuple(aten.input_nodes), layout)


def _scaling(form: str, ranks: tuple[int, int], scale_a: Any, scale_b: Any) -> str:
    """Which scaling the scales' types and axes say. NotEligible for others."""
    from .requests import NotEligible

    kinds, axes = (
        [f(s) for s in (scale_a, scale_b)] for f in (lambda s: str(s.get_dtype()), lambda s: len(s.get_size()))
    )
    if kinds == ["torch.float8_e8m0fnu"] * 2 and axes == [2, ranks[1]]:
        return "block"
    if kinds == ["torch.float32"] * 2 and axes == [1, 2] and form == "m":
        return "row"
    raise NotEligible(
        f"scales of {kinds[0]} and {kinds[1]}, {axes} axes: (T,) and (G, N) float32, or MX blocks, are taken"
    )


def _why_not_here(p: ScaledGroupedProblem, target: str) -> str | None:
    from templates.grouped_gemm.scaled import gfx950

    return gfx950.why_not(p) if target == "gfx950" else None


def only_ours(request: Any) -> bool:
    """Whether ATen has no kernel: its candidate would end the user's program."""
    import torch

    return request.layout.device.type == "cpu" or torch.version.hip is not None


def build(problem: ScaledGroupedProblem, config: dict, target: str) -> Any:
    """Compiles one kernel in this process."""
    from templates.grouped_gemm.scaled.build import build_from_json

    return build_from_json(problem, config, target)


# -- measuring
def errors(spec: Any) -> tuple[float, float]:
    """What a specification's sums may err by beyond f32's: nothing."""
    return 0.0, 0.0


def variants(p: ScaledGroupedProblem) -> int:
    """How many kinds of inputs a measurement is the mean of, as of unscaled grouped products."""
    return len(grouped.SHARES) if p.form == "m" else 1


def sane(p: ScaledGroupedProblem, inputs: Sequence[Any], variant: int = 0) -> list[Any]:
    """Finite numbers of moderate size, and offs that groups may have."""
    import torch

    *operands, offs = inputs
    operands = scaled.sane(None, operands)  # type: ignore[arg-type]
    tokens = tokens_of(p, operands[0])
    share, step = grouped.SHARES[variant % len(grouped.SHARES) if p.form == "m" else 0], p.unit
    shares = [share(g, p.groups) for g in range(p.groups)]
    ends = [round(sum(shares[: g + 1]) / sum(shares) * tokens / step) * step for g in range(p.groups - 1)]
    return [*operands, torch.tensor([*ends, tokens // step * step], dtype=offs.dtype, device=offs.device)]


def tokens_of(p: ScaledGroupedProblem, a: Any) -> int:
    return a.shape[0] if p.form == "m" else a.shape[1] * p.per_byte("a")


def products(p: ScaledGroupedProblem, inputs: Sequence[Any], out: Any) -> Iterator[tuple[Any, list[Any], Any]]:
    """(specification, operands, result) of every group as a dense product in f32."""
    from .kernels import Spec

    a, b, scale_a, scale_b, offs = inputs
    ends = bounds(offs.cpu().numpy() // p.unit * p.unit, tokens_of(p, a)).tolist()
    whole = lambda codes, scales: scaled.plain(codes) * scales.reshape(-1, 1) if p.scaling == "row" else \
        scaled.dequantized(codes, scales)  # fmt: skip
    x = whole(a, scale_a)
    y = whole(b.t(), scale_b) if p.form == "k" else None
    for g in range(p.groups):
        part = slice(*ends[g : g + 2])
        if p.form == "m":
            operands, of_c = [x[part], whole(b[g].t(), scale_b[g]).t()], out[part]
        else:
            operands, of_c = [x[:, part], y[:, part].t()], out[g]  # type: ignore[index]
        if of_c.numel():
            dense = GemmProblem(n=of_c.shape[-1], k=operands[0].shape[-1], dtype="f32", out_dtype=p.out_dtype)
            yield Spec("mm", "x86", dense, {}), operands, of_c


# -- calls
def aten(p: ScaledGroupedProblem) -> Callable:
    """The same without a kernel of ours: callable(a, b, scale_a, scale_b, offs, out=). Rows that no group has are left
    alone."""

    def run(*inputs: Any, out: Any) -> Any:
        for _, (x, y), of_c in products(p, inputs, out):
            of_c.copy_(x @ y)
        return out

    return run


def bind(code: Any, spec: Any) -> Callable:
    """callable(a, b, scale_a, scale_b, offs, out=) running `code`. On the CPU nonsense in offs is a ValueError; on
    a GPU nobody asks, and the kernel cuts it to what operands hold."""
    from .ops_grouped import look_at

    p = spec.problem
    if code.target == "x86":
        from flykernels.launch import host

        launch, fits = host.load(code).launcher(), lies_as_built
    else:
        from flykernels.launch.current import Launcher

        launch, fits = Launcher(code), lambda *x: lies_as_built(*x) and _aligned(*x)
    fallback = aten(p)

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, *, out: Any) -> Any:
        tensors = (a, b, scale_a, scale_b, offs, out)
        if offs.device.type == "cpu":
            look_at(offs, tokens_of(p, a), p.unit)
        if not fits(p, *tensors):
            log.warning("%s %s: operands are not what was compiled for; dense products serve", spec.op, spec.name)
            return fallback(*tensors[:-1], out=out)
        if not tokens_of(p, a):
            return out.zero_() if p.form == "k" else out
        given = dict(zip(POINTERS, tensors, strict=True))
        numbers = scalar_values(p, a, b, scale_a, scale_b, out)
        launch(*(given[name].data_ptr() for name in POINTERS), *numbers)
        return out

    return call


def lies_as_built(p: ScaledGroupedProblem, a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, out: Any) -> bool:
    """Whether sizes, and where neighbours lie, are what a kernel was compiled for."""
    if len({x.device for x in (a, b, scale_a, scale_b, offs, out)}) > 1 or tokens_of(p, a) > LARGEST:
        return False
    width = lambda which, n: n // p.per_byte(which)
    if p.form == "m":
        sizes = a.shape[1] == width("a", p.k) and b.shape == (p.groups, width("b", p.k), p.n)
    else:
        sizes = a.shape[0] == p.m and b.shape == (width("b", tokens_of(p, a)), p.n)
    neighbours = a.stride(1) == 1 and b.stride(-2) == 1 and (out.stride(-1) == 1 or p.n == 1)
    in_line = offs.shape == (p.groups,) and (p.groups == 1 or offs.stride(0) == 1)
    return sizes and neighbours and in_line and all(s.stride(-1) == 1 or s.shape[-1] == 1 for s in (scale_a, scale_b))


def _aligned(p: ScaledGroupedProblem, a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any, out: Any) -> bool:
    """On a GPU: what wide loads and stores need of addresses and strides."""
    steps = lambda x: [s * x.element_size() for s, n in zip(x.stride(), x.shape, strict=True) if s != 1 and n > 1]
    good = lambda x, align: all(v % align == 0 for v in (x.data_ptr(), *steps(x)))
    scales = all(good(s, p.align_scales) for s in (scale_a, scale_b))
    return good(a, ALIGN) and good(b, ALIGN) and good(out, p.align_c) and scales
