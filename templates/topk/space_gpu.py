"""Configurations for GPUs, from what a row needs and what a compute unit has."""

from __future__ import annotations

from dataclasses import replace

from flykernels.dtypes import f32
from templates.gemm.space import Candidate, Dropped, Space

from .access import WIDEST, vector_of
from .arguments import MOST_SPLIT_ROWS
from .config import TopKConfig
from .gpu_merge import most_parts
from .gpu_shared import Sizes
from .problem import MOST_K, TopKProblem

SHORT_K, MIDDLE_K = 16, 128  # classes of k: a lane's candidates in "rows"; what "block" ranks by counting
ROUNDS_K = 8  # up to here looking for the best k times is short
SHORT_LANES = (32, 16)  # that hold a row; both are less than a wave
SHORT_BYTES = 128  # of a row in one lane's registers, as f32
SHORT_WAVES = 2  # of a workgroup
THREADS = 1024  # of resident workgroups on a compute unit, with 64 registers each
LOADS = 4  # of 16 bytes that a thread has in flight
ENTRY = 8  # bytes of a candidate
HELD = 128  # bytes of a row that a thread may hold, as f32
SELECT_K = (512, 1024, 2048, MOST_K)  # classes of large k
SELECTED = 16  # elements of a chunk that a thread holds where all of them are counted


def configurations(p: TopKProblem, target) -> Space:
    """Kept: best guess first. Dropped: what does not fit, with the limit."""
    space = Space()

    def offer(config: TopKConfig, reason: str) -> None:
        shared = (Sizes(config).capacity + WIDEST) * ENTRY if config.family in ("block", "select") else 0
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
                config = _short(p, family, lanes, SHORT_WAVES * target.lanes)
                if family == "rows" and lanes < getattr(target, "write_banks", 0):
                    continue  # another row's lanes would write at the same time, and want the same banks
                if p.width <= config.most_width and config.elements * f32.bytes <= SHORT_BYTES:
                    offer(config, f"{lanes} lanes hold a row of up to {config.most_width} elements")
    for config, reason in _select(p, target) if p.k > MIDDLE_K else _block(p, target):
        offer(config, reason)
    return space


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def _short(p: TopKProblem, family: str, lanes: int, threads: int) -> TopKConfig:
    elements = max(vector_of(p), power_of_two(-(-p.width // lanes)))
    return TopKConfig(family, SHORT_K, elements * lanes, threads, lanes, elements)


def parts_of(p: TopKProblem, target, chunk: int, beside: int = 1) -> int:
    """Workgroups a row: one for each chunk, if the device has room for so many. beside: on a compute unit."""
    room = beside * target.limits.compute_units
    return max(1, min(room // p.rows, -(-p.width // chunk))) if p.rows <= MOST_SPLIT_ROWS else 1


def _block(p: TopKProblem, target):
    """A row that a small workgroup holds whole: nothing to walk or merge. Else, of many rows: small
    workgroups, so that some compute while others wait. Fewer: all a compute unit's threads at one or two rows. Few: one
    large workgroup if it holds a row, or rows in parts of about a chunk."""
    most_k, units = SHORT_K if p.k <= SHORT_K else MIDDLE_K, target.limits.compute_units
    most, elements = target.limits.max_workgroup, LOADS * (WIDEST // p.element.bytes)
    few, held = 2 * p.rows <= units, HELD // f32.bytes
    sizes = (most // 4, most // 2, most) if few else (most // 4,)
    threads = next((n for n in sizes if p.width <= n * held), 0)
    if threads:
        yield _blocks(p, most_k, threads, max(vector_of(p), power_of_two(-(-p.width // threads))), 1, held=True)
    if few:
        for n, some in ((most // 2, elements), (most // 4, elements), (most // 4, elements // 2)):
            if some >= vector_of(p):
                yield _blocks(p, most_k, n, some, parts_of(p, target, n * some))
        for n in (most // 2, most // 4):  # of long rows: some workgroups of a unit compute while others' chunks come
            parts = parts_of(p, target, n * elements, THREADS // n)
            if parts > parts_of(p, target, n * elements):
                yield _blocks(p, most_k, n, elements, parts)
        return
    short, many = p.width <= most * elements // 2, p.rows >= 8 * units
    for n in ((128, 256) if short else (256, 128)) if many else ((256, 512) if short else (512, 256)):
        yield _blocks(p, most_k, n, elements, 1)


def _blocks(p: TopKProblem, most_k: int, threads: int, elements: int, parts: int, held: bool = False):
    resident, width = max(1, THREADS // threads), threads * elements if held else 0
    config = TopKConfig("block", most_k, width, threads, 1, elements, 1, resident, parts > 1, parts)
    if held:
        return config, f"{threads} threads hold a row of up to {width} elements"
    return config, f"{parts} workgroups of {threads} threads a row, {elements} elements a thread at a time"


def _select(p: TopKProblem, target):
    """As many groups as there are twice the results, or more: then few elements are better than the threshold without
    being wanted."""
    most_k, most = next(n for n in SELECT_K if p.k <= n), target.limits.max_workgroup
    groups_of = lambda threads: max(1, 2 * most_k // threads)
    for threads in (most // 2, most):
        held = max(groups_of(threads), vector_of(p), power_of_two(-(-p.width // threads)))
        if held <= (HELD // f32.bytes if threads == most else SELECTED):
            yield _selects(p, most_k, threads, held, groups_of(threads), 1, held=True)
    for threads in (most, most // 2):
        parts = min(parts_of(p, target, threads * SELECTED), max(1, p.width // (2 * p.k)))
        yield _selects(p, most_k, threads, SELECTED, groups_of(threads), parts)


def _selects(p: TopKProblem, most_k: int, threads: int, elements: int, groups: int, parts: int, held: bool = False):
    resident, width = max(1, THREADS // threads), threads * elements if held else 0
    config = TopKConfig("select", most_k, width, threads, 1, elements, groups, resident, parts > 1, parts)
    config = replace(config, parts=min(parts, most_parts(config)))
    if held:
        return config, f"{threads} threads hold a row of up to {width} elements"
    return config, f"{parts} workgroups of {threads} threads a row, {elements} elements a thread at a time"
