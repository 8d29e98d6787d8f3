"""Who may touch LDS when: a happens-before checker for waves, barriers and waits.

`s_barrier` orders waves, not memory. Let bc(v) be the barriers that wave v has executed. An access X of wave w
*retires* at
the s_waitcnt that covers it (vmcnt for direct loads, lgkmcnt for ds_ instructions) with stamp c(X) = bc(w); until
then its
stamp is infinite. For a conflicting access Y issued by another wave v: X happens before Y if and only if c(X) < bc(v).
Within one wave X must have retired, except that LDS instructions are in order among themselves. This holds for any
interleaving of the waves, so a run in any order finds every race of the executed path, staggered groups of waves
included.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NEVER = np.int32(2**30)
NOTHING = np.zeros(1, bool)
WINDOW = 4096  # tickets: more than waves of a batch have in flight
DS, DIRECT, ATOMIC = 0, 1, 2  # through the LDS unit, a direct load from memory, or an atomic of the LDS unit


class Tickets:
    """One number for each (memory operation, wave): who, where, of what kind, and when it retired."""

    def __init__(self, waves: int) -> None:
        self.count = 1
        self._settled: dict[int, int] = {}  # barriers: see settled
        size = 1 << 14
        self.stamp = np.full(size, -1, np.int32)  # ticket 0: before everything
        self.wave = np.full(size, -1, np.int32)
        self.kind = np.zeros(size, np.int8)
        self.pc = np.full(size, -1, np.int32)

    def issue(self, waves: np.ndarray, kind: int, pc: int) -> np.ndarray:
        n, k = len(waves), self.count
        if k + n > len(self.stamp):
            for name in ("stamp", "wave", "kind", "pc"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.count += n
        self.stamp[k : k + n] = NEVER
        self.wave[k : k + n] = waves
        self.kind[k : k + n] = kind
        self.pc[k : k + n] = pc
        return np.arange(k, k + n, dtype=np.int32)

    def settled(self, barriers: int) -> int:
        """All tickets before this one retired before so many barriers. Grows with time and with `barriers`; what it
        says may be too small (it looks no further than WINDOW at once), never too large."""
        known = self._settled
        start = max((at for b, at in known.items() if b <= barriers), default=0)
        late = self.stamp[start : min(self.count, start + WINDOW)] >= barriers
        found = int(late.argmax()) if len(late) else 0
        at = start + (found if len(late) and late[found] else len(late))
        if len(known) > 4:
            del known[min(known)]
        known[barriers] = at
        return at

    def retire(self, tickets: np.ndarray, barriers: np.ndarray) -> None:
        self.stamp[tickets] = barriers if tickets.ndim == 1 else barriers[:, None]


class Place:
    """Where an access of a group lies in LDS, worked out once for addresses that come again (a loop's, mostly).

    at       [n, 64] byte addresses in the workgroup's LDS; `mask` the lanes that take part, None for all
    where    [n, 64] the same in the batch's LDS; `row` that as numbers of aligned 8- or 16-byte elements, or None
    block    [n] numbers of the aligned blocks of 64 * size bytes that the waves' lanes fill in order, or None
    granule  [n, m] granules of `step` bytes touched; `lanes` [n, m] which count, None for all
    """

    __slots__ = (
        "alignment", "all_readers", "apart", "at", "block", "granule", "lanes", "mask", "raw", "readers", "row", "size",
        "step", "where", "writers",
    )  # fmt: skip

    def __init__(
        self, g, at: np.ndarray, mask: np.ndarray | None, size: int, granule: int, races: Races | None, stride
    ):
        self.at, self.mask, self.raw, self.size, self.step = at, mask, b"", size, granule
        self.where = at + (g.workgroup * stride)[:, None]
        bits = int(np.bitwise_or.reduce(self.where, axis=None)) | 64
        self.alignment = bits & -bits  # a power of two that divides every address
        self.row = self.where // size if size in (8, 16) and self.alignment >= size else None
        self._find_block()
        if races is None:
            return
        if size <= granule:
            found = at // granule
        else:
            found = ((at[:, :, None] + np.arange(0, size, granule)) // granule).reshape(len(at), -1)
        self.granule = found
        self.lanes = None if mask is None else np.repeat(mask, found.shape[1] // at.shape[1], axis=1)
        self.writers = found + (g.workgroup * races.granules)[:, None]
        self.readers = found + (g.waves * races.granules)[:, None]
        each = self.writers if self.lanes is None else np.where(self.lanes, self.writers, -1)
        rows, flat = np.sort(each, axis=1), np.sort(each, axis=None)
        own = len(rows) + int((rows[:, 1:] != rows[:, :-1]).sum())
        self.apart = own == 1 + int((flat[1:] != flat[:-1]).sum())  # no granule belongs to two waves
        waves = races.waves_of[g.workgroup]
        self.all_readers = found[:, None, :] + (waves * races.granules)[:, :, None]

    def _find_block(self) -> None:
        """Lane after lane in one block, as direct loads write: worth a block copy instead of 64 scattered ones."""
        first, size = self.where[:, 0], self.size
        fits = self.mask is None and size >= 4 and not (first % (64 * size)).any()
        linear = fits and bool((self.where == first[:, None] + np.arange(64) * size).all())
        self.block = first // (64 * size) if linear else None

    @staticmethod
    def parts(places: list[Place], index: np.ndarray | None = None) -> Place:
        """Where data go, of several groups' waves together, or of some waves; what only the checker needs is left
        out."""
        made = Place.__new__(Place)
        cut = lambda x: x if index is None else x[index]
        made.size, made.alignment = places[0].size, min(p.alignment for p in places)
        made.where = cut(np.concatenate([p.where for p in places]))
        made.row = made.where // made.size if all(p.row is not None for p in places) else None
        made.mask = None
        if any(p.mask is not None for p in places):
            masks = [np.ones(p.where.shape, bool) if p.mask is None else p.mask for p in places]
            made.mask = cut(np.concatenate(masks))
        made._find_block()
        return made


class Races:
    """The last writer and each wave's last read of every granule of LDS.

    waves_of   [workgroups, waves each] wave numbers of the batch
    granules   LDS granules a workgroup; a granule is as small as the smallest store of the kernel, so that neighbours
               written by different waves are not mistaken for one
    report     hears of races, see Machine.report_race; `unwritten` (group, place, granules [n, m]) of reads of what
               nothing has written
    """

    def __init__(self, waves_of: np.ndarray, granules: int, report: Callable, unwritten: Callable) -> None:
        self.waves_of, self.granules, self.report, self.unwritten = waves_of, granules, report, unwritten
        groups, each = waves_of.shape
        self.tickets = Tickets(waves_of.size)
        self.writer = np.zeros(groups * granules, np.int32)
        self.reader = np.zeros(groups * each * granules, np.int32)
        self.first_wave = waves_of[:, 0]
        self.each = each

    def refine(self, factor: int) -> None:
        """Granules so many times smaller, each with what was known of the whole."""
        self.granules *= factor
        self.writer, self.reader = np.repeat(self.writer, factor), np.repeat(self.reader, factor)

    def read(self, g, p: Place, pc: int) -> np.ndarray:
        """Waves of group g read the granules of a place."""
        ticket = self.writer.take(p.writers)
        if int(ticket.max()) >= self.tickets.settled(g.first_barrier):
            late = self.tickets.stamp.take(ticket) >= g.barriers32[:, None]
            if p.lanes is not None:
                late &= p.lanes
            if late.any():
                self._judge_read(g, p.granule, ticket, late, pc)
        if int(ticket.min()) == 0:  # ticket 0: nothing has written there
            never = ticket == 0
            if p.lanes is not None:
                never &= p.lanes
            if never.any():
                self.unwritten(g, p, never)
        mine = self.tickets.issue(g.waves, DS, pc)
        if p.lanes is None:
            self.reader[p.readers] = mine[:, None]
        else:
            self.reader[p.readers[p.lanes]] = np.broadcast_to(mine[:, None], p.readers.shape)[p.lanes]
        return mine

    def _judge_read(self, g, granule, ticket, late, pc) -> None:
        t = self.tickets
        other = t.wave[ticket] != g.waves[:, None]
        race = late & other
        if race.any():
            self._tell(g, race, granule, ticket, pc, "lds-race", "reads LDS that", "wrote", "read after write")
        own = late & ~other & (t.stamp[ticket] == NEVER) & (t.kind[ticket] == DIRECT)
        if own.any():
            self._tell(g, own, granule, ticket, pc, "lds-in-flight", "reads LDS that", "loads into", "own direct load")

    def write(self, g, p: Place, pc: int, kind: int) -> np.ndarray:
        """Waves of group g write the granules of a place. Atomics do not race with each other."""
        t, lanes, granule = self.tickets, p.lanes, p.granule
        settled = t.settled(g.first_barrier)
        ticket = self.writer.take(p.writers)
        late = NOTHING
        if int(ticket.max()) >= settled:
            stamps = t.stamp.take(ticket)
            late = stamps >= g.barriers32[:, None]
        if lanes is not None and late is not NOTHING:
            late &= lanes
        if late.any():
            other = t.wave[ticket] != g.waves[:, None]
            race = late & other
            if kind == ATOMIC:
                race &= t.kind[ticket] != ATOMIC
            if race.any():
                self._tell(
                    g, race, granule, ticket, pc, "lds-race", "overwrites LDS that", "wrote", "write after write"
                )
            own = late & ~other & (stamps == NEVER) & ((t.kind[ticket] == DIRECT) != (kind == DIRECT))
            if own.any():
                self._tell(g, own, granule, ticket, pc, "lds-in-flight", "writes LDS that", "writes", "own, other path")
        if kind == ATOMIC and int(ticket.min()) == 0:
            never = ticket == 0 if lanes is None else (ticket == 0) & lanes
            if never.any():
                self.unwritten(g, p, never)
        reads = self.reader.take(p.all_readers)  # every wave of the workgroup: [n, waves, m]
        late = NOTHING
        if int(reads.max()) >= settled:
            stamps = t.stamp.take(reads)
            late = stamps >= g.barriers32[:, None, None]
        if lanes is not None and late is not NOTHING:
            late &= lanes[:, None, :]
        if late.any():
            own = (self.waves_of[g.workgroup] == g.waves[:, None])[:, :, None]
            late &= np.where(own, (stamps == NEVER) & (kind == DIRECT), True)
            for k in np.flatnonzero(late.any((0, 2))):
                self._tell(
                    g, late[:, k], granule, reads[:, k], pc, "lds-race", "overwrites LDS that", "reads",
                    "write after read",
                )  # fmt: skip
        mine = t.issue(g.waves, kind, pc)
        if lanes is None:
            self.writer[p.writers] = mine[:, None]
        else:
            self.writer[p.writers[lanes]] = np.broadcast_to(mine[:, None], p.writers.shape)[lanes]
        if not p.apart and kind != ATOMIC:  # two waves of the group write one granule in the same step
            now = self.writer.take(p.writers)
            clash = now != mine[:, None]
            if lanes is not None:
                clash &= lanes
            if clash.any():
                self._tell(g, clash, granule, now, pc, "lds-race", "overwrites LDS that", "writes", "write after write")
        return mine

    def _tell(self, g, bad, granule, ticket, pc, kind, verb, did, rule) -> None:
        t = self.tickets
        row, column = (int(x[0]) for x in np.nonzero(bad))
        first = int(ticket[row, column])
        stamp = int(t.stamp[first])
        when = (
            "its wait has not come"
            if stamp == NEVER
            else f"it was waited for in barrier interval {stamp}, this is in interval {int(g.barriers[row])}"
        )
        self.report(
            kind, g, row, pc, int(t.pc[first]), int(t.wave[first]), granule[row][bad[row]],
            (verb, did, rule, when),
        )  # fmt: skip
