"""C = A B^T with MXFP4 operands: three stages of A and B, and rings of their scales that turn more slowly.

A and B hold two e2m1 values a byte along K, and an E8M0 scale a row for each 32 values of K. The scales of several K
tiles share a slot of LDS, since a direct load brings 16 bytes a lane.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flykernels.lang import Global, Kernel, Swizzle, bf16, u8
from flykernels.lang.matrix import TiledMma
from flykernels.lang.plan import Plan
from flykernels.lang.ring import Ring

BLOCK = 32  # values that share a scale


@dataclass(frozen=True)
class Mxfp4Problem:
    """M and N multiples of the tile, K of the K tiles that share a slot of scales."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Mxfp4Config:
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 256
    stages: int = 3
    tiles_a_slot: int = 4
    waves: tuple[int, int] = (2, 2)
    repeat: tuple[int, int] = (4, 4)
    swizzle: Swizzle = field(default_factory=lambda: Swizzle(3, 4, 4))
    workgroup_size: int = 256


def gemm_mxfp4(k: Kernel, p: Mxfp4Problem, cfg: Mxfp4Config):
    values = {name: Global(u8, (rows, p.k // 2)) for name, rows in (("a", p.m), ("b", p.n))}
    scales = {f"scale_{name}": Global(u8, (rows, p.k // BLOCK)) for name, rows in (("a", p.m), ("b", p.n))}
    a, b, scale_a, scale_b, c = k.args(**values, **scales, c=Global(bf16, (p.m, p.n)))
    row, column = k.workgroup_id(0), k.workgroup_id(1)
    mma = TiledMma(k, k.target.mma_mxfp4, cfg.waves, cfg.repeat)

    width, blocks, per = cfg.tile_k // 2, cfg.tile_k // BLOCK, cfg.tiles_a_slot
    A = Ring(k, a.tile((cfg.tile_m,), row), (cfg.tile_m, width), cfg.stages, cfg.swizzle)
    B = Ring(k, b.tile((cfg.tile_n,), column), (cfg.tile_n, width), cfg.stages, cfg.swizzle)
    SA = Ring(k, scale_a.tile((cfg.tile_m,), row), (cfg.tile_m, per * blocks), 2)
    SB = Ring(k, scale_b.tile((cfg.tile_n,), column), (cfg.tile_n, per * blocks), 2)
    ahead, steps = cfg.stages - 1, width // mma.depth

    def fetch(t):
        """What is asked for at K tile t: scales once a slot, when the slot before last has been read."""
        slot = [(SA, t // per + 1), (SB, t // per + 1)] if t % per == 0 else []
        return [*slot, (A, t + ahead), (B, t + ahead)]

    plan = Plan(start=-per, fetch=fetch, need=lambda t: [(A, t), (B, t), (SA, t // per), (SB, t // per)])
    plan.prologue()

    def tiles(number, t, slot, acc):
        """A slot's worth of K tiles, the first of them t; `number` is theirs in the plan."""
        for j in range(per):
            k.wait_loads(plan.in_flight(number + j))
            k.barrier()
            for ring, n in plan.fetch(number + j):
                ring.prefetch(slot + (n - number // per) if ring in (SA, SB) else t + (n - number))
            for s in range(steps):
                scale = j * steps + s
                acc = mma(
                    A.read(mma.a, t + j, s), B.read(mma.b, t + j, s), acc,
                    SA.read(mma.scale_a, slot, scale), SB.read(mma.scale_b, slot, scale),
                )  # fmt: skip
        return acc

    slots = A.tiles // per
    assert A.tiles % per == 0 and plan.steady(per, A.tiles - per)
    acc = k.loop(0, slots - 1, carry=mma.zeros())(lambda slot, acc: tiles(0, slot * per, slot, acc))
    acc = tiles(A.tiles - per, A.tiles - per, slots - 1, acc)
    k.fragment(mma.d).store(c.tile((cfg.tile_m, cfg.tile_n), row, column), acc.to(bf16))
