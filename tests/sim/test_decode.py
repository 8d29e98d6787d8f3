"""The decoder prints what the assembler reads back into the same bytes."""

import io
import re

import pytest
from elftools.elf.elffile import ELFFile
from triton.backends.amd.compiler import assemble_amdgcn

from bench.simcases import triton_cases
from flykernels.sim.decode import Decoder, table
from flykernels.sim.elf import read
from flykernels.sim.errors import BadCodeObject, UnknownInstruction

HEAD = '.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n.text\n'


def assemble(lines: list[str]) -> bytes:
    made = assemble_amdgcn(HEAD + "\n".join(lines) + "\n", "gfx950", "")
    return ELFFile(io.BytesIO(made)).get_section_by_name(".text").data()


def numeric_branch(text: str, at: int) -> str:
    m = re.match(r"(s_c?branch\w*) L(-?\d+)$", text)
    return f"{m[1]} {(int(m[2]) - at - 4) // 4 & 0xFFFF}" if m else text


@pytest.mark.parametrize(
    "case",
    [
        lambda: triton_cases.matmul("bf16", 256, 256, 192, (256, 256, 64), 8),
        lambda: triton_cases.matmul_scaled("e2m1", 128, 128, 512, (128, 128, 256), 4),
        lambda: triton_cases.softmax("f32", 3, 300, 1),
        lambda: triton_cases.reduce_atomic(5000),
    ],
    ids=["matmul", "mxfp4", "softmax", "atomics"],
)
def test_kernels_come_back(case):
    binary = case().binary
    code, _, _ = read(binary)
    section = ELFFile(io.BytesIO(binary)).get_section_by_name(".text")
    raw, base = section.data(), section["sh_addr"]
    decoder, lines, want = Decoder(raw), [], b""
    for i in code.instructions:
        at = i.address - base
        lines.append(numeric_branch(i.text, at))
        want += raw[at : at + decoder.line(at)[1]]
    assert assemble(lines)[: len(want)] == want


# One of each operand form that the kernels above need not have.
FORMS = """
s_load_dwordx16 s[8:23], s[0:1], 0x40
s_load_dword s5, s[0:1], s7
s_buffer_load_dwordx4 s[8:11], s[4:7], 0x10
s_getreg_b32 s5, hwreg(HW_REG_XCC_ID)
s_cmpk_lg_u32 s5, 0x8000
s_addk_i32 s5, 0x8000
s_mov_b64 exec, -1
s_and_b64 s[4:5], vcc, s[6:7]
s_mul_hi_u32 s4, s5, 0x12345678
v_add_f32_e32 v1, 0.15915494, v2
v_add_f32_e64 v1, -v2, |v3| mul:2
v_fma_f32 v1, -|v2|, s3, 4.0 clamp
v_fma_f16 v1, v2, v3, v4 op_sel:[1,0,1,1]
v_add_u16_sdwa v1, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:WORD_1
v_cmp_lt_i32_sdwa s[4:5], sext(v1), v2 src0_sel:BYTE_1 src1_sel:DWORD
v_mov_b32_dpp v1, v2 row_bcast:31 row_mask:0xc bank_mask:0xf
v_add_f32_dpp v1, -v2, |v3| row_shr:3 row_mask:0xf bank_mask:0xf bound_ctrl:1
v_max_f32_dpp v1, v2, v3 quad_perm:[3,1,2,0] row_mask:0xf bank_mask:0x5
v_bitop3_b32 v1, v2, s3, v4 bitop3:0x6c
v_pk_fma_f32 v[2:3], v[4:5], v[6:7], v[8:9] op_sel_hi:[0,1,1] neg_lo:[1,0,0]
v_pk_add_f16 v1, v2, 1.0 op_sel_hi:[1,0]
v_fma_mixlo_f16 v1, v2, v3, -v4 op_sel:[1,0,0] op_sel_hi:[1,0,1]
v_mad_u64_u32 v[2:3], s[4:5], v6, s7, v[8:9]
v_div_scale_f32 v1, vcc, v2, v3, v2
v_div_fmas_f32 v1, v2, v3, v4
v_cndmask_b32_e64 v1, 0, 1, s[4:5]
v_readlane_b32 s5, v2, s6
v_writelane_b32 v1, s2, 7
v_cvt_pk_fp8_f32 v1, v2, v3 op_sel:[0,0,1]
v_cvt_scalef32_pk_fp4_f32 v1, v2, v3, v4 op_sel:[0,0,1,1]
v_accvgpr_write_b32 a3, v1
v_accvgpr_read_b32 v1, a3
v_accvgpr_mov_b32 a1, a2
v_mfma_f32_32x32x16_bf16 a[0:15], v[0:3], a[4:7], a[0:15]
v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], 0
v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:17], v[0:3] blgp:2
v_mfma_scale_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:27], v[0:15], v28, v29 op_sel:[0,1,0] op_sel_hi:[1,0,0] blgp:4
v_permlane32_swap_b32_e32 v1, v2
ds_read2st64_b32 v[2:3], v1 offset0:1 offset1:2
ds_read_b64_tr_b16 v[2:3], v1 offset:1024
ds_write_b96 v1, v[2:4] offset:16
ds_add_rtn_u32 v1, v2, v3
ds_swizzle_b32 v1, v2 offset:swizzle(SWAP,16)
global_load_dwordx4 v[4:7], v[2:3], off offset:-64
global_load_dword v1, v2, s[4:5] sc0 sc1
global_store_dwordx2 v1, v[2:3], s[4:5] offset:8
global_atomic_add v1, v2, v3, s[4:5] sc0
global_atomic_pk_add_bf16 v[2:3], v4, off
global_load_lds_dwordx4 v[2:3], off offset:16
flat_load_dword v1, v[2:3]
scratch_store_dword off, v1, s3 offset:4
scratch_load_dwordx2 v[2:3], v1, off
buffer_load_dwordx4 v1, s[4:7], s9 offen offset:64 lds
buffer_load_short_d16_hi v1, off, s[4:7], 0
buffer_store_dwordx3 a[2:4], v1, s[4:7], 0 idxen
buffer_atomic_add_f32 v1, v2, s[4:7], 0 offen
s_waitcnt vmcnt(17) lgkmcnt(3)
""".strip().splitlines()


@pytest.mark.parametrize("line", FORMS, ids=lambda x: x.split()[0])
def test_forms_come_back(line):
    raw = assemble([line])
    text, size = Decoder(raw + bytes(16)).line(0)
    assert assemble([text])[:size] == raw[:size]


def test_unknown_bytes():
    with pytest.raises(UnknownInstruction, match="no gfx950 encoding"):
        Decoder(b"\xff\xff\xff\xff" * 4).line(0)
    with pytest.raises(UnknownInstruction, match="has no opcode"):
        Decoder((0x7F << 25 >> 25 | 0b0111111 << 25 | 255 << 9).to_bytes(4, "little")).line(0)
    with pytest.raises(BadCodeObject, match="ends within"):
        Decoder(b"\x00\x00").line(0)


def test_table_has_the_prototypes_mnemonics():
    names = {name.removesuffix("_e32").removesuffix("_e64") for name, _ in table().values()}
    for name in ("v_bitop3_b32", "v_permlane16_swap_b32", "ds_read_b64_tr_b16", "buffer_load_dwordx4", "s_barrier"):
        assert name in names
