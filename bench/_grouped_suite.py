"""The grouped products that the benches time: groups, tokens, how tokens are shared out, sizes of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product

import numpy as np

GROUPS = (8, 16, 64, 128)
TOKENS = (16, 128, 1024)  # of an average group
SHARES = ("balanced", "zipf", "third empty")
SIZES_NK = ((2048, 4096), (4096, 1536))
SEED = 8


@dataclass(frozen=True)
class Case:
    """An MoE layer's forward: x (T, K), weights (G, N, K) used as .transpose(-2, -1), offs of `sizes`."""

    groups: int
    tokens: int
    share: str
    n: int
    k: int

    @property
    def total(self) -> int:
        """T."""
        return self.groups * self.tokens

    @property
    def sizes(self) -> list[int]:
        """Of the groups; they add up to T. zipf: the i-th largest has a share of 1 / i. Their order is drawn."""
        g = self.groups
        if self.share == "balanced":
            return [self.tokens] * g
        draw = np.random.default_rng(SEED)
        weights = 1 / np.arange(1, g + 1) if self.share == "zipf" else (np.arange(g) >= g // 3).astype(float)
        ends = np.round(np.cumsum(weights) / weights.sum() * self.total).astype(int)
        return draw.permutation(np.diff(ends, prepend=0)).tolist()

    @property
    def offs(self) -> list[int]:
        return list(accumulate(self.sizes))

    def __str__(self) -> str:
        return f"{self.groups} groups x {self.tokens} {self.share}, N {self.n}, K {self.k}"


def cases() -> Iterator[Case]:
    """All 72."""
    for g, tokens, (n, k), share in product(GROUPS, TOKENS, SIZES_NK, SHARES):
        yield Case(g, tokens, share, n, k)
