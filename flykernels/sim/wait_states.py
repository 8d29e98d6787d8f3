"""Wait states between instructions other than matrix ones: who may touch what a first one wrote, or stores, and when.

The numbers are those of the CDNA3 ISA reference ("Manually inserted wait states") and of LLVM's hazard recogniser for
gfx940 to gfx950, tried on its release 22.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .asm import EXEC, M0, VCC, Instruction, Operand
from .operands import MODE_REGISTER
from .program import Program, keys
from .smem import sgpr_key

DPP, LANE_SWAP, READ_LANE, TRANSCENDENTAL, PART, DOT = 2, 2, 1, 1, 1, 3  # after a vector ALU's vector result
LANE_SELECT, DIV_FMAS, MEMORY, MASK = 4, 4, 5, 2  # after a vector ALU's scalar result
DPP_LANES, OTHER_LANES = 5, 4  # EXEC, written by a vector ALU: before DPP; before lane and matrix instructions
DIRECT = 1  # M0, written by the scalar ALU, before a load into LDS
SETTING = 2  # s_setreg before another access to the same hardware register
# Data of a store of more than 8 bytes, before a vector ALU overwrites them. A buffer store with a scalar offset takes
# them earlier: LLVM 22 keeps none then, its later sources one, as measured on gfx950.
STORED, STORED_SCALAR_OFFSET = 2, 1
MEMORY_PREFIX = ("buffer_", "global_", "flat_", "scratch_")
WIDE_STORES = ("_store_dwordx3", "_store_dwordx4", "_atomic_cmpswap_x2")
SLOW = tuple(f"v_{f}_f{n}" for f in ("exp", "log", "rcp", "rsq", "sqrt", "sin", "cos") for n in (16, 32))
SLOW_ALSO = ("v_rcp_iflag_f32", "v_rcp_f64", "v_rsq_f64", "v_sqrt_f64")
PACKED = ("v_pk_", "v_dot", "v_fma_mix", "v_mfma_", "v_smfmac_")  # op_sel chooses halves of sources only
LANES = frozenset(sgpr_key(EXEC + k) for k in (0, 1))
CARRY = frozenset(sgpr_key(VCC + k) for k in (0, 1))
HARDWARE_REGISTER = sgpr_key(MODE_REGISTER)
Judge = Callable[[Instruction, frozenset[int], frozenset[int]], Iterable[tuple[Iterable[int], int]]]
Rule = tuple[frozenset[int], int, Judge]  # registers to follow, the most wait states they may need, who needs them


def slow(i: Instruction) -> bool:
    """Whether the transcendental unit computes it."""
    name = i.name.removesuffix("_dpp").removesuffix("_sdwa")
    return name in SLOW or name in SLOW_ALSO


def part(i: Instruction) -> bool:
    """Whether it writes a byte or a half of its result's register at another place than the lowest."""
    if i.name.endswith("_sdwa"):
        return i.mods.get("dst_sel", "DWORD") != "DWORD"
    select = i.mods.get("op_sel", [])
    if i.name.startswith(PACKED):
        return False
    return any(select[2:] if "_pk_fp4_" in i.name else select[len(i.operands) - 1 :])


def others(program: Program, first: Instruction, written: frozenset[int]) -> Rule | None:
    """What must be followed from `first` on, a vector, scalar or memory instruction; None if nothing."""
    if first.name.startswith("s_setreg"):
        return frozenset([HARDWARE_REGISTER]), SETTING, _setting(first)
    if first.name.startswith("s_"):
        m0 = sgpr_key(M0)
        return (frozenset([m0]), DIRECT, _direct) if m0 in written else None
    if first.name.startswith(MEMORY_PREFIX):
        return _stored(program, first)
    if not first.name.startswith("v_") or not written:
        return None
    registers = program.registers
    vector, scalar = frozenset(r for r in written if r >= 0), frozenset(r for r in written if r < 0)
    of = lambda i, *positions: frozenset().union(
        *(keys(i.operands[k], i.operands[k].count, registers) for k in positions)
    )
    in_part, computed_slowly, dot = part(first), slow(first), first.name.startswith("v_dot")
    lanes = scalar & LANES if first.name.startswith("v_cmpx") else frozenset()

    def judge(i: Instruction, read: frozenset[int], then: frozenset[int]) -> Iterable[tuple[Iterable[int], int]]:
        name = i.name
        memory = name.startswith(MEMORY_PREFIX)
        if not memory and not name.startswith(("v_", "ds_")):
            return []
        found: list[tuple[Iterable[int], int]] = []
        if dot:
            same = name == first.name  # the same instruction adds to a result at once
            found.append((vector & of(i, 1, 2) if same else vector & (read | then), DOT))
        if memory:
            return [*found, (scalar & read | lanes, MEMORY)]
        if name.startswith("ds_"):
            return found
        found.append((scalar & read, MASK))
        swap, lane = name.startswith("v_permlane"), name.startswith(("v_readlane", "v_readfirstlane", "v_writelane"))
        if lanes:
            found.append((lanes if name.endswith("_dpp") else frozenset(), DPP_LANES))
            found.append((lanes if swap or lane or name.startswith("v_mfma_") else frozenset(), OTHER_LANES))
        if name in ("v_readlane_b32", "v_writelane_b32"):
            found.append((scalar & of(i, 2), LANE_SELECT))
        if name.startswith("v_div_fmas"):
            found.append((scalar & CARRY, DIV_FMAS))
        if vector:
            if name.endswith("_dpp"):
                found.append((vector & read, DPP))
            if swap:
                found.append((vector & of(i, 0, 1), LANE_SWAP))
            if name.startswith("v_read"):
                found.append((vector & of(i, 1), READ_LANE))
            if computed_slowly and not slow(i):
                found.append((vector & read, TRANSCENDENTAL))
            if in_part:
                found.append((vector & (read | then), PART))  # what overwrites it reads it for parity
        return found

    most = max(MEMORY if scalar else 0, DOT if dot else DPP if vector else 0)
    return written, most, judge


def _direct(i: Instruction, read: frozenset[int], written: frozenset[int]) -> Iterable[tuple[Iterable[int], int]]:
    """M0 before a load into LDS."""
    return [({sgpr_key(M0)}, DIRECT)] if i.mods.get("lds") or "_load_lds_" in i.name else []


def _setting(first: Instruction) -> Judge:
    """The same hardware register again, read or written. The vector ALU may use a new MODE at once."""
    register = lambda o: o.word.partition(",")[0].removesuffix(")")

    def judge(i: Instruction, read: frozenset[int], written: frozenset[int]) -> Iterable[tuple[Iterable[int], int]]:
        again = {"s_setreg_b32": 0, "s_setreg_imm32_b32": 0, "s_getreg_b32": 1}.get(i.name)
        same = again is not None and register(i.operands[again]) == register(first.operands[0])
        return [({HARDWARE_REGISTER} if same else (), SETTING)]

    return judge


def _stored(program: Program, first: Instruction) -> Rule | None:
    """Data of a wide store, which is still being read when the next instructions begin."""
    if not first.name.endswith(WIDE_STORES):
        return None
    buffer = first.name.startswith("buffer_")
    wide = [o for o in first.operands if o.kind == "v" and o.count > 2]
    data: Operand = wide[-1]
    states = STORED_SCALAR_OFFSET if buffer and first.operands[-1].kind == "s" else STORED

    def judge(i: Instruction, read: frozenset[int], written: frozenset[int]) -> Iterable[tuple[Iterable[int], int]]:
        return [(written if i.name.startswith("v_") else (), states)]

    return frozenset(keys(data, data.count, program.registers)), states, judge
