"""Records what one workgroup does while it is simulated: each wave's instructions, with what they cost the memory
pipes.

Used by the counters, the timing model and the timeline.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from . import banks
from .asm import Instruction
from .hazards import matrix_cycles
from .lds import store_size
from .matrix import is_matrix
from .state import Group

SEGMENT, LINE = 64, 128  # bytes: what the L1 moves a clock, and an L2 line (CDNA3 ISA; rocm-origami for gfx950)
_TRANSCENDENTAL = re.compile(r"v_(rcp|rsq|exp|log|sqrt|sin|cos)_")


def kind_of(i: Instruction) -> str:
    """The pipe an instruction goes to: mfma, valu, trans, salu, smem, lds_read, lds_write, direct, load, store, wait,
    barrier, branch, nop, prio, end."""
    n = i.name
    if is_matrix(n):
        return "mfma"
    fixed = {"s_barrier": "barrier", "s_waitcnt": "wait", "s_nop": "nop", "s_sleep": "nop", "s_setprio": "prio"}
    if n in fixed:
        return fixed[n]
    if n.startswith("s_endpgm"):
        return "end"
    if n.startswith(("s_branch", "s_cbranch")):
        return "branch"
    if n.startswith("ds_"):
        return "lds_write" if store_size(i) else "lds_read"
    if n.startswith(("s_load", "s_buffer_load")):
        return "smem"
    if n.startswith(("buffer_", "global_", "flat_", "scratch_")):
        if i.mods.get("lds") or "_load_lds_" in n:
            return "direct"
        if "_load" in n:
            return "load"
        return "nop" if n.startswith(("buffer_inv", "buffer_wb")) else "store"
    if n.startswith("s_"):
        return "salu"
    return "trans" if _TRANSCENDENTAL.match(n) else "valu"


@dataclass
class SiteStats:
    """What one instruction cost over the run, all waves together."""

    accesses: int = 0  # wave accesses
    cycles: int = 0  # LDS cycles
    ideal: int = 0  # LDS cycles without conflicts
    bytes: int = 0  # bytes asked for by lanes
    segments: int = 0  # 64-byte segments touched
    lines: int = 0  # 128-byte lines touched


@dataclass
class Recorder:
    """Pass as `trace=` to run_on_sim, with one workgroup.

    streams  for each wave the list of [instruction index, a, b]: for LDS a is its cycles; for memory a is 64-byte
             segments
             and b bytes of 128-byte lines
    """

    streams: dict[int, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    sites: dict[int, SiteStats] = field(default_factory=lambda: defaultdict(SiteStats))
    instructions: list[Instruction] = field(default_factory=list)
    _known: dict = field(default_factory=dict)

    def step(self, g: Group, pc: int) -> None:
        for w in g.waves.tolist():
            self.streams[w].append([pc, 0, 0])

    def lds(self, g: Group, i: Instruction, at: np.ndarray, size: int, mask: np.ndarray | None) -> None:
        write, site = bool(store_size(i)), self.sites[g.pc]
        for row, w in enumerate(g.waves.tolist()):
            lanes = None if mask is None else mask[row]
            key = (write, size, at[row].tobytes(), None if lanes is None else lanes.tobytes())
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = banks.cycles(write, size, at[row], lanes)
            self.streams[w][-1][1] += found[0]
            site.accesses += 1
            site.cycles += found[0]
            site.ideal += found[1]

    def memory(self, g: Group, i: Instruction, address, mask, size: int, direct: bool = False) -> None:
        site = self.sites[g.pc]
        for row, w in enumerate(g.waves.tolist()):
            active = address[row][mask[row]]
            site.accesses += 1
            if active.size == 0:
                continue
            last = active + size - 1
            segments = np.unique(np.concatenate([active // SEGMENT, last // SEGMENT])).size
            lines = np.unique(np.concatenate([active // LINE, last // LINE])).size
            self.streams[w][-1][1:] = [segments, LINE * lines]
            site.bytes += size * active.size
            site.segments += segments
            site.lines += lines

    def waves(self) -> list[list[list[int]]]:
        """The streams in wave order."""
        return [self.streams[w] for w in sorted(self.streams)]

    def matrix_cycles(self) -> int:
        """Matrix-unit cycles of all waves."""
        total = 0
        for stream in self.streams.values():
            for pc, _, _ in stream:
                i = self.instructions[pc]
                if is_matrix(i.name):
                    total += matrix_cycles(i)
        return total
