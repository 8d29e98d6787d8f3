"""A matrix product and what follows it (bias, activation, residual) as one more candidate.

After Inductor's own post-grad passes, each such chain's result `y` is replaced by
`flykernels::fused_gemm(y, x, w, ...)`, whose lowering either builds one kernel from x and w, or hands `y` through
untouched. Nothing is lost by asking: the chain is still there when the fused kernel does not win, and is dropped by
Inductor when it does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from . import private

log = logging.getLogger(__name__)

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
LIBRARY = torch.library.Library("flykernels", "FRAGMENT")
LIBRARY.define(
    "fused_gemm(Tensor unfused, Tensor x, Tensor w, Tensor? bias, Tensor? residual, str base, str activation, "
    "bool materialised) -> Tensor"
)


def _eager(unfused: Any, *_: Any) -> Any:
    """What the operator means: the unfused result. Only graphs compiled by Inductor hold it."""
    return unfused.clone()


LIBRARY.impl("fused_gemm", _eager, "CompositeExplicitAutograd")

ACTIVATIONS: dict[str, Callable] = {
    "relu": lambda x: torch.nn.functional.relu(x),
    "silu": lambda x: torch.nn.functional.silu(x),
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


# -- finding the chains


@dataclass(frozen=True)
class Gemm:
    """A product in the graph: x (M, K) and w as the base operation takes it, with the bias that is added to it."""

    node: Node
    base: str
    x: Node
    w: Node
    bias: Node | None


@functools.cache
def mkl_linear_targets() -> tuple:
    try:
        packet = torch.ops.mkl._mkl_linear
        return (packet, packet.default)
    except (AttributeError, RuntimeError):
        return ()


def as_gemm(node: Node) -> Gemm | None:
    """The node read as a product, if it is one that a fused kernel could compute."""
    if node.op != "call_function":
        return None
    args: Any = node.args
    if node.target is aten.mm.default and len(args) == 2 and not node.kwargs:
        return Gemm(node, "mm", args[0], args[1], None)
    if node.target is aten.addmm.default and len(args) == 3:
        if any(node.kwargs.get(scale, 1) != 1 for scale in ("alpha", "beta")):
            return None
        return Gemm(node, "addmm", args[1], args[2], args[0])
    if node.target in mkl_linear_targets():
        x, _packed, w, bias = args[:4]
        return Gemm(node, "_mkl_linear", x, w, bias)
    return None


@functools.cache
def activation_graphs(dtype: torch.dtype) -> dict[str, Graph]:
    """Each activation as Inductor decomposes it for `dtype`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    table = private.load().names.select_decomp_table()
    x = torch.zeros(2, 2, dtype=dtype)
    return {name: make_fx(f, decomposition_table=table)(x).graph for name, f in ACTIVATIONS.items()}


def match_activation(value: Node) -> tuple[str, Node] | None:
    """(name, result) of an activation that is all that `value` is used for; the longest match wins."""
    found = []
    for name, pattern in activation_graphs(value.meta["val"].dtype).items():
        mapping = _embed(pattern, value)
        if mapping is None:
            continue
        result = mapping[next(n for n in pattern.nodes if n.op == "output").args[0]]
        inside = set(mapping.values())
        if all(set(n.users) <= inside for n in inside if n is not result):
            found.append((len(mapping), name, result))
    if not found:
        return None
    _, name, result = max(found, key=lambda f: f[0])
    return name, result


def _embed(pattern: Graph, value: Node) -> dict[Node, Node] | None:
    """Pattern node -> node of value's graph, the pattern's input being `value`; None if the pattern is not there."""
    mapping: dict[Node, Node] = {}
    for p in pattern.nodes:
        if p.op == "placeholder":
            mapping[p] = value
        elif p.op == "call_function":
            args = torch.fx.node.map_arg(p.args, lambda n: mapping[n])
            taken = set(mapping.values())
            source = next(a for a in args if isinstance(a, Node))
            same = (
                u
                for u in source.users
                if u not in taken and u.target is p.target and u.args == args and u.kwargs == p.kwargs
            )
            match = next(same, None)
            if match is None:
                return None
            mapping[p] = match
    return mapping


def chains(graph: Graph) -> Iterator[tuple[Gemm, str, Node | None, Node]]:
    """(product, activation, residual, last node) of everything that one kernel could compute."""
    for node in list(graph.nodes):
        gemm = as_gemm(node)
        if gemm is None or "val" not in node.meta or node.meta["val"].dtype not in TYPES:
            continue  # of other types not even every activation is there
        last, activation, residual = _through_views(node), "none", None
        biased = _bias_added_to(last) if gemm.bias is None else None
        if biased is not None:  # on a GPU Inductor takes addmm apart, to add the bias in the next loop
            gemm = replace(gemm, bias=biased[0])
            last = _through_views(biased[1])
        matched = match_activation(last)
        if matched is not None:
            activation, last = matched[0], _through_views(matched[1])
        added = _added_to(last)
        if added is not None:
            residual, last = added
        if activation != "none" or residual is not None or (gemm.base != "addmm" and gemm.bias is not None):
            if _changes_between(node, last):
                log.info("%s + %s: not eligible: something is written in place meanwhile", gemm.base, activation)
                continue
            yield gemm, activation, residual, last


def _changes_between(first: Node, last: Node) -> bool:
    """Whether something between two nodes writes in place: a kernel that stands at the second would read what the
    product at the first one did not. Any write counts, since after Inductor's passes what shares memory is not told."""
    node = first.next
    while node is not last:
        if private.may_write(node.target):
            return True
        node = node.next
    return False


def _through_views(node: Node) -> Node:
    while len(node.users) == 1 and next(iter(node.users)).target in VIEWS:
        node = next(iter(node.users))
    return node


def _bias_added_to(value: Node) -> tuple[Node, Node] | None:
    """(bias, sum) if value's only use is an addition of one number a column."""
    if len(value.users) != 1:
        return None
    (user,) = value.users
    if user.target is not aten.add.Tensor or len(user.args) != 2 or user.kwargs.get("alpha", 1) != 1:
        return None
    bias: Any = user.args[1] if user.args[0] is value else user.args[0]
    added, to = _tensor_of(bias), _tensor_of(value)
    if added is None or to is None:
        return None
    alike = added.dtype == to.dtype and added.dim() == 1 and added.shape[0] == to.shape[-1]
    return (bias, user) if alike else None


def _tensor_of(x: Any) -> torch.Tensor | None:
    """What a node stands for, if that is a tensor (and not a symbolic number)."""
    found = x.meta.get("val") if isinstance(x, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _added_to(value: Node) -> tuple[Node, Node] | None:
    """(residual, sum) if value's only use is an addition of a tensor of the same shape and type."""
    if len(value.users) != 1:
        return None
    (user,) = value.users
    if user.target is not aten.add.Tensor or len(user.args) != 2 or user.kwargs.get("alpha", 1) != 1:
        return None
    other: Any = user.args[1] if user.args[0] is value else user.args[0]
    mine, theirs, result = (_tensor_of(x) for x in (value, other, user))
    if other is value or mine is None or theirs is None or result is None:
        return None
    alike = mine.shape == theirs.shape == result.shape and mine.dtype == theirs.dtype == result.dtype
    return (other, user) if alike and theirs.is_contiguous() else None


def offer_fused(graph: Graph) -> int:
    """Insert the operator after every chain; how many there were."""
    replaced: dict[Node, Node] = {}  # a chain may begin where another ended
    now = lambda node: replaced.get(node, node)
    for gemm, activation, residual, last in list(chains(graph)):
        materialised = all(_reads_memory(user) for user in last.users)
        with graph.inserting_after(last):
            operands = map(now, (gemm.x, gemm.w, gemm.bias, residual))
            args = (last, *operands, gemm.base, activation, materialised)
            fused = graph.call_function(torch.ops.flykernels.fused_gemm.default, args)
        fused.meta.update(last.meta)
        last.replace_all_uses_with(fused, delete_user_cb=lambda user: user is not fused)
        replaced[last] = fused
    return len(replaced)


def _reads_memory(user: Node) -> bool:
    """Whether a user needs the value in memory anyway: another product, or the graph's output. Anything else may take
    the epilogue into its own loop, where it costs next to nothing."""
    if user.target in VIEWS:
        return all(_reads_memory(u) for u in user.users)
    extern = (aten.mm.default, aten.addmm.default, aten.bmm.default, *mkl_linear_targets())
    return user.op == "output" or user.target in extern


# -- as a pass


@functools.cache
def _register() -> None:
    from .fused_choice import lower

    private.load().names.register_lowering(torch.ops.flykernels.fused_gemm.default, type_promotion_kind=None)(lower)


def run(gm: Any) -> None:
    """Offer fused candidates in a graph module. Never raises."""
    try:
        _register()
        if offer_fused(gm.graph):
            gm.recompile()
    except Exception as e:
        log.warning("no fused candidates: %s: %s", type(e).__name__, e)
