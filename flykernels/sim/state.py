"""The registers of waves that run in lockstep, and their memory operations in flight.

A `Group` is a set of waves at the same instruction with the same operations in flight. Registers are arrays over the
group's waves, so one numpy call serves them all; groups split at a branch that the waves decide differently and merge
again when they meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .asm import EXEC

LANES = 64
SGPRS = 128  # numbers of scalar operands that name registers (CDNA3 ISA, operand table)
MASK32 = 0xFFFFFFFF
LANE = np.arange(LANES)
POISON = np.uint32(0x7FC1DEAD)  # a NaN in f32, and in both halves' upper one in bf16: shows in any result it reaches
DENORMALS_IN, DENORMALS_OUT = 1 << 4, 1 << 5  # of MODE: f32 denormals of sources and of results are kept
OVERFLOW = 1 << 23  # of MODE: FP16_OVFL
VM_MAX, LGKM_MAX = 63, 15  # the counters' widths on gfx9: an operation beyond waits for the oldest at issue


@dataclass(slots=True)
class Pending:
    """One memory operation in flight, for all waves of a group.

    registers     what it will write, as in `Bound.registers`; until it lands they may not be touched
    land          writes the result: (group, pending) -> None; None for stores
    data          [registers, waves, 64] for vector registers, [registers, waves] for scalar ones
    where         index of the first register written
    mask          [waves, 64] lanes that take part, None for all
    keep          bits of the old register that stay (d16 loads)
    slot, width   LDS bytes of a direct load: [waves, 64] first bytes and bytes a lane
    ticket        [waves] tickets of the race checker, or None
    holds         counters that hold it: a flat load is in two queues, and lands when both have let go
    pc            its instruction
    extra         what `land` needs besides
    """

    registers: frozenset[int]
    land: Callable | None
    data: np.ndarray | None = None
    where: int = 0
    mask: np.ndarray | None = None
    keep: int = 0
    slot: np.ndarray | None = None
    width: int = 0
    ticket: np.ndarray | None = None
    holds: int = 1
    pc: int = -1
    extra: Any = None

    def take(self, index: np.ndarray) -> Pending:
        """The same operation for some of the waves."""
        cut = lambda x, axis: None if x is None else np.ascontiguousarray(np.take(x, index, axis))
        extra = self.extra.take(index) if hasattr(self.extra, "take") else self.extra
        return Pending(
            self.registers, self.land, cut(self.data, 1), self.where, cut(self.mask, 0), self.keep, cut(self.slot, 0),
            self.width, cut(self.ticket, 0), self.holds, self.pc, extra,
        )  # fmt: skip

    @staticmethod
    def join(parts: list[Pending]) -> Pending:
        """The operation for the waves of several groups, which all have it in flight."""
        p = parts[0]

        def cat(name, axis):
            xs = [getattr(q, name) for q in parts]
            if all(x is None for x in xs):
                return None
            if name == "mask":
                xs = [np.ones((q.waves, LANES), bool) if x is None else x for q, x in zip(parts, xs, strict=True)]
            return np.concatenate(xs, axis)

        extra = p.extra.join([q.extra for q in parts]) if hasattr(p.extra, "join") else p.extra
        return Pending(
            p.registers, p.land, cat("data", 1), p.where, cat("mask", 0), p.keep, cat("slot", 0), p.width,
            cat("ticket", 0), p.holds, p.pc, extra,
        )  # fmt: skip

    @property
    def waves(self) -> int:
        for x, axis in ((self.data, 1), (self.mask, 0), (self.slot, 0), (self.ticket, 0)):
            if x is not None:
                return x.shape[axis]
        return 0


class Group:
    """Waves in lockstep.

    waves      [n] numbers in the batch; `workgroup` [n] their workgroup's number in the batch; `local` [n] in the
               workgroup
    V          [registers, n, 64] uint32; VF and VI are the same as float32 and int32
    S          [128, n] int64 holding 32-bit values; scc [n] int64
    exec       [n, 64] bool; full: all of it set
    barriers   [n] barriers executed
    vm, ds, sm queues of Pending: vector memory, LDS, scalar memory
    busy       registers that are in flight (see Bound.registers)
    """

    def __init__(self, waves: np.ndarray, workgroup: np.ndarray, local: np.ndarray, vector_registers: int):
        n = len(waves)
        self.waves, self.workgroup, self.local, self.n = waves, workgroup, local, n
        self.set_registers(np.zeros((vector_registers, n, LANES), np.uint32))
        self.S = np.zeros((SGPRS, n), np.int64)
        self.scc = np.zeros(n, np.int64)
        self.exec = np.ones((n, LANES), bool)
        self.S[EXEC] = self.S[EXEC + 1] = MASK32
        self.full = True
        self.pc = 0
        self.barriers = np.zeros(n, np.int64)
        self.barriers32, self.first_barrier = self.barriers.astype(np.int32), 0
        self.key = waves.tobytes()
        self.vm: list[Pending] = []
        self.ds: list[Pending] = []
        self.sm: list[Pending] = []
        self.busy: set[int] = set()
        self.unpacked: dict = {}  # matrix operands as floats, by register: see matrix.py
        self.scratch: np.ndarray | None = None  # [n, 64, bytes] private memory
        self.mode = 0  # the MODE register

    def set_registers(self, v: np.ndarray) -> None:
        self.V = v
        self.VF, self.VI = v.view(np.float32), v.view(np.int32)

    def pass_barrier(self) -> None:
        self.barriers = self.barriers + 1
        self.barriers32 = self.barriers.astype(np.int32)
        self.first_barrier = int(self.barriers.min())
        self.pc += 1

    # -- EXEC
    def refresh_exec(self) -> None:
        """After a write to S[126:128]: the mask as booleans."""
        self.full = bool((self.S[EXEC : EXEC + 2] == MASK32).all())
        self.exec = unpack_mask(self.S[EXEC], self.S[EXEC + 1])

    # -- memory in flight
    def issue(self, queue: list[Pending], p: Pending, limit: int) -> None:
        """Puts an operation in flight. The counter's width limits how many there can be."""
        if len(queue) >= limit:
            self.retire(queue, len(queue) - limit + 1)
        queue.append(p)
        if p.registers:
            self.busy |= p.registers

    def retire(self, queue: list[Pending], count: int) -> None:
        """Lands the oldest `count` operations of a queue."""
        for p in queue[:count]:
            p.holds -= 1
            if p.holds:
                continue
            self.busy -= p.registers
            if p.land is not None:
                p.land(self, p)
        del queue[:count]

    # -- splitting and merging
    def take(self, index: np.ndarray, pc: int) -> Group:
        """A group of some of the waves, continuing at pc."""
        g = Group.__new__(Group)
        g.waves, g.workgroup, g.local, g.n = self.waves[index], self.workgroup[index], self.local[index], len(index)
        g.set_registers(np.ascontiguousarray(self.V[:, index]))
        g.S, g.scc = np.ascontiguousarray(self.S[:, index]), self.scc[index]
        g.barriers, g.pc = self.barriers[index], pc
        g.barriers32, g.key, g.first_barrier = self.barriers32[index], g.waves.tobytes(), int(g.barriers.min())
        g.scratch = None if self.scratch is None else self.scratch[index]
        g.refresh_exec()
        copies: dict[int, Pending] = {}
        for name in ("vm", "ds", "sm"):
            queue = getattr(self, name)
            for p in queue:
                if id(p) not in copies:
                    copies[id(p)] = p.take(index)
            setattr(g, name, [copies[id(p)] for p in queue])
        g.busy, g.unpacked, g.mode = set(self.busy), {}, self.mode
        return g

    def signature(self) -> tuple:
        """Equal for groups whose operations in flight are the same instructions: such groups can merge."""
        return (self.pc, self.mode, *(tuple((p.pc, p.holds) for p in getattr(self, q)) for q in ("vm", "ds", "sm")))

    @staticmethod
    def join(groups: list[Group]) -> Group:
        """One group of all the waves, in wave order."""
        order = np.argsort(np.concatenate([g.waves for g in groups]), kind="stable")
        first = groups[0]
        g = Group.__new__(Group)
        cat = lambda name, axis=0: np.take(np.concatenate([getattr(x, name) for x in groups], axis), order, axis)
        g.waves, g.workgroup, g.local = cat("waves"), cat("workgroup"), cat("local")
        g.n, g.pc = len(order), first.pc
        g.set_registers(np.ascontiguousarray(cat("V", 1)))
        g.S, g.scc, g.barriers = np.ascontiguousarray(cat("S", 1)), cat("scc"), cat("barriers")
        g.barriers32, g.key, g.first_barrier = g.barriers.astype(np.int32), g.waves.tobytes(), int(g.barriers.min())
        g.scratch = None if first.scratch is None else cat("scratch")
        g.refresh_exec()
        joined: dict[int, Pending] = {}
        for name in ("vm", "ds", "sm"):
            queues = [getattr(x, name) for x in groups]
            for parts in zip(*queues, strict=True):
                if id(parts[0]) not in joined:
                    joined[id(parts[0])] = Pending.join(list(parts)).take(order)
            setattr(g, name, [joined[id(p)] for p in queues[0]])
        g.busy, g.unpacked, g.mode = set(first.busy), {}, first.mode
        return g


def spread(x: np.ndarray, n: int) -> np.ndarray:
    """A vector operand's values as [n, 64]; numpy's broadcast_to costs more than most instructions' arithmetic."""
    return x if x.shape == (n, LANES) else np.broadcast_to(x, (n, LANES))


def unpack_mask(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """[n], [n] 32-bit halves -> [n, 64] bool."""
    words = np.stack([low, high], -1).astype("<u4")
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").view(bool)


def pack_mask(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, 64] bool -> the two 32-bit halves as int64 [n]."""
    words = np.packbits(mask, axis=-1, bitorder="little").view("<u4").astype(np.int64)
    return words[:, 0], words[:, 1]
