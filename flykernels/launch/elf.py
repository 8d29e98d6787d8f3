"""Loads a relocatable ELF64 object for x86-64 into this process: what a linker would do, for the little that we emit.

Written for objects of our own making (one source file, large code model, no thread-local data, no constructors), but
it trusts none of them: every offset is checked against the file, and every relocation against the section it is in.
Memory is writable first and executable later, never both.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass

# System V ABI (gABI 4.1 and x86-64 psABI 1.0): the few numbers used here.
HEADER, SECTION, SYMBOL, RELA = (struct.Struct("<" + f) for f in ("16sHHIQQQIHHHHHH", "IIQQQQIIQQ", "IBBHQQ", "QQq"))
RELOCATABLE, X86_64 = 1, 62
SYMTAB, RELA_TABLE, NOBITS, UNWIND = 2, 4, 8, 0x70000001
UNWIND_END = 4  # bytes of zeros behind unwind information: its terminator, which a linker would add
ALLOCATE = 2  # section flag: takes up memory at run time
ABS, RESERVED = 0xFFF1, 0xFF00  # section indices
R_64, R_PC32, R_PLT32, R_PC64 = 1, 2, 4, 24
WIDTH = {R_64: 8, R_PC64: 8, R_PC32: 4, R_PLT32: 4}
LARGEST_IMAGE = 1 << 28  # bytes; a kernel takes some tens of KiB


class ElfError(ValueError):
    """Bytes that are not an object file this loader can load."""


@dataclass(frozen=True)
class _Section:
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class Image:
    """An object in memory; the memory lives as long as the Image.

    symbols  each defined symbol's address
    unwind   address of the unwind information (.eh_frame), terminated; 0 if there is none"""

    def __init__(self, data: bytes, resolve: Callable[[str], int | None]):
        """resolve: the address of a symbol that the object only names, or None. ElfError, or OSError from mmap."""
        self._data = data
        try:
            sections = self._sections()
            places, size = self._place(sections)
            self._memory = mmap.mmap(-1, max(size, 1))
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self.unwind = next((self._base + at for i, at in places.items() if sections[i].kind == UNWIND), 0)
            for i, at in places.items():
                if sections[i].kind != NOBITS:
                    self._memory[at : at + sections[i].size] = self._bytes(sections[i])
            self._values, self.symbols = self._read_symbols(sections, places, resolve)
            for s in sections:
                if s.kind == RELA_TABLE and s.info in places:
                    self._relocate(s, places[s.info], sections[s.info].size)
        except struct.error as e:
            raise ElfError(f"the object file is cut off: {e}") from e

    def write(self, symbol: str, data: bytes) -> None:
        """Puts data at a symbol; only before `seal`. ElfError if there is no such symbol or no room."""
        at = self.symbols.get(symbol, -1) - self._base
        if at < 0 or at + len(data) > len(self._memory):
            raise ElfError(f"the object has no room for {len(data)} bytes at {symbol!r}")
        self._memory[at : at + len(data)] = data

    def seal(self) -> None:
        """Makes the memory readable and executable, and no longer writable. OSError if the system refuses."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if libc.mprotect(self._base, len(self._memory), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "this system does not let memory become executable (mprotect)")

    # -- reading
    def _bytes(self, s: _Section) -> bytes:
        if s.offset + s.size > len(self._data):
            raise ElfError(f"a section ends at byte {s.offset + s.size} of a file of {len(self._data)}")
        return self._data[s.offset : s.offset + s.size]

    def _sections(self) -> list[_Section]:
        ident, kind, machine, *_, table, _, _, _, _, entry, count, _ = HEADER.unpack_from(self._data)
        if ident[:6] != b"\x7fELF\x02\x01":
            raise ElfError("not a 64-bit little-endian ELF file")
        if (kind, machine) != (RELOCATABLE, X86_64):
            raise ElfError(f"ELF type {kind} for machine {machine}; needed: a relocatable object (1) for x86-64 (62)")
        if entry != SECTION.size or table + count * entry > len(self._data):
            raise ElfError("the section table lies outside the file")
        return [_Section(*SECTION.unpack_from(self._data, table + i * entry)) for i in range(count)]

    def _place(self, sections) -> tuple[dict[int, int], int]:
        """Offset in the image of each section that takes up memory, and the image's size."""
        places, end = {}, 0
        for i, s in enumerate(sections):
            if s.flags & ALLOCATE:
                align = max(1, s.align)
                if align & (align - 1) or align > mmap.PAGESIZE:
                    raise ElfError(f"a section asks for an alignment of {s.align} bytes")
                places[i] = end = -(-end // align) * align
                end += s.size + (UNWIND_END if s.kind == UNWIND else 0)
        if end > LARGEST_IMAGE:
            raise ElfError(f"the object takes {end} bytes of memory; a kernel takes less than {LARGEST_IMAGE}")
        return places, end

    def _read_symbols(self, sections, places, resolve) -> tuple[list[int | str], dict[str, int]]:
        """Each symbol's address in the table's order (its name where nobody knows one), and those defined by name."""
        tables = [s for s in sections if s.kind == SYMTAB]
        if len(tables) != 1 or tables[0].link >= len(sections):
            raise ElfError(f"the object has {len(tables)} symbol tables with names; needed: one")
        raw, names = self._bytes(tables[0]), self._bytes(sections[tables[0].link])
        values: list[int | str] = []
        defined = {}
        for at in range(0, len(raw), SYMBOL.size):
            name, _, _, section, value, _ = SYMBOL.unpack_from(raw, at)
            end = names.find(b"\0", name)
            if end < 0:
                raise ElfError("a symbol's name runs out of its table")
            text = names[name:end].decode("ascii", "replace")
            if section in places:
                if value > sections[section].size:
                    raise ElfError(f"symbol {text!r} lies outside its section")
                defined[text] = self._base + places[section] + value
                values.append(defined[text])
            elif section == ABS:
                values.append(value)
            else:
                found = resolve(text) if section == 0 and text else None
                values.append(text if found is None else found)
        return values, defined

    def _relocate(self, table: _Section, place: int, room: int) -> None:
        for at in range(0, table.size, RELA.size):
            offset, info, addend = RELA.unpack_from(self._bytes(table), at)
            kind, index = info & 0xFFFFFFFF, info >> 32
            if kind not in WIDTH:
                raise ElfError(f"relocation type {kind} is none that our compiler emits")
            if offset + WIDTH[kind] > room or index >= len(self._values):
                raise ElfError(f"a relocation at {offset} of symbol {index} lies outside its section or table")
            value = self._values[index]
            if isinstance(value, str):
                raise ElfError(f"the object needs {value!r}, which this process does not have")
            target = value + addend
            if kind == R_64:
                struct.pack_into("<Q", self._memory, place + offset, target & (2**64 - 1))
                continue
            distance = target - (self._base + place + offset)
            if WIDTH[kind] == 4 and not -(2**31) <= distance < 2**31:
                raise ElfError(f"a relocation reaches {distance} bytes; 32 bits do not hold that")
            struct.pack_into("<i" if WIDTH[kind] == 4 else "<q", self._memory, place + offset, distance)
