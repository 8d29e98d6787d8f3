"""gfx950 machine code -> assembly lines, which asm.py parses. No disassembler is needed at run time.

Encodings: CDNA3 ISA reference, "Microcode formats"; opcodes, operand fields and register counts from opcodes.tsv, which
tests/sim/make_opcodes.py reads off LLVM's disassembler. Tests assemble what this prints and compare the bytes.
"""

from __future__ import annotations

import functools
import struct
from importlib import resources

from .errors import BadCodeObject, UnknownInstruction

SPECIAL = {
    102: "flat_scratch_lo", 103: "flat_scratch_hi", 104: "xnack_mask_lo", 105: "xnack_mask_hi", 106: "vcc_lo",
    107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi", 240: "0.5", 241: "-0.5", 242: "1.0", 243: "-1.0",
    244: "2.0", 245: "-2.0", 246: "4.0", 247: "-4.0", 248: "0.15915494", 251: "vccz", 252: "execz", 253: "scc",
}  # fmt: skip
PAIRS = {102: "flat_scratch", 104: "xnack_mask", 106: "vcc", 126: "exec"}
HWREG = {1: "MODE", 2: "STATUS", 3: "TRAPSTS", 4: "HW_ID", 5: "GPR_ALLOC", 6: "LDS_ALLOC", 7: "IB_STS", 20: "XCC_ID"}
LITERAL, DPP, SDWA = 255, 250, 249
SDWA_SELECT = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
SDWA_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
F8F6F4_REGISTERS = (8, 8, 6, 6, 4, 8, 8, 8)  # of an operand, by format code
LD_SCALE = 0x2C  # v_mfma_ld_scale_b32: the first half of a scaled matrix instruction


@functools.cache
def table() -> dict[tuple[str, int], tuple[str, tuple[str, ...]]]:
    """(format, opcode) -> (mnemonic, operand codes)."""
    rows = resources.files(__package__).joinpath("opcodes.tsv").read_text().splitlines()
    found = {}
    for row in rows:
        fmt, op, name, codes = row.split("\t")
        found[fmt, int(op)] = (name, tuple(codes.split()))
    return found


def vector(n: int, count: int, kind: str = "v") -> str:
    return f"{kind}{n}" if count == 1 else f"{kind}[{n}:{n + count - 1}]"


def source(n: int, count: int, literal: int | None = None) -> str:
    """A 9-bit (or 8-bit scalar) source field as text."""
    if n >= 256:
        return vector(n - 256, count)
    if n == LITERAL:
        if literal is None:
            raise UnknownInstruction("a literal where there can be none")
        return hex(literal)
    if count == 2 and n in PAIRS:
        return PAIRS[n]
    if n < 102:
        return vector(n, count, "s")
    if 108 <= n < 124:
        return f"ttmp{n - 108}" if count == 1 else f"ttmp[{n - 108}:{n - 109 + count}]"
    if 128 <= n <= 192:
        return str(n - 128)
    if 193 <= n <= 208:
        return str(192 - n)
    if n in SPECIAL:
        return SPECIAL[n]
    raise UnknownInstruction(f"source operand {n}")


def bits(word: int, high: int, low: int) -> int:
    return word >> low & ((1 << (high - low + 1)) - 1)


class Decoder:
    """Decodes a code section. `line(at)` gives (text, size) of the instruction at a byte offset."""

    def __init__(self, code: bytes):
        self.code = code

    def word(self, at: int) -> int:
        if at + 4 > len(self.code):
            raise BadCodeObject(f"the code ends within the instruction before byte {at}")
        return struct.unpack_from("<I", self.code, at)[0]

    def line(self, at: int) -> tuple[str, int]:
        w = self.word(at)
        if w >> 30 == 0b10:
            return self._scalar(w, at)
        if w >> 31 == 0:
            return self._vector(w, at)
        prefix = w >> 26
        if prefix == 0b110100:
            return self._vop3(w, at)
        if prefix == 0b110000:
            return self._smem(w, at)
        if prefix == 0b110110:
            return self._ds(w, at)
        if prefix == 0b110111:
            return self._flat(w, at)
        if prefix == 0b111000:
            return self._mubuf(w, at)
        raise UnknownInstruction(f"byte {at}: no gfx950 encoding begins with {w:#010x}")

    def _entry(self, fmt: str, op: int, at: int) -> tuple[str, tuple[str, ...]]:
        found = table().get((fmt, op))
        if found is None:
            raise UnknownInstruction(f"byte {at}: {fmt} has no opcode {op} on gfx950")
        return found

    # -- scalar
    def _scalar(self, w: int, at: int) -> tuple[str, int]:
        size = 4
        if w >> 23 == 0b101111111:
            return self._sopp(w, at)
        if w >> 23 == 0b101111110:
            fmt, op = "SOPC", bits(w, 22, 16)
        elif w >> 23 == 0b101111101:
            fmt, op = "SOP1", bits(w, 15, 8)
        elif w >> 28 == 0b1011:
            return self._sopk(w, at)
        else:
            fmt, op = "SOP2", bits(w, 29, 23)
        name, codes = self._entry(fmt, op, at)
        literal = None
        uses = (bits(w, 7, 0), bits(w, 15, 8) if fmt in ("SOP2", "SOPC") else 0)
        if LITERAL in uses:
            literal, size = self.word(at + 4), 8
        fields = {"d": bits(w, 22, 16), "0": uses[0], "1": uses[1]}
        out = []
        for code in codes:
            if code == "k":
                raise UnknownInstruction(f"byte {at}: {name} has an operand that cannot be decoded")
            field, count = code[1], int(code[3:])
            out.append(source(fields[field], count, literal))
        return f"{name} {', '.join(out)}", size

    def _sopk(self, w: int, at: int) -> tuple[str, int]:
        name, codes = self._entry("SOPK", bits(w, 27, 23), at)
        imm, d = w & 0xFFFF, bits(w, 22, 16)
        signed = imm - (1 << 16) if imm >> 15 else imm
        if name == "s_getreg_b32":
            which = HWREG.get(imm & 63, str(imm & 63))
            return f"{name} {source(d, 1)}, hwreg(HW_REG_{which}, {imm >> 6 & 31}, {(imm >> 11) + 1})", 4
        if name.startswith("s_setreg"):
            which = f"hwreg(HW_REG_{HWREG.get(imm & 63, imm & 63)}, {imm >> 6 & 31}, {(imm >> 11) + 1})"
            if name == "s_setreg_imm32_b32":
                return f"{name} {which}, {self.word(at + 4):#x}", 8
            return f"{name} {which}, {source(d, 1)}", 4
        if name.startswith("s_cbranch"):
            raise UnknownInstruction(f"byte {at}: {name}")
        count = int(codes[0][3:])
        return f"{name} {source(d, count)}, {hex(imm) if name.startswith('s_cmpk') else signed}", 4

    def _sopp(self, w: int, at: int) -> tuple[str, int]:
        name, codes = self._entry("SOPP", bits(w, 22, 16), at)
        imm = w & 0xFFFF
        if name.startswith(("s_branch", "s_cbranch")):
            step = imm - (1 << 16) if imm >> 15 else imm
            return f"{name} L{at + 4 + 4 * step}", 4
        if name == "s_waitcnt":
            return f"{name} {imm:#x}", 4
        return (f"{name} {imm}" if codes else name), 4

    def _smem(self, w: int, at: int) -> tuple[str, int]:
        name, codes = self._entry("SMEM", bits(w, 25, 18), at)
        w2 = self.word(at + 4)
        offset = bits(w2, 20, 0)
        offset = offset - (1 << 21) if offset >> 20 else offset
        out = []
        for code in codes:
            if code == "k":
                if w >> 14 & 1:
                    out.append(source(bits(w2, 31, 25), 1) + (f" offset:{offset:#x}" if w >> 17 & 1 else ""))
                else:
                    out.append(hex(offset) if w >> 17 & 1 else source(offset & 0x7F, 1))
            else:
                n = bits(w, 12, 6) if code[1] == "d" else 2 * bits(w, 5, 0)
                out.append(source(n, int(code[3:])))
        return f"{name} {', '.join(out)}{' glc' if w >> 16 & 1 else ''}", 8

    # -- vector, 32-bit forms
    def _vector(self, w: int, at: int) -> tuple[str, int]:
        if w >> 25 == 0b0111111:
            fmt, op, d, one = "VOP1", bits(w, 16, 9), bits(w, 24, 17), None
        elif w >> 25 == 0b0111110:
            fmt, op, d, one = "VOPC", bits(w, 24, 17), 0, bits(w, 16, 9)
        else:
            fmt, op, d, one = "VOP2", bits(w, 30, 25), bits(w, 24, 17), bits(w, 16, 9)
        name, codes = self._entry(fmt, op, at)
        zero, size, literal, extra, mods = bits(w, 8, 0), 4, None, 0, ""
        if zero in (DPP, SDWA):
            extra, size = self.word(at + 4), 8
        elif zero == LITERAL or "k" in codes:
            literal, size = self.word(at + 4), 8
        out = []
        for code in codes:
            if code == "k":
                out.append(hex(literal or 0))
                continue
            if ":" not in code:
                out.append(code)
                continue
            field, count = code[1], int(code[3:])
            if field == "?" or (field == "d" and code[0] == "s"):
                out.append(source(d, count))
            elif field == "d":
                out.append(vector(d, count, code[0]))
            elif code[0] == "a":
                out.append(vector(zero - 256, count, "a"))
            elif field == "1":
                out.append(vector(one or 0, count))
            elif zero in (DPP, SDWA):
                out.append(self._extra_source(extra, zero, 0, bits(extra, 7, 0), count))
            else:
                out.append(source(zero, count, literal))
        if zero == DPP:
            position = next(k for k, c in enumerate(codes) if c[1:2] == "1") if one is not None else None
            if position is not None:
                out[position] = _signs(out[position], extra >> 22 & 1, extra >> 23 & 1)
            name, mods = name.removesuffix("_e32") + "_dpp", _dpp_text(extra)
        elif zero == SDWA:
            name = name.removesuffix("_e32") + "_sdwa"
            mods = self._sdwa(extra, fmt, out, codes, one)
        return f"{name} {', '.join(out)}{mods}", size

    def _extra_source(self, extra: int, form: int, k: int, n: int, count: int) -> str:
        if form == DPP:
            return _signs(vector(n, count), extra >> 20 & 1, extra >> 21 & 1)
        text = source(n, count) if extra >> 23 & 1 else vector(n, count)
        return _signs(f"sext({text})" if extra >> 19 & 1 else text, extra >> 20 & 1, extra >> 21 & 1)

    def _sdwa(self, extra: int, fmt: str, out: list[str], codes: tuple[str, ...], one: int | None) -> str:
        mods = ""
        if fmt == "VOPC":
            if extra >> 15 & 1:
                out[0] = source(bits(extra, 14, 8), 2)
        else:
            mods += f" dst_sel:{SDWA_SELECT[bits(extra, 10, 8)]} dst_unused:{SDWA_UNUSED[bits(extra, 12, 11)]}"
            mods += " clamp" if extra >> 13 & 1 else ""
        mods += f" src0_sel:{SDWA_SELECT[bits(extra, 18, 16)]}"
        if one is not None:
            position = next(k for k, c in enumerate(codes) if c[1:2] == "1")
            text = source(one, 1) if extra >> 31 & 1 else out[position]
            text = f"sext({text})" if extra >> 27 & 1 else text
            out[position] = _signs(text, extra >> 28 & 1, extra >> 29 & 1)
            mods += f" src1_sel:{SDWA_SELECT[bits(extra, 26, 24)]}"
        return mods

    # -- vector, 64-bit forms
    def _vop3(self, w: int, at: int) -> tuple[str, int]:
        if w >> 23 == 0b110100111:
            return self._vop3p(w, at)
        op, w2 = bits(w, 25, 16), self.word(at + 4)
        second = ("VOP3B", op) in table()
        name, codes = self._entry("VOP3B" if second else "VOP3", op, at)
        fields = {"0": bits(w2, 8, 0), "1": bits(w2, 17, 9), "2": bits(w2, 26, 18)}
        out, k, order = [], -1, []
        free = [f for f in "012" if not any(c[1:2] == f for c in codes)]
        for code in codes:
            if ":" not in code and code != "k":
                out.append(code)
                continue
            if code == "k":
                field, count = free.pop(0), 1
            else:
                field, count = code[1], int(code[3:])
            if field == "d" and code[0] == "v":
                out.append(vector(bits(w, 7, 0), count))
            elif field == "d":
                out.append(source(bits(w, 14, 8), count))
            elif field == "?":
                out.append(source(bits(w, 7, 0), count))
            else:
                k = int(field)
                order.append(k)
                text = source(fields[field], count)
                out.append(_signs(text, w2 >> 29 + k & 1, 0 if second else w >> 8 + k & 1))
        mods = ""
        if not second and bits(w, 14, 11):
            select = [w >> 11 + k & 1 for k in range(len(order))] + [w >> 14 & 1]
            mods += f" op_sel:[{','.join(map(str, select))}]"
        if name == "v_bitop3_b32" or name.startswith("v_bitop3_b16"):
            return self._bitop3(name, w, w2, out)
        mods += " clamp" if w >> 15 & 1 else ""
        mods += ("", " mul:2", " mul:4", " div:2")[bits(w2, 28, 27)]
        return f"{name} {', '.join(out)}{mods}", 8

    def _bitop3(self, name: str, w: int, w2: int, out: list[str]) -> tuple[str, int]:
        """The truth table takes the places of abs (bits 10:8 are 5:3? of it), omod and neg."""
        value = bits(w2, 28, 27) << 6 | bits(w, 10, 8) << 3 | bits(w2, 31, 29)
        plain = [x.lstrip("-").strip("|") if x.startswith(("-v", "-s", "-|", "|")) else x for x in out]
        select = f" op_sel:[{','.join(str(w >> 11 + k & 1) for k in range(4))}]" if bits(w, 14, 11) else ""
        return f"{name} {', '.join(plain)} bitop3:{value:#x}{select}", 8

    def _vop3p(self, w: int, at: int) -> tuple[str, int]:
        op, w2 = bits(w, 22, 16), self.word(at + 4)
        if op == LD_SCALE:
            return self._scaled(w, w2, at)
        if ("MAI", op) in table():
            return self._mai(w, w2, at), 8
        name, codes = self._entry("VOP3P", op, at)
        fields = {"0": bits(w2, 8, 0), "1": bits(w2, 17, 9), "2": bits(w2, 26, 18)}
        out, n = [], 0
        for code in codes:
            field, count = code[1], int(code[3:])
            if field == "d":
                out.append(vector(bits(w, 7, 0), count))
            else:
                n += 1
                out.append(source(fields[field], count))
        low = [w >> 11 + k & 1 for k in range(n)]
        high = [(w2 >> 27 & 1, w2 >> 28 & 1, w >> 14 & 1)[k] for k in range(n)]
        neg_low, neg_high = [w2 >> 29 + k & 1 for k in range(n)], [w >> 8 + k & 1 for k in range(n)]
        join = lambda x: "[" + ",".join(map(str, x)) + "]"
        mods = f" op_sel:{join(low)} op_sel_hi:{join(high)}"
        if "mix" in name:  # neg_hi means abs, and neg_lo neg, in the mixed-precision forms
            head = len(codes) - n
            for k in range(n):
                out[head + k] = _signs(out[head + k], neg_low[k], neg_high[k])
        elif any(neg_low + neg_high):
            mods += f" neg_lo:{join(neg_low)} neg_hi:{join(neg_high)}"
        return f"{name} {', '.join(out)}{mods}{' clamp' if w >> 15 & 1 else ''}", 8

    def _mai(self, w: int, w2: int, at: int, scales: str = "", name: str = "", more: str = "") -> str:
        found, codes = self._entry("MAI", bits(w, 22, 16), at)
        kind = "a" if w >> 15 & 1 else "v"
        fields = {"0": bits(w2, 8, 0), "1": bits(w2, 17, 9), "2": bits(w2, 26, 18)}
        acc = {"0": w2 >> 27 & 1, "1": w2 >> 28 & 1}
        narrow = {}
        if found.endswith("_f8f6f4"):
            narrow = {"0": F8F6F4_REGISTERS[bits(w, 10, 8)], "1": F8F6F4_REGISTERS[bits(w2, 31, 29)]}
        single = found.startswith("v_accvgpr")
        out = []
        for code in codes:
            field, count = code[1], narrow.get(code[1], int(code[3:]))
            if field == "d":
                writes_acc = found == "v_accvgpr_write_b32"
                out.append(vector(bits(w, 7, 0), count, kind if not single else "a" if writes_acc else "v"))
            else:
                text = source(fields[field], count)
                from_acc = found == "v_accvgpr_read_b32" if single else acc.get(field)
                letter = "a" if (field == "2" and kind == "a") or from_acc else "v"
                out.append(text.replace("v", letter, 1) if fields[field] >= 256 else text)
        mods = more
        for key, value in (("cbsz", bits(w, 10, 8)), ("abid", bits(w, 14, 11)), ("blgp", bits(w2, 31, 29))):
            if value and not single and not (key == "abid" and scales):  # abid marks the scaled form
                mods += f" {key}:{value}"
        return f"{name or found} {', '.join(out)}{scales}{mods}"

    def _scaled(self, w: int, w2: int, at: int) -> tuple[str, int]:
        scales = "".join(f", {source(n, 1)}" for n in (bits(w2, 8, 0), bits(w2, 17, 9)))
        low, high = (w >> 11 & 1, w >> 12 & 1), (w2 >> 27 & 1, w2 >> 28 & 1)
        more = f" op_sel:[{low[0]},{low[1]},0] op_sel_hi:[{high[0]},{high[1]},0]"
        w3, w4 = self.word(at + 8), self.word(at + 12)
        name, _ = self._entry("MAI", bits(w3, 22, 16), at + 8)
        return self._mai(w3, w4, at + 8, scales, name.replace("v_mfma_", "v_mfma_scale_"), more), 16

    # -- memory
    def _ds(self, w: int, at: int) -> tuple[str, int]:
        name, codes = self._entry("DS", bits(w, 24, 17), at)
        w2 = self.word(at + 4)
        fields = {"d": bits(w2, 31, 24), "y": bits(w2, 23, 16), "x": bits(w2, 15, 8), "a": bits(w2, 7, 0)}
        kind = "a" if w >> 25 & 1 else "v"
        out = [vector(fields[c[1]], int(c[3:]), "v" if c[1] == "a" else kind) for c in codes if ":" in c]
        first, second = bits(w, 7, 0), bits(w, 15, 8)
        if "read2" in name or "write2" in name or "wrxchg2" in name:
            mods = (f" offset0:{first}" if first else "") + (f" offset1:{second}" if second else "")
        else:
            both = second << 8 | first
            mods = f" offset:{both}" if both else ""
        return f"{name} {', '.join(out)}{mods}{' gds' if w >> 16 & 1 else ''}", 8

    def _flat(self, w: int, at: int) -> tuple[str, int]:
        fmt = ("FLAT", "SCRATCH", "GLOBAL", "?")[bits(w, 15, 14)]
        op, w2 = bits(w, 24, 18), self.word(at + 4)
        sc0 = w >> 16 & 1
        returning = (fmt + "_RTN", op) in table() and sc0
        name, codes = self._entry(fmt + "_RTN" if returning else fmt, op, at)
        saddr, kind = bits(w2, 22, 16), "a" if w2 >> 23 & 1 else "v"
        out = []
        for code in codes:
            if code == "off" and fmt == "SCRATCH":  # vaddr, used if the SVE bit is set
                out.append(vector(bits(w2, 7, 0), 1) if w >> 13 & 1 else "off")
            elif code == "off" or code.startswith("sb"):
                count = 2 if fmt == "GLOBAL" else 1
                out.append("off" if saddr == 0x7F else source(saddr, count))
            elif code[1] == "a":
                wide = 1 if fmt == "GLOBAL" and saddr != 0x7F else int(code[3:])
                out.append(vector(bits(w2, 7, 0), wide))
            else:
                n = bits(w2, 31, 24) if code[1] == "d" else bits(w2, 15, 8)
                out.append(vector(n, int(code[3:]), kind))
        offset = bits(w, 12, 0) if fmt != "FLAT" else bits(w, 11, 0)
        if fmt != "FLAT" and offset >> 12:
            offset -= 1 << 13
        mods = f" offset:{offset}" if offset else ""
        for flag, on in (("sc0", sc0), ("nt", w >> 17 & 1), ("sc1", w >> 25 & 1)):
            mods += f" {flag}" if on else ""
        return f"{name} {', '.join(out)}{mods}", 8

    def _mubuf(self, w: int, at: int) -> tuple[str, int]:
        name, codes = self._entry("MUBUF", bits(w, 24, 18), at)
        w2 = self.word(at + 4)
        kind = "a" if w2 >> 23 & 1 else "v"
        offen, idxen, lds = w >> 12 & 1, w >> 13 & 1, w >> 16 & 1
        out = []
        for code in codes:
            field = code[1:2]
            if field == "d":
                if not lds:
                    out.append(vector(bits(w2, 15, 8), int(code[3:]), kind))
            elif field == "a":
                out.append(vector(bits(w2, 7, 0), offen + idxen) if offen + idxen else "off")
            elif field == "b":
                out.append(source(4 * bits(w2, 20, 16), 4))
            elif field == "2":
                out.append(source(bits(w2, 31, 24), 1))
        mods = ""
        for flag, on in (("offen", offen), ("idxen", idxen)):
            mods += f" {flag}" if on else ""
        offset = bits(w, 11, 0)
        mods += f" offset:{offset}" if offset else ""
        for flag, on in (("sc0", w >> 14 & 1), ("nt", w >> 17 & 1), ("sc1", w >> 15 & 1), ("lds", lds)):
            mods += f" {flag}" if on else ""
        return f"{name} {', '.join(out)}{mods}", 8


def _signs(text: str, negative: int, absolute: int) -> str:
    text = f"|{text}|" if absolute else text
    return f"-{text}" if negative and not text.startswith("-") and not text[0].isdigit() else text


def _dpp_text(extra: int) -> str:
    control = bits(extra, 16, 8)
    if control < 0x100:
        text = f"quad_perm:[{','.join(str(control >> 2 * k & 3) for k in range(4))}]"
    elif control in (0x140, 0x141):
        text = ("row_mirror", "row_half_mirror")[control - 0x140]
    elif control in (0x142, 0x143):
        text = f"row_bcast:{(15, 31)[control - 0x142]}"
    else:
        rows = {0x100: "row_shl", 0x110: "row_shr", 0x120: "row_ror", 0x150: "row_newbcast"}
        waves = {0x130: "wave_shl:1", 0x134: "wave_rol:1", 0x138: "wave_shr:1", 0x13C: "wave_ror:1"}
        if control in waves:
            text = waves[control]
        elif control & ~15 in rows:
            text = f"{rows[control & ~15]}:{control & 15}"
        else:
            raise UnknownInstruction(f"DPP control {control:#x}")
    bound = " bound_ctrl:1" if extra >> 19 & 1 else ""
    return f" {text} row_mask:{bits(extra, 31, 28):#x} bank_mask:{bits(extra, 27, 24):#x}{bound}"
