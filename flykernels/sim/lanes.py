"""Instructions that move data between lanes, or between vector and scalar registers.

Semantics: CDNA3 ISA reference; `v_permlane16_swap` and `v_permlane32_swap` (new on gfx950) from LLVM's documentation of
the intrinsics: odd rows of the first register and even rows of the second change places.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .asm import Instruction
from .operands import Binder, bad, scalar, write_scalar
from .state import LANE, LANES, Group

U32 = np.uint32


def bind(i: Instruction, b: Binder) -> Callable[[Group], None] | None:
    maker = TABLE.get(i.name)
    return None if maker is None else maker(i, b)


def _readfirstlane(i: Instruction, b: Binder) -> Callable[[Group], None]:
    """The lowest active lane's value; lane 0 if none is active."""
    write, read = write_scalar(i.operands[0]), b.typed(i.operands[1], "u32")

    def run(g: Group) -> None:
        x = np.broadcast_to(read(g), (g.n, LANES))
        if g.full:
            write(g, x[:, 0].astype(np.int64))
        else:
            write(g, x[np.arange(g.n), np.argmax(g.exec, axis=1)].astype(np.int64))

    return run


def _readlane(i: Instruction, b: Binder) -> Callable[[Group], None]:
    write, read, lane = write_scalar(i.operands[0]), b.typed(i.operands[1], "u32"), scalar(i.operands[2])

    def run(g: Group) -> None:
        x = np.broadcast_to(read(g), (g.n, LANES))
        at = np.broadcast_to(lane(g) & 63, g.n)
        write(g, x[np.arange(g.n), at].astype(np.int64))

    return run


def _writelane(i: Instruction, b: Binder) -> Callable[[Group], None]:
    """Ignores EXEC."""
    r = b.registers.index(i.operands[0].index)
    value, lane = scalar(i.operands[1]), scalar(i.operands[2])

    def run(g: Group) -> None:
        at = np.broadcast_to(lane(g) & 63, g.n)
        g.V[r][np.arange(g.n), at] = (np.broadcast_to(value(g), g.n) & 0xFFFFFFFF).astype(U32)

    return run


def _permlane_swap(rows: int):
    odd = (LANE // rows) % 2 == 1

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        if i.mods.get("fi") or any(o.kind != "v" for o in i.operands):
            raise bad(i, "this form of a permlane swap")
        first, second = (b.registers.index(o.index) for o in i.operands)
        partner = LANE ^ rows

        def run(g: Group) -> None:
            x, y = g.V[first].copy(), g.V[second].copy()
            new_x, new_y = np.where(odd, y[:, partner], x), np.where(odd, y, x[:, partner])
            if g.full:
                g.V[first], g.V[second] = new_x, new_y
            else:
                np.copyto(g.V[first], new_x, where=g.exec)
                np.copyto(g.V[second], new_y, where=g.exec)

        return run

    return make


TABLE: dict[str, Callable] = {
    "v_readfirstlane_b32": _readfirstlane,
    "v_readlane_b32": _readlane,
    "v_writelane_b32": _writelane,
    "v_permlane16_swap_b32": _permlane_swap(16),
    "v_permlane32_swap_b32": _permlane_swap(32),
}
NEEDS_ALL_LANES = ("v_permlane16_swap_b32", "v_permlane32_swap_b32")
