"""The simulated address space: one slot of 64 GiB for each allocation, so that an address alone says whose it is and no
two allocations are ever neighbours. Everything outside an allocation's allowed bytes is a guard zone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BadArguments

SLOT_BITS = 36
FIRST_SLOT = 0x7000_0000_0000 >> SLOT_BITS
BASE_IN_SLOT = 1 << 33  # leaves room for accesses before the allocation
PAD = 64  # bytes kept behind an allocation so that a masked gather may read past its end


@dataclass
class Allocation:
    """Bytes that a kernel may touch.

    name      for messages
    data      uint8, padded; `size` of them count
    low,high  bytes [low, high) may be touched; `allowed`, where present, marks them one by one
    writable  whether stores may go there
    """

    name: str
    data: np.ndarray
    size: int
    low: int
    high: int
    slot: int
    allowed: np.ndarray | None = None
    writable: np.ndarray | bool = True
    written: np.ndarray | None = None  # bytes written so far, where reads before a write are to be reported

    @property
    def base(self) -> int:
        return (self.slot << SLOT_BITS) + BASE_IN_SLOT

    def words(self, bytes_each: int) -> np.ndarray:
        return self.data.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[bytes_each])


class Memory:
    """Allocations by slot, and vectorised reads and writes. `report(kind, message, bad lanes)` hears of what is
    wrong."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []

    def add(self, name: str, data: np.ndarray, low: int = 0, high: int | None = None, **more: Any) -> Allocation:
        size = data.nbytes
        padded = np.zeros(-(-(size + PAD) // PAD) * PAD, np.uint8)
        padded[:size] = data.view(np.uint8).reshape(-1)
        slot = FIRST_SLOT + len(self.allocations)
        made = Allocation(name, padded, size, low, size if high is None else high, slot, **more)
        self.allocations.append(made)
        return made

    def find(self, address: np.ndarray) -> Allocation | None:
        """The allocation of all these addresses, if it is one."""
        slots = address >> SLOT_BITS
        first = int(slots.flat[0])
        if not (slots == first).all():
            return None
        k = first - FIRST_SLOT
        return self.allocations[k] if 0 <= k < len(self.allocations) else None

    def at(self, low: int, high: int) -> Allocation | None:
        """The allocation of a range of addresses, if it is one."""
        k = (low >> SLOT_BITS) - FIRST_SLOT
        return self.allocations[k] if high >> SLOT_BITS == low >> SLOT_BITS and 0 <= k < len(self.allocations) else None

    def _parts(self, address: np.ndarray, mask: np.ndarray, size: int, write: bool, report: Callable):
        """Yields (allocation, offsets, lanes) with good lanes only; bad ones are reported."""
        active = address[mask]
        if active.size == 0:
            return
        one = self.find(active)
        for a in [one] if one is not None else self._several(active, mask, address, report):
            lanes = mask if one is not None else mask & (address >> SLOT_BITS == a.slot)
            offset = address - a.base
            inside = offset[lanes]
            if inside.min() < a.low or inside.max() + size > a.high:
                wrong = lanes & ((offset < a.low) | (offset + size > a.high))
                at = offset[wrong]
                report(
                    "out-of-bounds",
                    f"{'writes' if write else 'reads'} {size} bytes at byte {int(at[0])} of {a.name}, which holds "
                    f"bytes {a.low} to {a.high - 1} "
                    f"({at.size} lanes, bytes {int(at.min())} to {int(at.max()) + size - 1})",
                    wrong,
                )
                lanes = lanes & ~wrong
                if not lanes.any():
                    continue
                inside = offset[lanes]
            if a.allowed is not None:
                lanes, inside = self._masked(a, a.allowed, offset, lanes, size, "out-of-bounds", write, report)
            if write and a.writable is not True:
                if a.writable is False:
                    report("write-outside-output", f"writes {a.name}, which is not an output", lanes)
                    continue
                lanes, inside = self._masked(a, a.writable, offset, lanes, size, "write-outside-output", write, report)
            if a.written is not None and inside.size:
                touched = inside[:, None] + np.arange(size)
                if write:
                    a.written[touched] = True
                elif not a.written[touched].all():
                    bad = inside[~a.written[touched].all(1)]
                    report(
                        "uninitialised-memory",
                        f"reads byte {int(bad[0])} of output {a.name} before it was written",
                        lanes,
                    )
            if inside.size:
                yield a, offset, lanes

    def _masked(self, a, marks, offset, lanes, size, kind, write, report):
        index = np.where(lanes, offset, a.low)
        good = np.ones(lanes.shape, bool)
        for k in range(size):
            good &= marks[index + k]
        wrong = lanes & ~good
        if wrong.any():
            verb = "writes" if write else "reads"
            report(kind, f"{verb} byte {int(offset[wrong][0])} of {a.name}, between its elements", wrong)
            lanes = lanes & good
        return lanes, offset[lanes]

    def _several(self, active, mask, address, report):
        slots = np.unique(active >> SLOT_BITS)
        for slot in slots:
            k = int(slot) - FIRST_SLOT
            if 0 <= k < len(self.allocations):
                yield self.allocations[k]
                continue
            wrong = mask & (address >> SLOT_BITS == slot)
            at = int(address[wrong][0])
            report(
                "out-of-bounds", f"touches address {at:#x}, which is in no argument ({int(wrong.sum())} lanes)", wrong
            )

    def _quick(self, address: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray | None:
        """Aligned reads of all lanes from the inside of one allocation: most of what kernels do."""
        if size < 4 or not mask.all():
            return None
        low, high = int(address.min()), int(address.max())
        k = (low >> SLOT_BITS) - FIRST_SLOT
        if not 0 <= k < len(self.allocations):
            return None
        a = self.allocations[k]
        base = a.base
        if low - base < a.low or high - base + size > a.high or a.allowed is not None or a.written is not None:
            return None
        offset = address - base
        bits = int(np.bitwise_or.reduce(offset, axis=None))
        if size in (8, 16) and not bits & (size - 1):
            rows = a.words(4).reshape(-1, size // 4).take(offset >> (3 if size == 8 else 4), axis=0)
            return np.moveaxis(rows, -1, 0) if rows.ndim != 3 else rows.transpose(2, 0, 1)
        if bits & 3:
            return None
        return a.words(4).take((offset >> 2)[None] + np.arange(size // 4).reshape(-1, *(1,) * address.ndim))

    def read(self, address: np.ndarray, mask: np.ndarray, size: int, report: Callable) -> np.ndarray:
        """[..., n, 64] addresses -> uint32 [ceil(size / 4), n, 64]; bytes of bad or masked lanes are poison or 0."""
        words = max(1, size // 4)
        quick = self._quick(address, mask, size)
        if quick is not None:
            return quick
        out = np.zeros((words, *address.shape), np.uint32)
        for a, offset, lanes in self._parts(address, mask, size, False, report):
            safe = np.where(lanes, offset, 0)
            if size >= 4 and not (safe & 3).any():
                index = safe >> 2
                source = a.words(4)
                for k in range(words):
                    np.copyto(out[k], source[index + k], where=lanes)
            elif size in (1, 2) and not (size == 2 and (safe & 1).any()):
                np.copyto(out[0], a.words(size)[safe >> (size - 1)], where=lanes)
            else:
                raw = np.zeros((*address.shape, words * 4), np.uint8)
                for k in range(size):
                    raw[..., k] = a.data[safe + k]
                got = raw.view(np.uint32)
                for k in range(words):
                    np.copyto(out[k], got[..., k], where=lanes)
        return out

    def write(self, address: np.ndarray, mask: np.ndarray, size: int, data: np.ndarray, report: Callable) -> None:
        """Stores `size` bytes a lane of data, uint32 [words, n, 64], lanes in order (the last of two wins)."""
        for a, offset, lanes in self._parts(address, mask, size, True, report):
            at = offset[lanes]
            if size >= 4 and not (at & 3).any():
                target = a.words(4)
                for k in range(size // 4):
                    target[(at >> 2) + k] = data[k][lanes]
            else:
                for k in range(size):
                    a.data[at + k] = (data[k // 4][lanes] >> np.uint32(8 * (k % 4))).astype(np.uint8)


# -- arguments
def root_of(x: np.ndarray) -> np.ndarray:
    """The array that owns a view's memory."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def extent(x: np.ndarray) -> tuple[int, int]:
    """First and one past the last byte that a view covers, from its data pointer."""
    if x.size == 0:
        return 0, 0
    low = sum(min(0, (n - 1) * s) for n, s in zip(x.shape, x.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(x.shape, x.strides, strict=True))
    return low, high + x.itemsize


def covered(x: np.ndarray, size: int, start: int) -> np.ndarray | None:
    """Which of `size` bytes a strided view covers, its data pointer being at byte `start`; None if without gaps."""
    low, high = extent(x)
    if high - low == x.nbytes:
        return None
    index = np.zeros((), np.int64)
    for n, s in zip(x.shape, x.strides, strict=True):
        index = index[..., None] + np.arange(n) * s
    marks = np.zeros(size + PAD, bool)
    for k in range(x.itemsize):
        marks[start + index.reshape(-1) + k] = True
    return marks


def as_array(x: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """(view, owner of its memory) of an argument that is a buffer: numpy, or torch on the CPU (any dtype, no copy)."""
    if isinstance(x, np.ndarray):
        return x, root_of(x)
    if type(x).__module__.split(".")[0] == "torch" and hasattr(x, "untyped_storage"):
        if x.device.type != "cpu":
            raise BadArguments(f"a tensor on {x.device}: the simulator takes CPU tensors; call .cpu() first")
        import torch

        raw = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy()
        item = x.element_size()
        start = x.storage_offset() * item
        if x.numel() == 0:
            return raw[:0], raw
        shape, strides = (*x.shape, item), (*(s * item for s in x.stride()), 1)
        return np.lib.stride_tricks.as_strided(raw[start:], shape, strides), raw
    return None


def place(
    memory: Memory, arrays: Sequence[tuple[np.ndarray, np.ndarray]], outputs: set[int] | None
) -> tuple[list[int], Callable[[], None]]:
    """Puts arrays into memory: (address of each, a function that copies results back). Views of one array share its
    allocation, at their offsets; the bytes between a strided view's elements are not to be touched."""
    owners: dict[tuple[int, int], list[int]] = {}
    roots = []
    views = [view for view, _ in arrays]
    for k, (_, r) in enumerate(arrays):
        start = r.__array_interface__["data"][0] + extent(r)[0]
        size = extent(r)[1] - extent(r)[0]
        roots.append((start, size, r))
        owners.setdefault((start, size), []).append(k)
    address = [0] * len(arrays)
    copies: list[Callable[[], None]] = []
    for (start, size), members in owners.items():
        storage = _bytes_of(roots[members[0]][2])
        allowed = np.zeros(size + PAD, bool)
        writable = np.zeros(size + PAD, bool)
        for k in members:
            at = views[k].__array_interface__["data"][0] - start if views[k].size else 0
            low, high = extent(views[k])
            marks = covered(views[k], size, at)
            part = slice(at + low, at + high)
            allowed[part] |= True if marks is None else marks[part]
            if outputs is None or k in outputs:
                writable[part] |= True if marks is None else marks[part]
        some, count = bool(allowed.any()), int(np.count_nonzero(allowed))
        low, high = (int(allowed.argmax()), size + PAD - int(allowed[::-1].argmax())) if some else (0, 0)
        name = " = ".join(f"argument {k}" for k in members)
        all_writable = bool(writable[low:high].all()) and storage.flags.writeable
        made = memory.add(
            name, storage, low, high,
            allowed=None if count == high - low else allowed,
            writable=True if all_writable else (writable if storage.flags.writeable and writable.any() else False),
        )  # fmt: skip
        if outputs is not None and writable.any():
            made.written = np.where(writable, False, True)
        for k in members:
            at = views[k].__array_interface__["data"][0] - start if views[k].size else 0
            address[k] = made.base + at

        def copy(storage=storage, made=made) -> None:
            if storage.flags.writeable:
                storage[:] = made.data[: made.size]

        copies.append(copy)

    def copy_back() -> None:
        for c in copies:
            c()

    return address, copy_back


class _Range:
    """A range of an array's memory, for numpy's array interface."""

    def __init__(self, owner: np.ndarray, low: int, high: int):
        data, read_only = owner.__array_interface__["data"]
        self.owner = owner  # keeps the memory alive
        self.__array_interface__ = {
            "shape": (high - low,), "typestr": "|u1", "data": (data + low, read_only), "version": 3,
        }  # fmt: skip


def _bytes_of(owner: np.ndarray) -> np.ndarray:
    """The owner's memory as bytes, whatever its strides."""
    return np.asarray(_Range(owner, *extent(owner)))
