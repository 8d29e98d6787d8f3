"""From a specification, as generated code and tuning workers carry it, to a kernel that takes tensors.

A specification is JSON: {"op", "problem", "config", "key", "artefact"}. The artefact's digest is looked up in the store
first, then the kernel is built from problem and config; where neither is possible, ATen computes the result.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flykernels.codeobject import CodeObject
from flykernels.forks import anew_in_children
from templates.gemm.problem import GemmProblem

from . import artifacts, settings
from .counters import counters
from .families import OWN

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spec:
    """One kernel for one problem: what a choice, a benchmark request and generated code share.

    op        ATen's name of the operation
    target    name of the target
    problem   what is computed: a GemmProblem, or of one of families.OWN its own
    config    the template's configuration, as JSON values
    artefact  digest of the code object in the store; "" if it was not built yet
    """

    op: str
    target: str
    problem: Any
    config: dict
    artefact: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Spec:
        data = json.loads(text)
        kind = OWN[data["op"]].PROBLEM if data["op"] in OWN else GemmProblem
        return Spec(**{**data, "problem": kind(**data["problem"])})

    @property
    def name(self) -> str:
        """Readable and unique among the candidates of a problem: flykernels and the configuration."""
        return "flykernels " + " ".join(f"{k}={_short(v)}" for k, v in sorted(self.config.items()))


def _short(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


_built: dict[str, CodeObject] = {}
_building = threading.Lock()
anew_in_children(sys.modules[__name__], _building=threading.Lock)


def code_for(spec: Spec) -> CodeObject:
    """The code object: from the store by its digest, from this process, or built now (and then stored).

    Raises whatever building raises; MLIRMissing where nothing can be built."""
    if spec.artefact:
        code = settings.store().load(spec.artefact)
        if code is not None:
            return code
    text = Spec(spec.op, spec.target, spec.problem, spec.config).to_json()
    with _building:
        code = _built.get(text)
    if code is None:
        counters["compiles"] += 1
        code = _build(spec)
        with _building:
            _built[text] = code
        settings.store().add(code)
    return code


def _build(spec: Spec) -> CodeObject:
    """x86 kernels here; GPU kernels, which take LLVM longer, in processes, so that precompiling uses many cores."""
    if spec.target != "x86":
        return _workers().build(spec.problem, spec.config, spec.target)
    if spec.op in OWN:
        return OWN[spec.op].build(spec.problem, spec.config, spec.target)
    from templates.gemm.build import build_from_json

    return build_from_json(spec.problem, spec.config, spec.target)


@functools.cache
def _workers() -> Any:
    from templates.gemm.workers import Workers

    cores = len(os.sched_getaffinity(0))
    made = Workers(max(2, cores // 2))  # Inductor has as many processes of its own as there are cores
    atexit.register(made.close)
    return made


def unpacked_b(spec: Spec, packed: Any) -> Any:
    """B as (K, N), from the packed constant that the specification's kernel reads."""
    from templates.gemm.packing import unpack_b

    return unpack_b(spec.problem, spec.config, packed)


def activation(name: str) -> Callable | None:
    """ATen's function of an activation's name; None for "none"."""
    import torch.nn.functional as F

    return {
        "none": None, "relu": F.relu, "silu": F.silu,
        "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }[name]  # fmt: skip


def torch_dtype(name: str) -> Any:
    """torch's dtype of an element type's name: "bf16", "f8E4M3FN", ..."""
    import torch

    from flykernels.dtypes import dtype

    return getattr(torch, dtype(name).torch or name)


def packing_of(spec: Spec) -> str:
    """What decides how a packed B looks: configurations with the same packing share one constant."""
    from templates.gemm.packing import packing

    return json.dumps(packing(spec.problem, spec.config), sort_keys=True)


def aten(spec: Spec) -> Callable:
    """What ATen computes for the specification: callable(a, b, [bias], [residual], out=)."""
    import torch

    if spec.op in OWN:
        return OWN[spec.op].aten(spec.problem)
    problem, activate = spec.problem, activation(spec.problem.activation)

    def run(a: Any, b: Any, *rest: Any, out: Any) -> Any:
        bias: Any
        if problem.packed_b:
            b = unpacked_b(spec, b)
        operands = list(rest)
        bias = operands.pop(0) if problem.bias != "none" else None
        product = torch.bmm if problem.batched else torch.mm
        if activate is None and not operands and bias is None:
            return product(a, b, out=out)
        if activate is None and (bias is None or not operands):  # something is added, once
            added = operands[0] if bias is None else bias
            return (torch.baddbmm if problem.batched else torch.addmm)(added, a, b, out=out)
        result = product(a, b) if bias is None else (torch.baddbmm if problem.batched else torch.addmm)(bias, a, b)
        if activate is not None:
            result = activate(result)
        return out.copy_(result + operands[0] if operands else result)

    return run


def misplaced(spec: Spec) -> Callable[[], None]:
    """Says, the first time that it is called, that operands do not lie as a kernel was compiled for."""
    said = "%s %s: operands are not laid out as compiled for; ATen serves this call and others like it"
    return functools.cache(lambda: log.warning(said, spec.op, spec.name))


def callable_for(spec: Spec) -> Callable:
    """A kernel for tensors: callable(a, b, [bias], [residual], out=). Raises if there is no code object to be had."""
    from .devices import DEVICES

    if spec.op in OWN:
        return OWN[spec.op].bind(code_for(spec), spec)
    device = next(d for d in DEVICES.values() if d.target == spec.target)
    return device.bind(code_for(spec), spec)


def bind(text: str) -> Callable:
    """What generated code calls, once a module, for each kernel in it. Never raises: without a kernel, ATen serves."""
    spec = Spec.from_json(text)
    artifacts.note_object(spec.artefact)
    try:
        return callable_for(spec)
    except Exception as e:
        log.warning("%s %s: no kernel (%s: %s); ATen serves it", spec.op, spec.name, type(e).__name__, e)
        return aten(spec)
