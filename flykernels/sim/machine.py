"""What the waves of a batch of workgroups share: memory, LDS, the race checker, and where findings go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import Instruction
from .findings import Collector
from .memory import Memory
from .races import Races
from .sharing import Sharing
from .state import Group


class Machine:
    """Shared state while one batch of workgroups runs.

    memory      the address space
    lds         uint8, all workgroups of the batch; `lds_bytes` each may use, `lds_stride` apart
    granule     bytes that the race checker keeps apart
    races       the LDS checker, or None
    sharing     the checker of memory that waves and workgroups share, or None
    poison      whether results in flight are overwritten with poison
    trace       records what the timing model and the counters need, or None
    delayed     (wave, number of its memory operation) that arrives only at its wait; None outside delay mode
    """

    def __init__(self, instructions: list[Instruction], memory: Memory, collector: Collector, register_name: Callable):
        self.instructions, self.memory, self.collector = instructions, memory, collector
        self.register_name = register_name
        self.check, self.poison = True, True
        self.mode = 0x3F0  # the MODE register that waves start with
        self.trace: Any = None
        self.delayed: tuple[int, int] | None = None
        self.delay_mode = False
        self.deferred: tuple[int, Callable[[], None]] | None = None  # (wave, effect) of a delayed LDS instruction
        self.operations: dict[int, int] = {}
        self.operation_log: dict[int, list[int]] | None = None
        self.wave_order: list[int] | None = None
        self.lds_bytes = self.lds_stride = 0
        self.granule, self.finest = 4, 16
        self.image: int | None = None  # address of the loaded code object's byte 0, if there is one
        self.races: Races | None = None
        self.sharing: Sharing | None = None
        self.lds = np.zeros(0, np.uint8)
        self.group_ids: list[tuple[int, int, int]] = []
        self._views: dict[int, np.ndarray] = {}

    def start(self, group_ids: list[tuple[int, int, int]], waves_each: int, lds_bytes: int, granule: int) -> None:
        """Fresh LDS (poisoned) and a fresh race checker for a batch."""
        self.group_ids = group_ids
        self.lds_bytes = lds_bytes
        self.lds_stride = -(-lds_bytes // 64) * 64
        self.granule = granule = min(granule, self.finest)
        words = np.full(max(1, self.lds_stride * len(group_ids) // 4), 0x7FC1DEAD, np.uint32)
        self.lds = words.view(np.uint8)
        self._views = {1: self.lds, 2: words.view(np.uint16), 4: words}
        self.operations, self.deferred = {}, None
        self.races = None
        if self.check and lds_bytes:
            waves = np.arange(len(group_ids) * waves_each).reshape(len(group_ids), waves_each)
            self.races = Races(waves, -(-self.lds_stride // granule), self.report_race, self.report_unwritten)

    def keep_apart(self, at: np.ndarray, mask: np.ndarray | None, size: int) -> None:
        """Makes the race checker's granules small enough for an access at byte addresses [n, 64] that does not fill
        whole ones: a 16-byte store at a multiple of 8, say, which compilers make where rows are padded."""
        if self.races is None:
            return
        over = at % self.granule
        across = over + size > self.granule if size <= self.granule else over != 0
        if mask is not None:
            across &= mask
        if not across.any():
            return
        bits = int(np.bitwise_or.reduce(at[across])) | self.granule
        step = bits & -bits
        self.races.refine(self.granule // step)
        self.granule = self.finest = step

    def lds_words(self, size: int) -> np.ndarray:
        """LDS as elements of 1, 2 or 4 bytes."""
        return self._views[size]

    def late(self, g: Group) -> bool | None:
        """None normally; in delay mode, whether this memory operation of the (single-wave) group is the delayed one."""
        if not self.delay_mode:
            return None
        wave = int(g.waves[0])
        number = self.operations.get(wave, 0)
        self.operations[wave] = number + 1
        if self.operation_log is not None:
            self.operation_log.setdefault(wave, []).append(g.pc)
        return self.delayed == (wave, number)

    def defer(self, g: Group, effect: Callable[[], None], land: Callable) -> Callable:
        """In delay mode: what the delayed LDS instruction does to or reads from LDS, later; how it lands then."""
        self.deferred = (int(g.waves[0]), effect)

        def late(g: Group, p: Any) -> None:
            self.catch_up(g)
            land(g, p)

        return late

    def catch_up(self, g: Group) -> None:
        """A wave's LDS instructions are served in order: a delayed one's turn comes before the wave's next one."""
        if self.deferred is not None and self.deferred[0] == int(g.waves[0]):
            effect = self.deferred[1]
            self.deferred = None
            effect()

    def order(self, waves: int) -> list[int]:
        """The order in which delay mode runs a workgroup's waves between barriers."""
        return self.wave_order if self.wave_order is not None else list(range(waves))

    def share(self, granule: int, ids: list[tuple[int, int, int]], each: int) -> None:
        """A fresh checker of shared memory for a launch of these workgroups of so many waves."""
        checked = self.check and not self.delay_mode
        self.sharing = Sharing(self.memory, granule, ids, each, self.report_sharing) if checked else None

    def touch(self, g: Group, address: np.ndarray, mask: np.ndarray, size: int, **how: bool) -> None:
        """Memory is accessed: see Sharing.access."""
        if self.sharing is not None:
            self.sharing.access(g, address, mask, size, **how)

    # -- findings
    def report(self, kind: str, message: str, g: Group, lanes: np.ndarray | None = None) -> None:
        """A finding at the group's instruction. `lanes` [n, 64] (or anything [n, ...]) tells which waves are meant."""
        if not self.check:
            return
        some = np.arange(g.n) if lanes is None else np.flatnonzero(lanes.reshape(g.n, -1).any(1))
        first = int(some[0]) if some.size else 0
        workgroup = self.group_ids[int(g.workgroup[first])]
        waves = tuple(int(w) for w in g.local[some] if True)[:16]
        self.collector.add(
            kind, message, self.instructions[g.pc], g.pc, workgroup=workgroup, waves=tuple(sorted(set(waves)))
        )

    def report_unwritten(self, g: Group, place, never: np.ndarray) -> None:
        """A read of LDS that nothing has written."""
        row, column = (int(x[0]) for x in np.nonzero(never))
        self.report(
            "uninitialised-lds",
            f"reads LDS byte {int(place.granule[row, column]) * self.granule}, which nothing has written", g, never,
        )  # fmt: skip

    def report_race(self, kind, g: Group, row: int, pc: int, other_pc: int, other_wave: int, granules, words) -> None:
        """A race between the group's wave `row` and another wave, in the message of the issue's form."""
        verb, did, rule, when = words
        each = self.races.each if self.races else 1
        there = self.instructions[other_pc]
        low, high = int(granules.min()) * self.granule, (int(granules.max()) + 1) * self.granule - 1
        me, he = int(g.local[row]), other_wave % each
        self.collector.add(
            kind,
            f"wave {me} {verb} wave {he} {did} at {there.where} ({there.text}): LDS bytes {low} to {high}, {rule}; "
            f"{when}",
            self.instructions[pc], pc, other_pc,
            workgroup=self.group_ids[int(g.workgroup[row])], waves=(me, he),
            other=f"{there.where}: {there.text}" + (f" at {there.source}" if there.source else ""),
        )  # fmt: skip

    def report_sharing(
        self, g: Group, row: int, other_pc: int, verb: str, did: str, what: str, other: tuple, why: str
    ) -> None:
        """A race on memory between the group's wave `row` and a wave of the same or another workgroup."""
        there, mine = self.instructions[other_pc], self.group_ids[int(g.workgroup[row])]
        group, he = other
        me = int(g.local[row])
        who = f"wave {he}" if group == mine else f"wave {he} of workgroup {group}"
        self.collector.add(
            "memory-race", f"wave {me} {verb} {what} that {who} {did} at {there.where} ({there.text}); {why}",
            self.instructions[g.pc], g.pc, other_pc, workgroup=mine, waves=(me, he) if group == mine else (me,),
            other=f"{there.where}: {there.text}" + (f" at {there.source}" if there.source else ""),
        )  # fmt: skip
