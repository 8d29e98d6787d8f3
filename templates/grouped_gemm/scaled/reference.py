"""What a scaled grouped GEMM should give: numpy in f64 over the dequantised operands, and how far a kernel may be."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import numpy as np

from flykernels.dtypes import dtype
from flykernels.microscaling import BLOCK, dequantised, values

from ..reference import bounds
from .problem import ScaledGroupedProblem


def reference(p: ScaledGroupedProblem, a, b, scale_a, scale_b, offs) -> tuple[np.ndarray, np.ndarray]:
    """(C not rounded, the error that f32 sums may show before it is rounded), NaN where no group owns C.

    a (T, bytes of K) and b (G, N, bytes of K), or a (M, bytes of T) and b (N, bytes of T): uint8, as scales are, whose
    last axis counts blocks; or scales f32 (T,) and (G, N). The bound is templates.scaled_gemm.reference's."""
    if p.scaling == "row":
        plain = lambda codes, kind: values(dtype(kind))[codes].astype(np.float64)
        x, y = (plain(c, kind) * np.asarray(s, np.float64)[..., None]
                for c, kind, s in ((a, p.a_dtype, scale_a), (b, p.b_dtype, scale_b)))  # fmt: skip
    else:
        x, y = dequantised(a, scale_a, dtype(p.a_dtype)), dequantised(b, scale_b, dtype(p.b_dtype))
    tokens = x.shape[0] if p.form == "m" else x.shape[1]
    ends = bounds(np.asarray(offs) // p.unit * p.unit, tokens)
    shape = (tokens, p.n) if p.form == "m" else (p.groups, p.m, p.n)
    exact, allowed = np.full(shape, np.nan), np.full(shape, np.nan)
    with np.errstate(all="ignore"):
        for g, (first, end) in enumerate(pairwise(ends)):
            t = slice(first, end)
            left, right, own = (x[t], y[g].T, t) if p.form == "m" else (x[:, t], y[:, t].T, g)
            steps = (8 * sqrt(max(BLOCK, left.shape[1])) + 8) * 2.0**-24
            exact[own] = left @ right
            allowed[own] = steps * (np.abs(left) @ np.abs(right))
    return exact, allowed
