"""Top-k in numpy, by sorting whole rows: what every kernel's results are compared with, bit for bit."""

from __future__ import annotations

import numpy as np


def reference(x: np.ndarray, k: int, largest: bool = True) -> np.ndarray:
    """Positions (int64) of the k best of each row of a (rows, width) array of floats or integers, best first.

    By value with NaN greatest and -0 equal to +0, then by position."""
    if not 0 <= k <= x.shape[1]:
        raise ValueError(f"k = {k} of rows of {x.shape[1]} elements: selected index k out of range")
    position = np.broadcast_to(np.arange(x.shape[1]), x.shape)
    if x.dtype.kind in "iu":
        return np.lexsort((position, ~x if largest else x), axis=1)[:, :k].astype(np.int64)
    nan = np.isnan(x)
    value = np.where(nan, 0, x.astype(np.float64)) + 0.0
    best_first = (position, -value, ~nan) if largest else (position, value, nan)  # lexsort: the last counts most
    return np.lexsort(best_first, axis=1)[:, :k].astype(np.int64)
