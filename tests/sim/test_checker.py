"""What the checker must say, and must not say: one small kernel a finding."""

import numpy as np
import pytest

from flykernels.sim import FindingsError, UnknownInstruction, Waiver, run_on_sim

from .asm_kernel import POINTER, kernel, kinds, run, words


def one(result, kind):
    """The only finding, of this kind."""
    assert kinds(result) == [kind], [str(f) for f in result.findings]
    return result.findings[0]


# -- waits
def test_clean_copy_has_no_finding():
    x, y = np.arange(64, dtype=np.uint32), words(64)
    body = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[4:5]
    s_waitcnt vmcnt(0)
    global_store_dword v1, v2, s[6:7]
    """
    result = run(body, [x, y], arguments="pp")
    assert result.findings == [] and (x == y).all()
    assert result.counters.instructions == 7 and result.counters.by_name["s_waitcnt"] == 2


@pytest.mark.parametrize(
    ("use", "named"),
    [("v_add_u32 v3, 1, v2", "v2"), ("v_mov_b32 v2, 0", "v2"), ("global_load_dword v2, v1, s[4:5]", "v2")],
    ids=["read", "overwritten", "loaded again"],
)
def test_register_in_flight(use, named):
    body = POINTER + f"global_load_dword v2, v1, s[4:5]\n{use}\ns_waitcnt vmcnt(0)"
    f = one(run(body, [words(64)]), "register-in-flight")
    assert named in f.message and "global_load_dword" in f.message and f.waves == (0,)


def test_results_are_poison_until_waited_for():
    x, y = np.arange(1, 65, dtype=np.uint32), words(64)
    body = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[4:5]
    global_store_dword v1, v2, s[6:7]
    """
    run(body, [x, y], arguments="pp", check=False)
    assert (y != x).all()


def test_counted_waits_retire_in_order():
    body = (
        POINTER
        + """
    global_load_dword v2, v1, s[4:5]
    global_load_dword v3, v1, s[4:5]
    s_waitcnt vmcnt(1)
    v_mov_b32 v4, v2
    """
    )
    assert run(body, [words(64)]).ok
    f = one(run(body + "v_mov_b32 v5, v3", [words(64)]), "register-in-flight")
    assert "v3" in f.message


def test_scalar_loads_are_waited_for_by_zero_only():
    body = "s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s6, s4"
    f = one(run(body, [words(1)]), "scalar-load-wait")
    assert "s4" in f.message and "lgkmcnt(0)" in f.message


# -- LDS
STORE = "v_lshlrev_b32 v1, 2, v0\nv_mov_b32 v2, v0\nds_write_b32 v1, v2\n"
ACROSS = "v_xor_b32 v3, 0x100, v1\nds_read_b32 v4, v3\ns_waitcnt lgkmcnt(0)\n"  # what the other wave wrote


def test_race_names_waves_instructions_and_range():
    f = one(run(STORE + "s_waitcnt lgkmcnt(0)\n" + ACROSS, [words(1)], waves=2, lds=512), "lds-race")
    assert "wave" in f.message and "ds_write_b32 v1, v2" in f.message and "read after write" in f.message
    assert "LDS bytes 256 to 511" in f.message or "LDS bytes 0 to 255" in f.message
    assert f.instruction == "ds_read_b32 v4, v3" and "ds_write_b32" in f.other and len(f.waves) == 2


@pytest.mark.parametrize(
    ("between", "ok"),
    [("s_waitcnt lgkmcnt(0)\ns_barrier\n", True), ("s_barrier\ns_waitcnt lgkmcnt(0)\n", False), ("s_barrier\n", False)],
    ids=["wait, barrier", "barrier, wait", "no wait"],
)
def test_a_barrier_orders_waves_and_not_memory(between, ok):
    result = run(STORE + between + ACROSS, [words(1)], waves=2, lds=512)
    assert result.ok is ok and (ok or "lds-race" in kinds(result))


def test_write_after_read_and_write_after_write():
    again = STORE + "s_waitcnt lgkmcnt(0)\ns_barrier\n" + ACROSS.replace("s_waitcnt lgkmcnt(0)\n", "")
    late = run(again + "ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)", [words(1)], waves=2, lds=512)
    assert "write after read" in one(late, "lds-race").message
    clash = "v_and_b32 v1, 0xfc, v1\nds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)"
    both = run("v_lshlrev_b32 v1, 2, v0\n" + clash, [words(1)], waves=2, lds=512)
    assert "write after write" in one(both, "lds-race").message


STAGGERED = """
v_readfirstlane_b32 s8, v0
s_cmp_lt_u32 s8, 64
s_cbranch_scc1 in_step
{extra}
in_step:
v_lshlrev_b32 v1, 2, v0
v_mov_b32 v2, v0
ds_write_b32 v1, v2
s_waitcnt lgkmcnt(0)
s_barrier
{between}
v_xor_b32 v3, 0x100, v1
ds_read_b32 v4, v3
s_waitcnt lgkmcnt(0)
s_cbranch_scc0 out
{extra}
out:
"""


def test_staggered_waves_are_judged_by_their_own_barriers():
    """With one wave a barrier behind, a wait must come one barrier earlier still: what is safe in step is then a
    race."""
    go = lambda **parts: run(STAGGERED.format(**parts), [words(1)], waves=2, lds=512)
    assert go(extra="s_nop 0", between="").ok
    result = go(extra="s_barrier", between="")
    assert kinds(result) == ["lds-race"] and result.findings[0].waves == (0, 1)
    assert go(extra="s_barrier", between="s_barrier").ok


def test_neighbouring_bytes_are_no_race():
    body = "v_lshlrev_b32 v2, 1, v0\nv_readfirstlane_b32 s8, v0\ns_cmp_lg_u32 s8, 0\ns_cselect_b32 s9, 1, 0\n"
    body += "v_and_b32 v2, 0x7f, v2\nv_add_u32 v2, s9, v2\nds_write_b8 v2, v0\ns_waitcnt lgkmcnt(0)"
    assert run(body, [words(1)], waves=2, lds=512).findings == []


DIRECT = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 4, v0
s_mov_b32 m0, 0
s_mov_b32 s6, 0x400
s_mov_b32 s7, 0x27000
s_waitcnt lgkmcnt(0)
buffer_load_dwordx4 v1, s[4:7], 0 offen lds
"""


def test_direct_load_to_lds():
    x, y = np.arange(256, dtype=np.uint32), words(256)
    read = "ds_read_b128 v[4:7], v1\ns_waitcnt lgkmcnt(0)\n"
    store = "s_load_dwordx2 s[8:9], s[0:1], 0x8\ns_waitcnt lgkmcnt(0)\nglobal_store_dwordx4 v1, v[4:7], s[8:9]"
    body = DIRECT + "s_waitcnt vmcnt(0)\n" + read + store
    assert run(body, [x, y], arguments="pp", lds=1024).findings == []
    np.testing.assert_array_equal(x, y)
    early = run(DIRECT + read + store, [x, words(256)], arguments="pp", lds=1024)
    assert "still" in early.findings[0].message or early.findings[0].kind == "lds-in-flight"
    over = run(DIRECT.replace("m0, 0", "m0, 0x100") + "s_waitcnt vmcnt(0)", [x], lds=1024)
    assert kinds(over) == ["lds-bounds"]


def test_lds_bounds_alignment_and_uninitialised():
    assert one(run("v_mov_b32 v1, 0x200\nds_write_b32 v1, v0", [words(1)], lds=512), "lds-bounds")
    f = one(run("v_mov_b32 v1, 2\nv_mov_b32 v2, 0\nds_write_b32 v1, v2", [words(1)], lds=512), "misaligned")
    assert "0x2" in f.message
    body = "v_lshlrev_b32 v1, 2, v0\nds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)"
    assert one(run(body, [words(1)], lds=512), "uninitialised-lds")


def test_lds_addresses_are_32_bit_sums():
    """A base below 0 whose offset brings it back lies inside: LLVM folds constants so (usableDSOffset, gfx7 on)."""
    body = "v_lshlrev_b32 v1, 2, v0\nv_add_u32 v2, -64, v1\nds_write_b32 v2, v1 offset:64\ns_waitcnt lgkmcnt(0)"
    assert run(body, [words(1)], lds=512).findings == []
    assert one(run(body.replace("offset:64", "offset:32"), [words(1)], lds=512), "lds-bounds")


def test_exec_must_be_full():
    body = "v_lshlrev_b32 v1, 3, v0\nv_mov_b32 v2, 0\nv_mov_b32 v3, 0\nds_write_b64 v1, v[2:3]\ns_waitcnt lgkmcnt(0)\n"
    body += "s_mov_b64 exec, 0xff\nds_read_b64_tr_b16 v[4:5], v1\ns_waitcnt lgkmcnt(0)"
    assert one(run(body, [words(1)], lds=512), "exec-not-full")
    swap = "v_mov_b32 v1, 0\nv_mov_b32 v2, 0\ns_nop 0\ns_mov_b64 exec, 0xff\nv_permlane32_swap_b32 v1, v2"
    assert one(run(swap, [words(1)]), "exec-not-full")


# -- memory
@pytest.mark.parametrize("offset", [-4, 256])
def test_guard_zones(offset):
    load = POINTER + f"global_load_dword v2, v1, s[4:5] offset:{offset}\ns_waitcnt vmcnt(0)"
    f = one(run(load, [words(64)]), "out-of-bounds")
    assert "argument 0" in f.message and "1 lanes" in f.message if offset < 0 else "64 lanes" in f.message
    x = words(64)
    result = run(POINTER + f"v_mov_b32 v2, 7\nglobal_store_dword v1, v2, s[4:5] offset:{offset}", [x])
    assert one(result, "out-of-bounds")


def test_addresses_of_nothing():
    f = one(run("v_mov_b32 v2, 0x1000\nv_mov_b32 v3, 0\nglobal_load_dword v4, v[2:3], off\ns_waitcnt vmcnt(0)",
                [words(1)]), "out-of-bounds")  # fmt: skip
    assert "no argument" in f.message


def test_buffers_are_bounded():
    x, y = np.arange(1, 65, dtype=np.uint32), words(64, 9)
    body = """
    s_load_dwordx4 s[8:11], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    s_mov_b64 s[4:5], s[8:9]
    s_mov_b32 s6, 100
    s_mov_b32 s7, 0x27000
    buffer_load_dword v2, v1, s[4:7], 0 offen
    s_waitcnt vmcnt(0)
    global_store_dword v1, v2, s[10:11]
    """
    assert run(body, [x, y], arguments="pp").findings == []
    np.testing.assert_array_equal(y, np.where(np.arange(64) < 25, x, 0))
    by_scalar = body.replace("v1, s[4:7], 0 offen", "v1, s[4:7], s12 offen").replace(
        "s_mov_b32 s6", "s_mov_b32 s12, 64\ns_mov_b32 s6"
    )
    assert kinds(run(by_scalar, [x, y], arguments="pp")) == ["bounds-ambiguous"]


def test_misaligned_memory():
    f = one(run(POINTER + "global_load_dword v2, v1, s[4:5] offset:2\ns_waitcnt vmcnt(0)",
                [words(65)]), "misaligned")  # fmt: skip
    assert "not a multiple of 4" in f.message


def test_outputs():
    x, y = words(64, 1), words(64)
    body = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_mov_b32 v2, 5
    s_waitcnt lgkmcnt(0)
    """
    stray = run(body + "global_store_dword v1, v2, s[4:5]", [x, y], arguments="pp", outputs=[1])
    assert "argument 0" in one(stray, "write-outside-output").message and (x == 1).all()
    early = body + "global_load_dword v3, v1, s[6:7]\ns_waitcnt vmcnt(0)\n"
    assert one(run(early, [x, y], arguments="pp", outputs=[1]), "uninitialised-memory")
    late = (
        body
        + "global_store_dword v1, v2, s[6:7]\ns_waitcnt vmcnt(0)\nglobal_load_dword v3, v1, s[6:7]\ns_waitcnt vmcnt(0)"
    )
    assert run(late, [x, y], arguments="pp", outputs=[1]).ok


def test_strided_views_have_guards_between_elements():
    store = np.zeros((8, 16), np.uint32)
    view = store[:, :8]
    body = POINTER + "v_mov_b32 v2, 3\nglobal_store_dword v1, v2, s[4:5]"
    f = one(run(body, [view]), "out-of-bounds")
    assert "between its elements" in f.message
    fit = "v_lshrrev_b32 v3, 3, v0\nv_and_b32 v4, 7, v0\nv_lshl_add_u32 v1, v3, 4, v4\nv_lshlrev_b32 v1, 2, v1\n"
    assert run(POINTER + fit + "v_mov_b32 v2, 3\nglobal_store_dword v1, v2, s[4:5]", [view]).ok
    assert (view == 3).all() and (store[:, 8:] == 0).all()


# -- matrix hazards, registers, barriers
MFMA = "v_mfma_f32_16x16x32_bf16 v[8:11], v[0:3], v[4:7], 0\n"
ZERO = "\n".join(f"v_mov_b32 v{k}, 0" for k in range(8)) + "\ns_nop 1\n"


def test_matrix_hazards():
    assert one(run(ZERO + MFMA + "v_mov_b32 v12, v8", [words(1)]), "mfma-hazard")
    f = one(run(ZERO + MFMA + "s_nop 6\nv_mov_b32 v12, v8", [words(1)]), "mfma-hazard")
    assert "7 wait states" in f.message and "s_nop 0" in f.message
    assert run(ZERO + MFMA + "s_nop 7\nv_mov_b32 v12, v8", [words(1)]).ok
    chained = "v_mfma_f32_16x16x32_bf16 v[8:11], v[0:3], v[4:7], v[8:11]\ns_nop 7"
    assert run(ZERO + MFMA + chained, [words(1)]).ok  # the accumulator is forwarded
    close = run(ZERO.replace("s_nop 1\n", "") + MFMA + "s_nop 7", [words(1)])  # v6 and v7 are too fresh
    assert kinds(close) == ["mfma-hazard", "mfma-hazard"]
    loop = ZERO + "s_mov_b32 s8, 2\nagain:\nv_mov_b32 v12, v8\n" + MFMA
    loop += "s_sub_u32 s8, s8, 1\ns_cmp_lg_u32 s8, 0\ns_cbranch_scc1 again\ns_nop 7"
    assert "mfma-hazard" in kinds(run(loop.replace("v_mov_b32 v12, v8", "v_mov_b32 v9, 0", 1), [words(1)]))


def test_uninitialised_register_is_a_warning():
    result = run("v_add_u32 v1, v2, v0", [words(1)])
    assert result.ok and one(result, "uninitialised-register").severity == "warning"


def test_barrier_divergence():
    body = "v_readfirstlane_b32 s8, v0\ns_cmp_lg_u32 s8, 0\ns_cbranch_scc1 out\ns_barrier\nout:"
    f = one(run(body, [words(1)], waves=2), "barrier-divergence")
    assert "0 barriers" in f.message and "1" in f.message


def test_waves_that_part_meet_again():
    x = words(256)
    body = (
        POINTER
        + """
    v_readfirstlane_b32 s8, v0
    s_and_b32 s9, s8, 64
    s_cmp_lg_u32 s9, 0
    s_cbranch_scc1 odd
    v_mov_b32 v2, 1
    s_branch on
    odd:
    v_mov_b32 v2, 2
    on:
    v_add_u32 v2, s8, v2
    s_barrier
    global_store_dword v1, v2, s[4:5]
    """
    )
    assert run(body, [x], waves=4).findings == []
    wave = np.arange(256) // 64
    np.testing.assert_array_equal(x, wave * 64 + 1 + wave % 2)


def test_divergent_lanes():
    x = words(64)
    body = (
        POINTER
        + """
    v_mov_b32 v2, 0
    v_cmp_gt_u32 vcc, 20, v0
    s_and_saveexec_b64 s[6:7], vcc
    v_add_u32 v2, 10, v2
    s_xor_b64 exec, exec, s[6:7]
    v_add_u32 v2, 20, v2
    s_mov_b64 exec, s[6:7]
    global_store_dword v1, v2, s[4:5]
    """
    )
    assert run(body, [x]).findings == []
    np.testing.assert_array_equal(x, np.where(np.arange(64) < 20, 10, 20))


# -- severity, waivers, unknown instructions
def test_waivers_name_kernel_and_reason():
    body = POINTER + "global_load_dword v2, v1, s[4:5]\nv_mov_b32 v3, v2\ns_waitcnt vmcnt(0)"
    result = run(body, [words(64)], waivers=[Waiver("k", "register-in-flight", "a test of waivers")])
    assert result.ok and result.findings[0].waived == "a test of waivers" and result.raise_for_findings() is result
    other = run(body, [words(64)], waivers=[Waiver("another", "register-in-flight", "not this kernel")])
    with pytest.raises(FindingsError, match="register-in-flight"):
        other.raise_for_findings()
    with pytest.raises(ValueError, match="reason"):
        Waiver("k", "lds-race", " ")
    with pytest.raises(ValueError, match="unknown kind"):
        Waiver("k", "no-such-kind", "x")


@pytest.mark.parametrize(
    "line", ["v_frobnicate_b32 v1, v2", "s_getpc_b64 s[4:5]", "image_load v0", "v_mov_b32 v1, what(3)"]
)
def test_unknown_is_an_error_and_named(line):
    with pytest.raises(UnknownInstruction, match=line.split()[0]):
        run(line, [words(1)])


def test_data_in_code_is_an_error():
    with pytest.raises(UnknownInstruction, match="data in a code section"):
        run_on_sim(kernel("s_nop 0").replace("s_nop 0", ".long 0xbf800000"), [words(1)])


def test_findings_are_counted_once_each():
    body = POINTER + "s_mov_b32 s9, 3\nagain:\nglobal_load_dword v2, v1, s[4:5] offset:4\ns_waitcnt vmcnt(0)\n"
    body += "s_sub_u32 s9, s9, 1\ns_cmp_lg_u32 s9, 0\ns_cbranch_scc1 again"
    f = one(run(body, [words(64)]), "out-of-bounds")
    assert f.count == 3 and "(3 times)" in str(f)


def test_a_store_across_two_granules_is_seen_whole():
    """16 bytes at a multiple of 8: the checker keeps 16-byte pieces apart until it meets such a store."""
    body = """
    v_mov_b32 v4, 0
    v_mov_b32 v5, 0
    v_mov_b32 v6, 0
    v_mov_b32 v7, 0
    v_mov_b32 v1, 16
    v_mov_b32 v2, 8
    v_readfirstlane_b32 s8, v0
    s_mov_b64 exec, 1
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc1 first
    ds_write_b128 v1, v[4:7]
    first:
    s_waitcnt lgkmcnt(0)
    s_barrier
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc0 second
    ds_write_b128 v2, v[4:7]
    s_waitcnt lgkmcnt(0)
    {between}
    s_endpgm
    second:
    {between}
    ds_read_b64 v[8:9], {at}
    s_waitcnt lgkmcnt(0)
    """
    go = lambda **parts: run(body.format(**parts), [words(1)], waves=2, lds=512)
    f = one(go(between="", at="v1"), "lds-race")
    assert "LDS bytes 16 to 23" in f.message
    assert go(between="", at="v1 offset:8").findings == []
    assert go(between="s_barrier", at="v1").findings == []
    assert go(between="s_barrier", at="v2").findings == []
