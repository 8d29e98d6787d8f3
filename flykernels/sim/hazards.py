"""Static checks over the control flow: wait states that a matrix instruction needs, and registers that nothing sets.

The hardware does not interlock a matrix instruction's result against other readers, so compilers keep instructions (or
s_nop) between. The numbers are those that LLVM's hazard recogniser keeps on gfx950, read off its output: a result of a
matrix instruction of p passes (4 cycles each) may be read by anything but an accumulator input after p + 4 wait states,
likewise overwritten; a vector ALU result may be a matrix operand after 2. An instruction is one wait state, s_nop n is
n + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import matrix
from .asm import EXEC, Instruction
from .findings import Collector
from .program import BRANCH, END, Program, touched
from .smem import sgpr_key

AFTER_PASSES, VALU_TO_MATRIX = 4, 2
# matrix cycles per instruction (rocm-libraries, "origami" hardware table; traces of an MI350X agree where they have
# them)
CYCLES = {
    "16x16x32_bf16": 16, "16x16x32_f16": 16, "32x32x16_bf16": 32, "32x32x16_f16": 32, "16x16x16_f16": 16,
    "16x16x16_bf16": 16, "32x32x8_f16": 32, "32x32x8_bf16": 32, "16x16x64_i8": 16, "32x32x32_i8": 32,
    "16x16x32_i8": 16, "32x32x16_i8": 32, "16x16x4_f32": 32, "32x32x2_f32": 64, "16x16x4_f64": 64,
}  # fmt: skip
F8F6F4 = {  # (shape, both operands narrower than 8 bits): cycles
    ("16x16x128", False): 32, ("16x16x128", True): 16, ("32x32x64", False): 64, ("32x32x64", True): 32,
}  # fmt: skip


def matrix_cycles(i: Instruction) -> int:
    """Cycles that one matrix instruction keeps its SIMD's matrix unit busy."""
    name = i.name.removeprefix("v_mfma_").removeprefix("scale_").split("_", 1)[1]
    if name.endswith("_f8f6f4"):
        narrow = i.mods.get("cbsz", 0) >= 2 and i.mods.get("blgp", 0) >= 2
        return F8F6F4[name.split("_")[0], narrow]
    if name in CYCLES:
        return CYCLES[name]
    if "fp8" in name or "bf8" in name:
        return 16 if name.startswith("16x16") else 32
    if name.startswith("4x4"):
        return 8
    return 64 if name.startswith("32x32") else 32


@dataclass
class _Need:
    """Registers that may not be touched until so many wait states have passed."""

    registers: frozenset[int]
    states: int
    source: int
    matrix: bool


def check_hazards(program: Program, entry: int, collector: Collector) -> None:
    """Reports "mfma-hazard" and "uninitialised-register" findings."""
    instructions = program.code.instructions
    facts = [touched(i, program.registers) for i in instructions]
    _matrix_hazards(program, facts, collector)
    _uninitialised(program, entry, facts, collector)


def _inputs(program: Program, i: Instruction) -> set[int]:
    """Registers of a matrix instruction's A and B."""
    found: set[int] = set()
    for o, count in matrix.sources(i):
        if o.kind == "v":
            first = program.registers.index(o.index)
            found.update(range(first, first + count))
    return found


def _matrix_hazards(program: Program, facts, collector: Collector) -> None:
    instructions = program.code.instructions
    has_matrix = any(matrix.is_matrix(i.name) for i in instructions)
    if not has_matrix:
        return
    for k, i in enumerate(instructions):
        is_matrix = matrix.is_matrix(i.name)
        if not (is_matrix or i.name.startswith("v_")):
            continue
        written = frozenset(r for r in facts[k][1] if r >= 0)
        if not written:
            continue
        states = matrix_cycles(i) // 4 + AFTER_PASSES if is_matrix else VALU_TO_MATRIX
        _follow(program, facts, _Need(written, states, k, is_matrix), k + 1, collector)


def _follow(program: Program, facts, need: _Need, start: int, collector: Collector) -> None:
    """Walks every path from a writer for as long as its hazard lasts."""
    todo = [(start, 0, need.registers)]
    bound = program.bound
    while todo:
        at, passed, registers = todo.pop()
        while passed < need.states and at < len(bound) and registers:
            i = bound[at].instruction
            read, written = facts[at]
            if matrix.is_matrix(i.name):
                clash = registers & _inputs(program, i)  # the accumulator is forwarded
            elif need.matrix:
                clash = registers & (read | written)
            else:
                clash = frozenset()
            if clash:
                first = bound[need.source].instruction
                names = ", ".join(program.registers.name(r) for r in sorted(clash)[:4])
                collector.add(
                    "mfma-hazard",
                    f"touches {names} {passed} wait states after {first.where}: {first.text}; {need.states} needed: "
                    f"add s_nop {need.states - passed - 1}",
                    i, at, need.source,
                )  # fmt: skip
                break
            registers = registers - written
            passed += i.operands[0].index + 1 if i.name == "s_nop" else 1
            if bound[at].kind == END:
                break
            if bound[at].kind == BRANCH:
                if bound[at].taken is not None:
                    todo.append((at + 1, passed, registers))
                at = bound[at].target
            else:
                at += 1


# -- registers that are read before anything on any path has set them
def _uninitialised(program: Program, entry: int, facts, collector: Collector) -> None:
    bound = program.bound
    kernel_sgprs = range(EXEC + 2)  # launch state: which of the low ones are set depends on the descriptor
    bit = lambda r: 1 << (2 * r if r >= 0 else -2 * r - 1)
    mask = lambda rs: sum(bit(r) for r in rs)
    starts = mask([0, *(sgpr_key(r) for r in kernel_sgprs)])
    reads = [mask(r) for r, _ in facts]
    writes = [mask(w) for _, w in facts]
    known = [0] * len(bound)
    seen = [False] * len(bound)
    todo = [(entry, starts)]
    while todo:
        at, have = todo.pop()
        while at < len(bound):
            merged = known[at] | have
            if seen[at] and merged == known[at]:
                break
            known[at], seen[at] = merged, True
            have = merged | writes[at]
            b = bound[at]
            if b.kind == END:
                break
            if b.kind == BRANCH:
                if b.taken is not None:
                    todo.append((at + 1, have))
                at = b.target
            else:
                at += 1
    partial = ("_dpp", "_sdwa", "_d16", "mixlo", "mixhi", "v_writelane", "v_cvt_pk_fp8", "v_cvt_pk_bf8", "scalef32_pk")
    for at, b in enumerate(bound):
        missing = reads[at] & ~known[at] if seen[at] else 0
        if not missing or any(p in b.instruction.name for p in partial):
            continue
        names = [program.registers.name(r) for r in sorted(facts[at][0]) if bit(r) & missing]
        collector.add(
            "uninitialised-register",
            f"reads {', '.join(names[:4])}, which no instruction before it sets",
            b.instruction, at,
        )  # fmt: skip
