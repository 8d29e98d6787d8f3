"""Shapes and data of the TopK bench, on any device."""

from __future__ import annotations

import torch

ROWS = (1, 16, 256, 4096)
LARGE = tuple((n, k) for n in (8192, 32000, 128256, 1000000) for k in (256, 1000, 2048, 4096))  # (N, large k)
LARGE_ROWS = (1, 16, 256)
OTHER_DIMENSIONS = (((128, 64), 6, 0), ((32, 512, 64), 8, 1), ((8192, 16), 8, 0), ((32000, 8), 50, 0))  # shape, k, dim
WIDTHS = ((128, 6), (256, 8), (8192, 8), (32000, 50), (128256, 64), (1000000, 100))  # (N, k)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ADVERSARIAL = ("ascending", "descending", "constant", "ties", "few")


def large_k() -> list[tuple[int, int, int]]:
    """(rows, N, k) beyond the suite: k from 256 to 4096."""
    return [(rows, n, k) for n, k in LARGE for rows in LARGE_ROWS]


def suite(most_bytes: int, element: int) -> list[tuple[int, int, int]]:
    """(rows, N, k) whose input takes at most so many bytes and has fewer than 2**31 elements."""
    found = [(rows, n, k) for n, k in WIDTHS for rows in ROWS]
    return [s for s in found if s[0] * s[1] < 2**31 and s[0] * s[1] * element <= most_bytes]


def check(x: torch.Tensor, k: int, dim: int, values: torch.Tensor, indices: torch.Tensor, largest: bool = True) -> None:
    """AssertionError if a result is not exact, to the bit and the index: by a stable sort of some rows. Of floats
    without NaN."""
    lines = [t.detach().movedim(dim, -1).reshape(-1, t.shape[dim]) for t in (x, values, indices)]
    some = sorted({*range(min(3, lines[0].shape[0])), *range(max(0, lines[0].shape[0] - 3), lines[0].shape[0])})
    row, value, index = (t[some] for t in lines)
    want = torch.sort(row + 0.0, dim=-1, descending=largest, stable=True).indices[:, :k]  # -0 is +0
    bits = torch.int32 if x.element_size() == 4 else torch.int16
    if not (torch.equal(index, want) and torch.equal(value.view(bits), row.contiguous().view(bits).gather(1, want))):
        raise AssertionError(f"top {k} of {tuple(x.shape)}, {x.dtype}: a wrong result")


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
