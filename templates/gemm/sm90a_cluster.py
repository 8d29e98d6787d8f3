"""Workgroups of a cluster that share a tile of C on sm_90a, each with a part of K: they add up in shared memory.

Each finishes some of the tile's columns: it gets the others' sums of those in its own shared memory, beside the ring,
adds them up, the first K steps first, and writes. That costs one barrier and a trip between multiprocessors, where
leaving sums in device memory costs several to L2 and back, one after the other.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import f32
from flykernels.lang import Kernel, Value, View
from flykernels.lang.fragment import Fragment
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers

from .problem import GemmProblem
from .sm90a_config import BLOCK_M, Sm90aConfig
from .sm90a_output import Output, Part, parts

VECTOR = 4  # sums of a thread that move together
COLUMNS = 8  # of C between a thread's neighbouring pairs of sums


def shares(p: GemmProblem, cfg: Sm90aConfig) -> list[list[int]]:
    """For each workgroup of the cluster the numbers of the output's parts that it finishes."""
    count = len(parts(p, cfg))
    return [[n for n in range(count) if n * cfg.split_k // count == rank] for rank in range(cfg.split_k)]


def vectors(part: Part) -> list[tuple[tuple, tuple]]:
    """The digits of a thread's sums of a part, in pairs that fill a vector."""
    first = part.column // COLUMNS
    return [((0, c, part.block), (1, c, part.block)) for c in range(first, first + part.columns // COLUMNS)]


def inbox_bytes(p: GemmProblem, cfg: Sm90aConfig) -> int:
    """Of what the others send to the workgroup that finishes most."""
    all_parts = parts(p, cfg)
    most = max(sum(len(vectors(all_parts[n])) for n in numbers) for numbers in shares(p, cfg))
    return (cfg.split_k - 1) * most * cfg.multipliers * VECTOR * f32.bytes


def add_up(
    k: Kernel, p: GemmProblem, cfg: Sm90aConfig, sums: Fragment, inbox: Any, rank: Value, output: Output
) -> None:
    """Sends what others finish, adds up what this workgroup does, and writes it. inbox: a pointer to `inbox_bytes` of
    shared memory. All threads of the workgroup have called `barriers.cluster_arrive` before."""
    split = range(cfg.split_k)
    held = {
        owner: [pair for n in numbers for pair in vectors(output.parts[n])]
        for owner, numbers in enumerate(shares(p, cfg))
    }

    def at(start, owner: int, sender: int, i: int):
        slot = sender - (sender > owner)
        first = (slot * len(held[owner]) + i) * cfg.multipliers * VECTOR
        return advance(advance(start, first, f32), k.thread * VECTOR, f32)

    barriers.cluster_wait()  # the others have begun, so that they have shared memory
    plain = View(inbox, f32, (1,), (1,))
    for owner in split:
        there = barriers.shared_memory_of(inbox, owner)
        for sender in split:
            if sender == owner:
                continue

            @k.when(rank.equals(sender))
            def _(owner=owner, sender=sender, there=there):
                for i, (low, high) in enumerate(held[owner]):
                    vector = sums[low].shuffle(range(VECTOR), sums[high])
                    plain.write(at(there, owner, sender, i), vector, VECTOR * f32.bytes)

    barriers.cluster_barrier(ordered=True)  # all have sent, and no warpgroup needs its ring: the shelves lie there
    for owner, numbers in enumerate(shares(p, cfg)):

        @k.when(rank.equals(owner))
        def _(owner=owner, numbers=numbers):
            values = {n: sums[n] for n in sums.names()}
            for i, (low, high) in enumerate(held[owner]):
                total: Any = None
                for sender in split:
                    if sender == owner:
                        one = sums[low].shuffle(range(VECTOR), sums[high])
                    else:
                        one = plain.read(at(inbox, owner, sender, i), VECTOR, VECTOR * f32.bytes)
                    total = one if total is None else total + one
                values[_name(sums, low)], values[_name(sums, high)] = total.shuffle((0, 1)), total.shuffle((2, 3))
            output.store(sums.like([values[n] for n in sums.names()]), output.fetch(numbers[0]), numbers)


def _name(sums: Fragment, digits: tuple) -> tuple:
    return tuple(0 if n == 1 else d for d, n in zip(digits, sums.layout.piece_sizes))


def why_not(p: GemmProblem, cfg: Sm90aConfig) -> str | None:
    """What is in the way of adding up in shared memory, in words; None if nothing."""
    if cfg.cluster_size > 1 or not cfg.one_tile or cfg.tma_store or cfg.split_k == 1:
        return "workgroups that add up in shared memory share one tile of C, and nothing of A and B"
    if not all(shares(p, cfg)):
        return f"{len(parts(p, cfg))} parts of C are too few for {cfg.split_k} workgroups"
    if cfg.tile_m < BLOCK_M:
        return f"a tile of {cfg.tile_m} rows has too few sums to send them round"
    return None
