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

    x starts `offset` elements into its storage. Layout "any": the tensors are (outer, along, inner + pad) with so many
    NaNs between, and `inner` of the rows are neighbours."""

    def __init__(self, p: TopKProblem, x: np.ndarray, pad: int = 0, offset: int = 0, inner: int = 1):
        self.p = p
        self.stored = store(x, p.dtype)
        kind, poison = self.stored.dtype, np.float32(np.nan) if p.dtype == "f32" else np.uint16(0x7FC1)
        self.inner, outer = inner, p.rows // inner
        assert outer * inner == p.rows
        if p.layout == "last":
            row = p.width + pad
            x_at, out_at = np.arange(p.rows)[:, None] * row + np.arange(p.width), np.arange(p.rows)[:, None] * (p.k + 1)
            out_at = out_at + np.arange(p.k)
            self.strides = {"x": (row,), "values": (p.k + 1,), "indices": (p.k + 1,)}
            sizes = p.rows * row, (p.rows + 1) * (p.k + 1)
        else:
            wide = inner + pad
            r = np.arange(p.rows)
            at = lambda n: (r // inner * n * wide + r % inner)[:, None] + np.arange(n) * wide
            x_at, out_at = at(p.width), at(p.k)
            self.strides = {n: (s * wide, wide, 1) for n, s in (("x", p.width), ("values", p.k), ("indices", p.k))}
            sizes = outer * p.width * wide, (outer + 1) * p.k * wide
        self.out_at = out_at
        self.storage = np.full(offset + sizes[0], poison, kind)
        self.x = self.storage[offset:]
        self.x[x_at] = self.stored
        self.values, self.indices = np.full(sizes[1], poison, kind), np.full(sizes[1], POISON_INDEX, np.int64)

    def scalars(self, config: TopKConfig) -> tuple[int, ...]:
        return scalar_values(self.p, config, self.strides, self.inner)

    def check(self):
        p = self.p
        want = reference(numbers(self.stored, p.dtype), p.k, p.largest)
        got = self.indices[self.out_at]
        wrong = np.argwhere(got != want)
        if len(wrong):
            row = wrong[0][0]
            raise AssertionError(
                f"{len(wrong)} indices differ, first at {wrong[0]}: {got[row][:20]}, not {want[row][:20]}"
            )
        bits = np.uint32 if p.dtype == "f32" else np.uint16
        exact = np.take_along_axis(self.stored.view(bits), want, 1)
        assert np.array_equal(self.values[self.out_at].view(bits), exact), "values are not the elements, bit for bit"
        outside = np.ones(len(self.values), bool)
        outside[self.out_at] = False
        assert (self.indices[outside] == POISON_INDEX).all(), "an index was written outside the results"
        assert np.isnan(numbers(self.values[outside], p.dtype)).all(), "a value was written outside the results"
