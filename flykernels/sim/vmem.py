"""Vector memory: buffer, global, flat and scratch loads, stores and atomics, and direct loads into LDS.

Semantics: CDNA3 ISA reference, "Vector memory" and "Flat memory"; a raw buffer's range check is that of the ISA: each
dword
is out of range if its offset (with the scalar offset) reaches num_records; reads give 0 and writes are dropped.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from .asm import M0, Instruction
from .atomic_ops import of_memory
from .lds import land, scatter
from .machine import Machine
from .operands import Binder, bad, scalar
from .races import DIRECT, Place
from .state import LANE, LANES, POISON, VM_MAX, Group, Pending, spread

U32, I64 = np.uint32, np.int64
SIZE = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2,
    "ubyte_d16": 1, "ubyte_d16_hi": 1, "sbyte_d16": 1, "sbyte_d16_hi": 1, "short_d16": 2, "short_d16_hi": 2,
    "byte": 1, "byte_d16_hi": 1, "short": 2,
}  # fmt: skip
_NAME = re.compile(r"^(buffer|global|flat|scratch)_(load|store)_(lds_)?(\w+)$")
_ATOMIC = re.compile(r"^(buffer|global|flat)_atomic_(\w+)$")


def bind(i: Instruction, b: Binder, m: Machine) -> Callable[[Group], None] | None:
    if i.name in ("buffer_wbl2", "buffer_inv"):
        return _cache(i, m)
    if match := _NAME.match(i.name):
        kind, action, direct, what = match.groups()
        if what not in SIZE:
            return None
        place = _addresses(i, b, m, kind, action)
        if direct or i.mods.get("lds"):
            return _direct_load(i, b, m, place, SIZE[what])
        return (_load if action == "load" else _store)(i, b, m, kind, place, SIZE[what], what)
    if match := _ATOMIC.match(i.name):
        return _atomic(i, b, m, match[1], match[2])
    return None


def store_size(i: Instruction) -> int:
    """Bytes of an element that an instruction stores to memory, at most 4; 0 if it stores nothing there."""
    match = _NAME.match(i.name)
    if match and match[2] == "store" and match[1] != "scratch" and match[4] in SIZE:
        return min(4, SIZE[match[4]])
    return 4 if _ATOMIC.match(i.name) else 0


def _cache(i: Instruction, m: Machine) -> Callable[[Group], None]:
    """Write-back and invalidation of caches. The first is waited for with vmcnt; the second takes effect by order alone
    (LLVM's memory model waits for neither, nor counts it)."""
    device, back = bool(i.mods.get("sc1")), i.name == "buffer_wbl2"

    def run(g: Group) -> None:
        if m.sharing is not None and device:
            (m.sharing.write_back if back else m.sharing.drop)(g)
        if back:
            _queue(g, m, Pending(frozenset(), None, pc=g.pc), "buffer")

    return run


# -- addresses: (group) -> (address [n, 64] int64, lanes that take part [n, 64]), for `size` bytes
def _addresses(i: Instruction, b: Binder, m: Machine, kind: str, action: str) -> Callable:
    operands = list(i.operands)
    direct = bool(i.mods.get("lds")) or "_lds_" in i.name
    if kind == "buffer":
        return _buffer(i, b, m, operands[0 if direct else 1 :])
    if kind == "scratch":
        return _scratch_address(i, b, operands[1:] if action == "load" else [operands[0], *operands[2:]])
    rest = operands[0:] if direct else (operands[1:] if action == "load" else [operands[0], *operands[2:]])
    return _flat(i, b, rest)


@functools.cache
def _all(n: int) -> np.ndarray:
    """[n, 64] of True, shared: not to be written."""
    made = np.ones((n, LANES), bool)
    made.flags.writeable = False
    return made


def _mask(g: Group) -> np.ndarray:
    return _all(g.n) if g.full else g.exec


def _buffer(i: Instruction, b: Binder, m: Machine, operands: list) -> Callable:
    """operands: [vaddr,] descriptor, soffset."""
    offen, idxen = bool(i.mods.get("offen")), bool(i.mods.get("idxen"))
    if i.mods.get("addr64"):
        raise bad(i, "addr64")
    if offen or idxen or operands[0].kind == "v" or operands[0].word == "off":
        vaddr, operands = operands[0], operands[1:]
    else:
        vaddr = None
    r, immediate = operands[0].index, i.mods.get("offset", 0)
    soffset = scalar(operands[1])
    reads = b.raw(vaddr, 1 if idxen and offen else 0) if vaddr is not None and offen else None
    index = b.raw(vaddr) if vaddr is not None and idxen else None

    known: list = [b"", None, None, 0]  # descriptor's bits; base and records [n, 1]; the smallest of the records

    def descriptor(g: Group) -> list:
        bits = g.S[r : r + 4].tobytes()
        if known[0] != bits:
            if (g.S[r + 1] >> 31).any() or (g.S[r + 3] >> 23 & 1).any():
                raise bad(i, "a swizzled or thread-id-addressed buffer")
            base = g.S[r] | (g.S[r + 1] & 0xFFFF) << 32
            known[:] = bits, base[:, None], g.S[r + 2][:, None].copy(), int(g.S[r + 2].min())
        return known

    def place(g: Group, size: int) -> tuple[np.ndarray, np.ndarray]:
        _, base, limit, least = descriptor(g)
        if reads is not None:
            offset = spread(reads(g), g.n).astype(I64)
            if immediate:
                offset += immediate
        else:
            offset = np.full((g.n, LANES), immediate, I64)
        uniform = soffset(g)
        mask = _mask(g)
        total = offset + uniform[:, None]
        place.inside = False  # type: ignore[attr-defined]
        if index is None and total.max() + size <= least:
            place.inside = True  # type: ignore[attr-defined]
            return base + total, mask
        if index is not None:
            at = index(g).astype(I64)
            stride = g.S[r + 1] >> 16 & 0x3FFF
            structured = (stride != 0)[:, None]
            inside = np.where(structured, (at < limit) & (offset < np.maximum(stride, 1)[:, None]), total < limit)
            return base + total + at * stride[:, None], mask & inside
        inside = total + min(size, 4) <= limit
        loose = mask & ~inside & (offset + min(size, 4) <= limit)
        if loose.any():
            m.report(
                "bounds-ambiguous", "only the scalar offset puts this buffer access out of range: editions of the ISA "
                "disagree on whether the range check counts it", g, loose,
            )  # fmt: skip
        return base + total, mask & inside

    def limits(g: Group, size: int, address: np.ndarray) -> np.ndarray | None:
        """For multi-dword accesses: dwords [words, n, 64] in range, None if all are."""
        if size <= 4 or place.inside:  # type: ignore[attr-defined]
            return None
        offset = address - descriptor(g)[1]
        if index is not None or (offset + size <= g.S[r + 2][:, None]).all():
            return None
        return offset[None] + 4 * np.arange(1, size // 4 + 1)[:, None, None] <= g.S[r + 2][None, :, None]

    place.limits = limits  # type: ignore[attr-defined]
    return place


def _flat(i: Instruction, b: Binder, operands: list) -> Callable:
    """operands: vaddr [, saddr or off]."""
    vaddr, offset = operands[0], i.mods.get("offset", 0)
    saddr = operands[1] if len(operands) > 1 and operands[1].kind == "s" else None
    if saddr is not None:
        base, low = scalar(saddr, wide=True), b.raw(vaddr)
        return lambda g, size: (base(g)[:, None] + low(g).astype(I64) + offset, _mask(g))
    pair = b.bits(vaddr, "u64")
    return lambda g, size: (pair(g).view(I64) + offset, _mask(g))


def _scratch_address(i: Instruction, b: Binder, operands: list) -> Callable:
    """operands: vaddr or off, saddr or off -> byte in the lane's private memory."""
    offset = i.mods.get("offset", 0)
    vector = b.raw(operands[0]) if operands[0].kind == "v" else None
    uniform = scalar(operands[1]) if len(operands) > 1 and operands[1].kind == "s" else None

    def place(g: Group, size: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.full((g.n, LANES), offset, I64)
        if vector is not None:
            at = at + vector(g)
        if uniform is not None:
            at = at + uniform(g)[:, None]
        return at, _mask(g)

    return place


def _report(m: Machine, g: Group) -> Callable:
    return lambda kind, text, lanes: m.report(kind, text, g, lanes)


def _aligned(m: Machine, g: Group, address: np.ndarray, mask: np.ndarray, size: int) -> None:
    """Memory accesses of a dword and more need 4-byte alignment, shorts 2 (unaligned access mode is a driver's
    choice)."""
    step = min(size, 4)
    if step > 1 and int(np.bitwise_or.reduce(address, axis=None)) & (step - 1):
        wrong = mask & ((address & (step - 1)) != 0)
        if wrong.any():
            m.report("misaligned", f"address {int(address[wrong][0]):#x} is not a multiple of {step}", g, wrong)


def _fetch(
    m: Machine, g: Group, place: Callable, kind: str, size: int, device: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data [words, n, 64], addresses, lanes in range). device: at device scope."""
    address, mask = place(g, size)
    if kind == "scratch":
        return _scratch_read(m, g, address, mask, size), address, mask
    _aligned(m, g, address, mask, size)
    limits = place.limits(g, size, address) if hasattr(place, "limits") else None
    if limits is None:
        m.touch(g, address, mask, size, write=False, device=device)
        data = m.memory.read(address, mask, size, _report(m, g))
    else:  # a buffer's end inside some lane's access: dword by dword
        parts = []
        for k in range(size // 4):
            m.touch(g, address + 4 * k, mask & limits[k], 4, write=False, device=device)
            parts.append(m.memory.read(address + 4 * k, mask & limits[k], 4, _report(m, g)))
        data = np.concatenate(parts)
    return data, address, mask


# -- scratch
def _scratch_read(m: Machine, g: Group, at: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
    memory = _scratch(m, g, at, mask, size)
    raw = np.zeros((g.n, LANES, max(4, size)), np.uint8)
    rows, lanes = np.arange(g.n)[:, None], LANE[None, :]
    safe = np.where(mask, at, 0)
    for k in range(size):
        raw[..., k] = memory[rows, lanes, safe + k]
    return np.ascontiguousarray(np.moveaxis(raw.view(U32), -1, 0))


def _scratch(m: Machine, g: Group, at: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
    memory = g.scratch
    if memory is None or (mask.any() and (int(at[mask].min()) < 0 or int(at[mask].max()) + size > memory.shape[2])):
        have = 0 if memory is None else memory.shape[2]
        m.report("out-of-bounds", f"touches private memory beyond the {have} bytes a lane that the kernel has", g, mask)
        need = int(at[mask].max()) + size if mask.any() else size
        grown = np.zeros((g.n, LANES, max(need, have)), np.uint8)
        if memory is not None:
            grown[:, :, :have] = memory
        g.scratch = memory = grown
    return memory


# -- loads
def _load(i: Instruction, b: Binder, m: Machine, kind: str, place: Callable, size: int, what: str):
    where = b.registers.index(i.operands[0].index)
    words = max(1, size // 4)
    registers = frozenset(range(where, where + words))
    high, d16, signed = what.endswith("_hi"), "d16" in what, what.startswith("s") and "short_d16" not in what
    if what in ("short", "short_d16", "short_d16_hi"):
        signed = False
    bits = 8 * size
    keep = (0xFFFF if high else 0xFFFF0000) if d16 else 0
    device = bool(i.mods.get("sc1"))

    def run(g: Group) -> None:
        data, address, mask = _fetch(m, g, place, kind, size, device)
        if signed:
            data = ((data ^ U32(1 << (bits - 1))) - U32(1 << (bits - 1))).astype(U32)
        if d16:
            data = (data & U32(0xFFFF)) << U32(16 if high else 0)
        active = None if g.full else g.exec
        p = Pending(registers, land, data, where, active, keep, pc=g.pc)
        if m.trace is not None:
            m.trace.memory(g, i, address, mask, size)
        late = m.late(g)
        if late is False:
            land(g, p)
            p = Pending(frozenset(), None, pc=g.pc)
        elif m.poison and not keep:
            target = g.V[where : where + words]
            if active is None:
                target[...] = POISON
            else:
                np.copyto(target, POISON, where=active)
        _queue(g, m, p, kind)

    return run


def _queue(g: Group, m: Machine, p: Pending, kind: str) -> None:
    """vmcnt counts all vector memory; flat accesses count in lgkmcnt too, since they may be LDS ones."""
    if m.sharing is not None:
        m.sharing.issue(g)
    if kind == "flat":
        p.holds = 2
        g.issue(g.ds, p, 15)
    g.issue(g.vm, p, VM_MAX)


def _store(i: Instruction, b: Binder, m: Machine, kind: str, place: Callable, size: int, what: str):
    source = i.operands[0] if kind == "buffer" else i.operands[1]
    words = max(1, size // 4)
    values = [b.raw(source, k) for k in range(words)]
    high, device = what.endswith("_hi"), bool(i.mods.get("sc1"))

    def run(g: Group) -> None:
        data = np.stack([spread(v(g), g.n) for v in values])
        if high:
            data = data >> U32(16)
        address, mask = place(g, size)
        if kind == "scratch":
            memory = _scratch(m, g, address, mask, size)
            rows, lanes = np.nonzero(mask)
            for k in range(size):
                byte = (data[k // 4][mask] >> U32(8 * (k % 4))).astype(np.uint8)
                memory[rows, lanes, address[mask] + k] = byte
        else:
            _aligned(m, g, address, mask, size)
            limits = place.limits(g, size, address) if hasattr(place, "limits") else None
            if limits is None:
                m.touch(g, address, mask, size, write=True, device=device)
                m.memory.write(address, mask, size, data, _report(m, g))
            else:
                for k in range(words):
                    m.touch(g, address + 4 * k, mask & limits[k], 4, write=True, device=device)
                    m.memory.write(address + 4 * k, mask & limits[k], 4, data[k : k + 1], _report(m, g))
        if m.trace is not None:
            m.trace.memory(g, i, address, mask, size)
        m.late(g)
        _queue(g, m, Pending(frozenset(), None, pc=g.pc), kind)

    return run


# -- direct to LDS
def _direct_load(i: Instruction, b: Binder, m: Machine, place: Callable, size: int) -> Callable[[Group], None]:
    """Each lane's bytes go to LDS at M0[17:0] + offset + lane * size: lane-linear, whatever the addresses."""
    if size not in (1, 2, 4, 12, 16):
        raise bad(i, "this size of a direct load")
    step = max(4, size)
    immediate = i.mods.get("offset", 0)
    kind, device = i.name.split("_")[0], bool(i.mods.get("sc1"))
    lane_bytes = LANE * step

    known: dict[bytes, tuple[bytes, Place]] = {}

    def target(g: Group) -> Place:
        first = g.S[M0]
        old = known.get(g.key)
        if old is not None and g.full and old[1].step == m.granule and old[0] == first.tobytes():
            return old[1]
        active = _mask(g)
        at = (first & 0x3FFFF)[:, None] + immediate + lane_bytes
        over = active & ((at + step > m.lds_bytes) | (at < 0))
        if over.any():
            top = int(at[over].max()) + step - 1
            m.report("lds-bounds", f"loads into LDS bytes up to {top} of {m.lds_bytes}", g, over)
            active = active & ~over
        lanes = None if active.all() else active
        m.keep_apart(at, lanes, step)
        made = Place(g, np.where(active, at, 0), lanes, step, m.granule, m.races, m.lds_stride)
        if lanes is None:
            known[g.key] = (first.tobytes(), made)
        return made

    def run(g: Group) -> None:
        data, address, mask = _fetch(m, g, place, kind, size, device)
        to = target(g)
        ticket = m.races.write(g, to, g.pc, DIRECT) if m.races is not None else None
        p = Pending(
            frozenset(), _land_direct, data, 0, to.mask, 0, to.where, step, ticket, pc=g.pc, extra=_Landing(m, to),
        )  # fmt: skip
        late = m.late(g)
        if m.trace is not None:
            m.trace.memory(g, i, address, mask, size, direct=True)
        if late is False:
            scatter(m, to, step, data)
            p.land, p.data = _retire_direct, None
        elif m.poison and late is None:
            scatter(m, to, step, np.asarray(POISON))
        _queue(g, m, p, kind)

    return run


class _Landing:
    """What a direct load needs to land: the machine (whose LDS it writes), and the place where it does."""

    def __init__(self, m: Machine, place: Place):
        self.machine, self.place = m, place

    def take(self, index: np.ndarray) -> _Landing:
        """For some of the waves."""
        return _Landing(self.machine, Place.parts([self.place], index))

    def join(self, parts: list[_Landing]) -> _Landing:
        return _Landing(self.machine, Place.parts([p.place for p in parts]))


def _retire_direct(g: Group, p: Pending) -> None:
    races = p.extra.machine.races
    if p.ticket is not None and races is not None:
        races.tickets.retire(p.ticket, g.barriers)


def _land_direct(g: Group, p: Pending) -> None:
    assert p.data is not None
    scatter(p.extra.machine, p.extra.place, p.width, p.data)
    _retire_direct(g, p)


# -- atomics
def _atomic(i: Instruction, b: Binder, m: Machine, kind: str, what: str) -> Callable[[Group], None] | None:
    """One lane after another; sc0 (glc) returns the old value."""
    op = of_memory(what)
    if op is None:
        return None
    size = op.size
    returns = bool(i.mods.get("sc0") or i.mods.get("glc"))
    operands = list(i.operands)
    if kind == "buffer":
        destination, value, rest = operands[0], operands[0], operands[1:]
        place = _buffer(i, b, m, rest)
    else:
        destination = operands[0]
        address, value, *more = operands[1:] if returns else operands
        place = _flat(i, b, [address, *more])
    words = size // 4
    values = [b.raw(value, k) for k in range(words * op.data)]
    where = b.registers.index(destination.index) if returns else 0
    registers = frozenset(range(where, where + words)) if returns else frozenset()
    top = (1 << 8 * size) - 1
    join = lambda parts, w, lane: sum(int(p[w, lane]) << 32 * k for k, p in enumerate(parts))

    def run(g: Group) -> None:
        at, mask = place(g, size)
        _aligned(m, g, at, mask, size)
        m.touch(g, at, mask, size, write=True, device=True, atomic=True, returns=returns)
        x = [np.broadcast_to(v(g), (g.n, LANES)) for v in values]
        out = np.zeros((words, g.n, LANES), U32)
        report = _report(m, g)
        for w, lane in zip(*np.nonzero(mask), strict=True):
            one = np.zeros_like(mask)
            one[w, lane] = True
            old_words = m.memory.read(at, one, size, report)
            old = join(old_words, w, lane)
            given = tuple(join(x[k : k + words], w, lane) for k in range(0, len(x), words))
            new = op.apply(old, given, 8 * size) & top
            data = np.zeros((words, g.n, LANES), U32)
            for k in range(words):
                data[k, w, lane] = new >> 32 * k & 0xFFFFFFFF
                out[k, w, lane] = old >> 32 * k & 0xFFFFFFFF
            m.memory.write(at, one, size, data, report)
        if m.trace is not None:
            m.trace.memory(g, i, at, mask, size)
        p = Pending(registers, land if returns else None, out, where, None if g.full else g.exec, pc=g.pc)
        if m.late(g) is False and returns:
            land(g, p)
            p = Pending(frozenset(), None, pc=g.pc)
        _queue(g, m, p, kind)

    return run
