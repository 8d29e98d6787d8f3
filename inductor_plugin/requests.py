"""From an autotuning call of Inductor to a problem that a template knows: what is asked, of which tensors, and why not.

Nothing here needs a device or a compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flykernels.dtypes import dtype as element_type
from templates.gemm.problem import GemmProblem
from tuning_cache import Key

from . import private
from .devices import device_for
from .families import OWN
from .fingerprint import versions
from .strides import alignments, number, unit_stride

SUPPORTED_TYPES = ("f32", "bf16", "f16")


class NotEligible(Exception):
    """Why a problem gets no candidate of ours, in words. Never seen by the user's program."""


@dataclass(frozen=True)
class Op:
    """How an ATen extern kernel's inputs are to be read.

    a, b, bias  positions among its input nodes (bias None: it has none)
    batched     operands have a leading batch axis
    weight      b's position holds the weight as (N, K) and not (K, N): a frozen Linear layer
    """

    a: int
    b: int
    bias: int | None = None
    batched: bool = False
    weight: bool = False


# By the name of Inductor's ExternKernelChoice.
OPS = {
    "mm": Op(0, 1),
    "bmm": Op(0, 1, batched=True),
    "addmm": Op(1, 2, bias=0),
    "baddbmm": Op(1, 2, bias=0, batched=True),
    **{op: Op(0, 1) for op in OWN},  # read by modules of their own
    "_mkl_linear": Op(0, 2, weight=True),  # inputs: x, MKL's packed weight, the weight itself
}


@dataclass(frozen=True)
class Request:
    """A problem with the IR nodes it is asked of.

    problem   a GemmProblem, or of one of families.OWN its own
    m         the size that only the run knows, or "symbolic"
    nodes     in the order the kernel takes them: a, b, [scales], bias if any, residual if any
    constant  B as a constant tensor of shape (K, N), where the graph has it frozen
    """

    op: str
    problem: Any
    m: int | str
    batch: int | str
    nodes: tuple
    layout: Any
    constant: Any = None

    @property
    def key(self) -> Key:
        """The tuning cache's key: the problem with the sizes it is tuned for, this machine, these versions."""
        own = OWN.get(self.op)
        problem = {**self.problem.key(), own.RUN_TIME_SIZE if own else "m": self.m}
        if own is None and self.problem.batched:
            problem["batch"] = self.batch
        template = own.TEMPLATE if own else "gemm"
        description = device_for(self.layout.device).description(self.layout.device)
        return Key(self.op, problem, description, versions(template))


@functools.cache
def type_name(torch_dtype: Any) -> str:
    """Our name of a torch dtype. NotEligible for one that no GEMM template takes."""
    try:
        name = element_type(str(torch_dtype)).name
    except ValueError:
        name = ""
    if name not in SUPPORTED_TYPES:
        raise NotEligible(f"dtype {torch_dtype}: matrix templates take {', '.join(SUPPORTED_TYPES)}")
    return name


def scalars_allow_bias(kwargs: dict) -> bool:
    """Whether addmm's alpha and beta leave C = A B + bias (True) or C = A B (False). NotEligible for anything else."""
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    if alpha != 1 or beta not in (0, 1):
        raise NotEligible(f"alpha={alpha}, beta={beta}: templates compute A B + bias without scaling")
    return beta == 1


def from_nodes(
    op: str, a: Any, b: Any, bias: Any, layout: Any, *, batched: bool = False, activation: str = "none",
    residual: Any = None, constant: Any = None,
) -> Request:  # fmt: skip
    """The request for C = activation(a b + bias) + residual over IR nodes. NotEligible with the reason."""
    why = private.stands_aside()
    if why:
        raise NotEligible(why)
    device = device_for(layout.device)
    constant = constant if device.packs_constants else None
    names = {a.get_dtype(), b.get_dtype()}
    if len(names) > 1:
        raise NotEligible(f"operands of different dtypes: {sorted(map(str, names))}")
    dtype, out = type_name(a.get_dtype()), type_name(layout.dtype)
    skip = 1 if batched else 0
    sizes = [list(x.get_size()) for x in (a, b)]
    if any(len(s) != 2 + skip for s in sizes):
        raise NotEligible(f"operands of {[len(s) for s in sizes]} axes")
    (m, k), (_, n) = (s[skip:] for s in sizes)
    n_, k_ = number(n), number(k)
    if n_ is None or k_ is None:
        raise NotEligible(f"N={n}, K={k}: only M may be symbolic")
    m_, batch = number(m), number(sizes[0][0]) if batched else 1
    hint = m_ if m_ is not None else private.symbolic_hint(m)
    if 0 in (m_, n_, k_, batch):
        raise NotEligible(f"M={m}, N={n}, K={k}: nothing to multiply, ATen's result is immediate")
    if unit_stride(layout.size[skip:], layout.stride[skip:]) != "row":
        raise NotEligible(f"output strides {list(layout.stride)}: templates write rows")
    strides = [list(x.get_stride()) for x in (a, b)]
    bias_is = bias_kind(bias, n_, skip) if bias is not None else "none"
    if bias_is == "full" and residual is None and activation == "none" and device.target != "x86":
        rows = unit_stride(bias.get_size()[skip:], bias.get_stride()[skip:]) == "row"
        if rows and list(bias.get_size()) == list(layout.size):
            bias, residual, bias_is = None, bias, "none"  # the same sum; rows of a residual are read in wide loads
    beside = [residual, bias if bias_is == "row" else None]  # C's alignment is promised of these as well
    held = [layout, *(x.get_layout() for x in beside if x is not None)]
    problem = GemmProblem(
        n=n_,
        k=k_,
        dtype=dtype,
        out_dtype=out,
        a=unit_stride(sizes[0][skip:], strides[0][skip:]),
        b=unit_stride(sizes[1][skip:], strides[1][skip:]),
        batched=batched,
        bias=bias_is,
        activation=activation,
        residual=residual is not None,
        packed_b=constant is not None,
        m_hint=hint,
        **(alignments(a.get_layout(), b.get_layout(), held) if device.target != "x86" else {}),
    )
    for extra, name in ((bias, "bias"), (residual, "residual")):
        if extra is not None and type_name(extra.get_dtype()) != out:
            raise NotEligible(f"{name} is {extra.get_dtype()} and the output {layout.dtype}")
    why = problem.why_not(device)
    if why:
        raise NotEligible(why)
    nodes = tuple(x for x in (a, b, bias, residual) if x is not None)
    named = lambda value: "symbolic" if value is None else value
    return Request(op, problem, named(m_), named(batch), nodes, layout, constant)


def bias_kind(bias: Any, n: int, skip: int) -> str:
    """ "row" for one value a column, however it is expanded; "full" for a matrix."""
    size, stride = list(bias.get_size()), list(bias.get_stride())
    if len(size) == 1:
        if number(size[0]) != n:
            raise NotEligible(f"bias of {size[0]} elements for N={n}")
        if n != 1 and number(stride[0]) != 1:
            raise NotEligible(f"bias with stride {stride[0]}: templates read neighbours")
        return "row"
    rows_alike = all(number(st) == 0 or number(sz) == 1 for sz, st in zip(size[:-1], stride[:-1], strict=True))
    if rows_alike and number(size[-1]) == n and (number(stride[-1]) == 1 or n == 1):
        return "row"
    if len(size) == 2 + skip and number(size[-1]) == n and number(size[-2]) != 1 and (not skip or number(size[0]) != 1):
        return "full"
    raise NotEligible(f"bias of shape {size} and strides {stride}: templates take (N,) or (M, N)")


def from_choice(aten: Any, choices: Sequence[Any]) -> Request:
    """The request behind an autotuning call, read off its ATen candidate. NotEligible with the reason."""
    if aten.name in OWN:
        return OWN[aten.name].request_from(aten)
    op = OPS[aten.name]
    nodes = list(aten.input_nodes)
    extra = {k: v for k, v in aten.kwargs.items() if k not in ("alpha", "beta", "B", "batch_size")}
    if extra:
        raise NotEligible(f"{aten.name} with {extra}")
    if aten.kwargs.get("B") is not None:
        raise NotEligible("a packed MKL layer with its own bias")
    bias = nodes[op.bias] if op.bias is not None and scalars_allow_bias(aten.kwargs) else None
    b, constant = nodes[op.b], None
    if op.weight:
        constant = private.constant_tensor(b)
        if constant is None:
            raise NotEligible("the frozen weight is not among the graph's constants")
        constant, b = constant.t(), private.transposed(b)
    elif not op.batched:
        constant = private.constant_tensor(b)
    return from_nodes(aten.name, nodes[op.a], b, bias, aten.layout, batched=op.batched, constant=constant)


def unpacked(request: Request) -> Request:
    """The same request with B read where it lies."""
    return replace(request, problem=replace(request.problem, packed_b=False), constant=None)
