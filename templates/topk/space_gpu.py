"""Configurations for GPUs, from what a row needs and what a compute unit has."""

from __future__ import annotations

from templates.gemm.space import Candidate, Dropped, Space

from .access import WIDEST, vector_of
from .arguments import MOST_SPLIT_ROWS
from .config import TopKConfig
from .gpu_block import Sizes
from .problem import MOST_K, TopKProblem

SHORT_K, MIDDLE_K = 16, 128  # classes of k: a lane's candidates in "rows"; what "block" ranks by counting
SHORT_LANES = (16, 32)  # that hold a row; both are less than a wave
SHORT_BYTES = 128  # of a row in one lane's registers, as f32
WORKGROUP = 256  # threads: four fit on a compute unit with all that they hold
RESIDENT = 3  # workgroups of that size on a compute unit
LOADS = 4  # of 16 bytes that a thread has in flight
ENTRY = 8  # bytes of a candidate


def configurations(p: TopKProblem, target) -> Space:
    """Kept: best guess first. Dropped: what does not fit, with the limit."""
    space = Space()

    def offer(config: TopKConfig, reason: str) -> None:
        shared = (Sizes(config).capacity + WIDEST) * ENTRY if config.family != "rows" else 0
        if shared > target.limits.shared_bytes:
            limit = f"{shared} bytes of shared memory; {target.name} has {target.limits.shared_bytes} a workgroup"
            space.dropped.append(Dropped(config, limit))
        else:
            space.kept.append(Candidate(config, reason))

    if p.k <= SHORT_K:
        for lanes in SHORT_LANES:
            config = _rows(p, lanes)
            if p.width <= config.most_width and config.elements * 4 <= SHORT_BYTES:
                offer(config, f"{lanes} lanes hold a row of up to {config.most_width} elements")
    for config, reason in _select(p, target) if p.k > MIDDLE_K else _block(p, target):
        offer(config, reason)
    return space


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def _rows(p: TopKProblem, lanes: int) -> TopKConfig:
    elements = max(vector_of(p), power_of_two(-(-p.width // lanes)))
    return TopKConfig("rows", SHORT_K, elements * lanes, WORKGROUP, lanes, elements)


def parts_of(p: TopKProblem, target, workgroup: int, chunk: int) -> int:
    """Workgroups a row: enough to fill the GPU once, each with half a chunk at least."""
    units = target.limits.compute_units
    wanted = RESIDENT * units * WORKGROUP // workgroup // p.rows
    return max(1, min(wanted, units, 2 * p.width // chunk)) if p.rows <= MOST_SPLIT_ROWS else 1


def _block(p: TopKProblem, target):
    most_k = SHORT_K if p.k <= SHORT_K else MIDDLE_K
    loads = LOADS * (WIDEST // p.element.bytes)
    for threads, elements in ((WORKGROUP, loads), (2 * WORKGROUP, loads), (WORKGROUP, loads // 2)):
        parts = parts_of(p, target, threads, threads * elements)
        split = parts > 1
        yield (
            TopKConfig("block", most_k, 0, threads, 1, elements, RESIDENT * WORKGROUP // threads, split, parts),
            f"{parts} workgroups of {threads} threads a row, {elements} elements a thread at a time",
        )


def _select(p: TopKProblem, target):
    most_k = MOST_K if p.k > MOST_K // 4 else MOST_K // 4
    threads = 4 * WORKGROUP
    for elements in (8, 16):
        chunk = threads * elements
        parts = min(parts_of(p, target, threads, chunk), max(1, p.width // (2 * max(chunk, p.k))))
        yield (
            TopKConfig("select", most_k, 0, threads, 1, elements, 1, parts > 1, parts),
            f"{parts} workgroups of {threads} threads a row; the board holds a chunk of {chunk}",
        )
