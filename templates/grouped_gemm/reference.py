"""What a grouped GEMM should give: numpy in f64, plain, and how far a kernel may be from it."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import numpy as np

from .problem import GroupedGemmProblem


def bounds(offs, tokens: int) -> np.ndarray:
    """(G + 1,) i64: group g has bounds[g] .. bounds[g + 1] - 1. What offs make of nonsense is defined: they are cut to
    0 .. tokens, and a group that would begin again where another has been begins where that one ended."""
    offs = np.asarray(offs, np.int64).reshape(-1)
    return np.concatenate([[0], np.maximum.accumulate(np.clip(offs, 0, tokens))]).astype(np.int64)


def reference(p: GroupedGemmProblem, a, b, offs=None, past=np.nan) -> np.ndarray:
    """C of a problem, not rounded. Arrays are shaped as the problem's form says, of any float type.

    past: what elements are that no group owns, and that kernels leave alone."""
    wide = lambda x: np.asarray(x, np.float64)
    a, b = wide(a), wide(b)
    with np.errstate(all="ignore"):
        if p.form == "batch":
            return a @ b
        tokens = {"m": a.shape[0], "n": b.shape[-1], "k": b.shape[0]}[p.form]
        ends = bounds(offs, tokens)
        parts = [slice(first, end) for first, end in pairwise(ends)]
        if p.form == "k":
            return np.stack([a[:, t] @ b[t] for t in parts])
        shape = (tokens, b.shape[-1]) if p.form == "m" else (a.shape[-2], tokens)
        out = np.full(shape, past, np.float64)
        for g, t in enumerate(parts):
            if p.form == "m":
                out[t] = a[t] @ b[g]
            else:
                out[:, t] = a[g] @ b[:, t]
        return out


def tolerance(p: GroupedGemmProblem, a, b, offs=None) -> float:
    """Absolute error that f32 sums and one rounding of C may show for these operands: the bound that
    templates.gemm.reference derives, with the largest sum of absolute products of any group."""
    size = reference(p, np.abs(np.asarray(a, np.float64)), np.abs(np.asarray(b, np.float64)), offs, past=0.0)
    steps = (8 * sqrt(max(1, np.shape(a)[-1])) + 8) * 2.0**-24
    return (steps + p.output_type.epsilon) * float(size.max(initial=0.0))
