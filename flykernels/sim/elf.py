"""Linked gfx950 code objects (ELF): kernels, their descriptors and metadata, and the code.

Sources: LLVM's "User Guide for AMDGPU Backend": ELF header (EM_AMDGPU, e_flags machine), NT_AMDGPU_METADATA note
(MessagePack), kernel descriptor layout.
"""

from __future__ import annotations

import io
import re
import struct
from typing import Any

import numpy as np

from .asm import Code, parse_instruction
from .decode import Decoder
from .errors import BadCodeObject, UnknownInstruction
from .kernel import USER_SGPRS, KernelInfo, info_of_metadata, require_gfx950
from .mode import of_descriptor

EM_AMDGPU = 224
MACH = {0x03F: "gfx90a", 0x04C: "gfx942", 0x04F: "gfx950"}
NT_AMDGPU_METADATA = 32
DESCRIPTOR_BYTES = 64
MOST_BYTES = 1 << 28  # of a loaded segment; more is a damaged header


def read(data: bytes) -> tuple[Code, dict[str, KernelInfo], list[tuple[int, np.ndarray]]]:
    """(code, kernels, loaded segments) of a code object's bytes. BadCodeObject if it is not a whole gfx950 one."""
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as e:
        raise BadCodeObject("reading code objects needs pyelftools and msgpack: pip install flykernels[sim]") from e
    if data[:4] != b"\x7fELF":
        raise BadCodeObject(f"not an ELF file: it begins with {bytes(data[:4])!r}")
    try:
        elf = ELFFile(io.BytesIO(data))
        if elf["e_machine"] not in ("EM_AMDGPU", EM_AMDGPU):
            raise BadCodeObject(f"an ELF file for {elf['e_machine']}: this simulator runs gfx950 code objects only")
        arch = MACH.get(elf["e_flags"] & 0xFF, f"AMDGPU machine {elf['e_flags'] & 0xFF:#x}")
        require_gfx950(arch)
        end = elf["e_shoff"] + elf["e_shnum"] * elf["e_shentsize"]
        for segment in elf.iter_segments():
            end = max(end, segment["p_offset"] + segment["p_filesz"])
            if segment["p_memsz"] > MOST_BYTES:
                raise BadCodeObject(f"a segment of {segment['p_memsz']} bytes: no code object is that large")
        if end > len(data):
            raise BadCodeObject(f"the code object is truncated: {len(data)} bytes of {end}")
        return _kernels(elf)
    except BadCodeObject:
        raise
    except (
        ELFError,
        struct.error,
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
        OverflowError,
        MemoryError,
    ) as e:
        if isinstance(e, UnknownInstruction):
            raise
        raise BadCodeObject(f"the code object cannot be read: {type(e).__name__}: {e}") from e


def _kernels(elf) -> tuple[Code, dict[str, KernelInfo], list[tuple[int, np.ndarray]]]:
    text = elf.get_section_by_name(".text")
    symbols = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
    if text is None or symbols is None:
        raise BadCodeObject("no code: the ELF has no .text or no symbols; link the object first")
    address = {s.name: s["st_value"] for s in symbols.iter_symbols() if s.name}
    kernels = {k["name"]: k for k in _metadata(elf)}
    if not kernels:
        raise BadCodeObject("no kernels: the code object's metadata lists none")
    segments = [
        (s["p_vaddr"], np.frombuffer(s.data().ljust(s["p_memsz"], b"\0"), np.uint8))
        for s in elf.iter_segments()
        if s["p_type"] == "PT_LOAD" and s["p_memsz"]
    ]
    starts, found = [], {}
    for name, k in kernels.items():
        info = info_of_metadata(k)
        symbol = k.get("symbol", name + ".kd")
        if symbol not in address or name not in address:
            raise BadCodeObject(f"kernel {name} has no symbol in the code object")
        _descriptor(info, _bytes_at(segments, address[symbol], DESCRIPTOR_BYTES))
        starts.append(address[name])
        found[name] = (info, address[name])
    code, index = disassemble(text.data(), text["sh_addr"], starts)
    for info, start in found.values():
        info.entry = index[start]
    return code, {n: info for n, (info, _) in found.items()}, segments


def _metadata(elf) -> list[dict[str, Any]]:
    import msgpack

    for segment in elf.iter_segments():
        if segment["p_type"] != "PT_NOTE":
            continue
        for note in segment.iter_notes():
            if note["n_name"] == "AMDGPU" and note["n_type"] in (NT_AMDGPU_METADATA, "NT_AMDGPU_METADATA"):
                raw = note["n_descdata"]
                document = msgpack.unpackb(raw, raw=False, strict_map_key=False)
                if "amdhsa.target" in document:
                    require_gfx950(document["amdhsa.target"])
                return [_plain(k) for k in document.get("amdhsa.kernels", [])]
    raise BadCodeObject("no AMDGPU metadata note: not a linked HSA code object")


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k.lstrip("."): _plain(v) for k, v in x.items()}
    return [_plain(v) for v in x] if isinstance(x, list) else x


def _bytes_at(segments: list[tuple[int, np.ndarray]], address: int, size: int) -> bytes:
    for start, raw in segments:
        if start <= address and address + size <= start + len(raw):
            return raw[address - start : address - start + size].tobytes()
    raise BadCodeObject(f"nothing is loaded at {address:#x}")


def _descriptor(info: KernelInfo, raw: bytes) -> None:
    """Fills in what the 64-byte kernel descriptor says."""
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", raw, 44)
    del rsrc3
    info.user = [flag for bit, (flag, _) in enumerate(USER_SGPRS) if properties >> bit & 1]
    info.preload = (preload >> 7, preload & 0x7F)
    info.mode = of_descriptor(rsrc1)
    info.user_sgprs = rsrc2 >> 1 & 31
    info.group_ids = (bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1), bool(rsrc2 >> 9 & 1))
    info.workgroup_info = bool(rsrc2 >> 10 & 1)
    info.item_ids = rsrc2 >> 11 & 3


def disassemble(code: bytes, base: int, starts: list[int]) -> tuple[Code, dict[int, int]]:
    """Decodes what is reachable from the kernels' first instructions: padding between kernels is not code.

    Gives the instructions in address order and the index of each address.
    """
    decoder = Decoder(code)
    lines: dict[int, tuple[str, int]] = {}
    todo = [s - base for s in starts]
    while todo:
        at = todo.pop()
        while at not in lines:
            if not 0 <= at < len(code):
                raise BadCodeObject(f"the code runs out of its section at byte {at + base:#x}")
            text, size = decoder.line(at)
            lines[at] = (text, size)
            if m := re.match(r"(s_c?branch\w*) L(-?\d+)$", text):
                todo.append(int(m[2]))
                if m[1] == "s_branch":
                    break
            if text.startswith(("s_endpgm", "s_setpc")):
                break
            at += size
    out, index = Code(), {}
    for at in sorted(lines):
        index[at + base] = len(out.instructions)
        out.labels[f"L{at}"] = len(out.instructions)
        instruction = parse_instruction(lines[at][0], at + base)
        instruction.address = at + base
        out.instructions.append(instruction)
    return out, index
