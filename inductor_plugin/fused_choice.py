"""Whether the fused kernel or Inductor's own chain computes a product with its epilogue: decided by measuring both."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tuning_cache import Entry, Timing

from . import artifacts, asked, devices, gpu_timing, kernels, private, ranks, runoff, settings
from .choices import Choice, specs
from .devices import device_for
from .kernels import Spec
from .requests import NotEligible, Request, from_nodes

log = logging.getLogger(__name__)
names = private.load().names

UNFUSED = "unfused"
TEMPLATES = ("cpp ", "triton ")  # whose kernels take in what follows a product
# What that costs Triton's kernels, as a part of the pass over C that it saves, on an H200 (dense15's shapes: 0.1 to 0.8
# with a residual; 0.6 and more with gelu, whose arithmetic nothing hides). C++ templates compute it on C in cache.
TAKEN_IN, TAKEN_IN_GELU = 0.5, 1.0


def lower(
    unfused: Any, x: Any, w: Any, bias: Any, residual: Any, base: str, activation: str, materialised: bool
) -> Any:
    """Inductor's lowering of flykernels::fused_gemm: one kernel, or `unfused` as it came. Never raises."""
    try:
        node = _fused(x, w, bias, residual, base, activation, materialised)
    except NotEligible as e:
        log.info("%s + %s: not eligible: %s", base, activation, e)
        return unfused
    except Exception as e:
        log.warning("%s + %s stays unfused: %s: %s", base, activation, type(e).__name__, e)
        return unfused
    if node is None:
        return unfused
    return names.lowerings[torch.ops.aten.view.default](node, list(unfused.get_size()))


def _fused(x: Any, w: Any, bias: Any, residual: Any, base: str, activation: str, materialised: bool) -> Any:
    listener = asked.listener()
    constant = private.constant_tensor(w)
    if base == "_mkl_linear":
        w = private.transposed(w)
        constant = constant.t() if constant is not None else None
    *_, layout, x, w = names.mm_args(x, w)
    if not materialised and layout.device.type != "cpu":
        # what reads it is a kernel of Inductor's in any case, which takes the epilogue in for nothing
        raise NotEligible("no pass over memory is saved: the next kernel takes in what follows the product")
    layout = names.FixedLayout(layout.device, layout.dtype, layout.size)
    if bias is not None:
        bias = names.ir.ExternKernel.realize_input(bias)
    if residual is not None:
        if not private.is_realized(residual) and not (listener and not listener.decide):  # then: it might come to lie
            raise NotEligible("the residual is not in memory: Inductor adds it while computing it")
        residual = names.lowerings[torch.ops.aten.view.default](residual, list(layout.size))
        residual = names.ir.ExternKernel.realize_input(residual)
    ask = lambda op, **epilogue: from_nodes(op, x, w, layout=layout, constant=constant, **epilogue)
    plain = ask(base, bias=bias if base == "addmm" else None)
    request = ask(f"{base}+{activation}", bias=bias, activation=activation, residual=residual)

    if listener is not None and not listener.hear(request):
        return None
    entry = settings.store().lookup(request.key)
    known = entry if entry is not None and entry.winner else None
    may_tune = settings.mode() == "tune" and not devices.capturing()
    turn = ranks.ask(request.key, known, may_tune)
    if known is None and listener is None:
        settings.missed(request.key)
    if turn.mine:
        try:
            private.measure_deferred(x, w)
            entry = _measure(request, plain, entry, materialised)
        except BaseException:
            ranks.publish(request.key, None)
            raise
        entry = entry if ranks.publish(request.key, entry) else None
    else:
        entry = turn.entry
    winner = entry.best() if entry else None
    if winner is None or winner.config is None:
        log.info("%s M=%s: the chain stays as it is", request.op, request.m)
        return None
    target = device_for(request.layout.device).target
    spec = Spec(request.op, target, request.problem, winner.config, winner.artefact or "")
    log.info("%s M=%s: %s", request.op, request.m, spec.name)
    artifacts.note_entry(entry)
    return Choice(request, spec).output_node()


def _measure(request: Request, plain: Request, entry: Entry | None, materialised: bool) -> Entry | None:
    """Time the fused candidates; record them beside the best unfused way, and the winner."""
    base = settings.store().lookup(plain.key)
    if base is None or not base.winner:
        log.info("%s: the product alone was not measured, so there is nothing to beat", request.op)
        return None
    epilogue = _epilogue_microseconds(request, plain) if materialised else 0.0
    alone = {name: t.microseconds for name, t in base.timings.items() if t.microseconds is not None}
    alone = runoff.comparable(plain.key, alone)
    ways = {name: us + _share(name, request) * epilogue for name, us in alone.items()}
    best = min(ways, key=ways.__getitem__)

    choices = [Choice(request, spec) for spec in _likely(specs(request, entry), base, alone)]
    milliseconds = runoff.among_ours(private.benchmark_apart(choices))
    winner = min(choices, key=lambda c: milliseconds[c], default=None)
    fused_wins = winner is not None and milliseconds[winner] * 1e3 < ways[best]
    unfused = Timing(
        f"{UNFUSED} {best} + {epilogue:.1f} us", round(ways[best], 3) if math.isfinite(ways[best]) else None
    )
    chosen = winner.spec.name if fused_wins and winner is not None else unfused.name
    return settings.store().update(request.key, lambda e: replace(e.with_timing(unfused), winner=chosen))


LIKELY = 4  # configurations that are tried with an epilogue on a GPU: those that were best without


def _share(name: str, request: Request) -> float:
    """The part of a pass over C that an unfused way takes for the epilogue: its own, or one that is taken in."""
    if not name.startswith(TEMPLATES):
        return 1.0
    if not name.startswith("triton "):
        return 0.0
    return TAKEN_IN_GELU if request.problem.activation.startswith("gelu") else TAKEN_IN


def _likely(found: list[Spec], base: Entry, alone: dict[str, float]) -> list[Spec]:
    """Those whose configuration did well for the product alone; all where that is not known, or on a CPU.

    alone: microseconds by name that may stand beside each other"""
    measured = [t for t in base.timings.values() if t.config is not None and t.name in alone]
    if not measured or not found or found[0].target == "x86":
        return found
    # of those that the last round left out, and that are therefore level, the faster single call
    order = sorted(measured, key=lambda t: (alone[t.name], t.microseconds))
    best = [t.config for t in order[:LIKELY]]
    return [spec for spec in found if spec.config in best] or found


def _epilogue_microseconds(request: Request, plain: Request) -> float:
    """What the epilogue costs as a pass of its own over C, measured with ATen's element-wise operators in place: one
    read and one write of C, as Inductor's own loop does."""
    sizes = [private.symbolic_hint(s) for s in request.layout.size]
    c = torch.randn(sizes, dtype=request.layout.dtype, device=request.layout.device)
    row = torch.randn(sizes[-1], dtype=c.dtype, device=c.device)
    activation = kernels.activation(request.problem.activation)
    added_bias = request.problem.bias != plain.problem.bias
    other = torch.randn_like(c) if request.problem.residual else None

    def run() -> None:
        value = c.add(row) if added_bias else c
        if activation is not None:
            value = activation(value)
        if other is not None:
            value.add(other)

    if c.device.type == "cpu":
        return names.benchmarker.benchmark_cpu(run) * 1e3
    # Inductor's loop is one kernel, and on a GPU a launch and one pass over memory are all that counts.
    with devices.on_device(c.device):
        tensors = lambda: (torch.randn_like(c), other if other is None else torch.randn_like(c))
        once = lambda x, y: x.add(y) if y is not None else activation(x) if activation is not None else x.add(row)
        calls: Callable[[int], list] = lambda count: [functools.partial(once, *tensors()) for _ in range(count)]
        (found,) = gpu_timing.in_turns([calls], 2 * c.numel() * c.element_size())
        assert found is not None  # all are timed at length
        return found.mean * 1e3
