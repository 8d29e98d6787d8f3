"""Shapes and data of the TopK bench, on any device."""

from __future__ import annotations

import torch

ROWS = (1, 16, 256, 4096)
WIDTHS = ((128, 6), (256, 8), (8192, 8), (32000, 50), (128256, 64), (1000000, 100))  # (N, k)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ADVERSARIAL = ("ascending", "descending", "constant", "ties", "few")


def suite(most_bytes: int, element: int) -> list[tuple[int, int, int]]:
    """(rows, N, k) whose input takes at most so many bytes and has fewer than 2**31 elements."""
    found = [(rows, n, k) for n, k in WIDTHS for rows in ROWS]
    return [s for s in found if s[0] * s[1] < 2**31 and s[0] * s[1] * element <= most_bytes]


def data(kind: str, rows: int, n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """(rows, n): "random" (normal), or one of ADVERSARIAL: rows sorted, all equal, half of the values equal (a ReLU's),
    five values."""
    if kind == "constant":
        return torch.full((rows, n), 0.5, dtype=dtype, device=device)
    if kind == "few":
        return torch.randint(0, 5, (rows, n), device=device).to(dtype)
    x = torch.randn(rows, n, device=device, dtype=dtype)
    if kind in ("ascending", "descending"):
        return x.sort(dim=-1, descending=kind == "descending").values
    return x.relu_() if kind == "ties" else x
