"""The half-tile-interleaved main loop on gfx950: two groups of waves, one phase apart; one loads, one multiplies.

A workgroup's rows of A and columns of B are cut into halves, C into four quadrants, which stay in registers. A schedule
is a table of phases; the loop walks it. In each phase a wave reads halves of K tile t from LDS, asks memory for a half
of a later tile, into LDS that every wave has finished reading, and multiplies quadrants. All waves run the same text;
half of them a barrier later, so that on each SIMD one wave multiplies while its neighbour moves data.

Order. Barriers order waves, not memory: what one wave did comes before another's access only if it *waited* for it (in
vmcnt or lgkmcnt) before a barrier that the other passed first; with the groups a barrier apart, every wait must come
two barriers before what depends on it. So each phase waits for what the next one reads, and LDS reads are waited for
before a phase's first barrier. Where a published port waits one phase later, another wave may read what has not landed.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from flykernels.lang import Kernel, View
from flykernels.lang.fragment import Fragment
from flykernels.lang.matrix import TiledMma
from flykernels.lang.plan import Plan
from flykernels.lang.values import maximum

from .gfx950_config import Gfx950Config, along_k
from .gfx950_operands import operand_ring
from .problem import GemmProblem


class Phase(NamedTuple):
    """reads: (half, tiles ahead) that go from LDS to registers. fetches: (half, tiles ahead) from memory into LDS that
    was read a phase ago or earlier. quadrants: (row half, column half) of C that are multiplied."""

    reads: tuple[tuple[str, int], ...]
    fetches: tuple[tuple[str, int], ...]
    quadrants: tuple[tuple[int, int], ...]


# Two barriers a phase. "four" has the fewest barriers that two stages allow: with f phases a tile and h phases to hide
# a load, 2 f >= 2 + h. "eight" interleaves finer. Published ports read A0 and B0 in one phase and nothing in the last;
# those reads take longer than a burst of multiplying. Here the last phase reads the next tile's B0, into registers that
# B1 has left, so that every phase's reads are shorter than a burst.
SCHEDULES = {
    "eight": (
        Phase((("A0", 0),), (("B0", 2),), ((0, 0),)),
        Phase((("B1", 0),), (("A0", 2),), ((0, 1),)),
        Phase((("A1", 0),), (("B1", 2),), ((1, 1),)),
        Phase((("B0", 1),), (("A1", 2),), ((1, 0),)),
    ),
    "four": (
        Phase((("B0", 0), ("B1", 0), ("A0", 0)), (("A1", 1),), ((0, 0), (0, 1))),
        Phase((("A1", 0),), (("B0", 2), ("B1", 2), ("A0", 2)), ((1, 0), (1, 1))),
    ),
}
QUADRANTS = ((0, 0), (0, 1), (1, 0), (1, 1))


def interleaved_loop(
    k: Kernel, p: GemmProblem, cfg: Gfx950Config, mma: TiledMma, a: View, b: View, last=None, ring_of=None, slots=None
):
    """({(row half, column half): the quadrant's sums}, the rings, whose LDS is free).

    a, b: the workgroup's (rows, K) of A and (columns, K) of B; either may end anywhere. mma: one quadrant's.
    last: of the rings, see `Ring`. ring_of(which, the half's view, its rows, number of the half): the ring of a half,
    if not `operand_ring`. slots: rings of what goes with several K tiles (`per`), each brought in while the one before
    is read; `slots.of(half)` goes with a half."""
    phases, (half_m, half_n) = SCHEDULES[cfg.schedule], cfg.part
    ring_of = ring_of or (lambda which, view, rows, _: operand_ring(k, p, cfg, which, view, rows, last))
    ring = {
        f"{name}{h}": ring_of(name.lower(), view.tile((rows,), h), rows, h)
        for name, view, rows in (("A", a, half_m), ("B", b, half_n))
        for h in (0, 1)
    }
    operand = {"A": mma.a, "B": mma.b}
    tiles, ragged, count = ring["A0"].tiles, ring["A0"].ragged, len(phases)
    furthest = max(ahead for phase in phases for _, ahead in phase.fetches)
    early = [half for phase in phases for half, ahead in phase.reads if ahead]  # read in the tile before
    per = slots.per if slots else 1
    turn = lcm(cfg.stages, per)  # K tiles of a turn of the loop
    run_time = ring["A0"].run_time
    # tiles whose fetches are whole
    whole = maximum(ring["A0"].tile_count - (furthest + 1), 0) if run_time else max(0, tiles - furthest - ragged)
    whole = whole // turn * turn

    def fetch(g):
        t, at = divmod(g, count)
        slot = [(r, t // per + 1) for r in slots.rings] if slots and at == 0 and t % per == 0 else []
        return slot + [(ring[half], t + ahead) for half, ahead in phases[at].fetches]

    def need(g):
        halves = [(half, g // count + ahead) for half, ahead in phases[g % count].reads]
        halves += [(half, 0) for half in early if g == 0]
        return [(ring[half], t) for half, t in halves] + [(slots.of(half), t // per) for half, t in halves if slots]

    plan = Plan(start=-max(furthest, per if slots else 0) * count, fetch=fetch, need=need)
    late = cfg.waves[0] * cfg.waves[1] // 2  # waves from here on run a barrier behind

    def wait(g, cut=False):
        """Until what phase g reads has landed. A cut K tile mixes loads that return nothing: do not count those."""
        cut = cut or (ragged and g // count + furthest >= tiles - 1)
        k.wait_loads(0 if cut and plan.in_flight(g) is not None else plan.in_flight(g))

    def read(half, t):
        r = ring[half]
        return [r.read(operand[half[0]], t, s) for s in range(r.steps(t, operand[half[0]].tile[1]))]

    def tile(number, t, acc, held, cut=False):
        """K tile t, which is `number` in the plan or one like it; held: the halves that were read early."""
        for g, phase in enumerate(phases, count * number):
            got = {half: read(half, t + ahead) for half, ahead in phase.reads if number + ahead < tiles}
            held = held | {half: got[half] for half, ahead in phase.reads if not ahead}
            for r, n in plan.fetch(g):
                r.prefetch(t // per + (n - number // per) if slots and r in slots.rings else t + (n - number))
            wait(g + 1, cut)  # for the next phase already: the other group reads a barrier earlier
            k.phase_end()
            acc = acc | multiplied(k, mma, held, {q: acc[q] for q in phase.quadrants})
            k.phase_end()
            held = held | got
        return acc, {half: held[half] for half in early}

    plan.prologue()
    wait(0, run_time)
    k.barrier()
    held = {half: read(half, 0) for half in early}
    if early:
        k.phase_end()  # before anyone asks for what comes in its place

    @k.when(k.subgroup >= late)
    def _():
        k.phase_end()

    assert plan.steady(count * turn, count * (turn * 2 if run_time else whole), early=1)
    acc = {q: mma.zeros() for q in QUADRANTS}

    def loop(first, end, step, acc, held, cut=False):
        @k.loop(first, end, step, carry=(tuple(acc.values()), tuple(tuple(x) for x in held.values())))
        def result(t, carried):
            now, held = dict(zip(QUADRANTS, carried[0])), dict(zip(early, carried[1]))
            for number in range(step):
                now, held = tile(number, t + number, now, held, cut)
            return tuple(now.values()), tuple(tuple(x) for x in held.values())

        return dict(zip(QUADRANTS, result[0])), dict(zip(early, result[1]))

    if run_time or whole:
        acc, held = loop(0, whole, turn, acc, held)

    def rest(now):
        now, last = dict(zip(QUADRANTS, now)), held
        for t in range(whole, tiles):
            now, last = tile(t, t, now, last)
        return tuple(now.values())

    if run_time:
        acc, _ = loop(whole, ring["A0"].tile_count, 1, acc, held, cut=True)
        k.wait_loads(0)  # what was asked for past K's end
        whole = tiles

    # Straight after a loop LLVM moves sums from register to register until they no longer fit; but where operands are
    # read transposed, it is within a loop that their many addresses do not.
    plain = along_k(p, "a") and along_k(p, "b")
    if whole != tiles:
        acc = dict(zip(QUADRANTS, (k.in_place(tuple(acc.values()))(rest) if plain else rest(acc.values()))))

    @k.when(k.subgroup < late)
    def _():
        k.phase_end()

    return acc, ring


def multiplied(k: Kernel, mma: TiledMma, held: dict[str, list[Fragment]], acc: dict) -> dict:
    """The quadrants `acc` plus A B over a K tile's steps, ahead of the wave that moves data on the same SIMD."""

    @k.urgent
    def product():
        out = dict(acc)
        for step in range(len(next(iter(held.values())))):
            if step:
                k.target.pin()  # one step's sums are done before the next one's begin: no register holds a copy
            for m, n in acc:
                out[m, n] = mma(held[f"A{m}"][step], held[f"B{n}"][step], out[m, n])
        return out

    return product
