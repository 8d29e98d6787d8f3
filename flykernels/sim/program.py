"""A kernel's instructions, bound: each with its function, the registers it touches, and how it moves the program
counter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import compare, lanes, lds, matrix, mode, packed, salu, smem, valu, vmem
from .asm import AGPR, EXEC, M0, VCC, Code, Instruction, Operand
from .dpp import CONTROLS
from .errors import UnknownInstruction
from .machine import Machine
from .operands import Binder, Registers, bad, write_scalar
from .smem import sgpr_key
from .state import DENORMALS_IN, DENORMALS_OUT, Group

PLAIN, BRANCH, BARRIER, END, WAIT = range(5)
ENDS = ("s_endpgm", "s_endpgm_saved")


@dataclass(slots=True)
class Bound:
    """An instruction ready to run.

    run        its function of a group
    kind       PLAIN, BRANCH, BARRIER, END or WAIT
    touches    registers read or written, vector ones by index in Group.V and scalar ones negative (see smem.sgpr_key)
    stale      first registers of unpacked matrix operands that it overwrites
    target     index of a branch's target
    taken      a branch's condition [waves] bool, None if always taken
    """

    run: Callable[[Group], None]
    kind: int
    touches: frozenset[int]
    stale: tuple
    instruction: Instruction
    target: int = -1
    taken: Callable[[Group], np.ndarray] | None = None
    vm: int = -1
    lgkm: int = -1


# All modifiers that some instruction's function looks at, or that change nothing here (cache policies, encodings).
MODIFIERS = frozenset({
    "e64", "offset", "offset0", "offset1", "offen", "idxen", "addr64", "sc0", "sc1", "nt", "glc", "lds", "gds",
    "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp", "mul", "div", "cbsz", "abid", "blgp", "bitop3", "row_mask",
    "bank_mask", "bound_ctrl", "fi", "dst_sel", "dst_unused", "src0_sel", "src1_sel", *CONTROLS,
})  # fmt: skip


def writes(i: Instruction) -> list[Operand]:
    """Operands that an instruction writes."""
    name, o = i.name, i.operands
    if not o:
        return []
    if name.startswith(("s_cmp", "s_cbranch", "s_branch", "s_bitcmp", "s_setprio", "s_nop", "s_sleep", "s_setreg")):
        return []
    if name.startswith(("ds_write", "buffer_store", "global_store", "flat_store", "scratch_store")):
        return []
    if name.startswith("ds_") and lds.store_size(i) and "_rtn" not in name:
        return []
    if "_atomic_" in name:
        return [o[0]] if i.mods.get("sc0") or i.mods.get("glc") else []
    if i.mods.get("lds") or "_load_lds_" in name:
        return []
    if "swap_b32" in name:
        return list(o[:2])
    two = name.startswith(("v_add_co", "v_sub_co", "v_subrev_co", "v_addc_co", "v_subb_co", "v_subbrev_co"))
    if two or name.startswith(("v_mad_u64", "v_mad_i64", "v_div_scale")):
        return list(o[:2])
    return [o[0]]


def width_of(i: Instruction, o: Operand, position: int) -> int:
    """Registers that an operand covers: as named in the text; the text names ranges fully."""
    if matrix.is_matrix(i.name) and position in (1, 2):
        return matrix.sources(i)[position - 1][1]
    return o.count


def keys(o: Operand, count: int, registers: Registers) -> list[int]:
    if o.kind == "v":
        first = registers.index(o.index)
        return list(range(first, first + count))
    if o.kind == "s":
        return [sgpr_key(o.index + k) for k in range(count)]
    return []


def touched(i: Instruction, registers: Registers) -> tuple[frozenset[int], frozenset[int]]:
    """(read, written) registers of an instruction, implied ones included."""
    outs = [id(o) for o in writes(i)]
    read: set[int] = set()
    written: set[int] = set()
    for position, o in enumerate(i.operands):
        k = keys(o, width_of(i, o, position), registers)
        if id(o) in outs and position < 2:
            written.update(k)
        else:
            read.update(k)
    first = i.operands[0] if i.operands else None
    reads_destination = i.name.startswith((
        "v_fmac", "v_mac", "v_dot2c", "s_addk", "s_mulk", "s_bitset", "v_permlane", "v_swap", "v_fma_mixlo",
        "v_fma_mixhi", "s_cmov", "v_writelane", "v_cvt_pk_fp8", "v_cvt_pk_bf8", "v_cvt_scalef32_pk_fp8",
        "v_cvt_scalef32_pk_bf8", "v_cvt_scalef32_pk_fp4",
    ))  # fmt: skip
    if first is not None and (reads_destination or "_d16" in i.name):
        read.update(keys(first, first.count, registers))
    if i.name.startswith(("v_cmp", "v_cndmask", "v_div_fmas", "s_cbranch_vcc")) and len(i.operands) < 4:
        (written if i.name.startswith("v_cmp") and not i.mods.get("e64") else read).update(
            sgpr_key(VCC + k) for k in (0, 1)
        )
        if i.name.startswith("v_cmp"):
            read.difference_update(sgpr_key(VCC + k) for k in (0, 1))
            if i.operands and i.operands[0].index != VCC:
                written.difference_update(sgpr_key(VCC + k) for k in (0, 1))
    if "saveexec" in i.name or i.name.startswith("v_cmpx"):
        written.update(sgpr_key(EXEC + k) for k in (0, 1))
    if i.mods.get("lds") or "_load_lds_" in i.name:
        read.add(sgpr_key(M0))
    return frozenset(read), frozenset(written)


class Program:
    """All instructions of a code object, bound for one machine."""

    def __init__(self, code: Code, machine: Machine, at_least_vgprs: int = 1):
        self.code = code
        self.registers = Registers(code.instructions, at_least_vgprs)
        kept = DENORMALS_IN | DENORMALS_OUT
        may_flush = machine.mode & kept != kept or any(map(mode.changes, code.instructions))
        self.binder = Binder(self.registers, may_flush)
        self.machine = machine
        self.stores = [s for s in map(_store_granule, code.instructions) if s]
        self.operand_keys = self._matrix_keys()
        self.bound: list[Bound] = []
        unknown: dict[str, str] = {}
        for i in code.instructions:
            try:
                self.bound.append(self._bind(i))
            except UnknownInstruction as e:
                unknown.setdefault(i.name, str(e))
            except (LookupError, AttributeError, TypeError, ValueError) as e:
                unknown.setdefault(i.name, f"{i.where}: {i.text}: operands that cannot be read ({e})")
        if unknown:
            names = ", ".join(sorted(unknown))
            raise UnknownInstruction(f"unknown to the simulator: {names}\n  " + "\n  ".join(unknown.values()))

    @property
    def granule(self) -> int:
        """Bytes of the smallest LDS store: what the race checker keeps apart (16 if nothing is stored)."""
        return min(self.stores, default=16)

    @property
    def memory_granule(self) -> int:
        """Bytes of the smallest store to memory, at most 4: what the checker of shared memory keeps apart."""
        return min((s for s in map(vmem.store_size, self.code.instructions) if s), default=4)

    def _matrix_keys(self) -> dict[int, set[int]]:
        """{register: first registers of the matrix operands it is part of}: matrix.py caches values by the first."""
        found: dict[int, set[int]] = {}
        for i in self.code.instructions:
            if not matrix.is_matrix(i.name):
                continue
            for o, count in matrix.sources(i):
                if o.kind == "v":
                    first = self.registers.index(o.index)
                    for register in range(first, first + count):
                        found.setdefault(register, set()).add(first)
        return found

    def _stale(self, written: frozenset[int]) -> tuple[int, ...]:
        return tuple(set().union(*(self.operand_keys[x] for x in written if x in self.operand_keys)))

    def _bind(self, i: Instruction) -> Bound:
        read, written = touched(i, self.registers)
        made = Bound(_nothing, PLAIN, read | written, self._stale(written), i)
        name = i.name
        if name in ENDS:
            made.kind = END
        elif name == "s_barrier":
            made.kind = BARRIER
        elif name == "s_waitcnt":
            made.kind, made.vm, made.lgkm = WAIT, i.mods.get("vmcnt", -1), i.mods.get("lgkmcnt", -1)
        elif name in salu.BRANCHES:
            made.kind, made.taken = BRANCH, salu.BRANCHES[name]
            made.target = self._target(i)
        else:
            made.run = self._function(i)
        return made

    def _target(self, i: Instruction) -> int:
        o = i.operands[0]
        label = o.word
        if label in self.code.labels:
            return self.code.labels[label]
        raise UnknownInstruction(f"{i.where}: {i.text}: no such label")

    def _function(self, i: Instruction) -> Callable[[Group], None]:
        b, m = self.binder, self.machine
        if strange := set(i.mods) - MODIFIERS:
            raise bad(i, f"unknown modifier {min(strange)}")
        f = (
            salu.bind(i)
            or valu.bind(i, b)
            or matrix.bind(i, b)
            or compare.bind(i, b)
            or packed.bind(i, b)
            or lanes.bind(i, b)
            or smem.bind(i, m)
            or mode.bind(i)
            or lds.bind(i, b, m)
            or vmem.bind(i, b, m)
        )
        if f is None and i.name == "s_getpc_b64" and m.image is not None:
            f = self._program_counter(i, m.image)
        if f is None:
            raise UnknownInstruction(f"{i.where}: {i.text}")
        if i.name in lanes.NEEDS_ALL_LANES:
            inner = f

            def checked(g: Group) -> None:
                if not g.full:
                    m.report("exec-not-full", "lanes that are off do not take part in the exchange", g, ~g.exec)
                inner(g)

            return checked
        return f

    def _program_counter(self, i: Instruction, image: int) -> Callable[[Group], None]:
        """s_getpc_b64: the address of the next instruction in the loaded code object."""
        write = write_scalar(i.operands[0], wide=True)
        here = np.array([image + i.address + 4], np.int64)
        return lambda g: write(g, np.broadcast_to(here, g.n))


def _nothing(g: Group) -> None:
    return None


def _store_granule(i: Instruction) -> int:
    """Bytes of an instruction's LDS store, capped at 16; 0 if it makes none."""
    if i.mods.get("lds") or "_load_lds_" in i.name:
        size = next((vmem.SIZE[w] for w in (i.name.split("_")[-1],) if w in vmem.SIZE), 4)
        return {12: 4}.get(max(4, size), max(4, size))
    size = lds.store_size(i) if i.name.startswith("ds_") else 0
    return {12: 4}.get(size, size)


__all__ = ["AGPR", "BARRIER", "BRANCH", "END", "PLAIN", "WAIT", "Bound", "Program", "touched", "writes"]
