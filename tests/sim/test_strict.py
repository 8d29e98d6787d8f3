"""Nothing passes in silence: what a kernel may not rely on holds poison, modifiers without a meaning here are errors,
and code that has no end says so."""

import numpy as np
import pytest

from flykernels.sim import BadArguments, BadCodeObject, UnknownInstruction, run_on_sim

from .asm_kernel import POINTER, kernel, run, words
from .vectors import vector

STORE = "\nglobal_store_dword v1, v2, s[4:5]"


# -- what the launch does not set
SKIPPED = POINTER + "s_cmp_eq_u32 s2, 7\ns_cbranch_scc0 over\nv_mov_b32 v2, 0\nover:" + STORE


def test_registers_that_nothing_sets_are_not_zero():
    """The initialisation is on a path that is not taken: no static check sees it, but the result is wrong."""
    x = words(64, 1)
    run(SKIPPED, [x])
    assert (x != 0).all()
    run(POINTER + "v_mov_b32 v2, s20" + STORE, [x])
    assert (x != 0).all()
    a = words(64, 1)
    run(POINTER + "v_accvgpr_read_b32 v2, a3" + STORE, [a])
    assert (a != 0).all()


def test_private_memory_that_nothing_wrote_is_not_zero():
    x = words(64, 1)
    run(POINTER + "scratch_load_dword v2, off, off offset:4\ns_waitcnt vmcnt(0)" + STORE, [x], scratch=8)
    assert (x != 0).all()


# -- modifiers
@pytest.mark.parametrize(
    "line",
    [
        "v_add_co_u32_e64 v2, vcc, v0, v0 clamp",
        "v_mad_u64_u32 v[2:3], vcc, v0, v0, v[4:5] clamp",
        "v_dot2_f32_f16 v2, v0, v0, v0 neg_lo:[1,0,0] neg_hi:[0,0,0]",
        "v_dot2_f32_bf16 v2, v0, v0, v0 op_sel_hi:[0,1,1]",
        "v_dot2_f32_f16 v2, v0, v0, v0 clamp",
        "v_bitop3_b16 v2, v0, v0, v0 bitop3:0x1 op_sel:[1,0,0,0]",
        "v_mfma_f64_16x16x4_f64 v[8:15], v[2:3], v[4:5], v[8:15] neg:[1,0,0]",
        "v_mfma_f64_16x16x4_f64 v[8:15], v[2:3], v[4:5], 1.0",
        "buffer_load_dword v2, v0, s[4:7], 0 offen tfe",
        "v_add_u32 v2, v0, v0 what:1",
    ],
    ids=lambda x: x.split()[0] + " " + x.split()[-1],
)
def test_a_modifier_is_never_passed_over(line):
    with pytest.raises(UnknownInstruction, match=line.split()[0].removesuffix("_e64")):
        run(line, [words(1)])


def test_division_obeys_clamp_and_multiplier():
    """x / y clamped to [0, 1]: compilers fold the clamp into the last step."""
    one = lambda x: np.array([x], np.float32).view(np.uint32)[0]
    for end, want in (("clamp", 1.0), ("mul:2", 6.0), ("", 3.0)):
        _, got = vector(f"v_div_fixup_f32 {{d}}, {one(3.0):#x}, {one(2.0):#x}, {one(6.0):#x} {end}")
        assert (got == one(want)).all()
        _, got = vector(f"v_mov_b32 v6, 0\ns_mov_b64 vcc, 0\nv_div_fmas_f32 {{d}}, 2.0, 1.0, 1.0 {end}")
        assert (got == one(want)).all()


def test_packed_halves_take_f16_constants_and_signs():
    (a, _, _), got = vector("v_pack_b32_f16 {d}, 1.0, -{a}")
    np.testing.assert_array_equal(got, 0x3C00 | (a & 0xFFFF ^ 0x8000) << 16)
    (a, b, _), got = vector("v_pack_b32_f16 {d}, -{a}, |{b}|")
    np.testing.assert_array_equal(got, a & 0xFFFF ^ 0x8000 | (b & 0x7FFF) << 16)


@pytest.mark.parametrize(
    ("mask", "want"),
    [(0, 0), (1, 15), (0x8000000000000010, 0xF0000000000000F0), (0x0124, 0x0FFF), (2**64 - 1, 2**64 - 1)],
)
def test_whole_quads(mask, want):
    x = words(2)
    body = f"""
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_mov_b32 s6, {mask & 0xFFFFFFFF:#x}
    s_mov_b32 s7, {mask >> 32:#x}
    s_wqm_b64 s[8:9], s[6:7]
    v_mov_b32 v1, 0
    v_mov_b32 v2, s8
    v_mov_b32 v3, s9
    s_waitcnt lgkmcnt(0)
    global_store_dwordx2 v1, v[2:3], s[4:5]
    """
    run(body, [x], block=(1,)).raise_for_findings()
    assert int(x[0]) | int(x[1]) << 32 == want


# -- code and launches without an end
@pytest.mark.parametrize("body", ["s_branch out\ns_nop 0\nout:", "s_nop 0"])
def test_code_that_runs_past_its_end(body):
    with pytest.raises(BadCodeObject, match="s_endpgm is missing"):
        run_on_sim(kernel(body).replace("s_endpgm", ""), [words(1)])


def test_huge_grids():
    x = words(64)
    wide = {"grid": (1 << 20, 1 << 15, 1 << 10)}
    run(POINTER + "v_mov_b32 v2, 7" + STORE, [x], workgroups=[(5, 6, 7)], **wide).raise_for_findings()
    assert (x == 7).all()
    with pytest.raises(BadArguments, match="workgroups="):
        run("s_nop 0", [x], **wide)
    with pytest.raises(BadArguments, match="2\\^32"):
        run("s_nop 0", [x], grid=(1 << 26,), workgroups=[(0, 0, 0)])
    with pytest.raises(BadArguments, match="not in the grid"):
        run("s_nop 0", [x], workgroups=[(0, 0)])
    with pytest.raises(BadArguments, match="negative"):
        run("s_nop 0", [x], shared_bytes=-4)


@pytest.mark.parametrize(("args", "message"), [([-1], "no address"), ([1 << 64], "no address")])
def test_addresses_that_are_none(args, message):
    with pytest.raises(BadArguments, match=message):
        run("s_nop 0", args)


# -- damaged text
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        .size: 8\n", ""),
        ("        .value_kind: global_buffer\n", ""),
        ("    .name: k\n", ""),
        ("      - .offset: 0\n", "      - .offset: x\n"),
        ("kernarg_segment_size: 8", "kernarg_segment_size: 8,"),
        ("  - .args:\n", ""),
        (".amdhsa_user_sgpr_count 2", ".amdhsa_user_sgpr_count ,"),
        ("s_nop 0", "s_mov_b32 s1, 01x"),
    ],
)
def test_damaged_text(old, new):
    text = kernel("s_nop 0")
    assert old in text
    with pytest.raises((BadCodeObject, UnknownInstruction)):
        run_on_sim(text.replace(old, new), [words(1)])


@pytest.mark.parametrize(
    "line",
    ["ds_read_b32 v1", "global_load_dword v1", "v_add_u32 v1", "s_add_u32 s1", "v_mfma_f32_16x16x32_bf16 v[8:11]",
     "buffer_load_dword", "v_cmp_eq_u32", "v_cndmask_b32 v1", "s_cbranch_scc0", "s_getreg_b32 s1", "ds_swizzle_b32"],
)  # fmt: skip
def test_missing_operands(line):
    with pytest.raises(UnknownInstruction, match=line.split()[0]):
        run(line, [words(1)])
