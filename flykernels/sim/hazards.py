"""Static checks over the control flow: wait states between instructions, and registers that nothing sets.

The hardware does not interlock these, so compilers keep instructions (or s_nop) between. The numbers are those that
LLVM's hazard recogniser keeps on gfx950, read off its output: a result of a matrix instruction of p passes (4 cycles
each) may be read or overwritten after p + 4 wait states, by an accumulator input at once if it is exactly that result
and after p + 2 if it overlaps it; a vector ALU result may be a matrix operand after 2. The rules between other
instructions are in `others`. An instruction is one wait state, s_nop n is n + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import matrix
from .asm import EXEC, Instruction, Operand
from .findings import Collector
from .program import BRANCH, END, Program, keys, touched
from .smem import sgpr_key
from .wait_states import others

AFTER_PASSES, AFTER_OVERLAP, VALU_TO_MATRIX = 4, 2, 2
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


Clash = tuple[Iterable[int], int]  # registers, and the wait states that they need
Judge = Callable[[Instruction, frozenset[int], frozenset[int]], Iterable[Clash]]  # of (instruction, read, written)


def check_hazards(program: Program, entry: int, collector: Collector) -> None:
    """Reports "mfma-hazard", "wait-states" and "uninitialised-register" findings."""
    facts = [touched(i, program.registers) for i in program.code.instructions]
    has_matrix = any(matrix.is_matrix(i.name) for i in program.code.instructions)
    for k, i in enumerate(program.code.instructions):
        is_matrix, written = matrix.is_matrix(i.name), facts[k][1]
        results = frozenset(r for r in written if r >= 0)
        if has_matrix and results and i.name.startswith("v_"):
            judge = _after_matrix(program, i, results) if is_matrix else _before_matrix(program)
            most = matrix_cycles(i) // 4 + AFTER_PASSES if is_matrix else VALU_TO_MATRIX
            _follow(program, facts, k, results, most, judge, "mfma-hazard", collector)
        if written and not is_matrix:
            _follow(program, facts, k, written, *others(program, i, written), "wait-states", collector)
    _uninitialised(program, entry, facts, collector)


def _registers(program: Program, o: Operand, count: int) -> frozenset[int]:
    return frozenset(keys(o, count, program.registers))


def _inputs(program: Program, i: Instruction) -> frozenset[int]:
    """Registers of a matrix instruction's A and B."""
    return frozenset().union(*(_registers(program, o, count) for o, count in matrix.sources(i)))


def _accumulator(program: Program, i: Instruction) -> frozenset[int]:
    return _registers(program, i.operands[3], i.operands[3].count)


def _after_matrix(program: Program, first: Instruction, results: frozenset[int]) -> Judge:
    """Who may touch a matrix instruction's results when."""
    passes = matrix_cycles(first) // 4

    def judge(i: Instruction, read: frozenset[int], written: frozenset[int]) -> Iterable[Clash]:
        if not matrix.is_matrix(i.name):
            return [(read | written, passes + AFTER_PASSES)]
        c = _accumulator(program, i)  # exactly the result is forwarded
        return [(_inputs(program, i), passes + AFTER_PASSES), (c if c != results else (), passes + AFTER_OVERLAP)]

    return judge


def _before_matrix(program: Program) -> Judge:
    def judge(i: Instruction, read: frozenset[int], written: frozenset[int]) -> Iterable[Clash]:
        return [(_inputs(program, i) | _accumulator(program, i), VALU_TO_MATRIX)] if matrix.is_matrix(i.name) else []

    return judge


def _follow(
    program: Program, facts, source: int, registers: frozenset[int], most: int, judge: Judge, kind: str,
    collector: Collector,
) -> None:  # fmt: skip
    """Walks every path from a writer of registers for as long as a hazard may last: `most` wait states."""
    todo = [(source + 1, 0, registers)]
    bound = program.bound
    while todo:
        at, passed, live = todo.pop()
        while passed < most and at < len(bound) and live:
            i = bound[at].instruction
            read, written = facts[at]
            found = [(live & frozenset(r), states) for r, states in judge(i, read, written) if passed < states]
            if clash := next(((r, states) for r, states in found if r), None):
                first = bound[source].instruction
                names = ", ".join(program.registers.name(r) for r in sorted(clash[0])[:4])
                collector.add(
                    kind,
                    f"touches {names} {passed} wait states after {first.where}: {first.text}; {clash[1]} needed: "
                    f"add s_nop {clash[1] - passed - 1}",
                    i, at, source,
                )  # fmt: skip
                break
            live = live - written
            passed += i.operands[0].index + 1 if i.name == "s_nop" else 1
            if bound[at].kind == END:
                break
            if bound[at].kind == BRANCH:
                if bound[at].taken is not None:
                    todo.append((at + 1, passed, live))
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
