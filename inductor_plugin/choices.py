"""Our candidates beside ATen's, Triton's and C++'s: which are offered, what Inductor sees of them, what is kept."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flykernels.versions import mlir_version
from tuning_cache import FAILED, Entry, Timing

from . import artifacts, asked, devices, install, kernels, private, ranks, settings
from .counters import counters
from .devices import device_for
from .families import OWN
from .fingerprint import fingerprint
from .kernels import Spec
from .measure import request as measurement
from .requests import OPS, NotEligible, Request, from_choice
from .settings import PinnedMiss

log = logging.getLogger(__name__)
names = private.load().names

BIND = "flykernels_bind"


class KernelCall(names.ExternKernelOut):  # type: ignore[name-defined,misc]
    """The winner in Inductor's graph: a call of a name that the generated module binds once, at its top."""

    def __init__(self, spec: Spec, name: str, **kwargs: Any):
        super().__init__(python_kernel_name=name, **kwargs)
        self.definition = f"{name} = {BIND}({spec.to_json()!r})"

    def codegen(self, wrapper: Any) -> None:
        private.define_in_wrapper(wrapper, f"from inductor_plugin.kernels import bind as {BIND}")
        private.define_in_wrapper(wrapper, self.definition)
        super().codegen(wrapper)


class Choice(names.ChoiceCaller):  # type: ignore[name-defined,misc]
    """One candidate of ours, as Inductor handles candidates.

    beside: the input nodes of the autotuning call, which its benchmark tensors follow (default: our own)
    followed: whether Inductor's own kernel could take in what follows"""

    followed = False

    def __init__(self, request: Request, spec: Spec, beside: Sequence[Any] = ()):
        nodes = list(request.nodes)
        if request.constant is not None:
            nodes[1] = packed_constant(request, spec)
        layout = request.layout
        layout = names.FixedLayout(layout.device, layout.dtype, layout.size, layout.stride, layout.offset)
        super().__init__("flykernels_" + re.sub(r"\W", "_", request.op.lstrip("_")), nodes, layout, spec.name)
        self.request, self.spec = request, spec
        self.beside = beside or nodes
        meta = names.TensorMeta.from_irnodes
        self.bmreq = measurement(spec, request.key, meta(nodes), meta(layout))

    def call_name(self) -> str:
        return self.name

    def to_callable(self) -> Any:
        return kernels.callable_for(self.spec)

    def hash_key(self) -> str:
        return f"{self.name}-{self.spec.to_json()}-{fingerprint()}"

    def info_dict(self) -> dict:
        return {"backend": "flykernels", **{k: str(v) for k, v in self.spec.config.items()}}

    def __str__(self) -> str:
        return f"{self.name}({self.spec.name})"

    def precompile(self) -> None:
        """Build the code object. A template that raises costs this candidate, not the user's compile."""
        try:
            kernels.code_for(self.spec)
        except Exception as e:
            log.debug("%s: will be quarantined when measured: %s: %s", self.spec.name, type(e).__name__, e)

    def benchmark(self, *tensors: Any, out: Any) -> float:
        return self.bmreq.benchmark(*self._arguments(tensors), out=out)

    def _arguments(self, tensors: Sequence[Any]) -> list[Any]:
        """Inductor hands over one tensor a *buffer*, in the order of first use in its own list of inputs; the kernel
        wants its own operands, some of them views of the same buffer. What cannot be mapped is made anew."""
        order = dict.fromkeys(n.get_name() for n in self.beside)
        by_name = dict(zip(order, tensors, strict=False))
        out = []
        for node, meta in zip(self.input_nodes, self.bmreq.input_tensor_meta, strict=True):
            tensor = by_name.get(node.get_name())
            if tensor is None or tensor.dtype != meta.dtype or getattr(tensor, "is_mkldnn", False):
                constant = private.constant_tensor(node)
                out.append(constant if constant is not None else meta.to_tensor())
            elif (tuple(tensor.shape), tensor.stride()) == (tuple(meta.sizes), tuple(meta.strides)):
                out.append(tensor)
            else:
                base = tensor if tensor._base is None else tensor._base
                needed = meta.offset + 1 + sum((n - 1) * s for n, s in zip(meta.sizes, meta.strides, strict=True))
                fits = needed <= base.untyped_storage().size() // base.element_size()
                out.append(base.as_strided(meta.sizes, meta.strides, meta.offset) if fits else meta.to_tensor())
        return out

    def output_node(self) -> Any:
        spec = with_artefact(self.spec)
        for node in self.input_nodes:  # what Inductor computes itself it would lay otherwise if it liked
            if isinstance(node.get_layout(), names.ir.FlexibleLayout):
                node.freeze_layout()
        name = f"{self.name}_{_short_digest(spec)}"
        return names.TensorBox.create(KernelCall(spec, name, layout=self.layout, inputs=self.input_nodes))


def _short_digest(spec: Spec) -> str:
    import hashlib

    return hashlib.sha256(spec.to_json().encode()).hexdigest()[:12]


def with_artefact(spec: Spec) -> Spec:
    """The specification with its code object's digest, so that the next process needs no compiler."""
    if spec.artefact:
        return spec
    try:
        return replace(spec, artefact=settings.store().add(kernels.code_for(spec)))
    except Exception as e:
        log.warning("%s: no code object: %s: %s", spec.name, type(e).__name__, e)
        return spec


def packed_constant(request: Request, spec: Spec) -> Any:
    """The node of B's panels as the configuration wants them: computed while compiling, a constant of the graph."""
    from templates.gemm.packing import pack_b

    make = lambda: pack_b(request.problem, spec.config, request.constant)
    name, b = request.nodes[1].get_name(), request.constant
    part = (b.storage_offset(), b.shape, b.stride())  # several products may each take a part of one constant
    return private.derived_constant((name, part, kernels.packing_of(spec)), make, name + private.DERIVED)


# -- what is offered


def specs(request: Request, entry: Entry | None = None) -> list[Spec]:
    """The candidates' specifications, without those that the cache has quarantined. Where there is no compiler to look
    for them, those that the cache has code objects of."""
    device = device_for(request.layout.device)
    if mlir_version() is None:
        held = [t for t in entry.timings.values() if t.config is not None and t.artefact] if entry else []
        configs: list[Any] = [t.config for t in held]
    else:
        configs = [candidate.config.key() for candidate in device.candidates(request.problem).kept]
    found = []
    for config in configs:
        spec = Spec(request.op, device.target, request.problem, config)
        timing = entry.timings.get(spec.name) if entry else None
        if timing is not None and timing.quarantined:
            log.info("%s: left out: %s", spec.name, timing.quarantined)
            continue
        found.append(replace(spec, artefact=timing.artefact or "") if timing else spec)
    return found


def label(choice: Any) -> str:
    """A choice's name in the cache: the same in every process (Inductor numbers its templates as they come)."""
    if isinstance(choice, Choice):
        return choice.spec.name
    if isinstance(choice, names.ExternKernelCaller):
        return f"aten {choice.name}"
    choice = getattr(choice, "_wrapped", choice)  # C++ templates come wrapped
    kind = type(choice).__name__.removesuffix("Caller").removesuffix("Template").lower() or "other"
    name = re.sub(r"_\d+$", "", getattr(choice, "name", "")) or "?"
    return f"{kind} {name} {getattr(choice, 'description', '')}".strip()


def offer(choices: list[Any]) -> list[Any]:
    """Inductor's hook: sees every autotuning call's candidates and returns those to consider.

    Never raises (but for a pinned-strict miss): whatever goes wrong leaves the list as it was."""
    try:
        if not install.active():
            return choices
        aten = next((c for c in choices if isinstance(c, names.ExternKernelCaller) and c.name in OPS), None)
        if aten is None:
            return choices
        try:
            request = from_choice(aten, choices)
        except NotEligible as e:
            log.info("%s: not eligible: %s", aten.name, e)
            return choices
        return _decide(request, aten, choices)
    except PinnedMiss:
        raise
    except Exception as e:
        log.warning("no candidates offered: %s: %s", type(e).__name__, e, exc_info=log.isEnabledFor(logging.DEBUG))
        return choices


def _decide(request: Request, aten: Any, choices: list[Any]) -> list[Any]:
    listener = asked.listener()
    if listener is not None and not listener.hear(request):
        return [aten]
    entry = settings.store().lookup(request.key)
    known = entry if entry is not None and entry.winner else None
    may_tune = settings.mode() == "tune" and not devices.capturing()
    turn = ranks.ask(request.key, known, may_tune)
    if turn.entry is not None:
        return _from_cache(request, turn.entry, choices)
    if listener is None:
        settings.missed(request.key)
    if may_tune and not turn.mine:
        log.info("%s M=%s: the job's ranks have agreed on ATen", request.op, request.m)
        return [aten]
    if devices.capturing():
        log.warning(
            "%s M=%s: not in the cache, and a CUDA graph is being captured, so nothing can be measured; ATen "
            "serves it. Run the model once before capturing",
            request.op,
            request.m,
        )
        return [aten]
    if settings.mode() != "tune":
        missed = f"{request.op} {request.problem} M={request.m}: not in the pinned cache"
        if settings.mode() == "pinned-strict":
            raise PinnedMiss(f"{missed}; fill it with `flykernels warmup` or set FLYKERNELS_MODE=tune")
        log.warning("%s; ATen serves it", missed)
        return [aten]
    ours = [Choice(request, spec, aten.input_nodes) for spec in specs(request, entry)]
    log.info("%s M=%s N=%s K=%s: %d candidates", request.op, request.m, request.problem.n, request.problem.k, len(ours))
    if ours and private.pointwise_follows():
        for choice in ours:
            choice.followed = True
    if ours and request.op in OWN and OWN[request.op].only_ours(request):
        return ours
    return choices + ours


def _from_cache(request: Request, entry: Entry, choices: list[Any]) -> list[Any]:
    """The recorded winner alone, so that nothing is compiled or measured. Where it is Inductor's, and this process has
    measured it on a GPU, all of Inductor's: it has their times still, and decides what each takes in of the rest."""
    winner = entry.best()
    counters["from cache"] += 1
    theirs = winner is None or winner.config is None
    if theirs and request.layout.device.type != "cpu" and request.key.digest in _measured_here:
        log.info("%s: %s was faster a moment ago; Inductor chooses again", request.op, entry.winner)
        return choices
    if winner is not None and winner.config is not None:
        target = device_for(request.layout.device).target
        spec = Spec(request.op, target, request.problem, winner.config, winner.artefact or "")
        log.info("%s: from the cache: %s", request.op, spec.name)
        artifacts.note_entry(entry)
        return [Choice(request, spec)]
    same = [c for c in choices if label(c) == entry.winner]
    if same:
        log.info("%s: from the cache: %s", request.op, entry.winner)
        return same[:1]
    log.info("%s: the cache's winner %s is not offered here; Inductor chooses", request.op, entry.winner)
    return choices


# -- what is remembered

_measured_here: set[str] = set()  # digests of keys whose candidates this process has measured


def remember(key: Any, microseconds: dict[str, float]) -> None:
    """Times of candidates, by name, that a later measurement has found. Never raises."""

    def change(entry: Entry) -> Entry:
        for name, us in microseconds.items():
            known = entry.timings.get(name)
            if known is not None and not known.quarantined:
                entry = entry.with_timing(replace(known, microseconds=round(us, 3)))
        return entry

    try:
        settings.store().update(key, change)
    except Exception as e:
        log.warning("times were not recorded: %s: %s", type(e).__name__, e)


def record(timings: dict, name: str, nodes: Any, choices: Sequence[Any], *_: Any) -> None:
    """Inductor's feedback: every candidate's time in milliseconds. Keeps them and the winner."""
    try:
        ours = next((c for c in choices if isinstance(c, Choice)), None)
        if ours is None or not timings or all(math.isinf(t) for t in timings.values()):
            return
        winner = min(timings, key=timings.__getitem__)
        _measured_here.add(ours.request.key.digest)
        others = [
            Timing(label(c), FAILED if math.isinf(t) else round(t * 1e3, 3))
            for c, t in timings.items()
            if not isinstance(c, Choice)
        ]

        def change(entry: Entry) -> Entry:
            for timing in others:
                entry = entry.with_timing(timing)
            for choice, time in timings.items():
                if not isinstance(choice, Choice) or choice.spec.name in entry.timings:
                    continue
                if math.isinf(time):  # nothing was noted by whoever measured it: the process that did is gone
                    lost = "whoever measured it noted no time: its process has probably ended"
                    entry = entry.with_timing(Timing(choice.spec.name, FAILED, choice.spec.config, None, lost))
                else:  # a time that came from Inductor's own cache: keep what is needed to build it
                    spec = with_artefact(choice.spec)
                    entry = entry.with_timing(Timing(spec.name, None, spec.config, spec.artefact or None))
            return replace(entry, winner=label(winner))

        settings.store().update(ours.request.key, change)
    except Exception as e:
        log.warning("the winner was not recorded: %s: %s", type(e).__name__, e)


def told(timings: dict) -> dict:
    """The job's other ranks are told what was decided; where they have gone on without, ATen wins here too. Never
    raises."""
    try:
        ours = next((c for c in timings if isinstance(c, Choice)), None)
        if ours is None:
            return timings
        entry = settings.store().lookup(ours.request.key)
        if ranks.publish(ours.request.key, entry):
            artifacts.note_entry(entry)
            return timings
        log.warning("%s M=%s: decided too late for the job's ranks; ATen serves it", ours.request.op, ours.request.m)
        return {c: t if isinstance(c, names.ExternKernelCaller) else math.inf for c, t in timings.items()}
    except Exception as e:
        log.warning("the job's ranks were not told: %s: %s", type(e).__name__, e)
        return timings
