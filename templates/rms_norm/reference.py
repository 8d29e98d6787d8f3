"""RMSNorm plainly, in float64, and how far from it a kernel may be. Tensors are torch's (or anything like them)."""

from __future__ import annotations

from flykernels.dtypes import f32

from .problem import RMSNormProblem

F32_STEPS = 12  # roundings in f32 on the way to a result, besides those of the sum
SUM_GROWTH = 2.0  # f32 sums of n terms err like a random walk; the bound leaves room for rows that are not random
SMALLEST = {"f32": 2.0**-149, "bf16": 2.0**-133, "f16": 2.0**-24}  # the least positive number: steps near zero


def forward(x, weight, residual, eps: float) -> dict:
    """x, residual: (rows, width); weight: (width,) or None. `y`, `sum` (rounded to x's type) and `rstd`, in float64."""
    total = x if residual is None else x + residual  # in x's type: that is what is normalised
    h = total.double()
    rstd = (h * h).mean(-1, keepdim=True).add(eps).rsqrt()
    y = h * rstd
    return {"y": y if weight is None else y * weight.double(), "sum": h, "rstd": rstd[..., 0]}


def backward(x, weight, rstd, dy, dsum) -> dict:
    """`dx` and `dweight`, and the sizes of what they are sums of (`dx_size`, `dweight_size`), in float64."""
    x, dy, rstd = x.double(), dy.double(), rstd.double()[:, None]
    g = dy if weight is None else dy * weight.double()
    other = x * rstd**3 * (g * x).mean(-1, keepdim=True)
    size = (g * rstd).abs() + (x * rstd**3).abs() * (g * x).abs().mean(-1, keepdim=True)
    if dsum is not None:
        size = size + dsum.double().abs()
    terms = dy * x * rstd
    return {
        "dx": g * rstd - other + (0 if dsum is None else dsum.double()),
        "dx_size": size,
        "dweight": terms.sum(0),
        "dweight_size": terms.abs().sum(0),
    }


def bound(p: RMSNormProblem, name: str, want: dict, terms: int):
    """How far result `name` may be from want[name], element by element. terms: summed up for one number."""
    kind = {"rstd": f32, "dweight": p.weight_type or f32}.get(name, p.type)
    size = want.get(f"{name}_size", want[name].abs())
    slack = (F32_STEPS + SUM_GROWTH * terms**0.5) * f32.epsilon * size
    return want[name].abs() * kind.epsilon + slack + SMALLEST[kind.name]
