"""Scalar memory: loads from memory into scalar registers. They return out of order, so only lgkmcnt(0) waits for
them. A buffer's range is checked dword by dword: those beyond it read 0 (CDNA3 ISA reference, "Scalar memory")."""

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


def _size(g: Group, descriptor: int) -> np.ndarray:
    """Bytes of a buffer [waves]: records are bytes, or as long as the stride where there is one."""
    stride = g.S[descriptor + 1] >> 16 & 0x3FFF
    return g.S[descriptor + 2] * np.maximum(stride, 1)


def _load(i: Instruction, m: Machine) -> Callable[[Group], None]:
    buffer = i.name in BUFFER_LOADS
    count, where = (BUFFER_LOADS if buffer else LOADS)[i.name], i.operands[0].index
    base, offset = scalar(i.operands[1], wide=True), scalar(i.operands[2], signed=i.operands[2].kind == "c")
    more = i.mods.get("offset", 0)
    descriptor = i.operands[1].index
    registers = frozenset(sgpr_key(where + k) for k in range(count))

    def fetch(g: Group, address: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
        m.touch(g, address, mask, size, write=False, track=False)
        return m.memory.read(address, mask, size, lambda k, t, lanes: m.report(k, t, g, lanes))

    def run(g: Group) -> None:
        at = np.broadcast_to(offset(g) + more, g.n)
        address = (base(g) & 0xFFFFFFFFFFFF if buffer else base(g)) + at & ~3
        address = np.broadcast_to(address, g.n)[:, None]
        inside = np.full(g.n, count)
        if buffer:
            inside = np.where(at < 0, 0, (_size(g, descriptor) - (at & ~3)) // 4)
        if inside.min() >= count:
            data = fetch(g, address, np.ones((g.n, 1), bool), 4 * count)
        else:
            data = np.concatenate([fetch(g, address + 4 * k, (k < inside)[:, None], 4) for k in range(count)])
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
