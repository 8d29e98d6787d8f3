"""gfx950 assembly text -> instructions with parsed operands.

Reads what LLVM prints, both `.s` files and disassembly. A line in a code section that is neither a label, a directive
nor
an instruction is an error; nothing is skipped.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Any

from .errors import UnknownInstruction

# SGPR numbers of the named scalar registers (CDNA3 ISA, "SGPR and VGPR operands"); SCC reads as a source only.
NAMED = {
    "flat_scratch_lo": 102,
    "flat_scratch_hi": 103,
    "xnack_mask_lo": 104,
    "xnack_mask_hi": 105,
    "vcc_lo": 106,
    "vcc_hi": 107,
    "m0": 124,
    "exec_lo": 126,
    "exec_hi": 127,
}
PAIRS = {"flat_scratch": 102, "xnack_mask": 104, "vcc": 106, "exec": 126}
VCC, M0, EXEC = 106, 124, 126
AGPR = 256  # accumulation register n is vector register 256 + n


@dataclass(frozen=True)
class Operand:
    """One operand.

    kind   "v" vector register (AGPR n is 256 + n), "s" scalar register, "c" constant, "x" a word (off, vmcnt, a label)
    index  first register, or the constant's 64-bit pattern
    count  registers named in the text
    value  a float constant's value (its bits depend on the instruction's type); None otherwise
    """

    kind: str
    index: int
    count: int = 1
    neg: bool = False
    absolute: bool = False
    value: float | None = None
    word: str = ""
    sext: bool = False
    literal: bool = False  # a 32-bit literal, as opposed to an inline constant


@dataclass
class Instruction:
    """One instruction: mnemonic without _e32/_e64, operands, modifiers (`offset`, `offen`, `op_sel`, ...), its text,
    and
    where it stands (line of the text, or byte offset in the code object)."""

    name: str
    operands: tuple[Operand, ...]
    mods: dict[str, Any]
    text: str
    where: int
    source: str = ""  # source location as the compiler noted it (`.loc`), for findings
    address: int = -1  # byte offset in the code object, -1 for text


@dataclass
class Code:
    """Instructions in order and what labels point at (index of an instruction)."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


_REGISTER = re.compile(r"^([vsa])(\d+)$")
_RANGE = re.compile(r"^([vsa])\[(\d+):(\d+)\]$")
_TTMP = re.compile(r"^ttmp(\d+)$|^ttmp\[(\d+):(\d+)\]$")
_INTEGER = re.compile(r"^-?(0x[0-9a-fA-F]+|\d+)$")
_FLOAT = re.compile(r"^-?\d+\.\d*(e[-+]?\d+)?$")
_MNEMONIC = re.compile(r"^(?:s|v|ds|buffer|global|flat|scratch)_[a-z0-9_]+$")
_LABEL = re.compile(r"^([.\w$@]+):")
_MODIFIER = re.compile(r"(?<![\w.])([a-z_][a-z_0-9]*):(\[[^\]]*\]|swizzle\([^)]*\)|-?0x[0-9a-fA-F]+|-?\w+)")


def operand(text: str) -> Operand:
    """Parses one operand. UnknownInstruction if it has no known form."""
    t, neg, absolute, sext = text.strip(), False, False, False
    if m := re.match(r"^sext\((.*)\)$", t):
        t, sext = m[1], True
    if m := re.match(r"^neg\((.*)\)$", t):
        t, neg = m[1], True
    if re.match(r"^-[vsa|ame]", t):
        t, neg = t[1:], True
    if m := re.match(r"^\|(.*)\|$|^abs\((.*)\)$", t):
        t, absolute = m[1] or m[2], True
    if m := _REGISTER.match(t):
        kind, index, count = m[1], int(m[2]), 1
    elif m := _RANGE.match(t):
        kind, index, count = m[1], int(m[2]), int(m[3]) - int(m[2]) + 1
    elif t in NAMED or t in PAIRS:
        kind, index, count = "s", NAMED.get(t, PAIRS.get(t, 0)), 1 if t in NAMED else 2
    elif m := _TTMP.match(t):
        kind, index = "s", 108 + int(m[1] or m[2])
        count = int(m[3]) - int(m[2]) + 1 if m[2] else 1
    elif _INTEGER.match(t):
        value = int(t, 0)
        return Operand("c", value & (2**64 - 1), 1, neg, absolute, literal=not -16 <= value <= 64)
    elif _FLOAT.match(t):
        bits = struct.unpack("<I", struct.pack("<f", float(t)))[0]
        return Operand("c", bits, 1, neg, absolute, value=float(t))
    else:
        return Operand("x", 0, 0, word=t)
    if kind == "a":
        kind, index = "v", index + AGPR
    return Operand(kind, index, count, neg, absolute, sext=sext)


def _modifier_value(text: str) -> Any:
    if text.startswith("["):
        return [int(x, 0) for x in text[1:-1].split(",")]
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        return int(text, 0)
    return text


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets, bars excluded."""
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch in "([") - (ch in ")]")
        if ch == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def parse_instruction(text: str, where: int = 0, source: str = "") -> Instruction:
    """One line of assembly -> Instruction. UnknownInstruction if it is not one."""
    head, _, rest = text.strip().partition(" ")
    head, rest = head.strip(), rest.strip()
    if "\t" in head:
        head, _, more = head.partition("\t")
        rest = f"{more} {rest}".strip()
    if not _MNEMONIC.match(head):
        raise UnknownInstruction(f"line {where}: {text.strip()!r} is not a gfx950 instruction that can be parsed")
    name = re.sub(r"_e(32|64)$", "", head)
    mods: dict[str, Any] = {"e64": head.endswith("_e64")}
    if name == "s_waitcnt":
        mods.update(wait_counts(rest))
        return Instruction(name, (), mods, text.strip(), where, source)
    if name in ("s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32", "s_sendmsg"):
        parts = _split(rest)
        return Instruction(name, tuple(operand(p) for p in parts), mods, text.strip(), where, source)
    if name in ("buffer_wbl2", "buffer_inv"):  # no operands: the words are scopes
        mods.update(dict.fromkeys(rest.split(), True))
        return Instruction(name, (), mods, text.strip(), where, source)
    for key, value in _MODIFIER.findall(rest):
        mods[key] = _modifier_value(value)
    rest = _MODIFIER.sub("", rest).strip()
    parts = _split(rest) if rest else []
    if parts:
        words = parts[-1].split()
        mods.update(dict.fromkeys(words[1:], True))
        parts[-1] = words[0] if words else ""
    operands = tuple(operand(p) for p in parts if p.strip())
    return Instruction(name, operands, mods, text.strip(), where, source)


def wait_counts(text: str) -> dict[str, int]:
    """Operand of s_waitcnt -> the counters that it names. Unnamed ones are not waited for."""
    if _INTEGER.match(text):  # gfx9 encoding: vmcnt 3:0 and 15:14, expcnt 6:4, lgkmcnt 11:8
        n = int(text, 0)
        counts = {"vmcnt": (n & 15) | (n >> 14 & 3) << 4, "lgkmcnt": n >> 8 & 15, "expcnt": n >> 4 & 7}
        full = {"vmcnt": 63, "lgkmcnt": 15, "expcnt": 7}
        return {k: v for k, v in counts.items() if v != full[k]}
    counts = {k: int(v, 0) for k, v in re.findall(r"(\w+)\(([0-9a-fx]+)\)", text)}
    if not counts or set(counts) - {"vmcnt", "lgkmcnt", "expcnt"}:
        raise UnknownInstruction(f"s_waitcnt {text}: unknown counter")
    return counts


def parse(text: str) -> Code:
    """Assembly text -> Code. Data sections, directives and comments are passed over; everything else must be a label
    or an
    instruction."""
    code, in_text, files, source = Code(), True, {}, ""
    in_metadata = False
    for number, line in enumerate(text.split("\n"), 1):
        body = line.split(";", 1)[0].split("//", 1)[0].rstrip()
        stripped = body.strip()
        if not stripped:
            continue
        if stripped.startswith(".amdgpu_metadata"):
            in_metadata = True
        if in_metadata:
            in_metadata = not stripped.startswith(".end_amdgpu_metadata")
            continue
        if m := _LABEL.match(stripped):
            if in_text:
                code.labels[m[1]] = len(code.instructions)
            stripped = stripped[m.end() :].strip()
            if not stripped:
                continue
        if stripped.startswith("."):
            word = stripped.split()[0]
            if word in (".text", ".section", ".rodata", ".data"):
                in_text = word == ".text" or bool(re.match(r"\.section\s+\.text", stripped))
            elif word == ".file" and (m := re.match(r'\.file\s+(\d+)\s+.*"([^"]+)"', stripped)):
                files[m[1]] = m[2]
            elif word == ".loc" and (m := re.match(r"\.loc\s+(\d+)\s+(\d+)", stripped)):
                source = f"{files.get(m[1], '?')}:{m[2]}" if m[2] != "0" else ""
            elif in_text and word in (".long", ".byte", ".short", ".quad"):
                raise UnknownInstruction(f"line {number}: data in a code section: {stripped}")
            continue
        if not in_text:
            continue
        if "=" in stripped and not _MNEMONIC.match(stripped.split()[0]):
            continue
        code.instructions.append(parse_instruction(stripped, number, source))
    return code
