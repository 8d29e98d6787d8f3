"""C = A B^T, fragments straight from memory: one source for every target that has a matrix atom. For small M, N, K."""

from __future__ import annotations

from dataclasses import dataclass

from flykernels.codeobject import Extent
from flykernels.lang import Global, Kernel, bf16, i32
from flykernels.lang.matrix import TiledMma


@dataclass(frozen=True)
class DirectConfig:
    """waves along (M, N), matrix instructions of each along (M, N), lanes of a wave."""

    waves: tuple[int, int]
    repeat: tuple[int, int]
    lanes: int

    @property
    def workgroup_size(self) -> int:
        return self.lanes * self.waves[0] * self.waves[1]


def direct_gemm(k: Kernel, p: tuple[int, int], cfg: DirectConfig):
    """p: (n, k); A is (m, k), B (n, k), C (m, n), all row-major bf16; K a multiple of the instruction's."""
    n, depth = p
    a, b, c, _ = k.args(a=Global(bf16, ("m", depth)), b=Global(bf16, (n, depth)), c=Global(bf16, ("m", n)), m=i32)
    mma = TiledMma(k, k.target.mma_bf16, cfg.waves, cfg.repeat)
    k.grid = ((Extent("m", mma.d.tile[0]),), (Extent(n, mma.d.tile[1]),))
    row, column = k.workgroup_id(0), k.workgroup_id(1)

    @k.loop(0, depth // mma.depth, carry=mma.zeros())
    def acc(t, acc):
        held_a = k.fragment(mma.a).load(a.tile(mma.a.tile, row, t))
        held_b = k.fragment(mma.b).load(b.tile(mma.b.tile, column, t))
        return mma(held_a, held_b, acc)

    k.fragment(mma.d).store(c.tile(mma.d.tile, row, column), acc.to(bf16))
