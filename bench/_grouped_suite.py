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


def sizes_of(groups: int, tokens: int, share: str) -> list[int]:
    """Of groups; they add up to groups x tokens. zipf: the i-th largest has a share of 1 / i. Their order is drawn."""
    if share == "balanced":
        return [tokens] * groups
    draw = np.random.default_rng(SEED)
    rank = np.arange(groups)
    weights = 1 / (1 + rank) if share == "zipf" else (rank >= groups // 3).astype(float)
    ends = np.round(np.cumsum(weights) / weights.sum() * groups * tokens).astype(int)
    return draw.permutation(np.diff(ends, prepend=0)).tolist()


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
        """Of the groups."""
        return sizes_of(self.groups, self.tokens, self.share)

    @property
    def offs(self) -> list[int]:
        return list(accumulate(self.sizes))

    def __str__(self) -> str:
        return f"{self.groups} groups x {self.tokens} {self.share}, N {self.n}, K {self.k}"


def cases() -> Iterator[Case]:
    """All 72."""
    for g, tokens, (n, k), share in product(GROUPS, TOKENS, SIZES_NK, SHARES):
        yield Case(g, tokens, share, n, k)
