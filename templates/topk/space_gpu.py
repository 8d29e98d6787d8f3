"""Configurations for GPUs, from what a row needs and what a compute unit has."""

from __future__ import annotations

from templates.gemm.space import Candidate, Dropped, Space

from .access import WIDEST, vector_of
from .arguments import MOST_SPLIT_ROWS
from .config import TopKConfig
from .gpu_shared import Sizes
from .problem import MOST_K, TopKProblem

SHORT_K, MIDDLE_K = 16, 128  # classes of k: a lane's candidates in "rows"; what "block" ranks by counting
ROUNDS_K = 8  # up to here looking for the best k times is short
SHORT_LANES = (32, 16)  # that hold a row; both are less than a wave
SHORT_BYTES = 128  # of a row in one lane's registers, as f32
SHORT_WORKGROUP = 128  # threads
THREADS = 1024  # of resident workgroups on a compute unit, with 64 registers each
LOADS = 4  # of 16 bytes that a thread has in flight
ENTRY = 8  # bytes of a candidate
ALONE = 2  # chunks of a row that one workgroup walks in no more time than several need to meet
SELECT_K = (512, 1024, 2048, MOST_K)  # classes of large k
SELECTED = 8  # elements of a chunk that a thread holds where all of them are counted


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
        few = p.rows <= 8 * target.limits.compute_units  # then a row's latency counts, else how many a wave holds
        for lanes in SHORT_LANES if few else reversed(SHORT_LANES):
            families = ("rounds", "rows") if p.k <= ROUNDS_K else ("rows",)
            for family in families if few else reversed(families):  # rounds: less latency, more instructions
                config = _short(p, family, lanes)
                if p.width <= config.most_width and config.elements * 4 <= SHORT_BYTES:
                    offer(config, f"{lanes} lanes hold a row of up to {config.most_width} elements")
    for config, reason in _select(p, target) if p.k > MIDDLE_K else _block(p, target):
        offer(config, reason)
    return space


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def _short(p: TopKProblem, family: str, lanes: int) -> TopKConfig:
    elements = max(vector_of(p), power_of_two(-(-p.width // lanes)))
    return TopKConfig(family, SHORT_K, elements * lanes, SHORT_WORKGROUP, lanes, elements)


def parts_of(p: TopKProblem, target, chunk: int) -> int:
    """Workgroups a row: enough for two on every compute unit, each with half a chunk at least."""
    units = target.limits.compute_units
    wanted = 2 * units // p.rows if 2 * p.rows <= units else 1
    return max(1, min(wanted, units, 2 * p.width // chunk)) if p.rows <= MOST_SPLIT_ROWS else 1


def _block(p: TopKProblem, target):
    """Many rows: small workgroups, so that some compute while others wait. Fewer: all a compute unit's threads at one
    or two rows. Few: a large workgroup a row where it needs few turns, as there is nothing to merge; else rows in parts,
    short ones in small workgroups, whose barriers are quick."""
    most_k, units = SHORT_K if p.k <= SHORT_K else MIDDLE_K, target.limits.compute_units
    elements = LOADS * (WIDEST // p.element.bytes)
    most = target.limits.max_workgroup
    if p.rows >= 8 * units:
        sizes = (128, 256)
    elif 2 * p.rows > units or p.rows * p.width >= units * 256 * elements:
        sizes = (512, 256)
    else:
        sizes = (256, 512)
        if p.width <= ALONE * most * elements:
            yield _blocks(most_k, most, elements, 1)
    for threads in sizes:
        yield _blocks(most_k, threads, elements, parts_of(p, target, threads * elements))


def _blocks(most_k: int, threads: int, elements: int, parts: int) -> tuple[TopKConfig, str]:
    resident = max(1, THREADS // threads)
    return (
        TopKConfig("block", most_k, 0, threads, 1, elements, resident, parts > 1, parts),
        f"{parts} workgroups of {threads} threads a row, {elements} elements a thread at a time",
    )


def _select(p: TopKProblem, target):
    most_k = next(n for n in SELECT_K if p.k <= n)
    for threads in (target.limits.max_workgroup, target.limits.max_workgroup // 2):
        chunk = threads * SELECTED
        parts = min(parts_of(p, target, chunk), max(1, p.width // (2 * max(chunk, p.k))))
        yield (
            TopKConfig("select", most_k, 0, threads, 1, SELECTED, max(1, THREADS // threads), parts > 1, parts),
            f"{parts} workgroups of {threads} threads a row, {SELECTED} elements a thread at a time",
        )
