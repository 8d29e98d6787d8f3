"""The half-tile-interleaved GEMM: C = A B^T in bf16, 256x256 tile, 8 waves, two groups of waves half a phase apart.

The hardest schedule that the simulator has to prove: waves are staggered by a barrier, every wait is counted, and LDS
is
refilled half tile by half tile. The plan is a table; the loop walks it, and the wait counts follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from flykernels.lang import Global, Kernel, Swizzle, bf16
from flykernels.lang.matrix import TiledMma
from flykernels.lang.plan import Plan
from flykernels.lang.ring import Ring


class Phase(NamedTuple):
    """read: halves that go from LDS to registers; fetch: (half, tiles ahead) from memory into the LDS that was read a
    phase ago; quadrant: (row half, column half) of C that is multiplied."""

    read: tuple[str, ...]
    fetch: tuple[str, int]
    quadrant: tuple[int, int]


PHASES = (
    Phase(("A0", "B0"), ("A1", 1), (0, 0)),
    Phase(("B1",), ("A0", 2), (0, 1)),
    Phase(("A1",), ("B0", 2), (1, 1)),
    Phase((), ("B1", 2), (1, 0)),
)


@dataclass(frozen=True)
class HtiProblem:
    """M and N multiples of 256, K an even number of K tiles of 64."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class HtiConfig:
    half: int = 128
    tile_k: int = 64
    stages: int = 2
    waves: tuple[int, int] = (2, 4)
    repeat: tuple[int, int] = (4, 2)
    swizzle: Swizzle = field(default_factory=lambda: Swizzle(3, 3, 4))
    workgroup_size = 512


def gemm_hti(k: Kernel, p: HtiProblem, cfg: HtiConfig):
    a, b, c = k.args(a=Global(bf16, (p.m, p.k)), b=Global(bf16, (p.n, p.k)), c=Global(bf16, (p.m, p.n)))
    row, column = k.workgroup_id(0), k.workgroup_id(1)
    mma = TiledMma(k, k.target.mma_bf16, cfg.waves, cfg.repeat)  # one quadrant
    ring = {
        f"{name}{h}": Ring(k, view.tile((cfg.half,), block * 2 + h), (cfg.half, cfg.tile_k), cfg.stages, cfg.swizzle)
        for name, view, block in (("A", a, row), ("B", b, column))
        for h in (0, 1)
    }
    steps, tiles = range(cfg.tile_k // mma.depth), ring["A0"].tiles

    def fetch(g):
        half, ahead = PHASES[g % 4].fetch
        return [(ring[half], g // 4 + ahead)]

    need = lambda g: [(ring[half], g // 4) for half in PHASES[g % 4].read]
    plan = Plan(start=-8, fetch=fetch, need=need)  # 4 phases a tile

    plan.prologue()
    k.wait_loads(plan.in_flight(0))
    k.barrier()

    @k.when(k.subgroup >= 4)
    def _():
        k.phase_end()  # from here on half the waves multiply while the others move data

    def tile(number, t, acc):
        """K tile t, which is `number` in the plan or one like it."""
        held = {}
        for g, phase in enumerate(PHASES, 4 * number):
            for half in phase.read:
                held[half] = [ring[half].read(mma.a if half[0] == "A" else mma.b, t, s) for s in steps]
            plan.issue(g, lambda n: t + (n - number))
            k.wait_loads(plan.in_flight(g + 1))  # for the next phase: the other waves read a barrier earlier
            k.phase_end()
            m, n = phase.quadrant

            @k.urgent
            def product():
                out = acc[2 * m + n]
                for s in steps:
                    out = mma(held[f"A{m}"][s], held[f"B{n}"][s], out)
                return out

            acc = (*acc[: 2 * m + n], product, *acc[2 * m + n + 1 :])
            k.phase_end()
        return acc

    assert tiles % 2 == 0 and plan.steady(8, 4 * (tiles - 2))

    @k.loop(0, tiles - 2, 2, carry=tuple(mma.zeros() for _ in range(4)))
    def acc(t, acc):
        return tile(1, t + 1, tile(0, t, acc))

    for t in (tiles - 2, tiles - 1):
        acc = tile(t, t, acc)

    @k.when(k.subgroup < 4)
    def _():
        k.phase_end()

    for i, quadrant in enumerate(acc):
        place = c.tile((cfg.half, cfg.half), row * 2 + i // 2, column * 2 + i % 2)
        k.fragment(mma.d).store(place, quadrant.to(bf16))
