"""LDS instructions: reads, writes, transposing reads, swizzles, permutes, atomics.

Semantics: CDNA3 ISA reference, "Data share"; gfx950's transposing reads `ds_read_b64_tr_b16/b8/b4`, `ds_read_b96_tr_b6`
as probed against kernels proven on hardware (b16) and generalised the same way: 16 lanes read a tile and lane i gets
column i of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .asm import Instruction
from .atomic_ops import Atomic, of_lds
from .errors import UnknownInstruction
from .machine import Machine
from .operands import Binder, bad
from .races import ATOMIC, DS, Place
from .state import LANE, LANES, LGKM_MAX, POISON, Group, Pending, spread

U32 = np.uint32
READ = {
    "ds_read_b32": 4, "ds_read_b64": 8, "ds_read_b96": 12, "ds_read_b128": 16, "ds_read_u8": 1, "ds_read_i8": 1,
    "ds_read_u16": 2, "ds_read_i16": 2, "ds_read_u8_d16": 1, "ds_read_u8_d16_hi": 1, "ds_read_i8_d16": 1,
    "ds_read_i8_d16_hi": 1, "ds_read_u16_d16": 2, "ds_read_u16_d16_hi": 2,
    "ds_read_b64_tr_b16": 8, "ds_read_b64_tr_b8": 8, "ds_read_b64_tr_b4": 8, "ds_read_b96_tr_b6": 12,
}  # fmt: skip
WRITE = {
    "ds_write_b8": 1, "ds_write_b16": 2, "ds_write_b32": 4, "ds_write_b64": 8, "ds_write_b96": 12, "ds_write_b128": 16,
    "ds_write_b8_d16_hi": 1, "ds_write_b16_d16_hi": 2,
}  # fmt: skip
TWO = {"b32": 4, "b64": 8}


def store_size(i: Instruction) -> int:
    """Bytes of the smallest LDS store that an instruction makes; 0 if it makes none."""
    if i.name in WRITE:
        return WRITE[i.name]
    if i.name.startswith("ds_write2"):
        return TWO[i.name.split("_")[-1]]
    return 4 if i.name.startswith("ds_") and of_lds(i.name) else 0


def bind(i: Instruction, b: Binder, m: Machine) -> Callable[[Group], None] | None:
    if not i.name.startswith("ds_"):
        return None
    if i.mods.get("gds"):
        raise bad(i, "global data share, which CDNA does not have")
    if i.name in READ:
        return _read(i, b, m)
    if i.name in WRITE:
        return _write(i, b, m)
    if match := re.fullmatch(r"ds_(read2|write2)(st64)?_(b32|b64)", i.name):
        size, stride = TWO[match[3]], 64 if match[2] else 1
        offsets = [i.mods.get(f"offset{k}", 0) * size * stride for k in (0, 1)]
        return (_read2 if match[1] == "read2" else _write2)(i, b, m, size, offsets)
    if i.name in ("ds_bpermute_b32", "ds_permute_b32"):
        return _permute(i, b, m, i.name == "ds_permute_b32")
    if i.name == "ds_swizzle_b32":
        return _swizzle(i, b, m)
    if i.name == "ds_nop":
        return lambda g: None
    found = of_lds(i.name)
    return _atomic(i, b, m, found) if found else None


def land(g: Group, p: Pending) -> None:
    """A load's registers arrive."""
    data = p.data
    assert data is not None
    if p.keep:
        old = g.V[p.where]
        data = (data | (old & U32(p.keep)))[:1] if data.shape[0] == 1 else data
    target = g.V[p.where : p.where + len(data)]
    if p.mask is None:
        target[...] = data
    else:
        np.copyto(target, data, where=p.mask)
    if p.ticket is not None:
        p.extra.retire(p.ticket, g.barriers)


def retired(g: Group, p: Pending) -> None:
    """A store is done."""
    if p.ticket is not None:
        p.extra.retire(p.ticket, g.barriers)


# -- addresses
def _checked(i: Instruction, m: Machine, g: Group, at: np.ndarray, size: int, align: int):
    """Byte addresses -> (addresses that are safe to use, lanes that take part or None for all)."""
    mask = None if g.full else g.exec
    lanes = at if mask is None else at[mask]
    if lanes.size == 0:
        return np.zeros_like(at), np.zeros(at.shape, bool)
    low, high = int(lanes.min()), int(lanes.max())
    if low < 0 or high + size > m.lds_bytes:
        wrong = (at < 0) | (at + size > m.lds_bytes)
        if mask is not None:
            wrong &= mask
        worst = at[wrong]
        m.report(
            "lds-bounds", f"touches LDS bytes {int(worst.min())} to {int(worst.max()) + size - 1} of "
            f"{m.lds_bytes} ({worst.size} lanes)", g, wrong,
        )  # fmt: skip
        mask = ~wrong if mask is None else mask & ~wrong
    if align > 1 and (lanes & (align - 1)).any():
        wrong = (at & (align - 1)) != 0
        if mask is not None:
            wrong &= mask
        if wrong.any():
            m.report(
                "misaligned", f"LDS address {int(at[wrong][0]):#x} is not a multiple of {align}", g, wrong
            )  # fmt: skip
        at = at & ~(align - 1)
    return (at if mask is None else np.where(mask, at, 0)), mask


# Alignment that an access needs. The compilers emit b64 and b96 on 4 and b128 on 8 (LLVM's unaligned-access-mode splits
# what the hardware would not take), so less than that is a mistake.
ALIGN = {1: 1, 2: 2, 4: 4, 8: 4, 12: 4, 16: 8}


class Site:
    """One LDS instruction's addresses, kept for the next time: loops come back to the same ones."""

    def __init__(self, i: Instruction, m: Machine, size: int, offset: int, align: int):
        self.instruction, self.machine, self.size, self.offset, self.align = i, m, size, offset, align
        self.known: dict[bytes, Place] = {}

    def place(self, g: Group, raw: np.ndarray) -> Place:
        """Addresses as the register holds them, uint32 [n, 64] or broadcasting to it -> where the access lies."""
        m = self.machine
        if g.full:
            known = self.known.get(g.key)
            if known is not None and known.step == m.granule and known.raw == raw.tobytes():
                return known
        # 32-bit sums: a base below 0 is fine where the offset brings it back (LLVM folds so from gfx7 on)
        at = (spread(raw, g.n) + U32(self.offset)).astype(np.int64)
        count = len(m.collector.found)
        at, mask = _checked(self.instruction, m, g, at, self.size, self.align)
        m.keep_apart(at, mask, self.size)
        made = Place(g, at, mask, self.size, m.granule, m.races, m.lds_stride)
        if mask is None and len(m.collector.found) == count:
            made.raw = raw.tobytes()
            self.known[g.key] = made
        return made


def gather(m: Machine, p: Place, size: int) -> np.ndarray:
    """LDS contents of a place -> uint32 [words, n, 64]."""
    where = p.where
    if size < 4:
        return m.lds_words(size).take(where >> (size - 1)).astype(U32)[None]
    if p.row is not None:
        return m.lds_words(4).reshape(-1, size // 4).take(p.row, axis=0).transpose(2, 0, 1)
    if p.alignment >= 4:
        return m.lds_words(4).take((where >> 2)[None] + np.arange(size // 4)[:, None, None])
    raw = m.lds[where[..., None] + np.arange(size)]
    return raw.view(U32).transpose(2, 0, 1)


def scatter(m: Machine, p: Place, size: int, data: np.ndarray) -> None:
    """uint32 [words, n, 64], or one word for all, -> LDS at a place."""
    where, mask = p.where, p.mask
    if p.block is not None:
        words = m.lds_words(4)
        blocks = words[: len(words) // (16 * size) * (16 * size)].reshape(-1, 16 * size)
        blocks[p.block] = data if data.ndim == 0 else data.transpose(1, 2, 0).reshape(len(where), -1)
        return
    if p.row is not None:
        rows = m.lds_words(4).reshape(-1, size // 4)
        shaped = data if data.ndim == 0 else data.transpose(1, 2, 0)
        if mask is None:
            rows[p.row] = shaped
        else:
            rows[p.row[mask]] = shaped if data.ndim == 0 else shaped[mask]
        return
    data = np.broadcast_to(data, (max(1, size // 4), *where.shape))
    if mask is not None:
        where, data = where[mask], data[:, mask]
    if size < 4:
        m.lds_words(size)[where >> (size - 1)] = data[0].astype(np.uint8 if size == 1 else np.uint16)
    elif not (where & 3).any():
        index = where >> 2
        words = m.lds_words(4)
        for k in range(size // 4):
            words[index + k] = data[k]
    else:
        for k in range(size):
            m.lds[where + k] = (data[k // 4] >> U32(8 * (k % 4))).astype(np.uint8)


# -- reads
def _sign(data: np.ndarray, bits: int) -> np.ndarray:
    return ((data ^ U32(1 << (bits - 1))) - U32(1 << (bits - 1))).astype(U32)


def transpose(data: np.ndarray, bits: int) -> np.ndarray:
    """What a transposing read gives: 16 lanes hold rows of a tile with 64 / bits columns... each group of 16 lanes
    reads
    16 x 64-bit pieces, taken as a matrix of k = 64 / bits rows by 16 columns (row j in lanes j * 16 / k onward), and
    lane
    i gets column i. uint32 [words, n, 64] -> the same shape."""
    words, n, _ = data.shape
    per = 32 * words // bits  # elements a lane
    lanes = np.ascontiguousarray(data.transpose(1, 2, 0)).reshape(n, 4, 16, words)
    if bits == 16:
        elements: np.ndarray = lanes.view(np.uint16)
    elif bits == 8:
        elements = lanes.view(np.uint8)
    else:
        every = np.unpackbits(lanes.view(np.uint8), axis=-1, bitorder="little").reshape(n, 4, 16, per, bits)
        elements = np.packbits(every, axis=-1, bitorder="little").reshape(n, 4, 16, per)
    flat = elements.reshape(n, 4, per, 16)  # row j of the tile: 16 consecutive elements in lane order
    column = np.ascontiguousarray(flat.swapaxes(2, 3))  # [n, 4, lane, per]
    if bits in (8, 16):
        out: np.ndarray = column.view(U32)
    else:
        every = np.unpackbits(column.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
        out = np.packbits(every.reshape(n, 4, 16, per * bits), axis=-1, bitorder="little")
        out = np.ascontiguousarray(out).view(U32)
    return np.ascontiguousarray(out.reshape(n, 64, words).transpose(2, 0, 1))


def _issue(m: Machine, g: Group, where: int, sample: Callable, mask, ticket, registers, keep: int = 0) -> None:
    """Puts a read in flight. Its data are sampled now and arrive at its wait; in delay mode (see delay.py) they arrive
    now, or are sampled at the wait too."""
    m.catch_up(g)
    extra = m.races.tickets if m.races is not None else None
    p = Pending(registers, land, None, where, mask, keep, ticket=ticket, pc=g.pc, extra=extra)
    late = m.late(g)
    if late:

        def take() -> None:
            p.data = sample()

        p.land = m.defer(g, take, land)
        g.issue(g.ds, p, LGKM_MAX)
        return
    p.data = data = sample()
    if late is False:
        p.ticket = None
        land(g, p)
        g.issue(g.ds, Pending(frozenset(), retired, mask=mask, ticket=ticket, pc=g.pc, extra=extra), LGKM_MAX)
        return
    if m.poison:
        target = g.V[where : where + len(data)]
        if not keep:
            if mask is None:
                target[...] = POISON
            else:
                np.copyto(target, POISON, where=mask)
    g.issue(g.ds, p, LGKM_MAX)


def _read_track(m: Machine, g: Group, p: Place) -> np.ndarray | None:
    return None if m.races is None else m.races.read(g, p, g.pc)


def _read(i: Instruction, b: Binder, m: Machine) -> Callable[[Group], None]:
    size, name = READ[i.name], i.name
    where, read, offset = b.registers.index(i.operands[0].index), b.raw(i.operands[1]), i.mods.get("offset", 0)
    words = max(1, size // 4)
    registers = frozenset(range(where, where + words))
    high = name.endswith("_d16_hi")
    keep = 0xFFFF if high else 0xFFFF0000 if "_d16" in name else 0
    signed = 8 * size if "_i8" in name or "_i16" in name else 0
    bits = int(name.rsplit("_b", 1)[1]) if "_tr_" in name else 0

    site = Site(i, m, size, offset, ALIGN[size])

    def sample(p: Place) -> np.ndarray:
        data = gather(m, p, size)
        if signed:
            data = _sign(data, signed)
        if keep:
            data = (data & U32(0xFFFF)) << U32(16 if high else 0)
        return transpose(data, bits) if bits else data

    def run(g: Group) -> None:
        if bits and not g.full:
            m.report("exec-not-full", "a transposing read needs all lanes: others' data is undefined", g, ~g.exec)
        p = site.place(g, read(g))
        ticket = _read_track(m, g, p)
        if m.trace is not None:
            m.trace.lds(g, i, p.at, size, p.mask)
        _issue(m, g, where, lambda: sample(p), p.mask, ticket, registers, keep)

    return run


def _both(tickets: list[np.ndarray | None]) -> np.ndarray | None:
    """The tickets of a two-address instruction's halves, [waves, 2]."""
    kept = [t for t in tickets if t is not None]
    return np.stack(kept, 1) if kept else None


def _read2(i: Instruction, b: Binder, m: Machine, size: int, offsets: list[int]) -> Callable[[Group], None]:
    where, read = b.registers.index(i.operands[0].index), b.raw(i.operands[1])
    words = size // 4
    registers = frozenset(range(where, where + 2 * words))
    sites = [Site(i, m, size, offset, 4) for offset in offsets]

    def run(g: Group) -> None:
        base = read(g)
        places, tickets = [], []
        for site in sites:
            places.append(p := site.place(g, base))
            tickets.append(_read_track(m, g, p))
            if m.trace is not None:
                m.trace.lds(g, i, p.at, size, p.mask)
        ticket = _both(tickets)
        sample = lambda: np.concatenate([gather(m, p, size) for p in places])
        _issue(m, g, where, sample, places[0].mask, ticket, registers)

    return run


# -- writes
def _store_track(m: Machine, g: Group, i: Instruction, p: Place, size: int) -> np.ndarray | None:
    ticket = m.races.write(g, p, g.pc, DS) if m.races is not None else None
    if m.trace is not None:
        m.trace.lds(g, i, p.at, size, p.mask)
    return ticket


def _issue_store(m: Machine, g: Group, put: Callable[[], None], ticket: np.ndarray | None) -> None:
    """Puts a store in flight: LDS changes now, or at the wait if delay mode delays this one."""
    m.catch_up(g)
    p = Pending(
        frozenset(), retired, ticket=ticket, pc=g.pc, mask=np.ones((g.n, LANES), bool),
        extra=m.races.tickets if m.races is not None else None,
    )  # fmt: skip
    if m.late(g):
        p.land = m.defer(g, put, retired)
    else:
        put()
    g.issue(g.ds, p, LGKM_MAX)


def _write(i: Instruction, b: Binder, m: Machine) -> Callable[[Group], None]:
    size, offset = WRITE[i.name], i.mods.get("offset", 0)
    read, words = b.raw(i.operands[0]), max(1, size // 4)
    values = [b.raw(i.operands[1], k) for k in range(words)]
    high = i.name.endswith("_d16_hi")
    site = Site(i, m, size, offset, ALIGN[size])

    def run(g: Group) -> None:
        p = site.place(g, read(g))
        data = np.stack([spread(v(g), g.n) for v in values])
        if high:
            data = data >> U32(16)
        ticket = _store_track(m, g, i, p, size)
        _issue_store(m, g, lambda: scatter(m, p, size, data), ticket)

    return run


def _write2(i: Instruction, b: Binder, m: Machine, size: int, offsets: list[int]) -> Callable[[Group], None]:
    read, words = b.raw(i.operands[0]), size // 4
    values = [[b.raw(o, k) for k in range(words)] for o in i.operands[1:3]]
    sites = [Site(i, m, size, offset, 4) for offset in offsets]

    def run(g: Group) -> None:
        base = read(g)
        tickets, stores = [], []
        for k in (0, 1):
            p = sites[k].place(g, base)
            data = np.stack([spread(v(g), g.n) for v in values[k]])
            tickets.append(_store_track(m, g, i, p, size))
            stores.append((p, data))

        def put() -> None:
            for p, data in stores:
                scatter(m, p, size, data)

        _issue_store(m, g, put, _both(tickets))

    return run


# -- between lanes, through the LDS unit but not its memory
def _permute(i: Instruction, b: Binder, m: Machine, push: bool) -> Callable[[Group], None]:
    """ds_bpermute: lane i reads lane (address[i] + offset) / 4, 0 from inactive ones. ds_permute: lane i sends
    there."""
    where, offset = b.registers.index(i.operands[0].index), i.mods.get("offset", 0)
    address, value = b.raw(i.operands[1]), b.raw(i.operands[2])
    registers = frozenset((where,))

    def run(g: Group) -> None:
        to = ((spread(address(g), g.n) + U32(offset)) >> U32(2)).astype(np.int64) & 63
        x = np.where(g.exec, spread(value(g), g.n), U32(0))
        if push:
            data = np.zeros((g.n, LANES), U32)
            rows = np.broadcast_to(np.arange(g.n)[:, None], to.shape)
            data[rows[g.exec], to[g.exec]] = x[g.exec]
        else:
            data = np.take_along_axis(x, to, axis=1)
        _issue(m, g, where, lambda: data[None], None if g.full else g.exec, None, registers)

    return run


def swizzle_lanes(text: str | int) -> np.ndarray:
    """Source lane of each lane for ds_swizzle's offset: a number, or LLVM's swizzle(...) form."""
    if isinstance(text, str):
        kind, *rest = [x.strip() for x in text.removeprefix("swizzle(").removesuffix(")").split(",")]
        if kind == "QUAD_PERM":
            return (LANE & ~3) + np.array([int(x) for x in rest])[LANE & 3]
        if kind == "BITMASK_PERM":
            out = np.zeros(LANES, np.int64)
            for k, ch in enumerate(reversed(rest[0].strip('"'))):
                bit = LANE >> k & 1
                chosen = {"0": 0 * bit, "1": 0 * bit + 1, "p": bit, "i": 1 - bit}[ch]
                out |= chosen << k
            return (LANE & 32) | out
        if kind == "SWAP":
            return LANE ^ int(rest[0])
        if kind == "REVERSE":
            return LANE ^ (int(rest[0]) - 1)
        if kind == "BROADCAST":
            size, at = int(rest[0]), int(rest[1])
            return (LANE & ~(size - 1)) + at
        raise UnknownInstruction(f"ds_swizzle {text}")
    if text & 0x8000:
        return (LANE & ~3) + (text >> 2 * (LANE & 3) & 3)
    and_mask, or_mask, xor_mask = text & 31, text >> 5 & 31, text >> 10 & 31
    return (LANE & 32) | (((LANE & 31 & and_mask) | or_mask) ^ xor_mask)


def _swizzle(i: Instruction, b: Binder, m: Machine) -> Callable[[Group], None]:
    where, read = b.registers.index(i.operands[0].index), b.raw(i.operands[1])
    lanes, registers = swizzle_lanes(i.mods.get("offset", 0)), frozenset((where,))

    def run(g: Group) -> None:
        x = np.where(g.exec, spread(read(g), g.n), U32(0))
        _issue(m, g, where, lambda: x[:, lanes][None], None if g.full else g.exec, None, registers)

    return run


def _atomic(i: Instruction, b: Binder, m: Machine, op: Atomic) -> Callable[[Group], None]:
    """Lane after lane, wave after wave. Atomics do not race with each other, but with plain accesses they do."""
    returns, offset, words = "_rtn" in i.name, i.mods.get("offset", 0), op.size // 4
    first = 1 if returns else 0
    read = b.raw(i.operands[first])
    data = [[b.raw(o, k) for k in range(words)] for o in i.operands[first + 1 : first + 1 + op.data]]
    where = b.registers.index(i.operands[0].index) if returns else 0
    registers = frozenset(range(where, where + words)) if returns else frozenset()
    site = Site(i, m, op.size, offset, op.size)
    top = (1 << 8 * op.size) - 1
    join = lambda parts, w, lane: sum(int(x[w, lane]) << 32 * k for k, x in enumerate(parts))

    def run(g: Group) -> None:
        m.catch_up(g)
        p = site.place(g, read(g))
        at, mask = p.at, p.mask
        ticket = m.races.write(g, p, g.pc, ATOMIC) if m.races is not None else None
        if m.trace is not None:
            m.trace.lds(g, i, at, op.size, mask)
        values = [[spread(x(g), g.n) for x in parts] for parts in data]
        out, memory = np.zeros((words, g.n, LANES), U32), m.lds_words(4)
        for w, lane in np.argwhere(np.ones((g.n, LANES), bool) if mask is None else mask).tolist():
            first = (int(g.workgroup[w]) * m.lds_stride + int(at[w, lane])) >> 2
            old = sum(int(memory[first + k]) << 32 * k for k in range(words))
            new = op.apply(old, tuple(join(parts, w, lane) for parts in values), 8 * op.size) & top
            for k in range(words):
                out[k, w, lane] = old >> 32 * k & 0xFFFFFFFF
                memory[first + k] = new >> 32 * k & 0xFFFFFFFF
        if returns:
            _issue(m, g, where, lambda: out, mask, ticket, registers)
        else:
            _issue_store(m, g, lambda: None, ticket)

    return run
