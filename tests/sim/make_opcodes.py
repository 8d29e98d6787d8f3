"""Writes flykernels/sim/opcodes.tsv: every opcode of every gfx950 encoding with its mnemonic and operands.

    python tests/sim/make_opcodes.py            (needs libLLVM >= 20 with AMDGPU, e.g. from the distribution)

Each opcode is put into an encoding with telling register numbers, LLVM's disassembler prints it, and what it prints
says
which field each operand comes from and how many registers it covers. The table is data about the machine; the
simulator's
decoder reads it, and tests check the decoder by assembling what it prints.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import struct
import sys
from pathlib import Path

TARGET = Path(__file__).parents[2] / "flykernels" / "sim" / "opcodes.tsv"


def disassembler():
    names = [f"LLVM-{n}" for n in range(30, 19, -1)]
    path = next((p for p in map(ctypes.util.find_library, names) if p), None)
    if path is None:
        sys.exit("no libLLVM of version 20 or later is installed")
    lib = ctypes.CDLL(path)
    for part in ("TargetInfo", "TargetMC", "Disassembler", "Target"):
        getattr(lib, f"LLVMInitializeAMDGPU{part}")()
    lib.LLVMCreateDisasmCPU.restype = ctypes.c_void_p
    handle = lib.LLVMCreateDisasmCPU(b"amdgcn-amd-amdhsa", b"gfx950", None, 0, None, None)
    lib.LLVMDisasmInstruction.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    lib.LLVMDisasmInstruction.restype = ctypes.c_size_t

    def one(raw: bytes) -> tuple[int, str]:
        text = ctypes.create_string_buffer(512)
        size = lib.LLVMDisasmInstruction(handle, raw + bytes(16), len(raw) + 16, 0, text, 512)
        return size, text.value.decode().strip()

    return one


DS_FIELDS = ("daxy", "dax", "da", "axy", "ax", "a", "dx", "d", "x", "")
# Telling numbers: the register a field names tells the field.
V = {"d": 40, "0": 50, "1": 60, "2": 70, "a": 80, "x": 90, "y": 100}
S = {"d": 8, "0": 12, "1": 20, "2": 28, "b": 32}
VSRC = lambda n: 256 + n


def candidates():
    """(format, opcode, bytes, fields in use)"""
    word = struct.Struct("<I").pack
    two = lambda a, b: struct.pack("<II", a, b)
    for op in range(128):
        yield "SOP2", op, word(2 << 30 | op << 23 | S["d"] << 16 | S["1"] << 8 | S["0"]), "d01"
    for op in range(32):
        yield "SOPK", op, word(0b1011 << 28 | op << 23 | S["d"] << 16 | 0x1234), "d"
    for op in range(256):
        yield "SOP1", op, word(0b101111101 << 23 | S["d"] << 16 | op << 8 | S["0"]), "d0"
    for op in range(128):
        yield "SOPC", op, word(0b101111110 << 23 | op << 16 | S["1"] << 8 | S["0"]), "01"
        yield "SOPP", op, word(0b101111111 << 23 | op << 16), ""
    for op in range(256):
        yield "SMEM", op, two(0b110000 << 26 | op << 18 | 1 << 17 | S["d"] << 6 | S["b"] >> 1, 0x10), "db"
    for op in range(64):
        yield "VOP2", op, two(op << 25 | V["d"] << 17 | V["1"] << 9 | VSRC(V["0"]), 0x12345678), "d01"
    for op in range(256):
        yield "VOP1", op, word(0b0111111 << 25 | V["d"] << 17 | op << 9 | VSRC(V["0"])), "d0"
        yield "VOPC", op, word(0b0111110 << 25 | op << 17 | V["1"] << 9 | VSRC(V["0"])), "01"
    sources = VSRC(V["2"]) << 18 | VSRC(V["1"]) << 9 | VSRC(V["0"])
    for op in range(1024):
        yield "VOP3", op, two(0b110100 << 26 | op << 16 | V["d"], sources), "d012"
        yield (
            "VOP3B",
            op,
            two(0b110100 << 26 | op << 16 | S["d"] << 8 | V["d"], S["2"] << 18 | sources & 0x3FFFF),
            "d012",
        )
    for op in range(128):
        yield "VOP3P", op, two(0b110100111 << 23 | op << 16 | 1 << 14 | V["d"], 3 << 27 | sources), "d012"
        yield "MAI", op, two(0b110100111 << 23 | op << 16 | V["d"], sources), "d012"
    for op in range(256):
        for used in DS_FIELDS:  # LLVM refuses fields that an opcode does not have
            d, y, x, a = (V[f] if f in used else 0 for f in "dyxa")
            yield "DS", op, two(0b110110 << 26 | op << 17, d << 24 | y << 16 | x << 8 | a), used
    for seg, name in ((0, "FLAT"), (1, "SCRATCH"), (2, "GLOBAL")):
        for op in range(128):
            saddr = {"FLAT": 0, "GLOBAL": 0x7F, "SCRATCH": S["b"]}[name]
            raw = two(0b110111 << 26 | op << 18 | seg << 14, V["d"] << 24 | saddr << 16 | V["x"] << 8 | V["a"])
            yield name, op, raw, "dxa"
            yield (
                name + "_RTN",
                op,
                two(0b110111 << 26 | op << 18 | seg << 14 | 1 << 16, V["d"] << 24 | saddr << 16 | V["x"] << 8 | V["a"]),
                "dxa",
            )
    for op in range(128):
        yield "MUBUF", op, two(0b111000 << 26 | op << 18, 0), ""
        yield (
            "MUBUF",
            op,
            two(0b111000 << 26 | op << 18 | 1 << 12, S["2"] << 24 | (S["b"] >> 2) << 16 | V["d"] << 8 | V["a"]),
            "da",
        )


def field_of(kind: str, first: int) -> str:
    for name, n in (V if kind in "va" else S).items():
        if n == first:
            return name
    return "?"


def shape(text: str) -> tuple[str, str] | None:
    """Printed instruction -> (mnemonic, operand codes): v0:2 is two registers named by field 0; k is an immediate,
    vcc a fixed word."""
    head, _, rest = re.sub(r"/\*.*?\*/", "", text).partition(" ")
    rest = re.sub(r"\b(offset\d?|op_sel|op_sel_hi|neg_lo|neg_hi|cbsz|blgp|abid):(\[[^\]]*\]|\S+)", "", rest)
    codes = []
    for part in (p.strip() for p in rest.split(",") if p.strip()):
        part = part.split()[0]
        m = re.match(r"^([vsa])(\d+)$", part) or re.match(r"^([vsa])\[(\d+):(\d+)\]$", part)
        if m:
            count = int(m[3]) - int(m[2]) + 1 if m.lastindex == 3 else 1
            codes.append(f"{m[1]}{field_of(m[1], int(m[2]))}:{count}")
        elif part in ("vcc", "off", "exec"):
            codes.append(part)
        else:
            codes.append("k")
    return head, " ".join(codes)


def main() -> None:
    one = disassembler()
    rows, seen = [], set()
    for fmt, op, raw, _ in candidates():
        if (fmt, op) in seen:
            continue
        size, text = one(raw)
        if not size or size > len(raw) + 4:
            continue
        head, codes = shape(text.replace("\t", " "))
        matrix = head.startswith(("v_mfma", "v_smfmac", "v_accvgpr"))
        limit = {"SOP2": 96, "SOPK": 26, "VOP2": 62, "VOP3": 896, "VOP3B": 896}.get(fmt, 1 << 10)
        if op >= limit or (fmt == "VOP3P" and matrix) or (fmt == "MAI" and not matrix):
            continue  # another encoding's prefix
        if fmt == "VOP3B" and "sd:" not in codes:
            continue
        if fmt.endswith("_RTN") and "atomic" not in head:
            continue
        if fmt == "MUBUF" and raw[4:] == bytes(4) and codes:
            continue  # the form with telling fields comes next
        seen.add((fmt, op))
        rows.append(f"{fmt}\t{op}\t{head}\t{codes}")
    TARGET.write_text("\n".join(rows) + "\n")
    print(len(rows), "opcodes")


if __name__ == "__main__":
    main()
