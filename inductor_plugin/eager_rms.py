"""aten::_fused_rms_norm and its backward, which F.rms_norm and nn.RMSNorm end in, on kernels of templates/rms_norm.

A call is looked up by what its kernel depends on (sizes, strides, dtypes, eps); the *plan* found there is a function
with everything bound but addresses, or None where ATen serves. Plans are made when first met, by `eager_gate`'s
decision.

On a GPU ATen has kernels of both, with derivatives: ours take their place below autograd. On the CPU ATen composes the
operator of others, and autograd sees those. There ours comes with a router on the autograd key: calls that ours
serves go on to ATen's derivative of the fused operator (which calls our backward), all others take the way they had.

Machine code does all this where it can (`eager_rms_host`, `eager_rms_door`); then this file serves gradients whose
operands do not lie as kernels want them. It serves everything where torch lacks what such a door needs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flykernels.dtypes import dtype as element_type
from templates.rms_norm.arguments import eps_bits, scalars
from templates.rms_norm.config import config_from_key
from templates.rms_norm.problem import RMSNormProblem, alignment_of, eps_or_default
from templates.rms_norm.space import configurations

from . import eager_code, eager_gate, private
from .devices import Device
from .eager_gate import Candidate
from .eager_rms_call import (
    NAMES,
    Call,
    Plan,
    bytes_like,
    case_of,
    compare,
    composed_backward,
    name_of,
    rows_of,
    why_not,
)
from .eager_rms_gradient import MISSING, PLANS_MOST, Gradients

log = logging.getLogger(__name__)

FORWARD, BACKWARD = "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"
PLAIN = (torch.Tensor, torch.nn.Parameter)
_serving: dict[str, Callable] = {}  # by dispatch key


SCHEMA = (  # what doors call for gradients that are Python's
    "_rms_norm_backward(Tensor dy, Tensor x, int[] shape, Tensor rstd, Tensor? weight, bool[2] mask) "
    "-> (Tensor, Tensor)"
)


@functools.cache
def _library() -> Any:
    library = torch.library.Library("flykernels", "FRAGMENT")
    library.define(SCHEMA)
    return library


class RMSNorm(Gradients):
    """The operators on one kind of device ("cpu", "cuda" or "hip").

    original  ATen's forward as a function of (keys, *arguments), and backward's; backward None: ATen has none"""

    def __init__(self, device: Device, original: Callable, original_backward: Callable | None):
        self.device, self.original, self.original_backward = device, original, original_backward
        self.on_cpu = device.target == "x86"
        self.derivative: Callable | None = None  # CPU: ATen's autograd formula of the fused operator
        self.plans: dict[tuple, Plan | None] = {}
        self.gradients: dict[tuple, Callable | None] = {}
        self.known: dict[tuple, tuple[dict, str]] = {}  # CPU: backward's configuration and digests, by dtypes
        names = private.eager()
        self.empty = names.empty_strided_cpu if self.on_cpu else names.empty_strided_cuda
        self.current_device, self.level = names.current_device, names.forward_ad
        self.modes, self.interpreter = names.dispatch_modes, names.functorch_level
        self.threads = torch.get_num_threads

    def serve_doors(self) -> None:
        """Doors find `backward` as an operator of their device."""
        names, key = private.eager(), self.device_key
        keys = names.DispatchKeySet(getattr(names.DispatchKey, key))
        if key not in _serving:
            _library().impl("_rms_norm_backward", lambda *operands: _serving[key](*operands), key)
        _serving[key] = lambda *operands: self.backward(keys, *operands)

    @property
    def device_key(self) -> str:
        return "CPU" if self.on_cpu else "CUDA"

    # -- what the dispatcher calls
    def route(self, keys: Any, x: Any, shape: list[int], weight: Any = None, eps: float | None = None) -> Any:
        """On the CPU's autograd key: ours where nobody looks on and the table says so, else what was there before."""
        if (
            x.dtype in NAMES
            and type(x) in PLAIN
            and (weight is None or type(weight) in PLAIN)
            and not self.modes()
            and self.interpreter() is None
            and self.level._current_level < 0  # ATen's derivative of the fused operator makes tangents f32
        ):
            grad = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
            kept = not (grad and x.is_inference())  # autograd can keep x for the gradient
            plan = self.plan(x, shape, weight, eps, grad) if kept else None
            if plan is not None:
                return self.derivative(keys, x, shape, weight, eps) if grad else plan.run(x, weight)  # type: ignore[misc]
        return self.original(keys, x, shape, weight, eps)

    def forward(self, keys: Any, x: Any, shape: list[int], weight: Any = None, eps: float | None = None) -> Any:
        """Below autograd: (y, rstd)."""
        plan = None
        if x.dtype in NAMES:
            plan = self.plan(x, shape, weight, eps, self.on_cpu and torch.is_grad_enabled(), below=True)
        if plan is None:
            return self.original(keys, x, shape, weight, eps)
        if not self.on_cpu and x.get_device() != self.current_device():
            with torch.cuda.device(x.device):
                return plan.run(x, weight)
        return plan.run(x, weight)

    def backward(
        self, keys: Any, dy: Any, x: Any, shape: list[int], rstd: Any, weight: Any = None,
        mask: Sequence[bool] = (True, True),
    ) -> Any:  # fmt: skip
        """Below autograd: (dx, dweight), None for what the mask leaves out."""
        plan = self.gradient_plan(dy, x, shape, rstd, weight, mask)
        if plan is None:
            if self.original_backward is not None:
                return self.original_backward(keys, dy, x, shape, rstd, weight, list(mask))
            return composed_backward(dy, x, shape, rstd, weight, mask)
        if not self.on_cpu and x.get_device() != self.current_device():
            with torch.cuda.device(x.device):
                return plan(dy, x, rstd, weight)
        return plan(dy, x, rstd, weight)

    # -- plans
    def plan(self, x: Any, shape: list[int], weight: Any, eps: float | None, grad: bool, below: bool = False) -> Any:
        """The plan for a call, or None. Every question to a tensor here costs as much as a part of the launch."""
        kind = None if weight is None else weight.dtype
        if self.on_cpu:
            key: tuple = (x.shape, x.stride(), x.dtype, kind, len(shape), eps, grad, self.threads())
        else:
            address = x.data_ptr() if weight is None else x.data_ptr() | weight.data_ptr()
            key = (x.shape, x.stride(), x.dtype, kind, len(shape), eps, address & 15, x.get_device())
        found: Any = self.plans.get(key, MISSING)
        if found is MISSING:
            self._new_plan(key, x, shape, weight, eps, grad, below)
            found = self.plans.get(key)
        if found is None or shape != found.shape:
            return None
        if weight is not None and not (weight.shape == found.normalized and weight.is_contiguous()):
            return None
        # On the CPU's keys all operands are the CPU's; on a GPU's one of them may not be.
        return found if self.on_cpu or weight is None or weight.get_device() == x.get_device() else None

    def _new_plan(
        self, key: tuple, x: Any, shape: Sequence[int], weight: Any, eps: float | None, grad: bool, below: bool
    ):
        if len(self.plans) >= PLANS_MOST:
            self.plans.clear()
        call = self.call_of(x, shape, weight, eps)
        if isinstance(call, str):
            log.debug("rms_norm of %s: %s; ATen serves it", tuple(x.shape), call)
            if list(shape) == list(x.shape[-len(shape) :]):  # else another call with this key may be right
                self.plans[key] = None
            return None
        try:
            may = not (below and grad) and not self._capturing()
            case = eager_gate.key_for("rms_norm", "rms_norm", case_of(call.problem, self.on_cpu, grad), self.device)
            measure = lambda: self._measure(case, key, call, x, shape, weight, eps, grad)
            decided, for_good = eager_gate.decide(case, measure, may)
            plan = self._use(call, decided, grad) if decided is not None else None
        except eager_gate.PinnedMiss:
            raise
        except Exception as e:
            log.warning("rms_norm of %s: no kernel (%s: %s); ATen serves it", tuple(x.shape), type(e).__name__, e)
            plan, for_good = None, True
        if for_good:
            self.plans[key] = plan
        return plan

    def call_of(self, x: Any, shape: Sequence[int], weight: Any, eps: float | None) -> Call | str:
        """The call as kernels see it, or why there is none."""
        why = why_not(x, shape, weight)
        if why:
            return why
        rows, width, x_row = rows_of(x, len(shape))  # type: ignore[misc]
        align = element_type(NAMES[x.dtype]).bytes
        if not self.on_cpu:
            addresses = [x.data_ptr(), *([weight.data_ptr()] if weight is not None else [])]
            align = alignment_of(align, *addresses, *([x_row * x.element_size()] if rows > 1 else []))
        problem = RMSNormProblem(
            width,
            NAMES[x.dtype],
            "none" if weight is None else NAMES[weight.dtype],
            rstd=True,
            align=align,
            rows_hint=rows,
        )
        why = problem.why_not(self.device)
        return why or Call(problem, rows, width, x_row, x, len(shape), eps_bits(eps_or_default(eps)))

    def _use(self, call: Call, decided: Any, grad: bool) -> Plan:
        """The plan for a decision; notes what backward needs."""
        forward, _, backward = decided.artefact.partition("|")
        config = eager_gate.won(decided)["forward"]
        problem = self._kernel_problem(call.problem)
        codes = eager_code.codes_for("rms_norm", problem, config, self.device.target, forward)
        if self.on_cpu and grad:
            self.known[(call.problem.dtype, call.problem.weight_dtype)] = (
                eager_gate.won(decided)["backward"],
                backward,
            )
        return self.bind(call, config, codes)

    def bind(self, call: Call, config: dict, codes: eager_code.Codes) -> Plan:
        """The plan of a call with a kernel."""
        launch, empty = eager_code.launcher(codes), self.empty
        size, strides, stat, stat_strides = call.y_size, call.y_strides, call.stat_size, call.stat_strides
        kind = call.dtype
        chosen = config_from_key(self.device.target, config)
        threads = torch.get_num_threads() if self.on_cpu else 1
        parts = chosen.parts_for(call.rows, call.width, threads)
        given = {"eps": call.eps, "rows": call.rows, "width": call.width, "x_row": call.x_row, "parts": parts}
        numbers = tuple(given[name] for name in scalars(self._kernel_problem(call.problem)))
        workspace = chosen.workspace_bytes(call.rows, call.width, parts) if eager_code.takes_workspace(codes) else 0
        number = torch.float32

        if workspace:

            def run(x, weight):
                y, rstd, space = empty(size, strides, kind), empty(stat, stat_strides, number), bytes_like(x, workspace)
                pointers = (
                    x.data_ptr(),
                    *(() if weight is None else (weight.data_ptr(),)),
                    y.data_ptr(),
                    rstd.data_ptr(),
                )
                launch(*pointers, *numbers, space.data_ptr())
                return y, rstd

        elif call.problem.weight_dtype == "none":

            def run(x, weight):
                y, rstd = empty(size, strides, kind), empty(stat, stat_strides, number)
                launch(x.data_ptr(), y.data_ptr(), rstd.data_ptr(), *numbers)
                return y, rstd

        else:

            def run(x, weight):
                y, rstd = empty(size, strides, kind), empty(stat, stat_strides, number)
                launch(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rstd.data_ptr(), *numbers)
                return y, rstd

        return Plan(run, list(call.normalized), call.normalized)

    # -- measuring
    def _measure(
        self, case: Any, key: tuple, call: Call, x: Any, shape: Any, weight: Any, eps: float | None, grad: bool
    ):
        """The case's entry: the user's call with each kernel and without."""
        target, problem = self._target(), call.problem
        candidates = []
        for c in configurations(self._kernel_problem(problem) if self.on_cpu else problem, target).kept:
            config = {"forward": c.config.key()}

            def make(config=config):
                codes = eager_code.codes_for("rms_norm", self._kernel_problem(problem), config["forward"], target.name)
                artefact = eager_code.artefact_of(codes)
                if self.on_cpu and grad:
                    config["backward"] = config["forward"]
                    artefact += "|" + self.build_gradients(problem, config["backward"], target)
                    _, _, digests = artefact.partition("|")
                    self.known[(problem.dtype, problem.weight_dtype)] = (config["backward"], digests)
                plan = self.bind(call, config["forward"], codes)

                def use():
                    self.plans[key] = plan

                return Candidate(name_of(config["forward"]), config, artefact, use)

            make.name = name_of(config["forward"])  # type: ignore[attr-defined]
            candidates.append(make)

        def aten():
            self.plans[key] = None

        with torch.set_grad_enabled(grad):
            least: tuple[Any, ...] = ()
            if grad:
                run, least = self.training_step(x, shape, weight, eps)
            else:
                run = lambda: torch.rms_norm(x, list(shape), weight, eps)
            aten()
            want = run()
            check = lambda: compare(run(), want, call.width, call.rows, least)
            return eager_gate.contest(case, candidates, run, aten, check, self._wait)

    def forget(self) -> None:
        """Drops all plans: every call is decided anew."""
        self.plans.clear()
        self.gradients.clear()
        self.known.clear()
