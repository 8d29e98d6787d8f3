"""Replays instruction traces recorded on an MI350X (rocprofv3 ATT, as JSON) through the timing model, and compares.

A trace has no addresses. Those of LDS follow from the code's own arithmetic mostly (addresses.py), and with them the
bank conflicts; where they do not, LDS accesses cost what conflict-free ones do, and global ones are taken as coalesced.
A workgroup's waves go to the SIMDs in turn, so a wave's number in its workgroup is taken to be its SIMD's. Compared is
the time between matrix instructions of the warm main loop: between two quantiles of a wave's matrix instructions.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from . import banks
from .addresses import lds_cycles
from .asm import Instruction, parse_instruction
from .matrix import is_matrix
from .timing import Machine950, Unit
from .trace import kind_of


@dataclass
class Recorded:
    """A kernel's recorded waves.

    instructions  by position; streams as in trace.Recorder; times [wave][k] = (issue, stall, duration) in cycles
    places        (SIMD, slot) of each wave, from the file names
    """

    name: str
    instructions: list[Instruction]
    streams: list[list[list[int]]]
    times: list[list[tuple[int, int, int]]]
    places: list[str]


def load_recorded(folder: Path, pick: str = "se*.json") -> Recorded:
    """Reads KERNEL/code.json and the chosen waves."""
    rows = json.loads((folder / "code.json").read_text())["code"]
    lines: dict[int, int] = {}
    instructions: list[Instruction] = []
    for row in rows:
        text, line = row[0], row[2]
        lines[line] = len(instructions)
        plain = text.split(";")[0].strip()
        instructions.append(parse_instruction(plain or "s_nop 0", line))
    streams, times, places = [], [], []
    for file in sorted(folder.glob(pick)):
        stream, when = [], []
        for start, _, stall, duration, line in json.loads(file.read_text())["wave"]["instructions"]:
            pc = lines[line]
            stream.append([pc, *_cost(instructions[pc])])
            when.append((start, stall, duration))
        for at, cycles in lds_cycles(instructions, stream, simd_of(file.stem)).items():
            stream[at][1] = cycles
        streams.append(stream)
        times.append(when)
        places.append(file.stem)
    return Recorded(folder.name, instructions, streams, times, places)


WORDS = {"x2": 2, "x3": 3, "x4": 4}


def _cost(i: Instruction) -> tuple[int, int]:
    """(a, b) of a stream entry for a conflict-free, coalesced access of all lanes."""
    kind = kind_of(i)
    if kind in ("lds_read", "lds_write"):
        match = re.search(r"_[bui](8|16|32|64|96|128)", i.name)
        size = int(match[1]) // 8 if match else 4
        phases = (banks.WRITE if kind == "lds_write" else banks.READ)[max(4, size)]
        two = "2_b" in i.name or "2st64" in i.name
        # neighbouring pairs: lanes lie at least two elements apart, so on each pass pairs of lanes share a bank
        paired = two and abs(i.mods.get("offset1", 0) - i.mods.get("offset0", 0)) == 1
        return len(phases.lanes) * (2 if two else 1) * (2 if paired else 1), 0
    if kind in ("direct", "load", "store"):
        words = WORDS.get(i.name[-2:], 1)
        return 4 * words, 256 * words
    return 0, 0


def measured_latency(kernel: Recorded, warm: float = 0.1) -> float | None:
    """Memory latency in cycles as this recording shows it: median, over the waits for vector memory that stalled in the
    warm part, of the time from the issue of the youngest load waited for to the end of the wait. Which cache level
    answers depends on the whole device's traffic, which one unit's trace does not tell otherwise. None if nothing
    stalled.
    """
    seen: list[float] = []
    for stream, when in zip(kernel.streams, kernel.times, strict=True):
        loads: list[float] = []
        for k, ((pc, *_), (start, stall, duration)) in enumerate(zip(stream, when, strict=True)):
            i = kernel.instructions[pc]
            kind = kind_of(i)
            if kind in ("direct", "load", "store"):
                loads.append(start + stall)
            elif kind == "wait" and "vmcnt" in i.mods:
                covered = loads[: max(0, len(loads) - i.mods["vmcnt"])]
                if covered and stall > 8 and k > warm * len(stream):
                    seen.append(start + duration - covered[-1])
                loads = loads[len(covered) :]
    return statistics.median(seen) if seen else None


@dataclass
class Comparison:
    """Cycles of the warm main loop, recorded and simulated, for each wave that had matrix instructions."""

    name: str
    recorded: list[float]
    simulated: list[float]

    @property
    def ratio(self) -> float:
        """Simulated over recorded cycles, summed over the waves."""
        return sum(self.simulated) / sum(self.recorded)


def compare(kernel: Recorded, c: Machine950 | None = None, low: float = 0.1, high: float = 0.9) -> Comparison:
    """Replays all waves of a recording on one compute unit and compares the span from quantile `low` to `high` of each
    wave's matrix instructions (or of all its instructions, if it has fewer than 16)."""
    if c is None:
        latency = measured_latency(kernel)
        c = Machine950() if latency is None else replace(Machine950(), latency=latency)
    groups: dict[str, list[int]] = {}  # waves of one slot on the SIMDs are a workgroup
    for number, place in enumerate(kernel.places):
        groups.setdefault("_".join(p for p in place.split("_") if not p.startswith("sm")), []).append(number)
    order = [n for members in groups.values() for n in members]
    begin = lambda members: min(kernel.times[n][0][0] for n in members)
    earliest = min(begin(m) for m in groups.values())
    loads, simds = [], []
    for members in groups.values():
        have = [simd_of(kernel.places[n]) for n in members]
        absent = [s for s in range(4) if s not in have]  # not recorded, but they ran: take them to be like the others
        twins = [members[k % len(members)] for k in range(len(absent))]
        loads.append(([kernel.streams[n] for n in [*members, *twins]], kernel.instructions))
        simds += have + absent
    unit = Unit(loads, c, starts=[float(begin(m) - earliest) for m in groups.values()])
    for wave, simd in zip(unit.waves, simds, strict=True):
        wave.simd = simd
    unit.run()
    place_of = {}
    at = 0
    for members, (streams, _) in zip(groups.values(), loads, strict=True):
        for k, n in enumerate(members):
            place_of[n] = at + k
        at += len(streams)
    recorded, simulated = [], []
    for number in order:
        at = place_of[number]
        stream, when = kernel.streams[number], kernel.times[number]
        marks = [k for k, x in enumerate(stream) if is_matrix(kernel.instructions[x[0]].name)]
        if len(marks) < 16:
            marks = list(range(len(stream)))
        first, last = marks[int(len(marks) * low)], marks[min(len(marks), int(len(marks) * high)) - 1]
        issued = lambda k, when=when: when[k][0] + when[k][1]
        if issued(last) > issued(first):
            recorded.append(issued(last) - issued(first))
            simulated.append(unit.times[at][last] - unit.times[at][first])
    return Comparison(kernel.name, recorded, simulated)


def simd_of(place: str) -> int:
    """SIMD number in a trace's file name, e.g. se0_sm3_sl1_wv0."""
    part = next((p for p in place.split("_") if p.startswith("sm")), "sm0")
    return int(part[2:]) % 4
