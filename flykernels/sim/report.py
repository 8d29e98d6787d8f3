"""What a profiler would say of a kernel: counters of one recorded workgroup, its simulated time, and the whole grid's.

All times are simulated, given as a band; see timing.py for what they are good for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .kernel import KernelInfo
from .load import load
from .run import LDS_LIMIT, SimResult, Simulation
from .timing import SIMDS, Machine950, Timing, Unit
from .trace import LINE, Recorder, kind_of

REGISTERS_A_SIMD = 512  # a lane: 256 architectural and 256 accumulation (LLVM's AMDGPU guide, gfx90a and later)
REGISTER_GRANULE = 8
WAVES_A_SIMD = 8


@dataclass
class Occupancy:
    """Workgroups that fit on one compute unit, and what limits them."""

    workgroups: int
    waves_a_simd: float
    limit: str


def occupancy(kernel: KernelInfo, waves: int, lds_bytes: int) -> Occupancy:
    """How many workgroups of `waves` waves share a compute unit, by registers, LDS and wave slots."""
    used = max(1, kernel.vgprs)
    granted = -(-used // REGISTER_GRANULE) * REGISTER_GRANULE
    by_registers = min(WAVES_A_SIMD, REGISTERS_A_SIMD // granted) * SIMDS // waves
    limits = {
        "registers": by_registers,
        "LDS": LDS_LIMIT // lds_bytes if lds_bytes else 1 << 10,
        "wave slots": WAVES_A_SIMD * SIMDS // waves,
    }
    limit = min(limits, key=lambda k: limits[k])
    count = max(1, limits[limit])
    return Occupancy(count, count * waves / SIMDS, limit)


@dataclass
class Site:
    """One memory instruction's behaviour: text, accesses, and what they cost."""

    where: int
    text: str
    accesses: int
    conflict_cycles: int = 0
    ideal_cycles: int = 0
    bytes: int = 0
    lines: int = 0

    @property
    def efficiency(self) -> float:
        """Global: bytes asked for over bytes of lines moved. LDS: ideal over spent cycles."""
        if self.lines:
            return self.bytes / (self.lines * LINE)
        return self.ideal_cycles / self.conflict_cycles if self.conflict_cycles else 1.0


@dataclass
class GridEstimate:
    """Simulated time of the whole grid in microseconds: (optimistic, middle, pessimistic), and how it was composed."""

    microseconds: tuple[float, float, float]
    rounds: int
    workgroups_at_once: int


@dataclass
class Report:
    """Counters of one workgroup and simulated times."""

    kernel: str
    result: SimResult
    mix: dict[str, int]
    occupancy: Occupancy
    timing: dict[str, Timing]
    grid: GridEstimate
    lds: list[Site] = field(default_factory=list)
    memory: list[Site] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def matrix_busy(self) -> float:
        """Share of the time that the matrix units work, simulated, middle of the band."""
        return self.timing["middle"].matrix_busy

    def lines(self) -> list[str]:
        """The report as text. Every time is marked as simulated."""
        t = self.timing
        mix = ", ".join(f"{k} {n}" for k, n in sorted(self.mix.items(), key=lambda x: -x[1]))
        o, g = self.occupancy, self.grid
        low, middle, high = g.microseconds
        stalls = ", ".join(f"{k} {v:.0f}" for k, v in t["middle"].stalls.items() if v >= 1)
        out = [
            f"{self.kernel}: one workgroup recorded; all times are simulated",
            f"  instructions       {sum(self.mix.values())} ({mix})",
            f"  occupancy          {o.workgroups} workgroups a unit, {o.waves_a_simd:g} waves a SIMD "
            f"(limit: {o.limit})",
            f"  cycles, simulated  {t['middle'].cycles:.0f} (band {t['low'].cycles:.0f} to {t['high'].cycles:.0f})",
            f"  matrix units busy  {100 * self.matrix_busy:.1f}% simulated "
            f"({100 * t['high'].matrix_busy:.1f} to {100 * t['low'].matrix_busy:.1f}%)",
            f"  stalls a wave      {stalls or 'none'} (cycles, simulated)",
            f"  grid, simulated    {middle:.1f} us (band {low:.1f} to {high:.1f}), {g.rounds} rounds of "
            f"{g.workgroups_at_once} workgroups",
        ]
        spent, ideal = (sum(getattr(s, n) for s in self.lds) for n in ("conflict_cycles", "ideal_cycles"))
        out.append(f"  LDS                {spent} cycles, {spent - ideal} of them bank conflicts")
        for s in sorted(self.lds, key=lambda s: s.ideal_cycles - s.conflict_cycles)[:5]:
            if s.conflict_cycles > s.ideal_cycles:
                out.append(f"    {s.where}: {s.text}: {s.conflict_cycles / s.ideal_cycles:.2f} times its ideal")
        asked, moved = sum(s.bytes for s in self.memory), LINE * sum(s.lines for s in self.memory)
        if moved:
            out.append(f"  global memory      {asked} bytes asked for, {moved} in lines ({100 * asked / moved:.0f}%)")
        for s in sorted(self.memory, key=lambda s: s.efficiency)[:5]:
            if s.lines and s.efficiency < 0.75:
                out.append(f"    {s.where}: {s.text}: {100 * s.efficiency:.0f}% of its lines used")
        return out


def profile(
    code: Any, args: Sequence[Any], grid: Sequence[int] = (1, 1, 1), *, workgroup: tuple[int, int, int] = (0, 0, 0),
    entry: str | None = None, machine: Machine950 | None = None, **options: Any,
) -> Report:  # fmt: skip
    """Runs one workgroup, records it, and reports counters and simulated times of it and of the grid.

    Options as of run_on_sim. The arguments are changed as by a launch of that one workgroup.
    """
    loaded = load(code, entry)
    recorder = Recorder(instructions=loaded.code.instructions)
    simulation = Simulation(loaded, args, grid, trace=recorder, **options)
    result = simulation.run([workgroup])
    return assemble(loaded.kernel, simulation, recorder, result, machine or Machine950())


def assemble(kernel, simulation: Simulation, recorder: Recorder, result: SimResult, machine: Machine950) -> Report:
    """A report from a recorded run."""
    mix: Counter[str] = Counter()
    kinds = [kind_of(i) for i in recorder.instructions]
    for stream in recorder.waves():
        mix.update(kinds[pc] for pc, _, _ in stream)
    fits = occupancy(kernel, simulation.waves_each, simulation.lds_bytes)
    ends = {"low": machine.end("low"), "middle": machine, "high": machine.end("high")}
    groups = math.prod(simulation.grid)
    together = max(1, min(fits.workgroups, -(-groups // int(machine.units))))
    timing = {name: run_together(recorder, together, c) for name, c in ends.items()}
    at_once = together * int(machine.units)
    rounds = max(1, -(-groups // at_once))
    times = tuple(
        rounds * timing[n].cycles / (ends[n].clock_ghz * 1e3) + ends[n].launch_us for n in ("low", "middle", "high")
    )
    report = Report(
        kernel.name, result, dict(mix), fits, timing, GridEstimate(times, rounds, at_once), recorder=recorder  # type: ignore[arg-type]
    )  # fmt: skip
    for pc, s in sorted(recorder.sites.items()):
        i = recorder.instructions[pc]
        if s.ideal:
            report.lds.append(Site(i.where, i.text, s.accesses, s.cycles, s.ideal))
        else:
            report.memory.append(Site(i.where, i.text, s.accesses, bytes=s.bytes, lines=s.lines))
    return report


def run_together(recorder: Recorder, workgroups: int, c: Machine950, events: bool = False) -> Timing:
    """The recorded workgroup, several times over on one compute unit. Cycles, simulated."""
    return Unit([(recorder.waves(), recorder.instructions)] * workgroups, c, events).run()


__all__ = ["GridEstimate", "Occupancy", "Report", "Site", "occupancy", "profile", "run_together"]
