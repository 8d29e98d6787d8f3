"""The table behind the door for RMSNorm on the CPU (`flykernels.launch.torch_library.HostRmsNormDoor`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from flykernels.launch import torch_door
from flykernels.launch.torch_library import HostRmsNormDoor
from templates.rms_norm.config import WORK_PER_PART
from templates.rms_norm.problem import RMSNormProblem
from templates.rms_norm.space import configurations

from . import eager_code, eager_gate, private
from .eager_gate import Candidate, drawn
from .eager_rms import RMSNorm
from .eager_rms_call import NAMES, NUMBERS, TYPES, case_of, compare, name_of

log = logging.getLogger(__name__)

CPU = 0  # DeviceType's number (c10/core/DeviceType.h)
EPS = 1e-6  # of calls that are measured
MEASURED_ELEMENTS = 1 << 24  # of x, at most: larger calls are measured with fewer rows
FLOAT_BYTES = 4
COMPOSED = ("rms_norm", "_fused_rms_norm")  # by ATen, on this device


class HostRMSNorm:
    """aten::rms_norm on the CPU, behind a door. LaunchError where torch lacks what it needs.

    rms: what serves the gradients that the door does not"""

    def __init__(self, rms: RMSNorm):
        self.device, self.rms = rms.device, rms
        self.door = HostRmsNormDoor(
            eager_code.door("rms_norm", "x86_rms_door", CPU, function="build_host"), self.resolve
        )
        self.door.opened = lambda on: private.trace_as_composed(COMPOSED, ("CPU", "AutogradCPU"), on)
        self.kernels: dict[str, Any] = {}
        rms.serve_doors()

    def resolve(self, width: int, exponent: int, code: int, rows: int) -> str | None:
        """Puts a slot for a call that the table does not know; a message that the call is to fail with, or None."""
        dtype, weight = NUMBERS[code & 0xFF], NUMBERS.get(code >> torch_door.WEIGHT_SHIFT & 0xFF)
        put = lambda state, **how: self.door.put(width, exponent, code, state, **how)
        p = RMSNormProblem(
            width, NAMES[dtype], NAMES[weight] if weight else "none", rstd=True, align=dtype.itemsize, rows_hint=rows
        )
        aten = lambda: put(torch_door.ATEN)

        def serve():
            if code >> torch_door.BACKWARD_BIT & 1:
                self._resolve_gradient(p, bool(code >> torch_door.WEIGHT_GRADIENT_BIT & 1), put)
                return
            gradient = bool(code >> torch_door.ALIGN_SHIFT & 1)
            if p.why_not(self.device):
                aten()
                return
            if weight not in (None, dtype):
                self._warn_of_mixed_types(dtype, weight)
            case = eager_gate.key_for("rms_norm", "rms_norm", case_of(p, True, gradient), self.device)
            decided, for_good = eager_gate.decide(case, lambda: self._measure(case, p, code, gradient))
            if decided is not None:
                self._use(p, eager_gate.won(decided), decided.artefact or "", put)
            elif for_good:
                aten()

        return eager_gate.settled(f"rms_norm of {rows} x {width}", serve, aten)

    def _warn_of_mixed_types(self, dtype: torch.dtype, weight: Any) -> None:
        """ATen says once that a weight of another type is slow: with what is ATen's, it says so still."""
        number = {t: n for n, t in NUMBERS.items()}
        for gradient in (False, True):
            code = torch_door.rms_code_of(number[dtype], number[weight], gradient, torch.get_num_threads())
            self.door.put(1, 0, code, torch_door.ATEN)
        torch.rms_norm(torch.ones(1, 1, dtype=dtype), [1], torch.ones(1, dtype=weight))

    # -- who serves
    def _use(self, p: RMSNormProblem, config: dict, artefact: str, put: Callable) -> None:
        """What has won serves the slot; notes what backward needs."""
        forward, _, backward = artefact.partition("|")
        if "backward" in config:
            self.rms.known[p.dtype, p.weight_dtype] = config["backward"], backward
        self._put(p, config["forward"], forward, put)

    def _resolve_gradient(self, p: RMSNormProblem, weight_gradient: bool, put: Callable) -> None:
        known = self.rms.known.get((p.dtype, p.weight_dtype))
        if known is None:  # a gradient of what this process has not seen forward: Python's, this time
            return
        config, digests = known
        problem = self.rms.gradient_problem(p, weight_gradient)
        self._put(problem, config, self.rms.gradient_digests(problem, digests), put)

    def _put(self, p: RMSNormProblem, config: dict, artefact: str | None, put: Callable) -> None:
        codes = eager_code.codes_for("rms_norm", p.canonical(self.device), config, self.device.target, artefact)
        kernels = [self._kernel(code) for code in codes]
        if len(kernels) > 2 or any(k.workspace_bytes for k in kernels):
            raise ValueError(f"{len(kernels)} kernels with private memory: the door launches two without")
        part_bytes = (p.width or 1) * FLOAT_BYTES if eager_code.takes_workspace(codes) else 0
        put(torch_door.OURS, kernels=kernels, work=WORK_PER_PART, part_bytes=part_bytes)

    def _kernel(self, code: Any) -> Any:
        from flykernels.launch import host

        return self.kernels.get(code.digest) or self.kernels.setdefault(code.digest, host.load(code))

    # -- measuring
    def _measure(self, case: Any, p: RMSNormProblem, code: int, gradient: bool):
        """The case's entry: the user's call with each kernel and without."""
        from flykernels import targets

        target, width = getattr(targets, self.device.target), p.width or 1
        rows = min(p.rows_hint, max(1, MEASURED_ELEMENTS // width))
        put = lambda state, **how: self.door.put(width, (rows - 1).bit_length(), code, state, **how)
        x = drawn(0, (rows, width), TYPES[p.dtype])
        weight = None if p.weight_dtype == "none" else drawn(1, (width,), TYPES[p.weight_dtype])
        candidates = []
        for c in configurations(p.canonical(self.device), target).kept:

            def make(config=c.config):
                config = config.key()
                chosen = {"forward": config}
                codes = eager_code.codes_for("rms_norm", p.canonical(self.device), config, target.name)
                artefact = eager_code.artefact_of(codes)
                if gradient:
                    chosen["backward"] = config
                    artefact += "|" + self.rms.build_gradients(p, config, target)
                return Candidate(name_of(config), chosen, artefact, lambda: self._use(p, chosen, artefact, put))

            make.name = name_of(c.config.key())  # type: ignore[attr-defined]
            candidates.append(make)
        aten = lambda: put(torch_door.ATEN)
        with torch.set_grad_enabled(gradient):
            run: Callable[[], Any] = lambda: torch.rms_norm(x, [width], weight, EPS)
            least: tuple[Any, ...] = ()
            if gradient:
                run, least = self.rms.training_step(x, [width], weight, EPS)
            aten()
            want = run()
            try:
                return eager_gate.contest(case, candidates, run, aten, lambda: compare(run(), want, width, rows, least))
            finally:
                put(torch_door.EMPTY)  # of another case, where fewer rows stood for many

    def forget(self) -> None:
        self.door.forget()
