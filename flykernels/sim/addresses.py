"""LDS addresses of a recorded instruction stream, from the code's own address arithmetic.

A trace says which instructions ran, not with which values. But addresses in LDS mostly follow from the work-item's
number alone, which is known. So the stream's arithmetic is executed for one wave; what depends on memory or on the
launch (arguments, workgroup numbers) is unknown, and an access whose address is unknown stays a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from . import banks, compare, lanes, lds, packed, salu, valu
from .asm import Instruction, Operand
from .errors import UnknownInstruction
from .matrix import is_matrix
from .operands import Binder, Registers
from .program import touched
from .state import LANES, Group
from .trace import kind_of

ARITHMETIC = (salu.bind, valu.bind, compare.bind, packed.bind, lanes.bind)


class KnownValues:
    """The registers of one wave while its recorded stream is walked.

    wave  its number in the workgroup, which with the lane makes v0, the work-item's number along x
    """

    def __init__(self, instructions: Sequence[Instruction], wave: int):
        self.instructions = list(instructions)
        self.registers = Registers(self.instructions)
        self.binder = Binder(self.registers)
        self.group = Group(np.array([0]), np.array([0]), np.array([wave]), self.registers.count)
        self.group.V[0] = np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * wave)
        self.known = {0}
        self.bound: dict[int, tuple[Callable | None, frozenset[int], frozenset[int]]] = {}

    def _bind(self, pc: int):
        i = self.instructions[pc]
        read, written = touched(i, self.registers)
        f = None
        if i.name.startswith(("v_", "s_")) and not is_matrix(i.name):
            try:
                f = next((f for f in (bind(i, *self._needs(bind)) for bind in ARITHMETIC) if f), None)
            except UnknownInstruction:
                f = None
        return f, read, written

    def _needs(self, bind: Callable) -> tuple:
        return () if bind is salu.bind else (self.binder,)

    def step(self, pc: int) -> None:
        """Executes one instruction as far as its sources are known."""
        if pc not in self.bound:
            self.bound[pc] = self._bind(pc)
        f, read, written = self.bound[pc]
        if not written:
            return
        if f is not None and read <= self.known:
            f(self.group)
            self.known |= written
        else:
            self.known -= written

    def vector(self, o: Operand) -> np.ndarray | None:
        """A vector register's [64] values, or None if they are not known."""
        index = self.registers.index(o.index)
        return self.group.V[index, 0].astype(np.int64) if o.kind == "v" and index in self.known else None


def lds_cycles(instructions: Sequence[Instruction], stream: Sequence[Sequence[int]], wave: int) -> dict[int, int]:
    """{position in the stream: cycles} of the LDS accesses whose addresses follow from the code, by sim/banks.py."""
    values, found = KnownValues(instructions, wave), {}
    with np.errstate(all="ignore"):
        for at, (pc, *_) in enumerate(stream):
            i = instructions[pc]
            if i.name.startswith("ds_") and kind_of(i) in ("lds_read", "lds_write"):
                cycles = _access(values, i)
                if cycles is not None:
                    found[at] = cycles
            values.step(pc)
    return found


def _access(values: KnownValues, i: Instruction) -> int | None:
    write = i.name.startswith("ds_write")
    if not write and not i.name.startswith("ds_read"):
        return None
    address = values.vector(i.operands[0 if write else 1])
    if address is None:
        return None
    if "2_b" in i.name or "2st64" in i.name:
        size = lds.TWO[i.name.split("_")[-1]]
        step = size * (64 if "st64" in i.name else 1)
        return sum(banks.cycles(write, size, address + i.mods.get(f"offset{k}", 0) * step, None)[0] for k in (0, 1))
    size = (lds.WRITE if write else lds.READ)[i.name]
    return banks.cycles(write, size, address + i.mods.get("offset", 0), None)[0]
