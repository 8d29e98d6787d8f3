"""Matrix instructions over a workgroup: an atom, repeated in registers and spread over waves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ..dtypes import f32
from ..layout import ThreadValues
from .fragment import Fragment
from .values import constant


@dataclass(frozen=True)
class MatrixAtom:
    """One matrix instruction, D = A B^T + D, and who holds what.

    name    of the LLVM intrinsic
    a, b    tiles of (rows, k) and (columns, k)
    d       tile of (rows, columns), f32
    scale   of a and of b: (rows, blocks of k), one E8M0 byte a lane
    formats MFMA's codes of a's and b's element types, for scaled instructions
    cycles  that one of them keeps a SIMD's matrix unit busy (0: not known)

    The order of a fragment's pieces is the order of the instruction's registers (last mode of `pieces` fastest)."""

    name: str
    a: ThreadValues
    b: ThreadValues
    d: ThreadValues
    scale: ThreadValues | None = None
    cycles: int = 0
    formats: tuple[int, int] = ()  # type: ignore[assignment]


class TiledMma:
    """acc = mma(a, b, acc) for the workgroup's tile: `repeat` atoms a wave and `waves` waves, along (rows, columns).

    k_waves: so many waves hold sums of the same tile, each of its own part of every step's K."""

    def __init__(self, k, atom: MatrixAtom, waves, repeat, k_waves: int = 1):
        self.k, self.atom, self.repeat, self.waves, self.k_waves = k, atom, repeat, waves, k_waves
        (wm, wn), (rm, rn) = waves, repeat
        self.a = atom.a.repeat(rm, 1).spread((wm, 0), (wn, None))  # waves side by side along N hold the same A
        self.b = atom.b.repeat(rn, 1).spread((wm, None), (wn, 0))
        self.d = atom.d.repeat(rm, rn).spread((wm, 0), (wn, 1))
        if atom.scale:
            self.scale_a = atom.scale.repeat(rm, 1).spread((wm, 0), (wn, None))
            self.scale_b = atom.scale.repeat(rn, 1).spread((wm, None), (wn, 0))
        if k_waves > 1:
            self.a, self.b, self.d = (
                self.a.spread((k_waves, 1)),
                self.b.spread((k_waves, 1)),
                self.d.spread((k_waves, None)),
            )
        self.depth = self.a.tile[1]  # K of one step

    def zeros(self) -> Fragment:
        return Fragment(self.k, self.d, False, lambda _: constant(0, f32, self.d.vector.size))

    def __call__(
        self,
        a: Fragment,
        b: Fragment,
        acc: Fragment,
        scale_a: Fragment | None = None,
        scale_b: Fragment | None = None,
        place: int = 0,
    ) -> Fragment:
        """acc + a b. place: which byte of the scales' registers is this step's."""
        registers = lambda f, atom, *at: [f[d + at] for d in product(*map(range, atom.piece_sizes))]
        out: dict = {}
        for i, j in product(*map(range, self.repeat)):
            d = self.k.target.mma(
                self.atom,
                registers(a, self.atom.a, i, 0),
                registers(b, self.atom.b, j, 0),
                registers(acc, self.atom.d, i, j),
                *([scale_a[i, 0], scale_b[j, 0], place] if scale_a and scale_b else []),
            )
            out.update(zip((n + (i, j) for n in product(*map(range, self.atom.d.piece_sizes))), d))
        return acc.like([out[n] for n in acc.names()])
