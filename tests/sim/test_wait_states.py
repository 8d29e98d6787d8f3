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
SCALED = "v_mfma_scale_f32_16x16x128_f8f6f4 v[16:19], v[0:7], v[0:7], 0, v12, v13 op_sel_hi:[0,0,0]"
F32 = "v_mfma_f32_16x16x4_f32 {d}, v0, v4, {c}"
F64 = "v_mfma_f64_16x16x4_f64 v[8:15], v[0:1], v[4:5], 0"
CMPX = "v_cmpx_eq_u32 vcc, v2, v3"
SETREG = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3"
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
    "DPP: another source": ("v_mov_b32 v4, 1", "v_add_u32_dpp v3, v2, v4 row_shr:1 row_mask:0xf bank_mask:0xf", 2),
    "lanes of DPP": (CMPX, "v_mov_b32_dpp v3, v2 row_shr:1 row_mask:0xf bank_mask:0xf", 5),
    "lanes of a swap": (CMPX, "v_permlane32_swap_b32 v2, v3", 4),
    "lanes of a lane's write": (CMPX, "v_writelane_b32 v2, s8, 3", 4),
    "lanes of a lane's read": (CMPX, "v_readlane_b32 s8, v2, 3", 4),
    "first of the lanes": (CMPX, "v_readfirstlane_b32 s8, v2", 4),
    "lanes of a matrix": (CMPX, MFMA.format(c="0"), 4),
    "lanes of a load": (CMPX, "global_load_dword v3, v2, s[4:5]", 5),
    "slow, half of it stays": ("v_exp_f32 v2, v3", "v_cvt_pk_fp8_f32 v2, v4, v5 op_sel:[0,0,1]", 1),
    "slow, bytes of it stay": ("v_exp_f32 v2, v3", "v_cvt_scalef32_pk_fp4_f32 v2, v4, v5, v6", 1),
    "slow, a lane changes": ("v_exp_f32 v2, v3", "v_writelane_b32 v2, s8, 3", 1),
    "slow f64": ("v_rcp_f64 v[2:3], v[4:5]", "v_add_f64 v[6:7], v[2:3], v[4:5]", 1),
    "part overwritten": ("v_cvt_pk_fp8_f32 v2, v3, v4 op_sel:[0,0,1]", "v_mov_b32 v2, v5", 1),
    "upper half": ("v_cvt_scalef32_pk_fp8_f32 v2, v3, v4, v5 op_sel:[0,0,0,1]", "v_mov_b32 v6, v2", 1),
    "byte 1": ("v_cvt_scalef32_pk_fp4_f32 v2, v3, v4, v5 op_sel:[0,0,1,0]", "v_mov_b32 v6, v2", 1),
    "dot product": ("v_dot2_f32_bf16 v2, v3, v4, v5", "v_add_f32 v6, v2, v3", 3),
    "dot product stored": ("v_dot2_f32_bf16 v2, v3, v4, v5", "global_store_dword v6, v2, s[4:5]", 3),
    "dot product as factor": ("v_dot2_f32_bf16 v2, v3, v4, v5", "v_dot2_f32_bf16 v6, v2, v4, v5", 3),
    "dot product overwritten": ("v_dot2_f32_bf16 v2, v3, v4, v5", "v_mov_b32 v2, v3", 3),
    "mode twice": (SETREG, SETREG, 2),
    "mode read": (SETREG, "s_getreg_b32 s8, hwreg(HW_REG_MODE, 4, 2)", 2),
    "stored": ("global_store_dwordx4 v2, v[4:7], s[4:5]", "v_mov_b32 v5, v2", 2),
    "stored three": ("flat_store_dwordx3 v[2:3], v[4:6]", "v_mov_b32 v6, v2", 2),
    "stored to a buffer": ("buffer_store_dwordx4 v[4:7], v2, s[12:15], 0 offen", "v_mov_b32 v5, v2", 2),
    "stored, scalar offset": ("buffer_store_dwordx4 v[4:7], v2, s[12:15], s8 offen", "v_mov_b32 v5, v2", 1),
    "compared and swapped": ("global_atomic_cmpswap_x2 v2, v[4:7], s[4:5]", "v_mov_b32 v5, v2", 2),
    "stored, matrix": ("global_store_dwordx4 v2, v[8:11], s[4:5]", MFMA.format(c="0"), 2),
    "scale": ("v_mov_b32 v12, 0", SCALED, 2),
    "result as scale": (MFMA.format(c="0"), SCALED.replace("v12", "v9"), 8),
    "read": (MFMA.format(c="0"), "v_mov_b32 v2, v9", 8),
    "read, 2 passes": ("v_mfma_f32_4x4x4_16b_f16 v[8:11], v[0:1], v[4:5], 0", "v_mov_b32 v2, v9", 5),
    "read, f32": (F32.format(d="v[8:11]", c="0"), "v_mov_b32 v2, v9", 10),
    "read, f64": (F64, "v_mov_b32 v2, v9", 19),
    "stored, f64": (F64, "global_store_dword v2, v9, s[4:5]", 18),
    "overwritten, f64": (F64, "v_mov_b32 v9, v2", 11),
    "f64 beside f64": (F64, "v_fma_f64 v[2:3], v[0:1], v[0:1], v[0:1]", 2),
    "accumulator overwritten": (MFMA.format(c="v[12:15]"), "v_mov_b32 v13, v2", 3),
    "accumulator loaded": (MFMA.format(c="v[12:15]"), "ds_read_b32 v13, v2", 3),
    "accumulator at once, 2 passes": ("v_mfma_f32_4x4x4_16b_f16 v[8:11], v[0:1], v[4:5], 0",
             MFMA.format(c="v[8:11]").replace("v[8:11]", "v[16:19]", 1), 2),
    "overlap of f32": (F32.format(d="v[8:11]", c="0"), F32.format(d="v[16:19]", c="v[9:12]"), 8),
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
    matrix = "mfma" in first or ("mfma" in second and first.startswith("v_mov"))
    assert found == ["mfma-hazard" if matrix else "wait-states"]


def test_what_needs_none():
    for first, second in {
        "the same transcendental unit": ("v_exp_f32 v2, v3", "v_rcp_f32 v4, v2"),
        "the scalar ALU reads": ("v_cmp_eq_u32 vcc, v2, v3", "s_and_saveexec_b64 s[8:9], vcc"),
        "overwritten between": ("v_readfirstlane_b32 s8, v2", "s_mov_b32 s8, 0\nv_add_u32 v3, s8, v2"),
        "what a store has not": ("global_store_dwordx2 v2, v[4:5], s[4:5]", "v_mov_b32 v5, v2"),
        "LDS": ("ds_write_b128 v2, v[4:7]", "v_mov_b32 v5, v2"),
        "loaded where it was stored from": ("global_store_dwordx4 v2, v[4:7], s[4:5]", "ds_read_b32 v5, v2"),
        "the lowest half": ("v_cvt_pk_fp8_f32 v2, v3, v4", "v_mov_b32 v6, v2"),
        "the same sum": ("v_dot2_f32_bf16 v2, v3, v4, v2", "v_dot2_f32_bf16 v2, v3, v4, v2"),
        "lanes of plain instructions": (CMPX, "v_mov_b32 v2, v3"),
        "lanes of LDS": (CMPX, "ds_read_b32 v2, v3"),
        "another hardware register": (SETREG, "s_getreg_b32 s8, hwreg(HW_REG_XCC_ID)"),
        "f32's accumulator": (F32.format(d="v[8:11]", c="v[12:15]"), "v_mov_b32 v13, v2"),
        "A of a matrix instruction": (MFMA.format(c="0"), "v_mov_b32 v1, v12"),
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
