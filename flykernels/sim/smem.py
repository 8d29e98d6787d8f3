"""Scalar memory: loads from memory into scalar registers. They return out of order, so only lgkmcnt(0) waits for
them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .asm import Instruction
from .machine import Machine
from .operands import scalar, write_scalar
from .state import Group, Pending

SIZES = {"": 1, "x2": 2, "x4": 4, "x8": 8, "x16": 16}
LOADS = {f"s_load_dword{k}": n for k, n in SIZES.items()}
BUFFER_LOADS = {f"s_buffer_load_dword{k}": n for k, n in SIZES.items()}


def sgpr_key(register: int) -> int:
    """A scalar register in sets of registers: negative, so that it cannot be taken for a vector one."""
    return -register - 1


def bind(i: Instruction, m: Machine) -> Callable[[Group], None] | None:
    if i.name in LOADS or i.name in BUFFER_LOADS:
        return _load(i, m)
    if i.name in ("s_memtime", "s_memrealtime"):
        return _time(i)
    return None


def land(g: Group, p: Pending) -> None:
    assert p.data is not None
    g.S[p.where : p.where + len(p.data)] = p.data
    if p.where + len(p.data) > 126:
        g.refresh_exec()


def _load(i: Instruction, m: Machine) -> Callable[[Group], None]:
    buffer = i.name in BUFFER_LOADS
    count, where = (BUFFER_LOADS if buffer else LOADS)[i.name], i.operands[0].index
    base, offset = scalar(i.operands[1], wide=True), scalar(i.operands[2], signed=True)
    more = i.mods.get("offset", 0)
    descriptor = i.operands[1].index
    registers = frozenset(sgpr_key(where + k) for k in range(count))

    def run(g: Group) -> None:
        at = np.broadcast_to(offset(g) + more, g.n)
        address = (base(g) & 0xFFFFFFFFFFFF if buffer else base(g)) + at & ~3
        mask = np.ones((g.n, 1), bool)
        if buffer:
            mask = (at + 4 * count <= g.S[descriptor + 2])[:, None]
        m.touch(g, np.broadcast_to(address, g.n)[:, None], mask, 4 * count, write=False, track=False)
        data = m.memory.read(
            np.broadcast_to(address, g.n)[:, None], mask, 4 * count, lambda k, t, lanes: m.report(k, t, g, lanes)
        )
        p = Pending(registers, land, data[:, :, 0].astype(np.int64), where, pc=g.pc)
        if m.delay_mode:
            land(g, p)
            p = Pending(frozenset(), None, pc=g.pc)
        g.sm.append(p)
        g.busy |= p.registers

    return run


def _time(i: Instruction) -> Callable[[Group], None]:
    """A clock that advances by the instruction count would be a lie; it reads 0."""
    write = write_scalar(i.operands[0], wide=True)
    return lambda g: write(g, np.zeros(g.n, np.int64))
