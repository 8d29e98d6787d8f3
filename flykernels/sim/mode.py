"""The MODE register: what a kernel may set of rounding, denormals and overflow, and reads of other hardware registers.

Simulated: f32 denormals kept or flushed (sources and results apart), and FP16_OVFL, which makes fp8 conversions
saturate. Rounding is to nearest even, f16 and f64 denormals are kept, and NaN are treated as with the IEEE and
DX10_CLAMP bits (minima, maxima; clamps); anything else is an error that says so.
Fields: CDNA3 ISA reference, "Mode register"; kernel descriptor: LLVM's AMDGPU usage guide, COMPUTE_PGM_RSRC1.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .asm import Instruction
from .errors import UnknownInstruction
from .operands import bad, scalar, write_scalar
from .state import Group

NAN_AS_USUAL = 3 << 8  # DX10_CLAMP and IEEE
ROUND, DENORMALS_WIDE = 0xF, 0xC0  # rounding of all types; denormals of f16 and f64
_HWREG = re.compile(r"hwreg\((?:HW_REG_)?(\w+)(?:,\s*(\d+),\s*(\d+))?\)")
IDENTITY = ("XCC_ID", "HW_ID", "LDS_ALLOC")  # where a wave runs: 0 here


def field(i: Instruction, text: str) -> tuple[str, int, int]:
    """(register, first bit, bits) of a hwreg operand."""
    match = _HWREG.fullmatch(text.strip())
    if match is None:
        raise bad(i, f"{text} names no hardware register")
    return match[1], int(match[2] or 0), int(match[3] or 32)


def of_descriptor(rsrc1: int) -> int:
    """MODE's first value as the kernel descriptor has it."""
    return rsrc1 >> 12 & 0xFF | (rsrc1 >> 21 & 1) << 8 | (rsrc1 >> 23 & 1) << 9 | (rsrc1 >> 26 & 1) << 23


def check(mode: int, where: str) -> int:
    """The mode itself. UnknownInstruction if it is not simulated."""
    if mode & ROUND:
        raise UnknownInstruction(f"{where}: rounding other than to nearest even is not simulated (MODE {mode:#x})")
    if mode & DENORMALS_WIDE != DENORMALS_WIDE:
        raise UnknownInstruction(f"{where}: flushing f16 and f64 denormals is not simulated (MODE {mode:#x})")
    if mode & NAN_AS_USUAL != NAN_AS_USUAL:
        raise UnknownInstruction(f"{where}: MODE without its IEEE or DX10_CLAMP bit is not simulated (MODE {mode:#x})")
    return mode


def changes(i: Instruction) -> bool:
    """Whether an instruction writes MODE."""
    return i.name.startswith("s_setreg") and "MODE" in i.operands[0].word


def bind(i: Instruction) -> Callable[[Group], None] | None:
    if i.name == "s_getreg_b32":
        return _get(i)
    return _set(i) if i.name in ("s_setreg_b32", "s_setreg_imm32_b32") else None


def _get(i: Instruction) -> Callable[[Group], None]:
    name, first, bits = field(i, i.operands[1].word)
    write = write_scalar(i.operands[0])
    if name == "MODE":
        return lambda g: write(g, np.full(g.n, g.mode >> first & (1 << bits) - 1, np.int64))
    if name not in IDENTITY:
        raise bad(i, f"reads {name}, which is not simulated")
    return lambda g: write(g, np.zeros(g.n, np.int64))


def _set(i: Instruction) -> Callable[[Group], None]:
    name, first, bits = field(i, i.operands[0].word)
    if name != "MODE":
        raise bad(i, f"writes {name}, which is not simulated")
    read, mask = scalar(i.operands[1]), (1 << bits) - 1 << first

    def run(g: Group) -> None:
        value = np.unique(read(g))
        if len(value) > 1:
            raise bad(i, "waves that run together set MODE differently")
        g.mode = check(g.mode & ~mask | int(value[0]) << first & mask, f"{i.where}: {i.text}")

    return run
