"""Static checks over the control flow: wait states between instructions, and registers that nothing sets.

The hardware does not interlock these, so compilers keep instructions (or s_nop) between. The numbers are those that
LLVM's hazard recogniser (release 22) keeps on gfx950, read off its output. A result of a matrix instruction of p passes
(4 cycles each) may be read or overwritten after p + 4 wait states (p + 3 if p is 2, p + 2 for f32 operands, 18, 19 and
11 for f64), by an accumulator input at once if it is exactly that result (2 if p is 2) and later if it overlaps it; its
accumulator input may be overwritten after p - 1; a vector ALU result may be a matrix operand or scale after 2. The
rules between other instructions are in `others`. An instruction is one wait state, s_nop n is n + 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import matrix
from .asm import EXEC, Instruction, Operand
from .findings import Collector
from .program import BRANCH, END, Program, keys, touched
from .smem import sgpr_key
from .wait_states import Judge, Rule, others

VALU_TO_MATRIX = 2
DOUBLE_READ, DOUBLE_STORED, DOUBLE_OVERWRITTEN, DOUBLE_OVERLAP, DOUBLE_FMA = 19, 18, 11, 17, 2  # after f64 16x16x4
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


def check_hazards(program: Program, entry: int, collector: Collector) -> None:
    """Reports "mfma-hazard", "wait-states" and "uninitialised-register" findings."""
    facts = [touched(i, program.registers) for i in program.code.instructions]
    has_matrix = any(matrix.is_matrix(i.name) for i in program.code.instructions)
    follow = lambda k, rule, kind: _follow(program, facts, k, rule, kind, collector)
    for k, i in enumerate(program.code.instructions):
        is_matrix, written = matrix.is_matrix(i.name), facts[k][1]
        results = frozenset(r for r in written if r >= 0)
        if is_matrix:
            for rule in _after_matrix(program, i, results):
                follow(k, rule, "mfma-hazard")
            continue
        if has_matrix and results and i.name.startswith("v_"):
            follow(k, (results, VALU_TO_MATRIX, _before_matrix(program)), "mfma-hazard")
        if found := others(program, i, written):
            follow(k, found, "wait-states")
    _uninitialised(program, entry, facts, collector)


def _registers(program: Program, o: Operand, count: int) -> frozenset[int]:
    return frozenset(keys(o, count, program.registers))


def _inputs(program: Program, i: Instruction) -> frozenset[int]:
    """Registers of a matrix instruction's A and B, and of their scales."""
    scales = frozenset().union(*(_registers(program, o, o.count) for o in i.operands[4:6]))
    return scales.union(*(_registers(program, o, count) for o, count in matrix.sources(i)))


def _accumulator(program: Program, i: Instruction) -> frozenset[int]:
    return _registers(program, i.operands[3], i.operands[3].count)


def _operands(i: Instruction) -> str:
    """f64 and f32 operands are multiplied by other units than all narrower ones."""
    last = i.name.rsplit("_", 1)[1]
    return last if last in ("f64", "f32") else "narrow"


def _after_matrix(program: Program, first: Instruction, results: frozenset[int]) -> list[Rule]:
    """Who may touch a matrix instruction's results, and its accumulator input, when."""
    passes, operands = matrix_cycles(first) // 4, _operands(first)
    done = {"narrow": passes + (4 if passes > 2 else 3), "f32": passes + 2, "f64": DOUBLE_READ}[operands]

    def overlap(i: Instruction) -> int:
        """Until a matrix instruction may add to what overlaps the results without being exactly them."""
        if operands == "narrow":
            return passes + (2 if passes > 2 or _operands(i) == "narrow" else 1)
        return 0 if _operands(i) == "narrow" else passes if operands == "f32" else DOUBLE_OVERLAP

    def judge(i: Instruction, read: frozenset[int], written: frozenset[int]) -> Iterable[Clash]:
        if matrix.is_matrix(i.name):
            c = _accumulator(program, i)  # exactly the result is forwarded
            return [(_inputs(program, i), done), (c, overlap(i) if c != results else 2 if passes == 2 else 0)]
        if operands != "f64":
            return [(read | written, done)]
        fma = results if i.name.startswith(("v_fma_f64", "v_fmac_f64")) else ()
        reading = DOUBLE_READ if i.name.startswith("v_") else DOUBLE_STORED
        return [(read, reading), (written, DOUBLE_OVERWRITTEN), (fma, DOUBLE_FMA)]

    def overwriting(i: Instruction, read: frozenset[int], written: frozenset[int]) -> Iterable[Clash]:
        return [(() if matrix.is_matrix(i.name) else written, passes - 1)]

    rules: list[Rule] = [(results, done, judge)]
    if operands == "narrow":
        rules.append((_accumulator(program, first), passes - 1, overwriting))
    return rules


def _before_matrix(program: Program) -> Judge:
    def judge(i: Instruction, read: frozenset[int], written: frozenset[int]) -> Iterable[Clash]:
        return [(_inputs(program, i) | _accumulator(program, i), VALU_TO_MATRIX)] if matrix.is_matrix(i.name) else []

    return judge


def _follow(program: Program, facts, source: int, rule: Rule, kind: str, collector: Collector) -> None:
    """Walks every path from a writer (or a reader) of registers for as long as a hazard may last."""
    registers, most, judge = rule
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
