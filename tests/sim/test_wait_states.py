"""Wait states: each rule with as many as it needs, and with one less."""

import pytest

from bench.simcases import triton_cases
from flykernels.sim.asm import Instruction, Operand
from flykernels.sim.findings import Collector
from flykernels.sim.hazards import check_hazards
from flykernels.sim.load import load
from flykernels.sim.run import Simulation

from .asm_kernel import kinds, run, words

START = "\n".join(f"v_mov_b32 v{k}, 0" for k in range(16)) + "\ns_mov_b64 vcc, 0\ns_mov_b64 s[8:9], 0\ns_nop 7\n"
MFMA = "v_mfma_f32_16x16x32_bf16 v[8:11], v[0:3], v[4:7], {c}"
RULES = {
    "DPP": ("v_mov_b32 v2, 1", "v_mov_b32_dpp v3, v2 row_shr:1 row_mask:0xf bank_mask:0xf", 2),
    "lane swap": ("v_mov_b32 v2, 1", "v_permlane32_swap_b32 v2, v3", 2),
    "read lane": ("v_mov_b32 v2, 1", "v_readlane_b32 s8, v2, 3", 1),
    "first lane": ("v_mov_b32 v2, 1", "v_readfirstlane_b32 s8, v2", 1),
    "lane select": ("v_readfirstlane_b32 s8, v2", "v_readlane_b32 s9, v3, s8", 4),
    "mask": ("v_cmp_eq_u32 vcc, v2, v3", "v_cndmask_b32 v4, v2, v3, vcc", 2),
    "carry": ("v_add_co_u32 v4, vcc, v2, v3", "v_addc_co_u32 v5, vcc, v2, v3, vcc", 2),
    "scalar": ("v_readfirstlane_b32 s8, v2", "v_add_u32 v3, s8, v2", 2),
    "division": ("v_div_scale_f32 v4, vcc, v2, v3, v2", "v_div_fmas_f32 v5, v4, v3, v2", 4),
    "memory": ("v_readfirstlane_b32 s4, v2", "global_load_dword v3, v2, s[4:5]", 5),
    "slow": ("v_exp_f32 v2, v3", "v_add_f32 v4, v2, v2", 1),
    "part": ("v_add_u16_sdwa v2, v3, v4 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0 src1_sel:WORD_0",
             "v_mov_b32 v5, v2", 1),
    "direct load": ("s_mov_b32 m0, 0", "buffer_load_dword v2, s[12:15], 0 offen lds", 1),
    "accumulator": ("v_mov_b32 v8, 0", MFMA.format(c="v[8:11]"), 2),
    "overlap": (MFMA.format(c="0"), MFMA.format(c="v[9:12]").replace("v[8:11]", "v[16:19]", 1), 6),
}  # fmt: skip


def waits(first: str, second: str, states: int) -> list[str]:
    """Kinds found with so many wait states between two instructions; neither runs."""
    nops = "".join(f"s_nop {n}\n" for n in [states - 1] if n >= 0)
    body = f"s_branch out\n{START}{first}\n{nops}{second}\nout:"
    return [k for k in kinds(run(body, [words(64)], lds=512)) if k in ("wait-states", "mfma-hazard")]


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    first, second, needed = RULES[name]
    assert waits(first, second, needed) == []
    found = waits(first, second, needed - 1)
    assert found == ["mfma-hazard" if "mfma" in second else "wait-states"]


def test_what_needs_none():
    for first, second in {
        "the same transcendental unit": ("v_exp_f32 v2, v3", "v_rcp_f32 v4, v2"),
        "the scalar ALU reads": ("v_cmp_eq_u32 vcc, v2, v3", "s_and_saveexec_b64 s[8:9], vcc"),
        "overwritten between": ("v_readfirstlane_b32 s8, v2", "s_mov_b32 s8, 0\nv_add_u32 v3, s8, v2"),
        "exactly the accumulator": (MFMA.format(c="0"), MFMA.format(c="v[8:11]")),
    }.values():
        assert waits(first, second, 0) == []


@pytest.mark.parametrize(
    "make",
    [lambda: triton_cases.softmax("f32", 3, 300, 1), lambda: triton_cases.scan(3, 1000)],
    ids=["softmax", "scan"],
)
def test_compilers_leave_as_many_and_no_more(make):
    """Nothing is found in what LLVM made; with any one of its s_nop a state shorter, something is."""
    case = make()
    loaded = load(case.binary, case.entry)
    simulation = Simulation(loaded, case.arguments(), case.grid, shared_bytes=case.options.get("shared_bytes", 0))
    assert not {"wait-states", "mfma-hazard"} & set(kinds(simulation.collector))
    instructions, bound = loaded.code.instructions, simulation.program.bound
    nops = [k for k, i in enumerate(instructions) if i.name == "s_nop"]
    assert len(nops) >= 6
    for k in nops:
        old = instructions[k]
        shorter = Instruction("s_nop", (Operand("c", old.operands[0].index - 1),), {}, old.text, old.where)
        instructions[k] = bound[k].instruction = shorter
        collector = Collector("k")
        check_hazards(simulation.program, loaded.kernel.entry, collector)
        assert {"wait-states", "mfma-hazard"} & set(kinds(collector)), old
        instructions[k] = bound[k].instruction = old
