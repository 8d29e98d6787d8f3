"""Wait states between instructions other than matrix ones: which readers of a result come too early.

The numbers are those of the CDNA3 ISA reference ("Manually inserted wait states") and of LLVM's hazard recogniser for
gfx940 to gfx950. Not covered: s_setreg, v_cmpx before DPP, and stores whose data are overwritten at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .asm import M0, VCC, Instruction
from .program import Program, keys
from .smem import sgpr_key

DPP, LANE_SWAP, READ_LANE, TRANSCENDENTAL, PART = 2, 2, 1, 1, 1  # after a vector ALU's vector result
LANE_SELECT, DIV_FMAS, MEMORY, MASK = 4, 4, 5, 2  # after a vector ALU's scalar result
DIRECT = 1  # M0, written by the scalar ALU, before a load into LDS
MEMORY_PREFIX = ("buffer_", "global_", "flat_", "scratch_")
SLOW = tuple(f"v_{f}_f{n}" for f in ("exp", "log", "rcp", "rsq", "sqrt", "sin", "cos") for n in (16, 32))
SLOW_ALSO = ("v_rcp_iflag_f32",)
Judge = Callable[[Instruction, frozenset[int], frozenset[int]], Iterable[tuple[Iterable[int], int]]]


def slow(i: Instruction) -> bool:
    """Whether the transcendental unit computes it."""
    name = i.name.removesuffix("_dpp").removesuffix("_sdwa")
    return name in SLOW or name in SLOW_ALSO


def others(program: Program, first: Instruction, written: frozenset[int]) -> tuple[int, Judge]:
    """(the most wait states that a result of `first` may need, who may touch it when)."""
    if first.name.startswith("s_"):
        return DIRECT if sgpr_key(M0) in written else 0, _direct
    if not first.name.startswith("v_"):
        return 0, _direct
    registers = program.registers
    vector, scalar = frozenset(r for r in written if r >= 0), frozenset(r for r in written if r < 0)
    of = lambda i, *positions: frozenset().union(
        *(keys(i.operands[k], i.operands[k].count, registers) for k in positions)
    )
    part = first.name.endswith("_sdwa") and first.mods.get("dst_sel", "DWORD") != "DWORD"
    computed_slowly = slow(first)

    def judge(i: Instruction, read: frozenset[int], _: frozenset[int]) -> Iterable[tuple[Iterable[int], int]]:
        name = i.name
        if name.startswith(MEMORY_PREFIX):
            return [(scalar & read, MEMORY)]
        if not name.startswith("v_"):
            return []
        found: list[tuple[Iterable[int], int]] = [(scalar & read, MASK)]
        if name in ("v_readlane_b32", "v_writelane_b32"):
            found.append((scalar & of(i, 2), LANE_SELECT))
        if name.startswith("v_div_fmas"):
            found.append((scalar & {sgpr_key(VCC), sgpr_key(VCC + 1)}, DIV_FMAS))
        if vector:
            if name.endswith("_dpp"):
                found.append((vector & of(i, 1), DPP))
            if name.startswith("v_permlane"):
                found.append((vector & of(i, 0, 1), LANE_SWAP))
            if name.startswith("v_read"):
                found.append((vector & of(i, 1), READ_LANE))
            if computed_slowly and not slow(i):
                found.append((vector & read, TRANSCENDENTAL))
            if part:
                found.append((vector & read, PART))
        return found

    most = max(MEMORY if scalar else 0, DPP if vector else 0)
    return most, judge


def _direct(i: Instruction, read: frozenset[int], written: frozenset[int]) -> Iterable[tuple[Iterable[int], int]]:
    """M0 before a load into LDS."""
    return [({sgpr_key(M0)}, DIRECT)] if i.mods.get("lds") or "_load_lds_" in i.name else []
