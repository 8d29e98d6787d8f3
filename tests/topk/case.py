"""Data for top-k tests, storage with guard zones, and the comparison: bit for bit, index for index."""

from __future__ import annotations

import numpy as np

from templates.topk.arguments import scalar_values
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem
from templates.topk.reference import reference

SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-40], np.float32)
POISON_INDEX = -7


def store(x: np.ndarray, dtype: str) -> np.ndarray:
    """f32 -> storage, rounded to nearest even; NaNs keep their sign. bf16 and f16 as uint16."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype == "f32":
        return x
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16).astype(np.uint16) | 0x40, rounded)


def numbers(stored: np.ndarray, dtype: str) -> np.ndarray:
    """storage -> f32."""
    if dtype == "f16":
        return stored.view(np.float16).astype(np.float32)
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored


def data(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """f32 rows: "normal", "ascending", "descending", "constant", "ties" (half equal), "few" (five values), "special"
    (NaNs and zeros of both signs, infinities), "nan" (mostly NaN), "late" (the best come last)."""
    r = np.random.default_rng(seed)
    x = r.standard_normal((rows, width)).astype(np.float32)
    if kind in ("ascending", "descending"):
        x = np.sort(x, axis=1)
        x = np.ascontiguousarray(x[:, ::-1]) if kind == "descending" else x
    elif kind == "constant":
        x[:] = 0.5
    elif kind == "ties":
        x = np.maximum(x, 0)
    elif kind == "few":
        x = r.integers(0, 5, (rows, width)).astype(np.float32)
    elif kind == "special":
        x = r.choice(SPECIAL, (rows, width)).astype(np.float32)
    elif kind == "nan":
        x = np.where(r.random((rows, width)) < 0.9, r.choice(SPECIAL[:2], (rows, width)), x).astype(np.float32)
    elif kind == "late":
        x[:, -(width // 8 + 1) :] += 10
    return x


KINDS = ("normal", "ascending", "descending", "constant", "ties", "few", "special", "nan", "late")


class Case:
    """A launch's arrays: x with `pad` NaNs after each row, results full of poison with a guard row and guard columns.

    x starts `offset` elements into its storage."""

    def __init__(self, p: TopKProblem, x: np.ndarray, pad: int = 0, offset: int = 0, guard: int = 1):
        self.p, self.pad, self.guard = p, pad, guard
        stored = store(x, p.dtype)
        self.kind = stored.dtype
        poison = np.float32(np.nan) if p.dtype == "f32" else np.uint16(0x7FC1)
        row = p.width + pad
        self.storage = np.full(offset + p.rows * row, poison, self.kind)
        self.x = self.storage[offset:]
        self.x.reshape(p.rows, row)[:, : p.width] = stored
        self.values = np.full((p.rows + guard, p.k + guard), poison, self.kind)
        self.indices = np.full((p.rows + guard, p.k + guard), POISON_INDEX, np.int64)
        self.stored = stored

    def scalars(self, config: TopKConfig) -> tuple[int, ...]:
        wide = self.p.k + self.guard
        strides = {"x": (self.p.width + self.pad,), "values": (wide,), "indices": (wide,)}
        return scalar_values(self.p, config, strides)

    def check(self):
        p = self.p
        want = reference(numbers(self.stored, p.dtype), p.k, p.largest)
        got = self.indices[: p.rows, : p.k]
        wrong = np.argwhere(got != want)
        assert not len(wrong), (
            f"{len(wrong)} indices differ, first at {wrong[0]}: {got[wrong[0][0]][:20]}, not {want[wrong[0][0]][:20]}"
        )
        bits = np.uint32 if p.dtype == "f32" else np.uint16
        exact = np.take_along_axis(self.stored.view(bits), want, 1)
        assert np.array_equal(self.values[: p.rows, : p.k].view(bits), exact), (
            "values are not the elements, bit for bit"
        )
        assert (self.indices[p.rows :] == POISON_INDEX).all() and (self.indices[:, p.k :] == POISON_INDEX).all()
        outside = np.ones(self.values.shape, bool)
        outside[: p.rows, : p.k] = False
        assert np.isnan(numbers(self.values[outside].copy(), p.dtype)).all(), (
            "something outside the results was written"
        )
