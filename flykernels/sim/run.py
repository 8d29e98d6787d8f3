"""Runs a kernel's grid: groups of waves in lockstep, barriers, instruction budget; `run_on_sim` is the front door."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..codeobject import CodeObject
from .asm import Instruction
from .errors import BadArguments, BadCodeObject, BudgetExceeded, FindingsError
from .findings import Collector, Finding, Waiver, failing
from .hazards import check_hazards
from .launch import Launch
from .load import Loaded, load
from .machine import Machine
from .mode import check as check_mode
from .program import BARRIER, BRANCH, END, PLAIN, Bound, Program
from .state import DENORMALS_OUT, LANES, Group

WAVES_AT_ONCE = 32  # waves of a batch: more amortise numpy's call overhead, until arrays outgrow the cache
BUDGET = 1_000_000  # instructions a wave: an order of magnitude over any kernel of ours
GRID_MOST = 1 << 22  # workgroups of one run: at some 10^6 wave-instructions a second, hours for the smallest kernel
LDS_LIMIT = 160 * 1024  # bytes of LDS a compute unit of gfx950 has


@dataclass
class Counters:
    """What ran.

    instructions  wave-instructions; `by_name` by mnemonic; `seconds` of processor time that the simulation took (this
                  machine's)
    hits          times each instruction of the code object ran, in waves
    """

    instructions: int = 0
    by_name: dict[str, int] = field(default_factory=dict)
    hits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    workgroups: int = 0
    waves: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Wave-instructions simulated per second of processor time."""
        return self.instructions / self.seconds if self.seconds else 0.0


@dataclass
class SimResult:
    """A simulated launch. The arrays given were changed in place, as by a launch.

    findings  all that the checker found, errors first
    counters  what ran
    kernel    the kernel's name
    """

    kernel: str
    findings: list[Finding]
    counters: Counters
    trace: Any = None

    @property
    def ok(self) -> bool:
        """No error that no waiver excuses."""
        return not failing(self.findings)

    def raise_for_findings(self) -> SimResult:
        """FindingsError with every unwaived error's text; the result itself if there is none."""
        bad = failing(self.findings)
        if bad:
            raise FindingsError(f"{self.kernel}: {len(bad)} findings\n" + "\n".join(map(str, bad)))
        return self


def run_on_sim(
    code: CodeObject | bytes | str | os.PathLike,
    args: Sequence[Any],
    grid: Sequence[int] = (1, 1, 1),
    check: bool = True,
    entry: str | None = None,
    waivers: Iterable[Waiver] = (),
    *,
    workgroups: Sequence[tuple[int, int, int]] | None = None,
    block: Sequence[int] | None = None,
    shared_bytes: int = 0,
    outputs: Iterable[int] | None = None,
    budget: int = BUDGET,
    trace: Any = None,
) -> SimResult:
    """Runs a gfx950 kernel on the CPU and checks its waits, barriers and addresses.

    code        a CodeObject, a linked code object's bytes, a path to one, or assembly text
    args        one for each explicit argument: numpy arrays and CPU torch tensors are buffers (changed in place; every
                byte outside them is a guard zone), ints, floats, numpy scalars and bytes go by value
    grid        workgroups along x, y, z
    check       report findings; without it the run is faster and memory results still arrive late
    entry       kernel name, where the code object has several
    waivers     findings to excuse, each for a kernel and with a reason
    workgroups  run only these of the grid, e.g. [(0, 0, 0)]
    block       work-items along x, y, z; by default the code object's size along x
    shared_bytes  dynamic LDS on top of what the code object says (Triton passes its LDS so)
    outputs     positions of the buffers that may be written; reads of theirs before a write are reported.
                None: all may
    budget      instructions a wave may execute

    Errors: BadCodeObject, BadArguments, UnknownInstruction, BudgetExceeded; see sim/errors.py.
    """
    return Simulation(
        load(code, entry), args, grid, check=check, waivers=waivers, block=block, shared_bytes=shared_bytes,
        outputs=outputs, budget=budget, trace=trace,
    ).run(workgroups)  # fmt: skip


class Simulation:
    """A kernel with its arguments, ready to run any of its workgroups."""

    def __init__(
        self, loaded: Loaded, args: Sequence[Any], grid: Sequence[int], *, check: bool = True,
        waivers: Iterable[Waiver] = (), block: Sequence[int] | None = None, shared_bytes: int = 0,
        outputs: Iterable[int] | None = None, budget: int = BUDGET, trace: Any = None,
    ):  # fmt: skip
        self.loaded = loaded
        self.program: Program
        kernel = self.kernel = loaded.kernel
        self.grid = _three(grid, "grid", zero=True)
        self.block = _three(block or kernel.required_size or (kernel.workgroup_size,), "block")
        self.items = self.block[0] * self.block[1] * self.block[2]
        if self.items > 1024:
            raise BadArguments(f"{self.items} work-items a workgroup: gfx950 has at most 1024")
        if any(n * b >= 1 << 32 for n, b in zip(self.grid, self.block, strict=True)):
            raise BadArguments(
                f"grid={self.grid} of {self.block} work-items: a launch has fewer than 2^32 along an axis"
            )
        if shared_bytes < 0:
            raise BadArguments(f"shared_bytes={shared_bytes}: dynamic LDS cannot be negative")
        self.lds_bytes = kernel.lds_bytes + shared_bytes
        if self.lds_bytes > LDS_LIMIT:
            raise BadArguments(f"{self.lds_bytes} bytes of LDS: a gfx950 compute unit has {LDS_LIMIT}")
        self.launch = Launch(kernel, args, self.grid, self.block, None if outputs is None else set(outputs))
        self.collector = Collector(kernel.name, tuple(waivers))
        name = lambda r: self.program.registers.name(r)
        self.machine = Machine(loaded.code.instructions, self.launch.memory, self.collector, name)
        self.machine.check, self.machine.trace = check, trace
        if loaded.data:
            self.machine.image = self._place_image(loaded)
        self.machine.mode = check_mode(kernel.mode, f"{kernel.name} starts")
        self.program = Program(loaded.code, self.machine, kernel.vgprs - kernel.agprs if kernel.vgprs else 1)
        if check and kernel.mode & DENORMALS_OUT == 0:
            self.collector.add("denormal-flush", "the kernel starts with f32 denormals flushed to zero")
        self.check, self.budget = check, budget
        self.waves_each = -(-self.items // LANES)
        if check:
            check_hazards(self.program, kernel.entry, self.collector)
        self.bound = [*self.program.bound, self._past_the_end()]
        self.hits = [0] * len(self.bound)

    def _past_the_end(self) -> Bound:
        """What stands behind the last instruction: an error for the wave that gets there."""
        last = self.loaded.code.instructions[-1] if self.loaded.code.instructions else None

        def run(g: Group) -> None:
            behind = f"behind {last.where}: {last.text}" if last else "at once"
            raise BadCodeObject(f"{self.kernel.name} runs past the end of its code, {behind}: s_endpgm is missing")

        return Bound(run, PLAIN, frozenset(), (), Instruction("the end of the code", (), {}, "", -1))

    def _place_image(self, loaded: Loaded) -> int:
        """Loads the code object's segments, whose constants code may read; the address of its byte 0."""
        image = np.zeros(max(start + len(raw) for start, raw in loaded.data), np.uint8)
        for start, raw in loaded.data:
            image[start : start + len(raw)] = raw
        return self.launch.memory.add("the code object", image, writable=False).base

    def run(self, workgroups: Sequence[tuple[int, int, int]] | None = None) -> SimResult:
        ids = self._ids(workgroups)
        per_batch = max(1, WAVES_AT_ONCE // self.waves_each)
        if self.machine.trace is not None or self.machine.delay_mode:
            per_batch = 1
        self.machine.share(self.program.memory_granule, ids, self.waves_each)
        start = time.process_time()
        with np.errstate(all="ignore"):
            try:
                for k in range(0, len(ids), per_batch):
                    if self.machine.sharing is not None:
                        self.machine.sharing.first = k
                    self._batch(ids[k : k + per_batch])
            finally:
                self.launch.copy_back()
        counters = self._count(len(ids), time.process_time() - start)
        return SimResult(self.kernel.name, self.collector.findings, counters, self.machine.trace)

    def _ids(self, workgroups: Sequence[tuple[int, int, int]] | None) -> list[tuple[int, int, int]]:
        """The workgroups to run: those given, or the whole grid, x fastest."""
        gx, gy, gz = self.grid
        if workgroups is None:
            if gx * gy * gz > GRID_MOST:
                raise BadArguments(f"grid={self.grid}: {gx * gy * gz} workgroups are too many; name some: workgroups=")
            return [(x, y, z) for z in range(gz) for y in range(gy) for x in range(gx)]
        for w in workgroups:
            if len(w) != 3 or not all(0 <= at < n for at, n in zip(w, self.grid, strict=True)):
                raise BadArguments(f"workgroup {tuple(w)} is not in the grid {self.grid}")
        return [(int(x), int(y), int(z)) for x, y, z in workgroups]

    def _count(self, workgroups: int, seconds: float) -> Counters:
        by_name: dict[str, int] = {}
        for b, n in zip(self.bound, self.hits, strict=True):
            if n:
                by_name[b.instruction.name] = by_name.get(b.instruction.name, 0) + n
        total = sum(self.hits)
        waves = workgroups * self.waves_each
        return Counters(total, by_name, np.array(self.hits[:-1]), workgroups, waves, seconds)

    # -- one batch of workgroups
    def _batch(self, ids: list[tuple[int, int, int]]) -> None:
        self.machine.start(ids, self.waves_each, self.lds_bytes, self.program.granule)
        n = len(ids) * self.waves_each
        every = np.arange(n)
        g = Group(every, every // self.waves_each, every % self.waves_each, self.program.registers.count)
        g.pc = self.kernel.entry
        g.mode = self.machine.mode
        self.launch.start(g, ids)
        groups = [g]
        if self.machine.delay_mode:
            groups = [g.take(np.array([k]), g.pc) for k in self.machine.order(n)]
        self.left = self.budget
        barriers = np.zeros(n, np.int64)
        while groups:
            waiting = self._to_barrier(groups, barriers)
            if self.machine.sharing is not None:
                self.machine.sharing.barrier(waiting)
            for w in waiting:
                w.pass_barrier()
            groups = self._merge(waiting)
        if self.check:
            self._same_barriers(barriers, ids)

    def _same_barriers(self, barriers: np.ndarray, ids: list[tuple[int, int, int]]) -> None:
        each = barriers.reshape(len(ids), -1)
        for k in np.flatnonzero((each != each[:, :1]).any(1)):
            counts = each[k]
            few, many = int(counts.argmin()), int(counts.argmax())
            self.collector.add(
                "barrier-divergence", f"wave {few} ended after {counts[few]} barriers, "
                f"wave {many} after {counts[many]}",
                workgroup=ids[k], waves=(few, many),
            )  # fmt: skip

    def _merge(self, groups: list[Group]) -> list[Group]:
        """Groups that stand at one instruction with the same operations in flight become one."""
        if len(groups) < 2 or self.machine.delay_mode:
            return groups
        same: dict[tuple, list[Group]] = {}
        for g in groups:
            same.setdefault(g.signature(), []).append(g)
        return [Group.join(x) if len(x) > 1 else x[0] for x in same.values()]

    def _to_barrier(self, groups: list[Group], barriers: np.ndarray) -> list[Group]:
        """Runs every group until it waits at a barrier or has ended; gives those that wait. The group that is furthest
        behind goes first, so that groups split at a branch meet again."""
        waiting: list[Group] = []
        running = list(groups)
        keep_order = self.machine.delay_mode
        while running:
            k = 0 if keep_order else min(range(len(running)), key=lambda j: running[j].pc)
            g = running.pop(k)
            others = [x.pc for x in running]
            stop = -1 if keep_order or not others else min(others)
            parts, arrived = self._run(g, stop)
            if not arrived:
                running += parts
            elif self.program.bound[g.pc].kind == BARRIER:
                waiting += parts
            else:
                barriers[g.waves] = g.barriers
            if len(running) > 1 and not keep_order:
                running = self._merge(running)
        return waiting

    def _run(self, g: Group, stop: int) -> tuple[list[Group], bool]:
        """Runs a group until a barrier, the end, a branch that divides it, or the instruction `stop`, where another
        group stands. (What has become of it, whether it has come to a barrier or the end: a branch may lead to either,
        and then the instruction itself has not run.)"""
        bound, hits, n = self.bound, self.hits, g.n
        trace = self.machine.trace
        check = self.check
        left = self.left
        pc = g.pc
        while True:
            b = bound[pc]
            left -= 1
            kind = b.kind
            if left < 0:
                raise BudgetExceeded(
                    f"{self.kernel.name}: more than {self.budget} instructions a wave (at {b.instruction.where}: "
                    f"{b.instruction.text}): an endless loop? Raise budget= if not"
                )
            hits[pc] += n
            if g.busy and check and not b.touches.isdisjoint(g.busy):
                g.pc = pc
                self._in_flight(g, b)
            if trace is not None:
                trace.step(g, pc)
            if kind == PLAIN:
                g.pc = pc
                b.run(g)
                if b.stale:
                    for first in b.stale:
                        g.unpacked.pop(first, None)
                pc += 1
            elif kind == BRANCH:
                if b.taken is None:
                    pc = b.target
                else:
                    taken = b.taken(g)
                    if taken.all():
                        pc = b.target
                    elif taken.any():
                        self.left = left
                        parts = [g.take(np.flatnonzero(taken), b.target), g.take(np.flatnonzero(~taken), pc + 1)]
                        return parts, False
                    else:
                        pc += 1
            elif kind in (BARRIER, END):
                g.pc = pc
                self.left = left
                return [g], True
            else:
                g.pc = pc
                if b.vm >= 0 and len(g.vm) > b.vm:
                    g.retire(g.vm, len(g.vm) - b.vm)
                if b.lgkm >= 0:
                    if b.lgkm == 0 and g.sm:
                        g.retire(g.sm, len(g.sm))
                    if len(g.ds) > b.lgkm:
                        g.retire(g.ds, len(g.ds) - b.lgkm)
                pc += 1
            if pc == stop:
                g.pc = pc
                self.left = left
                return [g], False

    def _in_flight(self, g: Group, b) -> None:
        """A register is touched while an operation in flight will write it."""
        busy = sorted(b.touches & g.busy)
        names = ", ".join(self.program.registers.name(r) for r in busy[:8])
        scalar = all(r < 0 for r in busy)
        queues = [*g.vm, *g.ds, *g.sm]
        source = next((p for p in queues if p.registers & b.touches), None)
        there = self.program.bound[source.pc].instruction if source is not None else None
        by = f" by {there.where}: {there.text}" if there is not None else ""
        wait = "lgkmcnt(0): scalar loads return out of order" if scalar else "the count that covers it"
        self.machine.collector.add(
            "scalar-load-wait" if scalar else "register-in-flight",
            f"touches {names} while being loaded{by}; wait for {wait}", b.instruction, g.pc,
            source.pc if source is not None else -1, workgroup=self.machine.group_ids[int(g.workgroup[0])],
            waves=tuple(int(w) for w in g.local[:16]),
        )  # fmt: skip


def _three(n: Sequence[int], what: str, zero: bool = False) -> tuple[int, int, int]:
    full = tuple(int(x) for x in n) + (1,) * (3 - len(n))
    if len(full) != 3 or any(x < (0 if zero else 1) for x in full):
        raise BadArguments(f"{what}={tuple(n)}: 1 to 3 {'' if zero else 'positive '}counts are needed")
    return full  # type: ignore[return-value]
