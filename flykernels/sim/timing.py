"""An event-driven timing model of one compute unit of gfx950, for ranking kernels and guarding against regressions.

Waves issue their recorded instructions (trace.py) in order, four SIMDs side by side; matrix, vector, scalar, LDS and
memory pipes take the cycles that the constants below say; waits, barriers and priorities hold waves as on the machine.
Every result is *simulated*: a band between an optimistic and a pessimistic set of constants, good for gaps over about
15% and worth nothing as an absolute performance claim.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .asm import Instruction
from .hazards import matrix_cycles
from .trace import Recorder, kind_of

SIMDS = 4


def constant(value: float, source: str, confidence: str, low: float | None = None, high: float | None = None):
    """A model constant with where it comes from, how sure it is, and its band."""
    meta = {"source": source, "confidence": confidence, "low": value if low is None else low}
    meta["high"] = value if high is None else high
    return field(default=value, metadata=meta)


ATT = "instruction traces of an MI350X (ATT), read off"
ORIGAMI = "rocm-origami, gfx950 constants"


@dataclass(frozen=True)
class Machine950:
    """The constants, in cycles unless said. `low`/`high` in the metadata are the optimistic and pessimistic ends."""

    cadence: float = constant(4, f"{ATT}: a wave issues one instruction in 4 cycles", "high")
    transcendental: float = constant(8, f"{ATT}: v_exp, v_rcp", "high")
    scaled_issue: float = constant(8, f"{ATT}: a scaled matrix instruction is two issues", "high")
    chain: float = constant(4, f"{ATT}: extra when the accumulator is the previous result", "medium")
    lds_latency: float = constant(48, f"{ATT}: 52 to 56 from issue to arrival, 4 of them the access", "high")
    lds_queue: float = constant(64, "a guess: LDS work queued before issue stalls", "low")
    lds_operand: float = constant(
        4,
        f"{ATT}: cycles that each dword a lane of an LDS instruction's data adds to its issue (ds_write_b16 and "
        "ds_bpermute take 8, ds_write2_b32 12, ds_write_b128 20): 16 lanes a cycle, over a path that two SIMDs share "
        "(of 0 and 1, and of 2 and 3, one waits for the other's stores; the pairs overlap)",
        "high",
    )
    barrier: float = constant(8, f"{ATT}: 4 to 8 from last arrival to release", "medium", 8, 40)
    memory_queue: float = constant(208, f"{ATT}: address work queued before issue stalls", "low")
    l1_bytes: float = constant(64, f"{ORIGAMI}; {ATT}", "medium")
    fill_bytes: float = constant(57.6, f"{ORIGAMI}: L2 bytes a cycle a unit, efficiency 0.9", "low", 64, 48)
    latency: float = constant(600, f"{ATT}: 550 to 1950, median of a warm loop", "medium", 400, 1500)
    latency_cold: float = constant(1900, f"{ATT}: first touch", "medium", 1500, 2200)
    scalar_latency: float = constant(300, f"{ATT}: 40 on a hit to 900 cold", "low", 100, 900)
    direct_lds_bytes: float = constant(128, "a guess: bytes a cycle that direct loads write to LDS", "low")
    branch: float = constant(4, f"{ATT}: a branch issues like any instruction", "low", 4, 16)
    clock_ghz: float = constant(1.8, f"{ORIGAMI}: effective in matrix work; 2.4 at most", "medium")
    launch_us: float = constant(2.6, ORIGAMI, "medium")
    units: float = constant(256, "AMD: MI350X and MI355X", "high")
    dies: float = constant(8, "AMD: MI350X and MI355X", "high")
    last_level_tbs: float = constant(6.0, ORIGAMI, "low", 8.0, 4.0)
    memory_tbs: float = constant(6.4, "8 TB/s peak at 80%", "medium", 7.2, 5.6)

    def end(self, which: str) -> Machine950:
        """All constants at one end of their bands: "low" (optimistic) or "high" (pessimistic)."""
        return replace(self, **{f.name: f.metadata[which] for f in fields(self)})


@dataclass(slots=True)
class _Step:
    """What the model needs of one static instruction."""

    kind: str
    issue: float
    pipe: float = 0.0
    accumulator: int = -1
    result: int = -1
    vm: int = -1
    lgkm: int = -1
    priority: int = 0


def prepare(instructions: Sequence[Instruction], c: Machine950) -> list[_Step]:
    """Static facts of every instruction under a set of constants."""
    steps = []
    for i in instructions:
        kind = kind_of(i)
        s = _Step(kind, c.cadence)
        if kind == "mfma":
            s.pipe = matrix_cycles(i)
            s.issue = c.scaled_issue if "scale" in i.name else c.cadence
            s.result = i.operands[0].index
            s.accumulator = i.operands[3].index if i.operands[3].kind == "v" else -1
        elif kind == "trans":
            s.issue = c.transcendental
        elif kind == "nop":
            s.issue = c.cadence * (1 + (i.operands[0].index if i.operands else 0))
        elif kind == "wait":
            s.vm, s.lgkm = i.mods.get("vmcnt", -1), i.mods.get("lgkmcnt", -1)
        elif kind == "prio":
            s.priority = i.operands[0].index
        elif kind == "branch":
            s.issue = c.branch
        elif kind in ("lds_read", "lds_write"):
            s.issue = c.cadence + c.lds_operand * data_dwords(i)
        elif kind == "direct":
            s.pipe = 64 * {"x2": 8, "x3": 12, "x4": 16}.get(i.name[-2:], 4)
        steps.append(s)
    return steps


def data_dwords(i: Instruction) -> int:
    """Registers of data, besides the address, that an LDS instruction takes from a lane."""
    stores_only = kind_of(i) == "lds_write" and "_rtn" not in i.name
    address = 0 if stores_only else 1
    return sum(o.count for o in i.operands[address + 1 :] if o.kind == "v")


@dataclass(slots=True)
class _Wave:
    number: int
    group: int
    simd: int
    stream: Sequence[Sequence[int]]
    steps: list[_Step]
    at: int = 0
    priority: int = 0
    last: float = 0.0
    end: float = 0.0
    loads: deque = field(default_factory=deque)
    lds: deque = field(default_factory=deque)
    ready: dict[int, float] = field(default_factory=dict)
    warm: bool = False
    waits: dict[str, float] = field(default_factory=dict)


@dataclass
class Timing:
    """A simulated run of workgroups on one compute unit, in cycles.

    cycles        until the last wave has ended
    matrix_busy   share of the time that the matrix units worked, all four
    lds_busy      cycles that LDS worked
    stalls        average cycles a wave waited, by reason: vmcnt, lgkmcnt, barrier, matrix, lds queue, memory queue
    events        (wave, instruction index, start, duration, kind) if asked for
    """

    cycles: float
    matrix_busy: float
    lds_busy: float
    stalls: dict[str, float]
    loaded_bytes: int
    stored_bytes: int
    first_matrix: float
    last_matrix: float
    events: list[tuple[int, int, float, float, str]] = field(default_factory=list)
    issue_times: list[list[float]] = field(default_factory=list)


class Unit:
    """One compute unit that runs workgroups' recorded streams."""

    def __init__(
        self, groups: Sequence[tuple[Sequence, Sequence[Instruction]]], c: Machine950, events: bool = False,
        starts: Sequence[float] | None = None,
    ):  # fmt: skip
        self.c, self.keep = c, events
        self.starts = starts or [0.0] * len(groups)
        self.waves: list[_Wave] = []
        for number, (streams, instructions) in enumerate(groups):
            steps = prepare(instructions, c)
            for k, stream in enumerate(streams):
                self.waves.append(_Wave(len(self.waves), number, k % SIMDS, stream, steps))
        self.alive = [sum(w.group == k for w in self.waves) for k in range(len(groups))]
        self.arrived: list[list[tuple[_Wave, float]]] = [[] for _ in groups]
        self.valu, self.salu, self.matrix = [0.0] * SIMDS, [0.0] * SIMDS, [0.0] * SIMDS
        self.lds_path = [0.0] * (SIMDS // 2)
        self.matrix_work = self.lds_free = self.lds_work = self.address_free = self.fill_free = 0.0
        self.landing: list[tuple[float, float]] = []  # direct loads that will write LDS: (when, cycles)
        self.loaded = self.stored = 0
        self.matrix_times: list[float] = []
        self.events: list[tuple[int, int, float, float, str]] = []
        self.times: list[list[float]] = [[0.0] * len(w.stream) for w in self.waves]
        self.heap: list[tuple[float, int, float, int]] = []

    def run(self) -> Timing:
        for w in self.waves:
            if w.stream:
                self._push(w, self.starts[w.group])
        while self.heap:
            t, _, _, number = heapq.heappop(self.heap)
            self._step(self.waves[number], t)
        total = max((w.end for w in self.waves), default=0.0)
        count = max(1, len(self.waves))
        reasons = ("vmcnt", "lgkmcnt", "barrier", "matrix", "lds queue", "memory queue")
        stalls = {r: sum(w.waits.get(r, 0.0) for w in self.waves) / count for r in reasons}
        busy = self.matrix_work / SIMDS / total if total else 0.0
        first, last = (min(self.matrix_times), max(self.matrix_times)) if self.matrix_times else (0.0, 0.0)
        return Timing(
            total, busy, self.lds_work, stalls, self.loaded, self.stored, first, last, self.events, self.times
        )

    def _push(self, w: _Wave, t: float) -> None:
        heapq.heappush(self.heap, (t, -w.priority, w.last, w.number))

    def _step(self, w: _Wave, t: float) -> None:
        pc, a, b = w.stream[w.at]
        s = w.steps[pc]
        while self.landing and self.landing[0][0] <= t:
            when, work = heapq.heappop(self.landing)
            self.lds_free = max(self.lds_free, when) + work
            self.lds_work += work
        ready = self._ready(w, s, t)
        if ready > t:
            if s.kind != "wait":  # issue slots come every `cadence` cycles
                ready = -(-ready // self.c.cadence) * self.c.cadence
            self._push(w, ready)
            return
        self._issue(w, s, t, pc, a, b)

    # -- when may it issue
    def _ready(self, w: _Wave, s: _Step, t: float) -> float:
        kind, simd, c = s.kind, w.simd, self.c
        if kind in ("valu", "trans"):
            return max(t, self.valu[simd])
        if kind == "salu":
            return max(t, self.salu[simd])
        if kind == "mfma":
            at = max(t, self.valu[simd], self.matrix[simd], w.ready.get(s.accumulator, 0.0))
            return self._stall(w, "matrix", t, at)
        if kind in ("lds_read", "lds_write"):
            return self._stall(w, "lds queue", t, max(t, self.lds_free - c.lds_queue, self.lds_path[simd // 2]))
        if kind in ("direct", "load", "store"):
            return self._stall(w, "memory queue", t, max(t, self.address_free - c.memory_queue))
        if kind == "wait":
            at = self._wait(w, "vmcnt", w.loads, s.vm, t)
            return self._wait(w, "lgkmcnt", w.lds, s.lgkm, at)
        return t

    def _stall(self, w: _Wave, reason: str, t: float, at: float) -> float:
        if at > t:
            w.waits[reason] = w.waits.get(reason, 0.0) + at - t
        return at

    def _wait(self, w: _Wave, reason: str, queue: deque, count: int, t: float) -> float:
        if count < 0:
            return t
        at = t
        while len(queue) > count:
            at = max(at, queue[0])
            if queue[0] > t:
                break
            queue.popleft()
        if len(queue) > count:
            at = max(at, *list(queue)[: len(queue) - count])
        return self._stall(w, reason, t, at)

    # -- what it does
    def _issue(self, w: _Wave, s: _Step, t: float, pc: int, a: int, b: int) -> None:
        kind, simd, c = s.kind, w.simd, self.c
        self.times[w.number][w.at] = t
        w.at += 1
        duration = s.issue
        if kind in ("valu", "trans"):
            self.valu[simd] = t + s.issue
        elif kind == "salu":
            self.salu[simd] = t + c.cadence
        elif kind == "mfma":
            self.valu[simd] = t + c.cadence
            self.matrix[simd] = t + s.pipe
            self.matrix_work += s.pipe
            self.matrix_times.append(t)
            w.warm = True
            w.ready[s.result] = t + s.pipe + c.chain
            duration = s.pipe
        elif kind in ("lds_read", "lds_write"):
            self.lds_path[simd // 2] = t + s.issue
            work = max(1, a)
            self.lds_free = max(self.lds_free, t) + work
            self.lds_work += work
            w.lds.append(self.lds_free + c.lds_latency)
        elif kind == "smem":
            w.lds.append(t + c.scalar_latency)
        elif kind in ("direct", "load", "store"):
            duration = self._memory(w, s, t, a, b)
        elif kind == "prio":
            w.priority = s.priority
        elif kind == "barrier":
            self._arrive(w, t, pc)
            return
        elif kind == "end":
            self._end(w, t)
            return
        if self.keep:
            self.events.append((w.number, pc, t, duration, kind))
        w.last = t
        self._push(w, t + s.issue)

    def _memory(self, w: _Wave, s: _Step, t: float, segments: int, line_bytes: int) -> float:
        c = self.c
        self.address_free = max(self.address_free, t) + max(segments * 64 / c.l1_bytes, 1)
        done = self.address_free
        if s.kind == "store":
            self.stored += line_bytes
            done += c.latency
        else:
            self.loaded += line_bytes
            self.fill_free = max(self.fill_free, t) + max(line_bytes / c.fill_bytes, 1)
            done = max(done, self.fill_free) + (c.latency if w.warm else c.latency_cold)
        if w.loads and w.loads[-1] > done:  # in order
            done = w.loads[-1]
        w.loads.append(done)
        if s.kind == "direct":
            heapq.heappush(self.landing, (done - c.barrier, s.pipe / c.direct_lds_bytes))
        return done - t

    def _arrive(self, w: _Wave, t: float, pc: int) -> None:
        waiting = self.arrived[w.group]
        waiting.append((w, t))
        w.last = t
        if len(waiting) == self.alive[w.group]:
            self._release(w.group, t, pc)

    def _release(self, group: int, t: float, pc: int) -> None:
        free = t + self.c.barrier
        for w, since in self.arrived[group]:
            w.waits["barrier"] = w.waits.get("barrier", 0.0) + free - since
            if self.keep:
                self.events.append((w.number, pc, since, free - since, "barrier"))
            w.last = free
            self._push(w, free)
        self.arrived[group] = []

    def _end(self, w: _Wave, t: float) -> None:
        w.end = max([t, *w.loads])
        self.alive[w.group] -= 1
        waiting = self.arrived[w.group]
        if self.alive[w.group] and len(waiting) == self.alive[w.group]:
            self._release(w.group, t, -1)


def time_workgroups(recorders: Sequence[Recorder], c: Machine950 | None = None, events: bool = False) -> Timing:
    """Runs recorded workgroups together on one compute unit. Cycles, simulated."""
    return Unit([(r.waves(), r.instructions) for r in recorders], c or Machine950(), events).run()


def band(recorders: Sequence[Recorder]) -> dict[str, Any]:
    """{"low", "middle", "high"}: Timing at the optimistic end, the middle and the pessimistic end of the constants."""
    c = Machine950()
    ends = {"low": c.end("low"), "middle": c, "high": c.end("high")}
    return {name: time_workgroups(recorders, e) for name, e in ends.items()}
