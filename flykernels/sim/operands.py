"""Operands -> functions of a group: typed readers and writers, with input and output modifiers, DPP and SDWA.

A reader gives an array that broadcasts to [waves, 64] (vector) or [waves] (scalar). A writer obeys EXEC.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from .arithmetic import flush
from .asm import AGPR, EXEC, M0, VCC, Instruction, Operand
from .dpp import dpp_lanes
from .errors import UnknownInstruction
from .state import DENORMALS_IN, DENORMALS_OUT, LANES, MASK32, OVERFLOW, SGPRS, Group, pack_mask, unpack_mask

U32, U64, I64 = np.uint32, np.uint64, np.int64
SIGN = {"f32": U32(0x80000000), "f16": U32(0x8000), "bf16": U32(0x8000), "u16": U32(0x8000), "u32": U32(0x80000000)}
WIDE = {"u64", "i64", "f64"}
MODE_REGISTER = SGPRS  # a number for it, beyond those of scalar registers, where sets of registers are followed
NAMED = {
    MODE_REGISTER: "mode",
    VCC: "vcc_lo",
    VCC + 1: "vcc_hi",
    M0: "m0",
    EXEC: "exec_lo",
    EXEC + 1: "exec_hi",
}  # scalar registers
Reader = Callable[[Group], np.ndarray]
Writer = Callable[[Group, np.ndarray], None]


class Registers:
    """Where a register lies in `Group.V`: architectural ones first, then the accumulation registers that the kernel
    uses."""

    def __init__(self, instructions: list[Instruction], at_least: int = 1):
        top, acc = at_least, 0
        for i in instructions:
            for o in i.operands:
                if o.kind == "v":
                    if o.index >= AGPR:
                        acc = max(acc, o.index - AGPR + o.count)
                    else:
                        top = max(top, o.index + o.count)
        self.agpr_base, self.count = top, top + acc

    def index(self, register: int) -> int:
        return register if register < AGPR else self.agpr_base + register - AGPR

    def name(self, index: int) -> str:
        if index < 0:
            return NAMED.get(-index - 1, f"s{-index - 1}")
        return f"v{index}" if index < self.agpr_base else f"a{index - self.agpr_base}"


def bad(i: Instruction, why: str) -> UnknownInstruction:
    return UnknownInstruction(f"{i.where}: {i.text}: {why}")


def refuse(i: Instruction, *modifiers: str) -> None:
    """UnknownInstruction if one of these modifiers is set: its meaning is not simulated, so it must not be passed
    over."""
    for name in modifiers:
        value = i.mods.get(name)
        if any(value) if isinstance(value, list) else value:
            raise bad(i, f"{name} on this instruction")


# -- scalar
def scalar(o: Operand, wide: bool = False, signed: bool = False) -> Reader:
    """[waves] int64: a 32-bit value as 0..2^32-1 (sign-extended if `signed`), or a 64-bit pattern."""
    if o.kind == "c":
        value = o.index if wide and not (o.literal and not signed) else o.index & (2**64 - 1 if wide else MASK32)
        if wide and o.value is not None:
            value = struct.unpack("<Q", struct.pack("<d", o.value))[0]
        elif wide and o.literal:
            value = o.index & MASK32
        if not wide and signed:
            value = (value ^ 0x80000000) - 0x80000000
        fixed = np.array([value & (2**64 - 1)], U64).view(I64) if value >= 0 else np.array([value], I64)
        return lambda g: fixed
    if o.kind != "s":
        if o.kind == "x" and o.word in ("scc", "src_scc"):
            return lambda g: g.scc
        if o.kind == "x" and o.word == "vccz":
            return lambda g: ((g.S[106] | g.S[107]) == 0).astype(I64)
        if o.kind == "x" and o.word == "execz":
            return lambda g: ((g.S[126] | g.S[127]) == 0).astype(I64)
        raise UnknownInstruction(f"scalar operand {o.word or o}")
    r = o.index
    if wide:
        return lambda g: g.S[r] | g.S[r + 1] << 32
    if signed:
        return lambda g: (g.S[r] ^ 0x80000000) - 0x80000000
    return lambda g: g.S[r]


def write_scalar(o: Operand, wide: bool = False) -> Writer:
    """Writes [waves] int64 values, 32 or 64 bits of them."""
    if o.kind != "s":
        raise UnknownInstruction(f"scalar destination {o.word or o}")
    r = o.index

    if wide:

        def write(g: Group, x: np.ndarray) -> None:
            g.S[r] = x & MASK32
            g.S[r + 1] = (x >> 32) & MASK32
            if r == EXEC:
                g.refresh_exec()

        return write

    def write32(g: Group, x: np.ndarray) -> None:
        g.S[r] = x & MASK32
        if r >= EXEC:
            g.refresh_exec()

    return write32


def mask_reader(o: Operand) -> Reader:
    """A lane mask in a register pair -> [waves, 64] bool."""
    if o.kind == "c":
        bits = np.array([[o.index >> k & 1 for k in range(LANES)]], bool)
        return lambda g: bits
    r = o.index
    if r == EXEC:
        return lambda g: g.exec
    return lambda g: unpack_mask(g.S[r], g.S[r + 1])


def mask_writer(o: Operand) -> Writer:
    """[waves, 64] bool -> register pair, with inactive lanes as 0 (VOPC and carries, CDNA3 ISA 6.2)."""
    r = o.index

    def write(g: Group, mask: np.ndarray) -> None:
        mask = np.broadcast_to(mask, (g.n, LANES))
        if not g.full:
            mask = mask & g.exec
        g.S[r], g.S[r + 1] = pack_mask(mask)
        if r == EXEC:
            g.refresh_exec()

    return write


# -- vector
def constant(o: Operand, kind: str) -> np.ndarray:
    """A constant operand as a [1, 1] array of the type's storage: inline floats take the operand's own format."""
    if kind in WIDE:
        if o.value is not None:
            bits = struct.unpack("<Q", struct.pack("<d", o.value))[0]
        elif o.literal and kind == "f64":
            bits = (o.index & MASK32) << 32
        elif o.literal and kind == "u64":
            bits = o.index & MASK32
        elif o.literal:
            bits = ((o.index & MASK32) ^ 0x80000000) - 0x80000000
        else:
            bits = o.index
        return np.array([[bits & (2**64 - 1)]], U64)
    if kind in ("f16", "u16", "i16") and o.value is not None:
        return np.array([[int(np.float16(o.value).view(np.uint16))]], U32)
    return np.array([[o.index & MASK32]], U32)


class Binder:
    """Makes readers and writers for one kernel's instructions."""

    def __init__(self, registers: Registers, may_flush: bool = False):
        self.registers, self.may_flush = registers, may_flush

    def _source(self, read: Reader, kind: str) -> Reader:
        """f32 sources, denormals flushed where the MODE register says so."""
        if kind != "f32" or not self.may_flush:
            return read

        def flushed(g: Group) -> np.ndarray:
            return read(g) if g.mode & DENORMALS_IN else flush(read(g))

        return flushed

    def raw(self, o: Operand, offset: int = 0) -> Reader:
        """A 32-bit operand's bits, uint32; `offset` names a later register of a range. No modifiers."""
        if o.kind == "v":
            i = self.registers.index(o.index) + offset
            return lambda g: g.V[i]
        if o.kind == "s":
            r = o.index + offset
            return lambda g: g.S[r].astype(U32)[:, None]
        if o.kind == "c":
            fixed = constant(o, "u32")
            return lambda g: fixed
        one = scalar(o)
        return lambda g: one(g).astype(U32)[:, None]

    def bits(self, o: Operand, kind: str) -> Reader:
        """An operand's bits (uint32, or uint64 for wide types), sign modifiers applied."""
        if kind in WIDE:
            read = self._wide_bits(o, kind)
            flip: np.unsignedinteger = U64(1 << 63)
            keep: np.unsignedinteger = U64((1 << 63) - 1)
        else:
            read = self.raw(o)
            if o.kind == "c":
                fixed = constant(o, kind)
                read = lambda g: fixed
            flip = SIGN.get(kind, U32(0x80000000))
            keep = U32(~flip & MASK32 if kind == "f32" else flip - U32(1))
        if o.absolute:
            inner = read
            read = lambda g: inner(g) & keep
        if o.neg:
            inner2 = read
            read = lambda g: inner2(g) ^ flip
        return read

    def _wide_bits(self, o: Operand, kind: str) -> Reader:
        if o.kind == "c":
            fixed = constant(o, kind)
            return lambda g: fixed
        if o.kind == "s":
            r = o.index
            return lambda g: (g.S[r] | g.S[r + 1] << 32).view(U64)[:, None]
        i = self.registers.index(o.index)
        return lambda g: g.V[i].astype(U64) | g.V[i + 1].astype(U64) << U64(32)

    def typed(self, o: Operand, kind: str, high: bool = False) -> Reader:
        """An operand as numpy values of its type; `high` takes the upper half of a 16-bit operand's register."""
        plain = o.kind == "v" and not (o.neg or o.absolute)
        if plain and kind in ("f32", "u32", "i32"):
            i = self.registers.index(o.index)
            if kind == "f32":
                return self._source(lambda g: g.VF[i], kind)
            return (lambda g: g.V[i]) if kind == "u32" else (lambda g: g.VI[i])
        if high and kind in ("f16", "u16", "i16", "bf16") and o.kind != "c":
            base = self.raw(o)
            read: Reader = lambda g: base(g) >> U32(16)
            if o.absolute:
                inner = read
                read = lambda g: inner(g) & U32(0x7FFF)
            if o.neg:
                inner2 = read
                read = lambda g: inner2(g) ^ U32(0x8000)
        else:
            read = self.bits(o, kind)
        return self._source(as_type(read, kind), kind)

    def writer(self, o: Operand, kind: str, offset: int = 0) -> Writer:
        """Writes a vector register (pair for wide types) from values of a type, in the active lanes."""
        if o.kind != "v":
            raise UnknownInstruction(f"vector destination {o.word or o}")
        i = self.registers.index(o.index) + offset
        if kind in WIDE:

            def wide(g: Group, x: np.ndarray) -> None:
                bits = x.view(U64) if x.dtype != U64 else x
                low, high = bits.astype(U32), (bits >> U64(32)).astype(U32)
                if g.full:
                    g.V[i], g.V[i + 1] = low, high
                else:
                    np.copyto(g.V[i], low, where=g.exec)
                    np.copyto(g.V[i + 1], high, where=g.exec)

            return wide
        if kind in ("f16", "u16", "i16", "bf16"):
            half = {"f16": np.float16, "u16": np.uint16, "i16": np.int16, "bf16": np.uint16}[kind]

            may_saturate = self.may_flush and kind == "f16"

            def narrow(g: Group, x: np.ndarray) -> None:
                if may_saturate and g.mode & OVERFLOW and np.isinf(x).any():
                    raise UnknownInstruction("an infinite f16 result with FP16_OVFL set in MODE is not simulated")
                bits = x.astype(half).view(np.uint16).astype(U32)
                if g.full:
                    g.V[i] = bits
                else:
                    np.copyto(g.V[i], bits, where=g.exec)

            return narrow
        view = {"f32": "VF", "i32": "VI"}.get(kind, "V")
        if view == "VF":
            may_flush = self.may_flush

            def write_float(g: Group, x: np.ndarray) -> None:
                if may_flush and not g.mode & DENORMALS_OUT:
                    x = flush(x)
                if g.full:
                    g.VF[i] = x
                else:
                    np.copyto(g.VF[i], x, where=g.exec)

            return write_float
        if view == "VI":

            def write_int(g: Group, x: np.ndarray) -> None:
                if g.full:
                    g.VI[i] = x
                else:
                    np.copyto(g.VI[i], x, where=g.exec)

            return write_int

        def write(g: Group, x: np.ndarray) -> None:
            if g.full:
                g.V[i] = x
            else:
                np.copyto(g.V[i], x, where=g.exec)

        return write

    # -- data parallel primitives
    def dpp(self, o: Operand, kind: str, i: Instruction) -> tuple[Reader, Callable[[Group], np.ndarray | None]]:
        """The permuted source 0, and the lanes that may be written (None: all active ones)."""
        lanes, valid, enabled = dpp_lanes(i)
        zero = bool(i.mods.get("bound_ctrl"))
        read = self.bits(o, kind)

        def source(g: Group) -> np.ndarray:
            x = np.broadcast_to(read(g), (g.n, LANES))[:, lanes]
            ok = valid if g.full else valid & g.exec[:, lanes]
            return x if ok is valid and valid.all() else np.where(ok, x, x.dtype.type(0))

        def writable(g: Group) -> np.ndarray | None:
            ok = enabled
            if not zero:
                ok = ok & (valid if g.full else valid & g.exec[:, lanes])
            return None if ok.all() else np.broadcast_to(ok, (g.n, LANES))

        return self._source(as_type(source, kind), kind), writable

    # -- sub-dword addressing
    def sdwa(self, o: Operand, kind: str, select: str) -> Reader:
        """A source whose byte or word is selected, zero- or sign-extended."""
        read = self.raw(o)
        shift, width = SDWA[select]

        def bits(g: Group) -> np.ndarray:
            x = read(g) if width == 32 else (read(g) >> U32(shift)) & U32((1 << width) - 1)
            if o.sext and width < 32:
                x = ((x ^ U32(1 << (width - 1))) - U32(1 << (width - 1))).astype(U32)
            if o.absolute:
                x = x & U32(0x7FFF if kind == "f16" else 0x7FFFFFFF)
            if o.neg:
                x = x ^ U32(0x8000 if kind == "f16" else 0x80000000)
            return x

        return self._source(as_type(bits, kind), kind)


SDWA = {
    "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
    "WORD_0": (0, 16), "WORD_1": (16, 16), "DWORD": (0, 32),
}  # fmt: skip


def as_type(read: Reader, kind: str) -> Reader:
    """Bits (uint32 or uint64) -> values of the type."""
    if kind in ("u32", "u64"):
        return read
    if kind == "f32":
        return lambda g: read(g).view(np.float32)
    if kind == "i32":
        return lambda g: read(g).view(np.int32)
    if kind == "f64":
        return lambda g: read(g).view(np.float64)
    if kind == "i64":
        return lambda g: read(g).view(np.int64)
    if kind == "f16":
        return lambda g: read(g).astype(np.uint16).view(np.float16)
    if kind == "bf16":
        return lambda g: (read(g) << U32(16)).view(np.float32)
    if kind == "u16":
        return lambda g: read(g).astype(np.uint16)
    if kind == "i16":
        return lambda g: read(g).astype(np.uint16).view(np.int16)
    raise ValueError(kind)
