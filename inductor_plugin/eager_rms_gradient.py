"""The gradient of RMSNorm on one kind of device: plans for calls of aten::_fused_rms_norm_backward, as eager_rms.py has
them for forward calls. On the CPU its kernels come with the forward call's decision; on a GPU they are decided by
themselves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from templates.rms_norm.arguments import scalars
from templates.rms_norm.config import config_from_key
from templates.rms_norm.problem import RMSNormProblem, alignment_of, eps_or_default
from templates.rms_norm.space import configurations

from . import eager_code, eager_gate
from .devices import Device
from .eager_gate import Candidate, drawn
from .eager_rms_call import (
    NAMES,
    bytes_like,
    case_of,
    compare,
    dense,
    gradient_sizes,
    name_of,
    rows_of,
    why_not,
)

log = logging.getLogger(__name__)

PLANS_MOST = 4096  # kept at a time; a program with more shapes starts over
MISSING = object()


class Gradients:
    """What serves gradients, and what both directions need.

    gradients  plans by call; None: ATen's
    known      CPU: backward's configuration and digests, by dtypes"""

    device: Device
    on_cpu: bool
    empty: Callable
    gradients: dict[tuple, Callable | None]
    known: dict[tuple, tuple[dict, str]]

    def _target(self) -> Any:
        from flykernels import targets

        return getattr(targets, self.device.target)

    @property
    def _wait(self) -> Callable[[], None] | None:
        return None if self.on_cpu else torch.cuda.synchronize

    def _capturing(self) -> bool:
        return not self.on_cpu and torch.cuda.is_current_stream_capturing()

    def _kernel_problem(self, problem: RMSNormProblem) -> RMSNormProblem:
        """The problem that a code object is built for: on the CPU one for all widths."""
        return problem.canonical(self.device) if self.on_cpu else problem

    def gradient_plan(self, dy: Any, x: Any, shape: Sequence[int], rstd: Any, weight: Any, mask: Sequence[bool]) -> Any:
        kind = None if weight is None else weight.dtype
        address = 0
        if not self.on_cpu:
            address = (x.data_ptr() | dy.data_ptr() | (0 if weight is None else weight.data_ptr())) & 15
        key = (
            x.shape, x.stride(), x.dtype, kind, tuple(shape), dy.shape, dy.stride(), dy.dtype, tuple(mask), address,
            x.get_device(), torch.get_num_threads() if self.on_cpu else 0,
        )  # fmt: skip
        found = self.gradients.get(key, MISSING)
        if found is MISSING:
            found = self._new_gradient(key, dy, x, shape, rstd, weight, mask)
        if found is not None:
            numel = math.prod(x.shape[: x.dim() - len(shape)])
            sound = rstd.dtype == torch.float32 and rstd.numel() == numel and rstd.is_contiguous()
            if not sound or (
                weight is not None and not (weight.shape == x.shape[-len(shape) :] and weight.is_contiguous())
            ):
                return None
        return found

    def _new_gradient(
        self, key: tuple, dy: Any, x: Any, shape: Sequence[int], rstd: Any, weight: Any, mask: Sequence[bool]
    ):
        if len(self.gradients) >= PLANS_MOST:
            self.gradients.clear()
        why = why_not(x, shape, weight)
        if why or dy.shape != x.shape or dy.dtype != x.dtype or dy.get_device() != x.get_device() or not any(mask):
            self.gradients[key] = None
            return None
        rows, width, x_row = rows_of(x, len(shape))  # type: ignore[misc]
        lies = rows_of(dy, len(shape))
        dy_row = lies[2] if lies else width  # else a dense copy is made
        align = x.element_size()
        if not self.on_cpu:
            addresses = [
                x.data_ptr(),
                *([dy.data_ptr()] if lies else []),
                *([weight.data_ptr()] if weight is not None else []),
            ]
            strides = [s * x.element_size() for s in (x_row, dy_row)] if rows > 1 else []
            align = alignment_of(align, *addresses, *strides)
        problem = RMSNormProblem(
            width, NAMES[x.dtype], "none" if weight is None else NAMES[weight.dtype], "backward",
            weight_gradient=weight is not None and bool(mask[1]), align=align, rows_hint=rows,
        )  # fmt: skip
        for_good, plan = True, None
        try:
            bind = lambda config, artefact: self.bind_gradient(
                problem, rows, width, x_row, dy_row, lies is None, x, len(shape), mask, config, artefact
            )
            if self.on_cpu:
                known = self.known.get((problem.dtype, problem.weight_dtype))
                plan = bind(known[0], known[1]) if known else None
            else:
                may = not self._capturing()
                case = case_of(problem, self.on_cpu, True) | {"weight_gradient": problem.weight_gradient}
                key_ = eager_gate.key_for("rms_norm_backward", "rms_norm", case, self.device)
                operands = (dy, x, list(shape), rstd, weight, list(mask))
                decided, for_good = eager_gate.decide(
                    key_, lambda: self._measure_gradient(key_, key, problem, bind, operands), may
                )
                plan = bind(eager_gate.won(decided)["backward"], decided.artefact) if decided is not None else None
        except eager_gate.PinnedMiss:
            raise
        except Exception as e:
            log.warning(
                "rms_norm backward of %s: no kernel (%s: %s); ATen serves it", tuple(x.shape), type(e).__name__, e
            )
        if for_good:
            self.gradients[key] = plan
        return plan

    def bind_gradient(
        self, problem: RMSNormProblem, rows: int, width: int, x_row: int, dy_row: int, copy: bool, like: Any,
        axes: int, mask: Sequence[bool], config: dict, artefact: str | None,
    ) -> Callable:  # fmt: skip
        """plan(dy, x, rstd, weight) -> (dx, dweight)."""
        kernel = self._kernel_problem(problem)
        digests = self.gradient_digests(problem, artefact)
        codes = eager_code.codes_for("rms_norm", kernel, config, self.device.target, digests)
        launch, empty = eager_code.launcher(codes), self.empty
        chosen = config_from_key(self.device.target, config)
        parts = chosen.parts_for(rows, width, torch.get_num_threads() if self.on_cpu else 1)
        given = {"rows": rows, "width": width, "x_row": x_row, "dy_row": dy_row, "parts": parts}
        numbers = tuple(given[name] for name in scalars(kernel))
        space = chosen.workspace_bytes(rows, width, parts) if eager_code.takes_workspace(codes) else 0
        size, strides, kind = tuple(like.shape), dense(like.shape), like.dtype
        normalized = tuple(like.shape[-axes:])
        weight_strides = dense(normalized)

        def run(dy, x, rstd, weight):
            if copy:
                dy = dy.contiguous()
            dx = empty(size, strides, kind)
            given = [x.data_ptr()]
            if weight is not None:
                given.append(weight.data_ptr())
            given += (rstd.data_ptr(), dy.data_ptr(), dx.data_ptr())
            dweight = None
            if problem.weight_gradient:
                dweight = empty(normalized, weight_strides, weight.dtype)
                given.append(dweight.data_ptr())
            if space:
                held = bytes_like(x, space)
                launch(*given, *numbers, held.data_ptr())
            else:
                launch(*given, *numbers)
            return dx if mask[0] else None, dweight

        return run

    def _measure_gradient(self, case: Any, key: tuple, problem: RMSNormProblem, bind: Callable, operands: tuple):
        target, candidates = self._target(), []
        for c in configurations(problem, target).kept:
            config = {"backward": c.config.key()}

            def make(config=config):
                codes = eager_code.codes_for("rms_norm", problem, config["backward"], target.name)
                artefact = eager_code.artefact_of(codes)
                plan = bind(config["backward"], artefact)

                def use():
                    self.gradients[key] = plan

                return Candidate(name_of(config["backward"]), config, artefact, use)

            make.name = name_of(config["backward"])  # type: ignore[attr-defined]
            candidates.append(make)

        def aten():
            self.gradients[key] = None

        run = lambda: torch.ops.aten._fused_rms_norm_backward(*operands)
        aten()
        want = run()
        width, least = problem.width or 1, gradient_sizes(*operands[:5])
        check = lambda: compare(run(), want, width, operands[1].numel() // width, least)
        return eager_gate.contest(case, candidates, run, aten, check, self._wait)

    @staticmethod
    def gradient_problem(problem: RMSNormProblem, weight_gradient: bool) -> RMSNormProblem:
        wanted = weight_gradient and problem.weight_dtype != "none"
        return replace(problem, direction="backward", rstd=False, weight_gradient=wanted)

    @staticmethod
    def gradient_digests(problem: RMSNormProblem, digests: str | None) -> str | None:
        """Those of a backward problem among what `build_gradients` returned."""
        if not digests or "|" not in digests:
            return digests or None
        return digests.split("|")[0 if problem.weight_gradient or problem.weight_dtype == "none" else 1]

    def build_gradients(self, problem: RMSNormProblem, config: dict, target: Any) -> str:
        """Digests of the backward kernels that a forward call may need: with the weight's gradient | without."""
        problems = [self.gradient_problem(problem, wanted) for wanted in (True, False)]
        made = [eager_code.codes_for("rms_norm", p.canonical(self.device), config, target.name) for p in problems]
        return "|".join(map(eager_code.artefact_of, made[: 1 if problem.weight_dtype == "none" else 2]))

    def training_step(self, x: Any, shape: Any, weight: Any, eps: float | None) -> tuple[Callable, tuple[Any, ...]]:
        """(step() -> (y, dx, dweight if there is a weight), what `compare` holds them at least against)."""
        leaf = x.detach().requires_grad_()
        own = weight.detach().requires_grad_() if weight is not None else None
        dy = drawn(2, x.shape, x.dtype, x.device)
        wanted = [leaf, *([own] if own is not None else [])]

        def run():
            y = torch.rms_norm(leaf, list(shape), own, eps)
            return (y.detach(), *torch.autograd.grad(y, wanted, dy))

        with torch.no_grad():
            axes = tuple(range(x.dim() - len(shape), x.dim()))
            rstd = (x.float().pow(2).mean(axes, keepdim=True) + eps_or_default(eps)).rsqrt()
            return run, gradient_sizes(dy, x, shape, rstd, weight)[: len(wanted)]
