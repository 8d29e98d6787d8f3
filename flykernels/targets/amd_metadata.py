"""What a linked AMD code object says of itself: the NT_AMDGPU_METADATA note, MessagePack inside ELF.

Formats: ELF-64 gABI (section headers, notes); LLVM "User Guide for AMDGPU Backend", code object V3 and later, note type
32 named "AMDGPU"; MessagePack specification. Only what those notes use is read."""

from __future__ import annotations

import struct
from typing import Any

NT_AMDGPU_METADATA, SHT_NOTE = 32, 7
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, align, entry size


class MetadataError(ValueError):
    """Bytes that are not a code object with readable metadata."""


def kernels(code_object: bytes) -> list[dict[str, Any]]:
    """The description of each kernel, keys as LLVM documents them (".vgpr_count", ".group_segment_fixed_size", ...)."""
    for name, kind, payload in _notes(code_object):
        if kind == NT_AMDGPU_METADATA and name == b"AMDGPU":
            try:
                return _unpack(payload, 0)[0]["amdhsa.kernels"]
            except (IndexError, KeyError, TypeError, struct.error) as e:
                raise MetadataError(f"the AMDGPU metadata note is damaged: {e!r}") from e
    raise MetadataError("the file has no AMDGPU metadata note: it is not a linked AMD code object")


def _notes(elf: bytes):
    """(name, type, payload) of each note in an ELF-64 little-endian file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise MetadataError("not a 64-bit little-endian ELF file")
    try:
        (table,), (entry, count) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HH", elf, 0x3A)
        for i in range(count):
            _, kind, _, _, at, size, *_ = SECTION_HEADER.unpack_from(elf, table + i * entry)
            end = at + size if kind == SHT_NOTE else 0
            while kind == SHT_NOTE and at < end:
                name_size, payload_size, note = struct.unpack_from("<III", elf, at)
                name, payload = at + 12, at + 12 + -(-name_size // 4) * 4
                yield elf[name : name + name_size].rstrip(b"\0"), note, elf[payload : payload + payload_size]
                at = payload + -(-payload_size // 4) * 4
    except struct.error as e:
        raise MetadataError(f"the ELF file is cut off: {e}") from e


_NUMBERS = {
    **{0xCC + i: f for i, f in enumerate(("B", "H", "I", "Q", "b", "h", "i", "q"))},
    **{0xCA: "f", 0xCB: "d"},
}
_LENGTHS = {0xD9: ("B", str), 0xDA: ("H", str), 0xDB: ("I", str), 0xC4: ("B", bytes), 0xC5: ("H", bytes)}
_LENGTHS |= {0xC6: ("I", bytes), 0xDC: ("H", list), 0xDD: ("I", list), 0xDE: ("H", dict), 0xDF: ("I", dict)}


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """(the MessagePack value at `at`, where the next one begins)"""
    tag, at = data[at], at + 1
    if tag < 0x80 or tag >= 0xE0:
        return (tag if tag < 0x80 else tag - 256), at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag in _NUMBERS:
        number = struct.Struct(">" + _NUMBERS[tag])
        return number.unpack_from(data, at)[0], at + number.size
    if tag in _LENGTHS:
        form, kind = _LENGTHS[tag]
        size = struct.Struct(">" + form)
        n, at = size.unpack_from(data, at)[0], at + size.size
    elif tag < 0xC0:
        kind = str if tag >= 0xA0 else list if tag >= 0x90 else dict
        n = tag & (0x1F if kind is str else 0x0F)
    else:
        raise MetadataError(f"MessagePack type {tag:#x} is not used in AMDGPU metadata")
    if kind in (str, bytes):
        raw = data[at : at + n]
        return (raw.decode() if kind is str else raw), at + n
    out: list = []
    for _ in range(n * (2 if kind is dict else 1)):
        value, at = _unpack(data, at)
        out.append(value)
    return (dict(zip(out[::2], out[1::2])) if kind is dict else out), at
