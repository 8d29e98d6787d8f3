"""Warpgroups that take the K tiles of one tile of C in turn on sm_90a, and add up at the end.

The products of a small tile are short, and each waits for the sums of the one before: with two warpgroups there are two
such chains, each half as long. They add up in shared memory, where the ring was, those of the first K tiles first.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import f32, i32
from flykernels.lang import Kernel, View, constant
from flykernels.lang.fragment import Fragment
from flykernels.lang.memory import advance
from flykernels.targets import sm90a_barriers as barriers
from flykernels.targets import sm90a_wgmma as wgmma

from .gfx950_operands import matrix
from .problem import GemmProblem
from .sm90a_config import STAGE_ALIGNMENT, WARPGROUP, Sm90aConfig, shared_memory, shelf_bytes, up
from .sm90a_output import Output
from .sm90a_ring import READY, Stages, advance_bytes
from .sm90a_work import VECTOR, Work


def why_not(p: GemmProblem, cfg: Sm90aConfig) -> str | None:
    """What is in the way of taking K tiles in turn, in words; None if nothing."""
    turns, room = cfg.k_groups, shared_memory(p, cfg)
    whole = cfg.one_tile and cfg.split_k == cfg.cluster_size == 1 and not cfg.tma_store
    if not whole or cfg.multipliers > turns * WARPGROUP or cfg.blocks > 1:
        return "warpgroups that take K tiles in turn have one tile of up to 64 rows, and write it themselves"
    if cfg.stages % turns or cfg.steps(p) < turns:
        return f"{cfg.stages} stages and {cfg.steps(p)} K tiles for {turns} warpgroups in turn"
    needed = inbox_start(p, cfg) + (turns - 1) * WARPGROUP * cfg.sums * f32.bytes
    return (
        f"{needed} bytes for others' sums; the stages have {cfg.stages * room.stage}"
        if needed > cfg.stages * room.stage
        else None
    )


def inbox_start(p: GemmProblem, cfg: Sm90aConfig) -> int:
    """Bytes from the start of shared memory to where others' sums are left: after the shelves."""
    return up(shelf_bytes(p, cfg), STAGE_ALIGNMENT)


def consume_in_turns(k: Kernel, p: GemmProblem, cfg: Sm90aConfig, work: Work, given, ring: Stages) -> None:
    """Multiplies every `k_groups`-th K tile of the workgroup's tile; the first warpgroup adds up and writes."""
    turns, turn, lane = cfg.k_groups, k.thread // WARPGROUP, k.thread % WARPGROUP
    origin = wgmma.address_of(ring.memory)
    start = wgmma.descriptor(ring.a, origin), wgmma.descriptor(ring.b, origin + ring.a.bytes)
    piece = work.start()

    def release(stage):
        k.when(lane.equals(0))(lambda: ring.empty.arrive(stage))

    # main loop: stages are a multiple of the turns, so that each warpgroup meets its own again and again
    at = barriers.Position(turn, constant(0, i32), cfg.stages)
    ring.full.wait(at.stage, at.parity)
    sums = ring.product(start, [wgmma.undefined(cfg.columns)], at.stage, True)

    @k.loop(turn + (piece.first + turns), piece.end, turns, carry=(sums, at.next(turns).carried, at.stage))
    def done(step, carried):
        sums, now, before = carried
        at = barriers.Position.of(now, cfg.stages)
        ring.full.wait(at.stage, at.parity)
        sums = ring.product(start, sums, at.stage, False)
        wgmma.wait(1)
        release(before)
        return sums, at.next(turns).carried, at.stage

    sums, _, last = done
    wgmma.wait(0)
    release(last)
    barriers.named_barrier(READY, cfg.multipliers)  # nobody needs the ring any more

    # epilogue: all but the first leave their sums beside the shelves
    acc = wgmma.fragment(k, wgmma.sums_layout(cfg.columns, cfg.blocks, cfg.groups), list(sums))
    pairs = [(n, (1, *n[1:])) for n in acc.names() if n[0] == 0]
    inbox = View(advance_bytes(ring.memory, inbox_start(p, cfg)), f32, (1,), (1,))
    together = lambda low, high: acc[low].shuffle(range(VECTOR), acc[high])

    def slot(sender: Any, i: int):
        first = (sender * len(pairs) + i) * (WARPGROUP * VECTOR)
        return advance(advance(inbox.pointer, first, f32), lane * VECTOR, f32)

    @k.when(turn > 0)
    def _():
        for i, pair in enumerate(pairs):
            inbox.write(slot(turn - 1, i), together(*pair), VECTOR * f32.bytes)

    barriers.named_barrier(READY, cfg.multipliers)

    @k.when(turn.equals(0))
    def _():
        at = (piece.row, piece.column)
        output = Output(k, p, cfg, lambda n: matrix(k, p, given, n, piece.batch), at, (), ring.shelf)
        added = output.fetch(0)
        output.store(
            _total(acc, pairs, together, turns, lambda s, i: inbox.read(slot(s, i), VECTOR, VECTOR * f32.bytes)), added
        )


def _total(acc: Fragment, pairs: list, together: Any, turns: int, sent: Any) -> Fragment:
    """The sums of all. together(*pair): this thread's; sent(sender, i): those of pair i of another."""
    values = {}
    for i, (low, high) in enumerate(pairs):
        total = together(low, high)
        for sender in range(turns - 1):
            total = total + sent(sender, i)
        values[low], values[high] = total.shuffle((0, 1)), total.shuffle((2, 3))
    return acc.like([values[n] for n in acc.names()])
