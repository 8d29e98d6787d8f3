"""One call of RMSNorm as kernels see it, what a plan for it is, and how its results are held against ATen's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flykernels.dtypes import f32
from flykernels.launch import torch_door
from templates.rms_norm.problem import DTYPES, RMSNormProblem

from .eager_gate import Wrong, bucket

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
TYPES = {name: dtype for dtype, name in NAMES.items()}
NUMBERS = {torch_door.F32: torch.float32, torch_door.BF16: torch.bfloat16, torch_door.F16: torch.float16}
ROUNDINGS, GROWTH = (
    24,
    4.0,
)  # in f32, of ours and ATen's: steps besides the sum, and what sums of n terms err by sqrt(n)


class Plan:
    """How calls of one layout are served.

    run         (x, weight) -> (y, rstd)
    shape       normalized_shape, as calls have it; normalized: the size that a weight then has"""

    __slots__ = ("normalized", "run", "shape")

    def __init__(self, run: Callable, shape: list[int], normalized: Any):
        self.run, self.shape, self.normalized = run, shape, normalized


class Call:
    """One call's sizes, and those of its results."""

    def __init__(self, problem: RMSNormProblem, rows: int, width: int, x_row: int, x: Any, axes: int, eps: int):
        self.problem, self.rows, self.width, self.x_row, self.eps = problem, rows, width, x_row, eps
        self.dtype = x.dtype
        self.normalized = x.shape[-axes:]
        self.y_size, self.y_strides = tuple(x.shape), dense(x.shape)
        self.stat_size = (*x.shape[: x.dim() - axes], *(1,) * axes)
        self.stat_strides = dense(self.stat_size)


def case_of(p: RMSNormProblem, on_cpu: bool, gradient: bool) -> dict:
    """The bucket that a problem belongs to, as the cache's key holds it. gradient: on the CPU, where a call whose
    gradient is wanted is measured with its backward; a GPU's backward has cases of its own."""
    shared = {"dtype": p.dtype, "weight_dtype": p.weight_dtype, "rows": bucket(p.rows_hint)}
    if on_cpu:
        return {**shared, "width": bucket(p.width or 1), "gradient": gradient}
    return {**shared, "width": p.width, "align": p.align}


def why_not(x: Any, shape: Sequence[int], weight: Any) -> str | None:
    """Why these tensors are not what kernels take; None if they are."""
    if x.dtype not in NAMES or (weight is not None and weight.dtype not in NAMES):
        return f"dtype {x.dtype}: kernels take {', '.join(DTYPES)}"
    if not 0 < len(shape) <= x.dim() or list(x.shape[-len(shape) :]) != list(shape):
        return f"normalized_shape {list(shape)} of a tensor of shape {list(x.shape)}"
    if x.numel() == 0:
        return "nothing to normalise"
    if rows_of(x, len(shape)) is None:
        return f"strides {x.stride()}: rows that lie one distance apart, of neighbouring elements, are needed"
    return None


def rows_of(x: Any, axes: int) -> tuple[int, int, int] | None:
    """(rows, width, elements from one row to the next) of a tensor whose last `axes` axes make a row; None if its rows
    are not whole or not evenly spaced."""
    width = 1
    for size, stride in zip(reversed(x.shape[-axes:]), reversed(x.stride()[-axes:])):
        if size != 1 and stride != width:
            return None
        width *= size
    rows, row, following = 1, width, 0
    for size, stride in zip(reversed(x.shape[:-axes]), reversed(x.stride()[:-axes])):
        if size == 1:
            continue
        if rows == 1:
            row = stride
        elif stride != following:
            return None
        rows, following = rows * size, stride * size
    if rows > 1 and row < width:  # expanded or overlapping rows: ATen's results have other strides
        return None
    return rows, width, row


def dense(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of this size, in elements."""
    out, step = [], 1
    for n in reversed(size):
        out.append(step)
        step *= max(1, n)
    return tuple(reversed(out))


def bytes_like(like: Any, size: int) -> Any:
    return torch.empty(size, dtype=torch.uint8, device=like.device)


def name_of(config: dict) -> str:
    return "flykernels " + " ".join(f"{k}={v}" for k, v in sorted(config.items()))


def compare(
    got: Sequence[Any], want: Sequence[Any], width: int, rows: int, least: Sequence[Any] = (),
) -> None:  # fmt: skip
    """Compares a call's results with ATen's, ours and ATen's erring alike. Raises Wrong.

    Results are (y, rstd or dx, dweight or nothing) in either order: each is held against the largest of its row (of the
    whole, if it has one axis), times one rounding to its type and the errors of f32 sums of `width` (or `rows`)
    terms.

    least  for each result, or the last of them, what it is at least held against: a tensor of its shape, or None"""
    as_list = lambda results: list(results) if isinstance(results, (tuple, list)) else [results]
    got, want = as_list(got), as_list(want)
    bounds = [*[None] * (len(want) - len(least)), *least]
    for number, (ours, aten, at_least) in enumerate(zip(got, want, bounds)):
        if ours is None or aten is None:
            if ours is not aten:
                raise Wrong(f"result {number}: one of ours and ATen's is missing")
            continue
        a, b = ours.detach().float(), aten.detach().float()
        if a.shape != b.shape or ours.dtype != aten.dtype:
            raise Wrong(f"result {number}: {list(a.shape)} {ours.dtype} for ATen's {list(b.shape)} {aten.dtype}")
        flat = b.reshape(-1, b.shape[-1]) if b.dim() > 1 else b.reshape(1, -1)
        sizes = flat.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
        if at_least is not None:
            sizes = torch.maximum(sizes, at_least.reshape(flat.shape).nan_to_num(0, 0, 0).amax(-1, keepdim=True))
        terms = max(width, rows if b.dim() == 1 else 1)
        step = 2 * torch.finfo(ours.dtype).eps + (ROUNDINGS + GROWTH * terms**0.5) * f32.epsilon
        error = (a.reshape(flat.shape) - flat).abs()
        good = (error <= step * sizes + torch.finfo(ours.dtype).tiny) | (a.reshape(flat.shape) == flat)
        good |= a.reshape(flat.shape).isnan() & flat.isnan()
        if not bool(good.all()):
            bad = int((~good).sum())
            raise Wrong(f"result {number}: {bad} of {good.numel()} elements differ from ATen's by more than {step:.2g}")


def composed_backward(dy: Any, x: Any, shape: Sequence[int], rstd: Any, weight: Any, mask: Sequence[bool]) -> Any:
    """(dx, dweight) of ATen operators, for the device where ATen has no such kernel and ours does not fit."""
    axes = tuple(range(x.dim() - len(shape), x.dim()))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    g, x_, r = dy.to(wide), x.to(wide), rstd.to(wide)
    normal = x_ * r
    inner = g if weight is None else g * weight.to(wide)
    dx = dweight = None
    if mask[0]:
        dx = ((inner - normal * (inner * normal).mean(axes, keepdim=True)) * r).to(x.dtype)
    if mask[1] and weight is not None:
        outer = tuple(range(x.dim() - len(shape)))
        terms = g * normal
        dweight = (terms.sum(outer) if outer else terms).to(weight.dtype)
    return dx, dweight


def gradient_sizes(dy: Any, x: Any, shape: Sequence[int], rstd: Any, weight: Any) -> tuple[Any, ...]:
    """What `compare` holds (dx, dweight) at least against (None without a weight): where terms nearly cancel, as
    they do in short rows, a result is much smaller than they are, and its errors are theirs."""
    axes, outer = tuple(range(x.dim() - len(shape), x.dim())), tuple(range(x.dim() - len(shape)))
    g, r = dy.float(), rstd.float()
    inner = g if weight is None else g * weight.float()
    dx = (inner.abs().amax(axes, keepdim=True) * r).expand(x.shape)
    if weight is None:
        return dx, None
    terms = g * x.float() * r
    return dx, (torch.linalg.vector_norm(terms, dim=outer) if outer else terms.abs())
