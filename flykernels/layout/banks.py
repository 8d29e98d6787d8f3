"""Bank conflicts of shared memory, counted from the addresses of a wave's lanes."""

from __future__ import annotations

import numpy as np

BANK_BYTES = 4


def bank_conflicts(addresses, phases, bytes_per_lane: int = 16, banks: int = 64) -> int:
    """Worst number of turns that any phase takes (1: free of conflicts).

    addresses       byte address of each lane
    phases          groups of lanes that the memory serves together (a target's `read_phases`)
    bytes_per_lane  bytes that each lane reads, a multiple of 4
    banks           of 4 bytes each; two words of one bank take two turns, the same word one"""
    first = np.asarray(addresses, np.int64) // BANK_BYTES
    words = first[:, None] + np.arange(max(1, bytes_per_lane // BANK_BYTES))
    turns = (np.bincount(np.unique(words[list(lanes)]) % banks).max() for lanes in phases)
    return int(max(turns))
