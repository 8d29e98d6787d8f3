"""Grouped products as the plugin sees them: aten._grouped_mm, which F.grouped_mm and its gradients lower to.

ATen's candidate is read for what is asked; the kernel is called, or ATen where operands do not lie as it was built for;
and for the comparison with ATen there is one dense product a group. What `offs` say is known only when they lie on the
CPU: there nonsense goes to ATen. On a GPU nobody asks; the kernel cuts it to what operands hold (`schedule.Schedule`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from templates.gemm.problem import LARGEST, GemmProblem
from templates.grouped_gemm.arguments import pointers, scalar_values, tokens_of
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.reference import bounds

log = logging.getLogger(__name__)

OP, TEMPLATE, RUN_TIME_SIZE = "_grouped_mm", "grouped_gemm", "tokens"
PROBLEM = GroupedGemmProblem
FORMS = {(2, 3): "m", (3, 2): "n", (2, 2): "k", (3, 3): "batch"}  # by how many axes A and B have
# Of the tokens, group g of G, while candidates are measured: all alike; the i-th largest 1 / i, in a mixed-up order; a
# third of them none.
SHARES: tuple[Callable[[int, int], float], ...] = (
    lambda g, groups: 1.0,
    lambda g, groups: 1 / (1 + g * MIX % groups),
    lambda g, groups: float(g % 3 != 1 or groups == 1),
)
MIX = 61  # a prime
KEPT_MOST = 1024  # sizes and strides whose arguments are kept
TILE_MOST, SPAN_MOST = 256, 0xFFFFF000  # rows of a tile; bytes that it may span where a buffer descriptor addresses it


# -- what is asked
def request_from(aten: Any) -> Any:
    """The request behind an autotuning call of _grouped_mm. NotEligible with the reason."""
    from . import private
    from .devices import device_for
    from .requests import NotEligible, Request, alignments, number, type_name, unit_stride

    why = private.stands_aside()
    if why:
        raise NotEligible(why)
    a, b, *rest = aten.input_nodes
    layout, device = aten.layout, device_for(aten.layout.device)
    extra = {k: v for k, v in aten.kwargs.items() if v is not None and not (k == "out_dtype" and v == layout.dtype)}
    if extra or len(rest) > 1:
        raise NotEligible(f"{aten.name} with {extra or 'a bias'}")
    if a.get_dtype() != b.get_dtype():
        raise NotEligible(f"operands of different dtypes: {a.get_dtype()}, {b.get_dtype()}")
    ranks = len(a.get_size()), len(b.get_size())
    form = FORMS.get(ranks)
    if form is None or (form != "batch") != bool(rest):
        raise NotEligible(f"operands of {ranks} axes {'with' if rest else 'without'} offs")
    (m, k), n = a.get_size()[-2:], b.get_size()[-1]
    run_time, tokens = ("m", m) if form == "batch" else (form, {"m": m, "n": n, "k": k}[form])
    sizes: dict[str, Any] = {name: number(size) for name, size in (("m", m), ("n", n), ("k", k)) if name != run_time}
    groups = number((rest[0] if rest else a).get_size()[0])
    if None in sizes.values() or groups is None:
        raise NotEligible(f"M={m}, N={n}, K={k}, {groups} groups: only the tokens' axis may be symbolic")
    tokens_ = number(tokens)
    if tokens_ == 0:
        raise NotEligible(f"M={m}, N={n}, K={k}: nothing to multiply")
    if unit_stride(layout.size[-2:], layout.stride[-2:]) != "row":
        raise NotEligible(f"output strides {list(layout.stride)}: templates write rows")
    strides = [unit_stride(x.get_size()[-2:], x.get_stride()[-2:]) for x in (a, b)]
    aligned: dict[str, Any] = alignments(a.get_layout(), b.get_layout(), [layout])
    p = GroupedGemmProblem(
        form, groups, **{**sizes, run_time: 0}, dtype=type_name(a.get_dtype()), out_dtype=type_name(layout.dtype),
        a=strides[0], b=strides[1], tokens_hint=tokens_ if tokens_ is not None else private.symbolic_hint(tokens),
        **(aligned if device.target != "x86" else {}),
    )  # fmt: skip
    why = p.why_not(device)
    if why:
        raise NotEligible(why)
    return Request(OP, p, "symbolic" if tokens_ is None else tokens_, 1, tuple(aten.input_nodes), layout)


def build(problem: GroupedGemmProblem, config: dict, target: str) -> Any:
    """Compiles one kernel in this process."""
    from templates.grouped_gemm.build import build_from_json

    return build_from_json(problem, config, target)


def only_ours(request: Any) -> bool:
    """Whether ATen has no kernel: it has, everywhere."""
    return False


# -- measuring
def errors(spec: Any) -> tuple[float, float]:
    """What a specification's sums may err by beyond f32's: nothing."""
    return 0.0, 0.0


def variants(p: GroupedGemmProblem) -> int:
    """How many kinds of inputs a measurement is the mean of: tuning does not know how rows will be shared out, and what
    is fastest where all groups are alike is often not where they differ."""
    return len(SHARES) if p.form == "m" else 1


def sane(p: GroupedGemmProblem, inputs: Sequence[Any], variant: int = 0) -> list[Any]:
    """`inputs` with offs that groups may have: what a benchmark made may hold any numbers.

    variant: which of SHARES. Evenly in other forms than "m", since ATen's kernels ask for more there: each group some,
    beginning at a multiple of 16 bytes."""
    import torch

    tokens = tokens_of(p.form, *inputs[:2])
    step = 16 // p.input_type.bytes
    share = SHARES[variant % len(SHARES) if p.form == "m" else 0]
    shares = list(accumulate(share(g, p.groups) for g in range(p.groups)))
    ends = [min(tokens, round(upto / shares[-1] * tokens / step) * step) for upto in shares[:-1]]
    made = lambda x: torch.tensor([*ends, tokens], dtype=x.dtype, device=x.device)
    return [made(x) if x.dtype == torch.int32 and x.dim() == 1 else x for x in inputs]


def products(p: GroupedGemmProblem, inputs: Sequence[Any], out: Any) -> Iterator[tuple[Any, list[Any], Any]]:
    """(specification, operands, result) of every group as a dense product."""
    from .kernels import Spec

    a, b, *offs = inputs
    ends = [0, *bounds(offs[0].cpu().numpy(), tokens_of(p.form, a, b))[1:].tolist()] if offs else []
    for g in range(p.groups):
        part = slice(*ends[g : g + 2]) if offs else slice(None)
        of_a = a[part] if p.form == "m" else a[:, part] if p.form == "k" else a[g]
        of_b = b[:, part] if p.form == "n" else b[part] if p.form == "k" else b[g]
        of_c = out[part] if p.form == "m" else out[:, part] if p.form == "n" else out[g]
        if of_c.numel():
            dense = GemmProblem(n=of_c.shape[-1], k=of_a.shape[-1], dtype=p.dtype, out_dtype=p.out_dtype)
            yield Spec("mm", "x86", dense, {}), [of_a, of_b], of_c


# -- calls
def aten(p: GroupedGemmProblem) -> Callable:
    """What ATen computes: callable(a, b, [offs], out=)."""
    import torch

    def run(a: Any, b: Any, *offs: Any, out: Any) -> Any:
        return out.copy_(torch._grouped_mm(a, b, *offs))

    return run


def bind(code: Any, spec: Any) -> Callable:
    """callable(a, b, [offs], out=) running `code` or, where operands do not fit, ATen.

    What sizes and strides say is worked out once; addresses, and on the CPU offs, are looked at in each call."""
    p = spec.problem
    if code.target == "x86":
        from flykernels.launch import host

        launch, fits, aligns, looks = host.load(code).launcher(), lambda *_, **__: True, {}, True
    else:
        from flykernels.launch.current import Launcher

        launch, fits, looks = Launcher(code), aligned if code.target == "sm90a" else within_buffers, False
        aligns = {"a": p.align_a, "b": p.align_b, "c": p.align_c}
    fallback, names, known = aten(p), pointers(p), {}  # type: ignore[var-annotated]
    masks = [aligns.get(name, 1) - 1 for name in names]

    def scalars(a: Any, b: Any, *offs: Any, out: Any) -> tuple[int, ...] | None:
        """The scalar arguments; None where sizes or strides do not fit."""
        if len(known) > KEPT_MOST:
            known.clear()
        good = lies_as_built(p, a, b, *offs, out=out) and fits(p, a, b, *offs, out=out)
        return scalar_values(p, a, b, out) if good else None

    def call(a: Any, b: Any, *offs: Any, out: Any) -> Any:
        key = (a.shape, a.stride(), b.shape, b.stride(), out.stride(), *((o.shape, o.stride(), o.device) for o in offs))
        if key not in known:
            known[key] = scalars(a, b, *offs, out=out)
        numbers = known[key]
        addresses = [x.data_ptr() for x in (a, b, *offs, out)]
        misplaced = any(address & mask for address, mask in zip(addresses, masks, strict=True))
        if numbers is None or misplaced or (looks and not in_order(p, a, b, *offs)):
            log.warning("%s %s: operands are not what was compiled for; ATen serves this call", spec.op, spec.name)
            return fallback(a, b, *offs, out=out)
        if not tokens_of(p.form, a, b):
            return out.zero_() if p.form == "k" else out
        launch(*addresses, *numbers)
        return out

    return call


def lies_as_built(p: GroupedGemmProblem, a: Any, b: Any, *offs: Any, out: Any) -> bool:
    """Whether sizes, and where neighbours lie, are what a kernel was compiled for."""
    tokens = tokens_of(p.form, a, b)
    m, n, k = (tokens if x == ("m" if p.form == "batch" else p.form) else getattr(p, x) for x in "mnk")
    lead = lambda name: (p.groups,) if p.has_groups(name) else ()
    if tokens > LARGEST or a.shape != (*lead("a"), m, k) or b.shape != (*lead("b"), k, n):
        return False
    if offs and (offs[0].shape != (p.groups,) or (p.groups > 1 and offs[0].stride(0) != 1)):
        return False
    unit = lambda x, layout: {"row": x.shape[-1] < 2 or x.stride(-1) == 1, "col": x.shape[-2] < 2 or x.stride(-2) == 1}
    return all(unit(x, layout).get(layout, True) for x, layout in ((a, p.a), (b, p.b), (out, "row")))


def in_order(p: GroupedGemmProblem, a: Any, b: Any, *offs: Any) -> bool:
    """On the CPU: whether offs do not decrease and stay within T; of anything else ATen makes what it makes."""
    if not offs:
        return True
    ends = [0, *offs[0].tolist(), tokens_of(p.form, a, b)]
    return offs[0].device.type == "cpu" and all(first <= end for first, end in pairwise(ends))


def aligned(p: GroupedGemmProblem, a: Any, b: Any, *offs: Any, out: Any) -> bool:
    """On a GPU: whether strides are multiples of what wide loads and TMA need, and nothing is repeated but whole
    groups. One group's rows may lie anywhere in this."""
    if any(x.device != out.device for x in (a, b, *offs)):
        return False
    for x, align, layout in ((a, p.align_a, p.a), (b, p.align_b, p.b), (out, p.align_c, "row")):
        size = x.element_size()
        outer = {"row": (-2,), "col": (-1,)}.get(layout, (-2, -1))
        steps = [x.stride(i) for i in (*outer, *((0,) if x.dim() == 3 else ())) if x.shape[i] > 1]
        if any(s * size % align for s in steps):
            return False
        if any(x.stride(i) == 0 and x.shape[i] > 1 for i in outer):
            return False
    return True


def within_buffers(p: GroupedGemmProblem, a: Any, b: Any, *offs: Any, out: Any) -> bool:
    """On HIP: `aligned`, and no tile of A or B spans more than a buffer descriptor addresses."""
    most = SPAN_MOST // (TILE_MOST * p.input_type.bytes)
    return aligned(p, a, b, *offs, out=out) and all(max(x.stride()[-2:]) <= most for x in (a, b))
