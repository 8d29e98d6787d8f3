"""Who may touch memory when: a happens-before checker for memory that waves and workgroups share.

Memory is not coherent between the dies: each has an L2 cache of its own, and each compute unit an L1. What the machine
guarantees is what LLVM's memory model of gfx940 and later says (AMDGPU usage guide, "Memory Model GFX942"):

- A wave's vector memory operations retire in order; one has reached its die's L2 when the `s_waitcnt vmcnt` that covers
  it is over. Within a workgroup it is then ordered before all that the other waves do after the next `s_barrier`.
- Between workgroups, order needs a meeting point: an atomic of one wave (or a store with sc1), issued once its
  operations have retired, and a later atomic of another at the same address that returns what was there (sc0), or a
  load with sc1, once it has retired.
- Order alone is not enough. The writer's data must have left its L2: a `buffer_wbl2 sc1` after the store and retired
  before the meeting point, or a store with sc1. The reader's caches must have been emptied: a `buffer_inv sc1` between
  the meeting point and the load, or a load with sc1. Atomics act beyond the L1 and are coherent on the device.

An access Y conflicts with an earlier X of another wave to the same bytes if one of them writes and they are not both
atomic (or sc1). It is a race unless X happens before Y in this sense. The check does not depend on the order in which
the simulator runs waves and workgroups, except through what the meeting points themselves decide.

Clocks count a wave's vector memory operations. Remembered for each element: the last write, the last read, and a read
of another workgroup than the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from .memory import PAD, SLOT_BITS, Allocation, Memory
from .state import Group

DEVICE, THROUGH = 1, 2  # of an operation: at device scope (cannot race with its like); written through to memory
ORDER, WRITTEN = 0, 1  # columns of a clock: operations that happened before, stores that have left their L2
LOG_MOST = 1 << 22  # addresses of an allocation's reads that are put aside
Clock = dict[int, np.ndarray]  # workgroup -> [waves, 2] counts of operations


def merged(*clocks: Clock | None) -> Clock:
    """The later of each count. The arrays of the arguments are shared, not changed."""
    out: Clock = {}
    for clock in clocks:
        for workgroup, counts in (clock or {}).items():
            out[workgroup] = np.maximum(out[workgroup], counts) if workgroup in out else counts
    return out


class Operations:
    """One number for each (vector memory operation, wave): whose, its how-manieth, what and where. 0: none."""

    def __init__(self) -> None:
        self.count = 1
        size = 1 << 14
        self.wave = np.full(size, -1, np.int32)
        self.turn = np.zeros(size, np.int32)
        self.flags = np.zeros(size, np.int8)
        self.pc = np.zeros(size, np.int32)

    def add(self, waves: np.ndarray, turns: np.ndarray, flags: int, pc: int) -> np.ndarray:
        n, k = len(waves), self.count
        while k + n > len(self.wave):
            for name in ("wave", "turn", "flags", "pc"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.count += n
        at = slice(k, k + n)
        self.wave[at], self.turn[at], self.flags[at], self.pc[at] = waves, turns, flags, pc
        return np.arange(k, k + n, dtype=np.int32)


class Shadow:
    """An allocation's last write, last read, and a read of another workgroup than that, by element.

    Most allocations are only read. Their reads are put aside in `log`, and worked out when something is written there
    (or the log grows long).
    """

    def __init__(self, a: Allocation, granule: int) -> None:
        self.log: list[tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray]] | None = []
        self.logged = 0
        self.count = -(-(a.size + PAD) // (16 * granule)) * 16
        self.writer = np.zeros(self.count, np.int32)
        self.reader = np.zeros(self.count, np.int32)
        self.second = np.zeros(self.count, np.int32)


class Sharing:
    """The checker of one launch.

    granule   bytes that are kept apart: the smallest store of the kernel, at most 4
    ids       the workgroups that run, in order; `each` waves in each
    report    (kind, group, row of the wave, message, instruction of the other access)
    """

    def __init__(self, memory: Memory, granule: int, ids: list[tuple[int, int, int]], each: int, report: Callable):
        self.memory, self.granule, self.ids, self.each, self.report = memory, granule, ids, each, report
        self.operations = Operations()
        self.shadows: dict[int, Shadow] = {}
        waves = len(ids) * each
        self.issued = np.zeros(waves, np.int32)  # operations of each wave
        self.known = np.zeros(waves, np.int32)  # of them, those that the other waves of its workgroup build on
        self.flushed: dict[int, np.ndarray] = {}  # by wave: of its workgroup's operations, those that have left the L2
        self.heard: dict[int, Clock] = {}  # by wave: what happened before, by way of meeting points
        self.seen: dict[int, Clock] = {}  # and what of that its caches cannot hide
        self.points: dict[int, Clock] = {}  # by address: what atomics there have brought
        self.asking: dict[int, list[tuple[int, Clock]]] = {}  # by wave: what operations in flight will bring
        self.flushing: dict[int, list[tuple[int, np.ndarray]]] = {}
        self.first = 0  # number of the batch's first workgroup

    # -- waves
    def waves(self, g: Group) -> np.ndarray:
        """Numbers of a group's waves in the launch."""
        return g.waves + self.first * self.each

    def issue(self, g: Group) -> None:
        """A vector memory operation joins the group's queue."""
        self.issued[self.waves(g)] += 1

    def _settle(self, g: Group) -> None:
        """What has retired by now takes effect."""
        if not self.asking and not self.flushing:
            return
        for w in self.waves(g).tolist():
            done = int(self.issued[w]) - len(g.vm)
            if self.asking.get(w):
                came = [clock for turn, clock in self.asking[w] if turn <= done]
                if came:
                    self.heard[w] = merged(self.heard.get(w), *came)
                    self.asking[w] = [x for x in self.asking[w] if x[0] > done]
            if self.flushing.get(w):
                for _, cover in [x for x in self.flushing[w] if x[0] <= done]:
                    self.flushed[w] = np.maximum(self.flushed.get(w, 0), cover)
                self.flushing[w] = [x for x in self.flushing[w] if x[0] > done]

    def barrier(self, groups: Iterable[Group]) -> None:
        """Waves of whole workgroups pass a barrier: each knows what the others have waited for."""
        groups = list(groups)
        for g in groups:
            self._settle(g)
            waves = self.waves(g)
            self.known[waves] = self.issued[waves] - len(g.vm)
        if not (self.flushed or self.heard):
            return
        members: dict[int, list[int]] = {}
        for g in groups:
            for w in self.waves(g).tolist():
                members.setdefault(w // self.each, []).append(w)
        for waves_of in members.values():
            flushed = [self.flushed[w] for w in waves_of if w in self.flushed]
            if flushed:
                together = np.maximum.reduce(flushed)
                for w in waves_of:
                    self.flushed[w] = together
            for clocks in (self.heard, self.seen):
                if any(w in clocks for w in waves_of):
                    all_of = merged(*(clocks.get(w) for w in waves_of))
                    for w in waves_of:
                        clocks[w] = all_of

    # -- caches
    def write_back(self, g: Group) -> None:
        """buffer_wbl2 sc1: once it has retired, what this wave has stored before it, and what the others had before the
        last barrier, has left the L2."""
        self._settle(g)
        for w in self.waves(g).tolist():
            start = w // self.each * self.each
            cover = self.known[start : start + self.each].copy()
            cover[w - start] = self.issued[w]
            self.flushing.setdefault(w, []).append((int(self.issued[w]) + 1, cover))

    def drop(self, g: Group) -> None:
        """buffer_inv sc1: loads from here on see what has been heard of."""
        self._settle(g)
        for w in self.waves(g).tolist():
            if w in self.heard:
                self.seen[w] = self.heard[w]

    def _clock(self, w: int, done: int) -> Clock:
        """What a wave's atomic brings to its address."""
        workgroup = w // self.each
        start = workgroup * self.each
        counts = np.zeros((self.each, 2), np.int32)
        counts[:, ORDER] = self.known[start : start + self.each]
        counts[w - start, ORDER] = done
        if w in self.flushed:
            counts[:, WRITTEN] = self.flushed[w]
        return merged({workgroup: counts}, self.heard.get(w))

    def _meet(self, g: Group, address: np.ndarray, mask: np.ndarray, read: bool, write: bool, update: bool) -> None:
        """Operations at device scope are meeting points. update: an atomic, which goes on from what was there."""
        if not write and not self.points:
            return
        waves = self.waves(g)
        turns = self.issued[waves] + 1
        for row, w in enumerate(waves.tolist()):
            places = np.unique(address[row][mask[row]]).tolist()
            if read:
                found = [self.points[p] for p in places if p in self.points]
                if found:
                    self.asking.setdefault(w, []).append((int(turns[row]), merged(*found)))
            if write:
                # the operation itself is part of what it brings, unless older ones are still in flight
                mine = self._clock(w, int(turns[row]) - (len(g.vm) + 1 if g.vm else 0))
                for p in places:
                    point = self.points.setdefault(p, {}) if update else {}
                    for workgroup, counts in mine.items():
                        old = point.get(workgroup)
                        point[workgroup] = counts if old is None else np.maximum(old, counts)
                    self.points[p] = point

    # -- accesses
    def access(
        self,
        g: Group,
        address: np.ndarray,
        mask: np.ndarray,
        size: int,
        *,
        write: bool,
        device: bool = False,
        atomic: bool = False,
        returns: bool = False,
        track: bool = True,
    ) -> None:
        """A group's instruction reads or writes `size` bytes at address [n, lanes] in the lanes of `mask`.

        device: at device scope; atomic: reads and writes; returns: brings back what was there; track: false for scalar
        loads, whose reads are checked but not remembered (they are not vector memory operations).
        """
        self._settle(g)
        waves = self.waves(g)
        flags = (DEVICE if device else 0) | (THROUGH if device else 0)
        mine = self.operations.add(waves, self.issued[waves] + 1, flags, g.pc) if track else None
        if not write and self._put_aside(waves, address, mask, size, mine):
            if device:
                self._meet(g, address, mask, True, False, False)
            return
        for a, rows, at in self._elements(address, mask, size, write):
            shadow = self._shadow(a)
            self._work_out(shadow, a)
            if write:
                self._write(g, waves, shadow, a, rows, at, mine, device)
            else:
                self._read(g, waves, shadow, a, rows, at, mine, device)
        if device:
            self._meet(g, address, mask, returns or not write, write, atomic)

    def _shadow(self, a: Allocation) -> Shadow:
        found = self.shadows.get(a.slot)
        if found is None:
            found = self.shadows[a.slot] = Shadow(a, self.granule)
        return found

    def _put_aside(self, waves, address: np.ndarray, mask: np.ndarray, size: int, mine) -> bool:
        """Whether a read needs no look now: nothing has been written where it reads."""
        a = self.memory.at(int(address.min()), int(address.max()))
        if a is None:
            return False
        if a.writable is False:
            return True
        shadow = self._shadow(a)
        if shadow.log is None or shadow.logged > LOG_MOST:
            return False
        if mine is not None:
            shadow.log.append((waves, address, mask, size, mine))
            shadow.logged += address.size
        return True

    def _work_out(self, shadow: Shadow, a: Allocation) -> None:
        """The reads that were put aside take their places in the shadow."""
        log, shadow.log = shadow.log, None
        for waves, address, mask, size, mine in log or ():
            for b, rows, at in self._elements(address, mask, size, False):
                if b is a:
                    self._note_read(waves, shadow, rows, at, mine)

    def _elements(self, address: np.ndarray, mask: np.ndarray, size: int, write: bool):
        """Yields (allocation, row of each lane [m], its elements [m, k]); lanes outside are left to memory.py."""
        one = self.memory.find(address)
        if one is None:
            active = address[mask]
            numbers = {int(s) for s in np.unique(active >> SLOT_BITS)} if active.size else set()
            known = {a.slot: a for a in self.memory.allocations}
            allocations = [known[s] for s in numbers if s in known]
        else:
            allocations = [one]
        whole = one is not None and bool(mask.all())
        for a in allocations:
            if a.writable is False and not write:
                continue
            offset = address - a.base
            good = mask & (offset >= a.low) & (offset + size <= a.high) if not whole else mask
            if whole and (int(offset.min()) < a.low or int(offset.max()) + size > a.high):
                good = (offset >= a.low) & (offset + size <= a.high)
            n, lanes = address.shape
            if good.all():
                rows, flat = np.repeat(np.arange(n), lanes), offset.reshape(-1)
            else:
                rows, flat = np.nonzero(good)[0], offset[good]
            if flat.size:
                first = flat // self.granule
                count = max(1, size // self.granule)
                yield a, rows, first[:, None] + np.arange(count) if count > 1 else first[:, None]

    def _late(self, g: Group, waves, rows, earlier: np.ndarray, device: bool) -> np.ndarray | None:
        """Which of the earlier operations [m, k] are of other waves, and not known within the workgroup."""
        if not earlier.any():
            return None
        ops = self.operations
        whose = ops.wave.take(earlier)
        own = waves[rows][:, None]
        late = (earlier != 0) & (whose != own)
        if not late.any():
            return None
        near = whose // self.each == own // self.each
        late &= ~(near & (ops.turn.take(earlier) <= self.known.take(whose)))
        if device:
            late &= (ops.flags.take(earlier) & DEVICE) == 0
        return late if late.any() else None

    def _read(self, g, waves, shadow: Shadow, a, rows, at, mine, device: bool) -> None:
        earlier = shadow.writer.take(at)
        late = self._late(g, waves, rows, earlier, device)
        if late is not None:
            self._judge(g, waves, a, rows, at, earlier, late, "reads", "wrote", fresh=not device, written=True)
        if mine is not None:
            self._note_read(waves, shadow, rows, at, mine)

    def _note_read(self, waves, shadow: Shadow, rows, at, mine) -> None:
        before = shadow.reader.take(at)
        if before.any():
            theirs = self.operations.wave.take(before) // self.each
            foreign = (before != 0) & (theirs != (waves[rows] // self.each)[:, None])
            if foreign.any():
                shadow.second[at[foreign]] = before[foreign]
        shadow.reader[at] = mine[rows][:, None]

    def _write(self, g, waves, shadow: Shadow, a, rows, at, mine, device: bool) -> None:
        earlier = shadow.writer.take(at)
        late = self._late(g, waves, rows, earlier, device)
        if late is not None:
            self._judge(g, waves, a, rows, at, earlier, late, "overwrites", "wrote", fresh=False, written=True)
        for reads in (shadow.reader, shadow.second):
            earlier = reads.take(at)
            late = self._late(g, waves, rows, earlier, device)
            if late is not None:
                self._judge(g, waves, a, rows, at, earlier, late, "overwrites", "reads", fresh=False, written=False)
        tickets = mine[rows][:, None]
        shadow.writer[at] = tickets
        if len(waves) > 1 and not device:  # two waves at this very instruction
            now = shadow.writer.take(at)
            clash = now != tickets
            if clash.any():
                self._judge(g, waves, a, rows, at, now, clash, "overwrites", "writes", fresh=False, written=True)

    def _judge(self, g, waves, a, rows, at, earlier, late, verb, did, fresh: bool, written: bool) -> None:
        """Reports what meeting points do not order. fresh: the caches must have been emptied; written: the other's data
        must have left its L2."""
        ops = self.operations
        pairs = np.stack([np.broadcast_to(rows[:, None], late.shape)[late], earlier[late]], 1)
        for row, other in np.unique(pairs, axis=0).tolist():
            why = self._missing(int(waves[row]), other, fresh, written)
            if why is None:
                continue
            elements = at[(rows[:, None] == row) & late & (earlier == other)]
            low, high = int(elements.min()) * self.granule, (int(elements.max()) + 1) * self.granule - 1
            w = int(ops.wave[other])
            self.report(
                g, row, int(ops.pc[other]), verb, did, f"bytes {low} to {high} of {a.name}",
                (self.ids[w // self.each], w % self.each), why,
            )  # fmt: skip

    def _missing(self, wave: int, other: int, fresh: bool, written: bool) -> str | None:
        """Why an earlier operation of another wave does not happen before this wave's, or None if it does."""
        ops = self.operations
        w, turn = int(ops.wave[other]), int(ops.turn[other])
        workgroup, member = divmod(w, self.each)
        if workgroup == wave // self.each:
            return "the other has not waited (vmcnt) for it before a barrier that both passed"
        through = int(ops.flags[other]) & THROUGH
        heard = self.heard.get(wave, {}).get(workgroup)
        if heard is None or heard[member, ORDER] < turn:
            return "no atomic (or sc1 access) that both made orders them"
        if written and not through and heard[member, WRITTEN] < turn:
            return "the other's die may still hold it: no buffer_wbl2 sc1 between that store and the atomic"
        seen = self.seen.get(wave, {}).get(workgroup)
        if fresh and (seen is None or seen[member, ORDER] < turn or (not through and seen[member, WRITTEN] < turn)):
            return "this die's caches may be stale: no buffer_inv sc1 between the atomic and this load"
        return None
