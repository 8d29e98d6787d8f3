"""LDS bank conflicts: how many cycles an access takes from its lanes' addresses.

An access is served in phases; the lanes of a phase go together if they touch different banks (or the same dword). Which
lanes make a phase is measured, not obvious: for 16-byte reads it is the table of the HipKittens paper (arXiv
2511.08083)
for gfx950, as remembered; other reads take 64 banks in lane order; writes behave as on 32 banks (probed for 8-byte
writes, taken over for the others). Confidence: reads of 16 bytes medium, the rest low.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Phases:
    """Lanes served together, and over how many banks of 4 bytes."""

    lanes: np.ndarray
    banks: int


def _in_order(count: int) -> np.ndarray:
    return np.arange(64).reshape(count, -1)


_QUARTERS = [[*range(b, b + 4), *range(b + 12, b + 16), *range(b + 20, b + 28)] for b in (0, 32)]
_QUARTERS += [[*range(b + 4, b + 12), *range(b + 16, b + 20), *range(b + 28, b + 32)] for b in (0, 32)]
READ = {16: Phases(np.array(_QUARTERS), 64), 12: Phases(_in_order(4), 64), 8: Phases(_in_order(2), 64)}
READ[4] = Phases(_in_order(1), 64)
WRITE = {16: Phases(_in_order(8), 32), 12: Phases(_in_order(8), 32), 8: Phases(_in_order(4), 32)}
WRITE[4] = Phases(_in_order(2), 32)


def cycles(write: bool, size: int, at: np.ndarray, mask: np.ndarray | None) -> tuple[int, int]:
    """(cycles, cycles without conflicts) of one wave's access: `size` bytes a lane at byte addresses at [64]."""
    table = WRITE if write else READ
    phases = table[max(4, size) if size in (4, 8, 12, 16) or size < 4 else 16]
    dwords = (at[:, None] >> 2) + np.arange(max(1, size // 4))
    total = ideal = 0
    for lanes in phases.lanes:
        active = lanes if mask is None else lanes[mask[lanes]]
        if active.size == 0:
            continue
        each = np.unique(dwords[active].ravel())
        total += int(np.bincount(each % phases.banks, minlength=phases.banks).max())
        ideal += 1
    return total, ideal
