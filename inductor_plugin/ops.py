"""Operators that PyTorch does not have, with gradients, fake implementations and a Python name.

    from inductor_plugin import ops                     # or inductor_plugin.ops, after the import: torch.ops.flykernels
    y, total = ops.add_rms_norm(x, residual, weight, eps)
    y = ops.scaled_linear(x, weight)                    # MXFP8 or MXFP4, see ops_mx.py
    y = ops.mxfp8_grouped_linear(x, weights, offs)      # of experts, see ops_grouped.py

They are there once this module is imported; compiled graphs call them as they are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from templates.rms_norm.arguments import eps_bits, scalars
from templates.rms_norm.config import config_from_key
from templates.rms_norm.problem import RMSNormProblem, alignment_of, eps_or_default
from templates.rms_norm.space import configurations

from . import devices, eager_code, eager_gate
from .eager_gate import Candidate, bucket
from .eager_rms import MISSING, PLANS_MOST
from .eager_rms_call import NAMES, compare, composed_backward, dense, gradient_sizes, rows_of
from .ops_grouped import mx_grouped_matmul, mxfp8_grouped_linear
from .ops_mx import has_tangent, mx_matmul, mx_quantize, scaled_linear

log = logging.getLogger(__name__)
__all__ = [
    "add_rms_norm",
    "mx_grouped_matmul",
    "mx_matmul",
    "mx_quantize",
    "mxfp8_grouped_linear",
    "scaled_linear",
]

_library = torch.library.Library("flykernels", "FRAGMENT")
_library.define("add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float? eps=None) -> (Tensor, Tensor)")
_library.define(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float? eps) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "add_rms_norm_backward(Tensor dy, Tensor? dsum, Tensor total, Tensor rstd, Tensor? weight, bool weight_gradient)"
    " -> (Tensor, Tensor)"
)


def add_rms_norm(x: Any, residual: Any, weight: Any = None, eps: float | None = None) -> tuple[Any, Any]:
    """(RMSNorm of x + residual, x + residual) in one pass over memory; the sum is what the next block's residual is.

    x, residual  same shape (..., *normalized), dtype (f32, bf16 or f16 for our kernels; any float for ATen) and device
    weight       (*normalized), or None: the last axis is normalised, and not scaled
    eps          None: as F.rms_norm takes it

    Both results have x's dtype and are dense. x + residual is rounded to that dtype before it is normalised, as the two
    operators by themselves do. Differentiable in x, residual and weight, in forward mode too.
    RuntimeError for shapes or dtypes that do not fit. Same as torch.ops.flykernels.add_rms_norm."""
    return torch.ops.flykernels.add_rms_norm(x, residual, weight, eps)


def _checked(x: Any, residual: Any, weight: Any) -> tuple[int, ...]:
    """The normalised shape. RuntimeError in words for operands that do not fit together."""
    if x.dim() == 0 or x.shape != residual.shape or x.dtype != residual.dtype or x.device != residual.device:
        raise RuntimeError(
            "flykernels::add_rms_norm: x and residual must have one shape of at least one axis, one dtype and one "
            f"device; got {list(x.shape)} {x.dtype} on {x.device} and {list(residual.shape)} {residual.dtype} "
            f"on {residual.device}"
        )
    if not x.is_floating_point():
        raise RuntimeError(f"flykernels::add_rms_norm: x must be floating point, not {x.dtype}")
    if weight is None:
        return tuple(x.shape[-1:])
    if not 0 < weight.dim() <= x.dim() or weight.shape != x.shape[-weight.dim() :] or weight.device != x.device:
        raise RuntimeError(
            "flykernels::add_rms_norm: weight must have the shape of x's last axes and x's device; got "
            f"{list(weight.shape)} on {weight.device} for x {list(x.shape)} on {x.device}"
        )
    return tuple(weight.shape)


def _add_rms_norm(x: Any, residual: Any, weight: Any = None, eps: float | None = None) -> Any:
    if any(t is not None and has_tangent(t) for t in (x, residual, weight)):
        return composed(x, residual, weight, eps)[:2]  # of operators that forward mode knows
    y, total, _ = torch.ops.flykernels.add_rms_norm_forward(x, residual, weight, eps)
    return y, total


def _fake_forward(x: Any, residual: Any, weight: Any, eps: float | None) -> Any:
    shape = _checked(x, residual, weight)
    stat = (*x.shape[: x.dim() - len(shape)], *(1,) * len(shape))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    new = lambda size, dtype: torch.empty(size, dtype=dtype, device=x.device)
    return new(x.shape, x.dtype), new(x.shape, x.dtype), new(stat, wide)


def _fake_backward(dy: Any, dsum: Any, total: Any, rstd: Any, weight: Any, weight_gradient: bool) -> Any:
    dweight = torch.empty_like(weight) if weight_gradient else total.new_empty(0)
    return torch.empty(total.shape, dtype=total.dtype, device=total.device), dweight


def composed(x: Any, residual: Any, weight: Any, eps: float | None) -> Any:
    """(y, total, rstd) of ATen's operators: what serves where no kernel of ours does."""
    shape = _checked(x, residual, weight)
    total = (x + residual).contiguous()
    axes = tuple(range(x.dim() - len(shape), x.dim()))
    wide = total if x.dtype == torch.float64 else total.float()
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + least)
    y = wide * rstd if weight is None else wide * rstd * weight.to(wide.dtype)
    return y.to(x.dtype).contiguous(), total, rstd


class _AddRMSNorm:
    """The operator on one kind of device: plans by what a kernel depends on, decided by measurement."""

    def __init__(self, device: devices.Device):
        self.device, self.on_cpu = device, device.target == "x86"
        self.plans: dict[tuple, Callable | None] = {}

    def forward(self, x: Any, residual: Any, weight: Any, eps: float | None) -> Any:
        shape = _checked(x, residual, weight)
        operands = (x, residual) if weight is None else (x, weight, residual)  # in the kernel's order
        key = ("forward", *_layout(x), *_layout(residual), *_layout(weight), eps, *self._where(operands))
        plan: Any = self.plans.get(key, MISSING)
        if plan is MISSING:
            lies = [rows_of(t, len(shape)) for t in (x, residual)]
            if x.dtype not in NAMES or x.numel() == 0 or None in lies or not _weight_fits(weight):
                plan = self.plans[key] = None
            else:
                (rows, width, x_row), (_, _, residual_row) = lies  # type: ignore[misc]
                given = {"eps": eps_bits(eps_or_default(eps)), "x_row": x_row, "residual_row": residual_row}
                rows_apart = [x_row * x.element_size(), residual_row * x.element_size()]
                problem = self._problem(operands, weight, rows, width, rows_apart, residual=True, rstd=True)
                stat = (*x.shape[: x.dim() - len(shape)], *(1,) * len(shape))
                results = ((tuple(x.shape), x.dtype), (tuple(x.shape), x.dtype), (stat, torch.float32))
                aten = lambda: composed(x, residual, weight, eps)
                plan = self._plan(key, problem, rows, given, results, operands, aten)
        return composed(x, residual, weight, eps) if plan is None else self._run(plan, operands)

    def backward(self, dy: Any, dsum: Any, total: Any, rstd: Any, weight: Any, weight_gradient: bool) -> Any:
        axes = 1 if weight is None else weight.dim()
        aten = lambda: _composed_backward(dy, dsum, total, rstd, weight, weight_gradient)
        dy = dy if rows_of(dy, axes) else dy.contiguous()
        dsum = dsum if dsum is None or rows_of(dsum, axes) else dsum.contiguous()
        operands = tuple(t for t in (total, weight, rstd, dy, dsum) if t is not None)
        key = ("backward", *_layout(total), *_layout(dy), *_layout(dsum), *_layout(weight), weight_gradient)
        key = (*key, *self._where(operands))
        plan: Any = self.plans.get(key, MISSING)
        if plan is MISSING:
            lies = rows_of(total, axes)
            if (
                total.dtype not in NAMES
                or total.numel() == 0
                or lies is None
                or not _weight_fits(weight)
                or not rstd.is_contiguous()
            ):
                plan = self.plans[key] = None
            else:
                rows, width, x_row = lies
                given = {"x_row": x_row, "dy_row": rows_of(dy, axes)[2]}  # type: ignore[index]
                if dsum is not None:
                    given["dsum_row"] = rows_of(dsum, axes)[2]  # type: ignore[index]
                apart = [s * total.element_size() for s in given.values()]
                problem = self._problem(
                    [t for t in operands if t is not rstd], weight, rows, width, apart, direction="backward",
                    residual=dsum is not None, weight_gradient=weight_gradient,
                )  # fmt: skip
                results = (
                    (tuple(total.shape), total.dtype),
                    *([(tuple(weight.shape), weight.dtype)] if weight_gradient else []),
                )
                least = lambda: gradient_sizes(dy, total, total.shape[-axes:], rstd, weight)[: len(results)]
                plan = self._plan(key, problem, rows, given, results, operands, aten, least)
        found = aten() if plan is None else self._run(plan, operands)
        return (*found, total.new_empty(0)) if len(found) == 1 else found

    # -- plans
    def _where(self, operands: Any) -> tuple:
        if self.on_cpu:
            return (torch.get_num_threads(),)
        address = functools.reduce(lambda a, t: a | t.data_ptr(), operands, 0)
        return address & 15, operands[0].get_device()

    def _run(self, plan: Callable, operands: tuple) -> Any:
        if self.on_cpu:
            return plan(*operands)
        with torch.cuda.device(operands[0].device):
            return plan(*operands)

    def _problem(
        self, operands: Any, weight: Any, rows: int, width: int, apart: list[int], **more: Any
    ) -> RMSNormProblem:
        size = operands[0].element_size()
        align = (
            size if self.on_cpu else alignment_of(size, *(t.data_ptr() for t in operands), *(apart if rows > 1 else ()))
        )
        kind = "none" if weight is None else NAMES[weight.dtype]
        return RMSNormProblem(width, NAMES[operands[0].dtype], kind, align=align, rows_hint=rows, **more)

    def _plan(
        self, key: tuple, p: RMSNormProblem, rows: int, given: dict, results: tuple, operands: tuple, aten: Callable,
        least: Callable[[], tuple] = tuple,
    ):  # fmt: skip
        """The plan for a key, decided by the cache or by measuring on these operands. least: see `compare`."""
        if len(self.plans) >= PLANS_MOST:
            self.plans.clear()
        width: int = p.width  # type: ignore[assignment]
        kernel = p.canonical(self.device) if self.on_cpu else p
        case = {**kernel.key(), "rows": bucket(rows), "width": bucket(width) if self.on_cpu else width}
        del case["rows_hint"]
        case_key = eager_gate.key_for("add_rms_norm", "rms_norm", case, self.device)
        bind = lambda config, codes: self._bind(kernel, config, codes, rows, width, given, results)
        plan, for_good = None, True
        try:
            if p.why_not(self.device) is None:
                may = self.on_cpu or not torch.cuda.is_current_stream_capturing()
                measure = lambda: self._measure(case_key, kernel, bind, rows, width, operands, aten, least)
                decided, for_good = eager_gate.decide(case_key, measure, may)
                if decided is not None:
                    codes = eager_code.codes_for(
                        "rms_norm", kernel, eager_gate.won(decided), self.device.target, decided.artefact
                    )
                    plan = bind(eager_gate.won(decided), codes)
        except eager_gate.PinnedMiss:
            raise
        except Exception as e:
            log.warning("add_rms_norm of %s: no kernel (%s: %s); ATen serves it", key[1], type(e).__name__, e)
        if for_good:
            self.plans[key] = plan
        return plan

    def _bind(
        self, kernel: RMSNormProblem, config: dict, codes: Any, rows: int, width: int, given: dict, results: tuple
    ):
        """plan(*operands) -> results: operands and results are the kernel's pointers, in its order."""
        launch = eager_code.launcher(codes)
        chosen = config_from_key(self.device.target, config)
        parts = chosen.parts_for(rows, width, torch.get_num_threads() if self.on_cpu else 1)
        numbers = tuple({**given, "rows": rows, "width": width, "parts": parts}[name] for name in scalars(kernel))
        space = chosen.workspace_bytes(rows, width, parts) if eager_code.takes_workspace(codes) else 0
        sizes = [(size, dense(size), dtype) for size, dtype in results]
        empty = torch.empty_strided

        def run(*operands):
            device = operands[0].device
            out = [empty(size, strides, dtype=dtype, device=device) for size, strides, dtype in sizes]
            pointers = [t.data_ptr() for t in (*operands, *out)]
            if space:
                held = torch.empty(space, dtype=torch.uint8, device=device)
                launch(*pointers, *numbers, held.data_ptr())
            else:
                launch(*pointers, *numbers)
            return tuple(out)

        return run

    def _measure(
        self, case: Any, kernel: Any, bind: Callable, rows: int, width: int, operands: tuple, aten: Callable,
        least: Callable[[], tuple],
    ):  # fmt: skip
        from flykernels import targets

        target = getattr(targets, self.device.target)
        using: list[Callable] = [aten]
        candidates = []
        for config in (c.config.key() for c in configurations(kernel, target).kept):

            def make(config=config):
                codes = eager_code.codes_for("rms_norm", kernel, config, target.name)
                plan = bind(config, codes)

                def use():
                    using[0] = lambda: self._run(plan, operands)

                return Candidate(str(config), config, eager_code.artefact_of(codes), use)

            make.name = str(config)  # type: ignore[attr-defined]
            candidates.append(make)
        want = aten()
        run = lambda: using[0]()
        bounds = least()
        check = lambda: compare(run(), want, width, rows, bounds)
        wait = None if self.on_cpu else torch.cuda.synchronize
        with torch.no_grad():
            return eager_gate.contest(case, candidates, run, lambda: using.__setitem__(0, aten), check, wait)


def _layout(x: Any) -> tuple:
    return (None,) if x is None else (x.shape, x.stride(), x.dtype)


def _weight_fits(weight: Any) -> bool:
    return weight is None or (weight.dtype in NAMES and weight.is_contiguous())


def _composed_backward(dy: Any, dsum: Any, total: Any, rstd: Any, weight: Any, weight_gradient: bool) -> Any:
    shape = total.shape[-1:] if weight is None else weight.shape
    dx, dweight = composed_backward(dy, total, shape, rstd, weight, (True, weight_gradient))
    if dsum is not None:
        dx = dx + dsum
    return (dx.contiguous(), dweight) if weight_gradient else (dx.contiguous(),)


@functools.cache
def _on(kind: str) -> _AddRMSNorm | None:
    device = devices.DEVICES.get(kind)
    return _AddRMSNorm(device) if device is not None else None


def _served(x: Any) -> _AddRMSNorm | None:
    return _on(devices.kind_of(x.device))


def _forward(x: Any, residual: Any, weight: Any, eps: float | None) -> Any:
    ours = _served(x)
    return composed(x, residual, weight, eps) if ours is None else ours.forward(x, residual, weight, eps)


def _backward(dy: Any, dsum: Any, total: Any, rstd: Any, weight: Any, weight_gradient: bool) -> Any:
    ours = _served(total)
    if ours is not None:
        return ours.backward(dy, dsum, total, rstd, weight, weight_gradient)
    found = _composed_backward(dy, dsum, total, rstd, weight, weight_gradient)
    return (*found, total.new_empty(0)) if len(found) == 1 else found


# -- gradients
def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, weight, eps = inputs
    _, total, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(total, rstd, weight)
    ctx.eps = eps


def _gradients(ctx: Any, dy: Any, dsum: Any, _: Any) -> tuple:
    total, rstd, weight = ctx.saved_tensors
    wanted = bool(ctx.needs_input_grad[2]) and weight is not None
    if dy is None:
        return dsum, dsum, torch.zeros_like(weight) if wanted else None, None
    if torch.is_grad_enabled():  # a gradient of the gradient will be asked for: of operators that have one
        shape = total.shape[-1:] if weight is None else weight.shape
        axes = tuple(range(total.dim() - len(shape), total.dim()))
        wide = total if total.dtype == torch.float64 else total.float()
        least = torch.finfo(wide.dtype).eps if ctx.eps is None else ctx.eps
        rstd = torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + least)
        dx, dweight = composed_backward(dy, total, shape, rstd, weight, (True, wanted))
        dx = dx if dsum is None else dx + dsum
        return dx, dx, dweight, None
    dx, dweight = torch.ops.flykernels.add_rms_norm_backward(dy, dsum, total, rstd, weight, wanted)
    return dx, dx, dweight if wanted else None, None


_library.impl("add_rms_norm", _add_rms_norm, "CompositeImplicitAutograd")
for _key in ("CPU", "CUDA"):
    _library.impl("add_rms_norm_forward", _forward, _key)
    _library.impl("add_rms_norm_backward", _backward, _key)
torch.library.register_fake("flykernels::add_rms_norm_forward", _fake_forward, lib=_library)
torch.library.register_fake("flykernels::add_rms_norm_backward", _fake_backward, lib=_library)
torch.library.register_autograd("flykernels::add_rms_norm_forward", _gradients, setup_context=_keep, lib=_library)
