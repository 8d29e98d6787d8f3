"""Configurations on a CPU, from its registers, caches and threads."""

from __future__ import annotations

from math import ceil

from .config import X86Config
from .problem import GemmProblem
from .space import Candidate, Dropped, Space
from .x86_dot import GROUP

F32 = 4  # bytes; everything is added up in f32
UNROLL = 4  # steps along K in a turn of the inner loop: the loop's own cost is then 3 of some 80 instructions
WORK_PER_THREAD = 1 << 17  # multiply-adds that outweigh a fork and join, some 5 us
TILE_M_LEAST, TILE_M_MOST = 64, 512  # rows of a workgroup's tile: see _tiles
DOT_ROWS = 128  # with more rows, packing B pays
SUMS_IN_FLIGHT = 8  # two multiply-add units with a latency of 4 cycles (AMD Zen 2 to 4, Intel since Skylake)
LOADS_A_STEP = 1.5  # beyond 2/3 of a load for each multiply-add the loads set the pace
TAIL_COST = 1.15  # what a narrower last panel must be worth: its loops are compiled apart, for twice the time
DIRECT_PASSES = 4  # times that B may be read unpacked


def candidates(p: GemmProblem, target, threads: int) -> Space:
    """Register blocks that fit, each with the K block that its cache asks for."""
    space, lanes = Space(), target.vector_bytes // F32
    for rows, columns in _dot_blocks(p, target, lanes, space):
        k_block = _even(p.k, target.caches.l1 * 3 // 4 // (columns * F32), 2 * lanes)
        config = _config(p, target, threads, "dot", rows, columns, k_block)
        space.kept.append(Candidate(config, f"{rows}x{columns} sums along K: nothing is packed"))
    for rows, columns in _panel_blocks(p, target, lanes, space):
        k_block = _even(p.k, target.caches.l1 * 9 // 8 // (columns * F32), 2 * lanes)
        passes = ceil(p.m_hint / rows)
        if p.b == "row" and passes <= DIRECT_PASSES and not p.packed_b:
            config = _config(p, target, threads, "panel", rows, columns, k_block, pack_b=False)
            space.kept.append(Candidate(config, f"B is read {passes} times where it is"))
        config = _config(p, target, threads, "panel", rows, columns, k_block)
        if p.m_hint <= 2 and not p.packed_b:
            space.dropped.append(Dropped(config, f"M = {p.m_hint}: B would be packed to be read once"))
        else:
            space.kept.append(Candidate(config, f"{rows}x{columns} sums in {target.vector_registers} registers"))
    if not space.kept:  # a tiny M, and a B that can only be packed
        space.kept = [Candidate(d.config, "the only one") for d in space.dropped if d.config is not None][:1]
    return space


def _dot_blocks(p: GemmProblem, target, lanes: int, space: Space):
    """(rows, columns) of dot products, most reuse first."""
    step = 2 * lanes if p.dtype == "bf16" else lanes
    for wrong, reason in (
        ((p.a, p.b) != ("row", "col"), f"dot: A {p.a} and B {p.b} do not both run along K"),
        (p.packed_b, "dot: B is packed in panels"),
        (p.k < step, f"dot: K = {p.k} is shorter than a load of {step}"),
        (p.m_hint > DOT_ROWS, f"dot: M = {p.m_hint} is more than {DOT_ROWS}, so packing B pays"),
    ):
        if wrong:
            space.dropped.append(Dropped(None, reason))
            return []
    if p.m_hint == 1:
        return [(1, c) for c in (GROUP, 2 * GROUP)]
    found: list[tuple[int, int]] = []
    for rows, columns in ((r, c) for c in (GROUP, GROUP - 1) for r in range(min(p.m_hint, 8), 1, -1)):
        # of bf16 both halves of what is held and passes by, and the mask that takes them apart
        need = rows * columns + (2 * min(rows, columns) + 3 if p.dtype == "bf16" else min(rows, columns) + 1)
        if need > target.vector_registers:
            space.dropped.append(Dropped(None, f"dot {rows}x{columns}: {need} registers of {target.vector_registers}"))
        elif not any(c == columns for _, c in found):
            found.append((rows, columns))
    return sorted(found, key=lambda b: ceil(p.m_hint / b[0]) * (1 / b[1] + b[0]))


def _panel_blocks(p: GemmProblem, target, lanes: int, space: Space):
    """(rows, columns) of panels: for each number of vectors the most rows that the registers hold."""
    pairs = p.packed_b and p.dtype == "bf16"
    found: list[tuple[float, int, int]] = []
    for vectors in range(1, 8):
        if (vectors - 1) * lanes >= p.n:
            break
        per_row = vectors + (vectors if pairs else 0)  # of pairs both the words and one half of them
        most = (target.vector_registers - per_row - 1) // vectors
        rows = min(most, p.m_hint)
        if rows < 1:
            space.dropped.append(Dropped(None, f"panel of {vectors} vectors: {target.vector_registers} registers"))
            continue
        loads = (rows + vectors) / (rows * vectors)  # a multiply-add
        wasted = ceil(p.m_hint / rows) * rows * ceil(p.n / (vectors * lanes)) * vectors * lanes / (p.m_hint * p.n)
        idle = max(1.0, SUMS_IN_FLIGHT / (rows * vectors))
        twice = TAIL_COST if p.n % (vectors * lanes) else 1.0
        starved = max(1.0, LOADS_A_STEP * loads)  # two loads a cycle serve two multiply-adds, with a little to spare
        found.append((wasted * idle * twice * starved, vectors * lanes, rows))
    found.sort()  # of equal ones the narrower: the more rows of B at hand, the sooner LLVM spills
    for cost, columns, rows in found[2:]:
        space.dropped.append(Dropped(None, f"panel {rows}x{columns}: {cost / found[0][0]:.2f}x the best one's steps"))
    return [(rows, columns) for _, columns, rows in found[:2]]


def _even(k: int, most: int, multiple: int) -> int:
    """A block of K, at most about `most`: K in equal parts, rounded up to `multiple`."""
    parts = max(1, ceil(k / max(multiple, most)))
    return ceil(ceil(k / parts) / multiple) * multiple


def _config(p: GemmProblem, target, threads, family, rows, columns, k_block, pack_b=True) -> X86Config:
    worth = max(1, min(threads, p.m_hint * p.n * p.k // WORK_PER_THREAD))  # threads for one matrix
    tile_m, tile_n = _tiles(p, worth, rows, columns)
    k_here = min(k_block, p.k)
    in_l2 = target.caches.l2 // 2 // (k_here * F32)
    return X86Config(
        family=family,
        rows=rows,
        columns=columns,
        k_block=k_block,
        m_block=max(rows, min(tile_m, in_l2) // rows * rows),
        tile_m=tile_m,
        tile_n=tile_n,
        unroll=UNROLL,
        pack_a=family == "panel" and not (p.dtype == "f32" and p.a == "row"),
        pack_b=pack_b,
        threads=threads if p.batched else worth,  # how many matrices there are is not known here
    )


def _tiles(p: GemmProblem, threads: int, rows: int, columns: int) -> tuple[int, int]:
    """A workgroup's rows and columns. B is packed anew for each tile along M, so N is split first.

    M may turn out larger than hinted: then there are more tiles along M, none of them tiny."""
    up = lambda n, multiple: ceil(n / multiple) * multiple
    tile_m = up(min(max(p.m_hint, TILE_M_LEAST), TILE_M_MOST), rows)
    if threads == 1:
        return tile_m, up(p.n, columns)
    panels_n, panels_m = ceil(p.n / columns), ceil(p.m_hint / rows)
    even = lambda panels: panels / (ceil(panels / threads) * threads)  # part of the threads' time that is used
    if even(panels_n) >= 0.9 * even(panels_m):
        return tile_m, ceil(panels_n / threads) * columns
    return min(tile_m, ceil(panels_m / threads) * rows), up(p.n, columns)
