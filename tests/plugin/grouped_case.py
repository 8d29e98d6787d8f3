"""What a compiled grouped product must give, wherever it runs."""

from __future__ import annotations

from itertools import pairwise

import torch


def exact(a, b, offs=None) -> torch.Tensor:
    """In f64; NaN where no group owns the result."""
    a, b = a.double(), b.double()
    if offs is None:
        return a @ b
    parts = [slice(*x) for x in pairwise([0, *offs.tolist()])]
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, t] @ b[t] for t in parts])
    c = torch.full((a.shape[-2], b.shape[-1]), float("nan"), dtype=torch.float64, device=a.device)
    for g, t in enumerate(parts):
        if a.dim() == 2:
            c[t] = a[t] @ b[g]
        else:
            c[:, t] = a[g] @ b[:, t]
    return c


def assert_right(got: torch.Tensor, a, b, offs=None) -> None:
    """Within the error of f32 sums and one rounding to bf16; |products| of standard normal numbers sum to about K."""
    want, k = exact(a, b, offs), a.shape[-1]
    mine = ~want.isnan()
    error = (got.double() - want).abs()[mine]
    bound = torch.finfo(got.dtype).eps * want.abs()[mine] + 8 * k**0.5 * torch.finfo(torch.float32).eps * k + 1e-30
    assert got.shape == want.shape and (error <= bound).all()
