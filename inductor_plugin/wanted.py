"""Problems that a warmup is to prepare, as the plugin will ask for them: of shapes files, records, and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from flykernels.dtypes import dtype as element_type
from flykernels.microscaling import FORMATS
from templates.gemm.problem import GemmProblem
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.scaled_gemm.problem import ScaledGemmProblem
from tuning_cache import Key
from tuning_cache.record import Miss
from tuning_cache.shapes import GROUPED, SCALED, Shape

from . import grouped, scaled
from .asked import Heard
from .devices import ARCHITECTURES, DEVICES, here
from .fingerprint import versions
from .strides import alignments, unit_stride

# What torch says of a GPU that is not here: see `devices.py` for what keys hold of it.
ELSEWHERE = {
    "gfx950": {"arch": "gfx950", "product": "AMD Instinct MI350X", "compute_units": 256},
    "sm90a": {"arch": "sm_90", "product": "NVIDIA H200", "compute_units": 132},
}
TARGETS = ("x86", *ELSEWHERE)
BIASED = ("addmm", "baddbmm")


@dataclass(frozen=True)
class Problem:
    """One problem on a target.

    name     as a person reads it
    target   by name
    problem  the template's
    key      under which the plugin will look it up"""

    name: str
    target: str
    problem: Any
    key: Key

    def __str__(self) -> str:
        return f"{self.name} on {self.target}"


def description_of(target: str, product: str | None = None, compute_units: int | None = None) -> dict:
    """A target as keys hold it: of the device here if there is one, else what torch says of the usual one."""
    device = here(target)
    found = dict(device.description() if device is not None else ELSEWHERE[target])
    given = {"product": product, "compute_units": compute_units if target != "x86" else None}
    return {**found, **{k: v for k, v in given.items() if v is not None}}


def runs_here(target: str, description: dict) -> bool:
    """Whether this process has the device of a target that keys describe so: what is measured is measured there."""
    device = here(target)
    return device is not None and device.description() == description


# -- shapes files
def problems_of(shape: Shape, target: str, description: dict) -> list[Problem]:
    """The problems that contiguous tensors of the shape lead to under Inductor (requests.py).

    A product with an epilogue is several: the product alone is always asked for first, since it is what the fused
    kernel has to beat; and on a GPU Inductor may, depending on its version and the types, add the bias apart."""
    if shape.op in SCALED:
        return [_scaled_problem(shape, target, description)]
    if shape.op in GROUPED:
        return [_grouped_problem(shape, target, description)]
    base, _, activation = shape.op.partition("+")
    bias, residual = shape.bias, shape.residual
    fused = bool(activation) or residual or (base not in BIASED and bias != "none")
    if not fused:
        return [problem_of(shape, base, bias, False, "", target, description)]
    kept = bias, residual, activation, target, description
    whole = lambda op: problem_of(shape, f"{op}+{activation or 'none'}", *kept)
    alone = lambda op: problem_of(shape, op, bias if op in BIASED else "none", False, "", target, description)
    found = [alone(base), whole(base)]
    if target != "x86" and base == "addmm" and bias == "row":
        found += [alone("mm"), whole("mm")]
    return found


def problem_of(
    shape: Shape, op: str, bias: str, residual: bool, activation: str, target: str, description: dict
) -> Problem:
    """A dense problem with a shape's sizes."""
    batched = op.partition("+")[0] in ("bmm", "baddbmm")
    if bias == "full" and not residual and not activation and target != "x86":
        bias, residual = "none", True  # the same sum; see requests.py
    size = {"a": (shape.m, shape.k), "b": (shape.k, shape.n), "c": (shape.m, shape.n)}
    item = element_type(shape.dtype).bytes
    held = {x: layout(size[x], letter, item, shape.batch if batched else None) for x, letter in _letters(shape.layout)}
    lie = {x: unit_stride(held[x].size[-2:], held[x].stride[-2:]) for x in "ab"}
    aligned = alignments(held["a"], held["b"], [held["c"]]) if target != "x86" else {}
    problem = GemmProblem(
        n=shape.n, k=shape.k, dtype=shape.dtype, out_dtype=shape.dtype, a=lie["a"], b=lie["b"], batched=batched,
        bias=bias, activation=activation or "none", residual=residual, packed_b=shape.frozen and target == "x86",
        m_hint=shape.m if shape.m is not None else shape.hint, **aligned,
    )  # fmt: skip
    sizes = {"m": _named(shape.m), **({"batch": shape.batch} if batched else {})}
    return _problem(op, target, problem, sizes, description, "gemm")


def _scaled_problem(shape: Shape, target: str, description: dict) -> Problem:
    kinds = {x: element_type(name) for x, name in (("a", shape.dtype), ("b", shape.b_dtype or shape.dtype))}
    stored = {x: shape.k // FORMATS[kind].per_byte if kind in FORMATS else shape.k for x, kind in kinds.items()}
    a, b = layout((shape.m, stored["a"]), "N", 1, None), layout((stored["b"], shape.n), "T", 1, None)
    c = layout((shape.m, shape.n), "N", element_type(shape.out_dtype).bytes, None)
    aligned: dict[str, Any] = alignments(a, b, [c]) if target != "x86" else {}
    problem = ScaledGemmProblem(
        n=shape.n, k=shape.k, a_dtype=kinds["a"].name, b_dtype=kinds["b"].name, scaling=shape.scaling,
        out_dtype=shape.out_dtype, bias=shape.bias, m_hint=shape.m if shape.m is not None else shape.hint,
        **aligned,
    )  # fmt: skip
    return _problem(scaled.OP, target, problem, {"m": _named(shape.m)}, description, "scaled_gemm")


def _grouped_problem(shape: Shape, target: str, description: dict) -> Problem:
    """An MoE layer's forward: (T, K) by (G, K, N), where T is `groups` times `m`."""
    rows = shape.m if shape.m is not None else shape.hint
    tokens, item = rows * shape.groups, element_type(shape.dtype).bytes
    a = layout((None if shape.m is None else tokens, shape.k), "N", item, None)
    b = layout((shape.k, shape.n), shape.layout[1], item, shape.groups)
    c = layout((None if shape.m is None else tokens, shape.n), "N", item, None)
    aligned: dict[str, Any] = alignments(a, b, [c]) if target != "x86" else {}
    problem = GroupedGemmProblem(
        "m", shape.groups, m=0, n=shape.n, k=shape.k, dtype=shape.dtype, out_dtype=shape.dtype,
        a=unit_stride(a.size, a.stride), b=unit_stride(b.size[-2:], b.stride[-2:]), tokens_hint=tokens,
        **aligned,
    )  # fmt: skip
    sizes = {grouped.RUN_TIME_SIZE: "symbolic" if shape.m is None else tokens}
    return _problem(grouped.OP, target, problem, sizes, description, grouped.TEMPLATE)


def _problem(op: str, target: str, problem: Any, sizes: dict, description: dict, template: str) -> Problem:
    key = Key(op, {**problem.key(), **sizes}, description, versions(template))
    return Problem(title(key), target, problem, key)


def _letters(layout: str) -> Sequence[tuple[str, str]]:
    return [("a", layout[0]), ("b", layout[1]), ("c", "N")]


def _named(size: int | None) -> int | str:
    return "symbolic" if size is None else size


def layout(size: tuple[int | None, int | None], letter: str, itemsize: int, batch: int | None) -> Any:
    rows, columns = size
    stride: tuple = (columns, 1) if letter == "N" else (1, rows)
    whole: tuple = size
    if batch is not None:
        one = None if rows is None or columns is None else rows * columns
        whole, stride = (batch, *size), (one, *stride)
    return SimpleNamespace(dtype=SimpleNamespace(itemsize=itemsize), size=whole, stride=stride, offset=0)


# -- graphs and records
def of_heard(heard: Heard, target: str, description: dict) -> Problem:
    """What a graph asked for, where `description` is of the device it was lowered for."""
    key = heard.key
    return Problem(title(key), target, heard.problem, Key(key.op, key.problem, description, key.versions))


def of_miss(miss: Miss) -> Problem:
    """What a record holds. ValueError where no template is compiled for its target here."""
    target = target_of(miss.target)
    if target == "x86" and miss.target != DEVICES["cpu"].description():
        raise ValueError(f"recorded on another CPU: {', '.join(f'{k} {v}' for k, v in miss.target.items())}")
    key = miss.key(versions(miss.template))
    return Problem(title(key), target, miss.problem, key)


def target_of(description: dict) -> str:
    """The name of the target that keys describe so. ValueError if there is none."""
    arch = description.get("arch")
    by_arch = {known: DEVICES[kind].target for kind, known in ARCHITECTURES.items()}
    if arch in by_arch and type(description.get("compute_units")) is int:
        return by_arch[arch]
    if isinstance(arch, str) and arch.startswith("x86") and type(description.get("threads")) is int:
        return "x86"
    raise ValueError(f"no target has the architecture {arch!r}; known: x86-64-v3, {', '.join(by_arch)}")


def title(key: Key) -> str:
    """A key's problem as a person reads it: "addmm+gelu 64x1536x384 bf16 NT"."""
    p = key.problem
    if not {"m", "n", "k"} <= set(p):
        return " ".join([key.op, *(f"{name}={value}" for name, value in p.items())])
    batch = f"{p['batch']}x" if p.get("batch", 1) != 1 else f"{p['groups']} groups of " if p.get("groups") else ""
    m = p.get("m") or p.get(grouped.RUN_TIME_SIZE)
    rows = f"(symbolic, {p.get('m_hint') or p.get('tokens_hint')})" if m == "symbolic" else m
    dtypes = p.get("dtype") or "*".join(dict.fromkeys((str(p.get("a_dtype")), str(p.get("b_dtype")))))
    letters = {"row": "N", "col": "T", "any": "x"}
    layout = "".join(letters.get(str(p.get(x)), "") for x in "ab")
    more = [x for x in ("residual", "packed_b") if p.get(x)]
    more += [f"bias {p['bias']}"] if p.get("bias") == "full" else []
    more += [f"scaled by {p['scaling']}"] if "scaling" in p else []
    parts = key.op, f"{batch}{rows}x{p.get('n')}x{p.get('k')}", dtypes, layout, *more
    return " ".join(str(x) for x in parts if x)
