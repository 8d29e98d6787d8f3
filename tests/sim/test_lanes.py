"""Instructions that move data between lanes or take parts of a register: DPP, swaps and permutes, SDWA."""

import numpy as np
import pytest

from .asm_kernel import run, words
from .vectors import vector


def lanes(line: str, lane=lambda i: i) -> np.ndarray:
    """One wave: v2 holds `lane` of the lane number; the result of an instruction that writes v5."""
    d = words(64)
    values = np.array([lane(i) for i in range(64)], np.uint32)
    body = f"""
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[4:5]
    v_mov_b32 v5, -1
    s_waitcnt vmcnt(0)
    {line}
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v5, s[6:7]
    """
    run(body, [values, d], arguments="pp").raise_for_findings()
    return d


@pytest.mark.parametrize(
    ("control", "source"),
    [
        ("quad_perm:[1,0,3,2]", lambda i: i ^ 1),
        ("quad_perm:[3,3,0,1]", lambda i: i // 4 * 4 + (3, 3, 0, 1)[i % 4]),
        ("row_shl:3", lambda i: i + 3 if i % 16 < 13 else None),
        ("row_shr:1", lambda i: i - 1 if i % 16 else None),
        ("row_ror:5", lambda i: i // 16 * 16 + (i - 5) % 16),
        ("row_mirror", lambda i: i // 16 * 16 + 15 - i % 16),
        ("row_half_mirror", lambda i: i // 8 * 8 + 7 - i % 8),
        ("row_bcast:15", lambda i: i // 16 * 16 - 1 if i >= 16 else None),
        ("row_bcast:31", lambda i: 31 if i >= 32 else None),
        ("row_newbcast:6", lambda i: i // 16 * 16 + 6),
        ("wave_shr:1", lambda i: i - 1 if i else None),
        ("wave_rol:1", lambda i: (i + 1) % 64),
    ],
)
def test_dpp(control, source):
    for bound, missing in (("bound_ctrl:1", 0), ("", 0xFFFFFFFF)):  # read as zero, or not written
        got = lanes(f"v_mov_b32_dpp v5, v2 {control} row_mask:0xf bank_mask:0xf {bound}", lambda i: i + 100)
        want = [missing if source(i) is None else source(i) + 100 for i in range(64)]
        np.testing.assert_array_equal(got, want)


def test_dpp_masks_and_inactive_lanes():
    got = lanes("v_mov_b32_dpp v5, v2 quad_perm:[0,1,2,3] row_mask:0x5 bank_mask:0x3")
    on = np.array([(i // 16 in (0, 2)) and (i % 16 // 4 in (0, 1)) for i in range(64)])
    np.testing.assert_array_equal(got, np.where(on, np.arange(64), 0xFFFFFFFF))
    shift = "v_mov_b32_dpp v5, v2 row_shl:2 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    off = f"s_mov_b64 exec, 0xf\n{shift}\ns_mov_b64 exec, -1"
    got = lanes(off, lambda i: i + 1)
    np.testing.assert_array_equal(got[:6], [3, 4, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF])


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("v_readfirstlane_b32 s8, v2\ns_nop 1\nv_mov_b32 v5, s8", lambda i: 7),
        ("v_readlane_b32 s8, v2, 13\ns_nop 1\nv_mov_b32 v5, s8", lambda i: 20),
        ("s_mov_b32 s8, 99\nv_mov_b32 v5, v2\nv_writelane_b32 v5, s8, 5", lambda i: 99 if i == 5 else i + 7),
        ("v_mov_b32 v5, v2\nv_mov_b32 v6, v2\ns_nop 1\nv_permlane32_swap_b32 v5, v6", lambda i: i % 32 + 7),
        ("v_mov_b32 v5, v2\nv_mov_b32 v6, 0\ns_nop 1\nv_permlane16_swap_b32 v5, v6",
         lambda i: i + 7 if i // 16 % 2 == 0 else 0),
        ("v_lshlrev_b32 v6, 2, v0\nv_xor_b32 v6, 0xfc, v6\nds_bpermute_b32 v5, v6, v2", lambda i: 63 - i + 7),
        ("v_lshlrev_b32 v6, 2, v0\nv_xor_b32 v6, 0x14, v6\nds_permute_b32 v5, v6, v2", lambda i: (i ^ 5) + 7),
        ("ds_swizzle_b32 v5, v2 offset:swizzle(SWAP,16)", lambda i: (i ^ 16) + 7),
        ("ds_swizzle_b32 v5, v2 offset:swizzle(BROADCAST,8,3)", lambda i: i // 8 * 8 + 3 + 7),
        ("ds_swizzle_b32 v5, v2 offset:swizzle(QUAD_PERM,3,0,1,2)", lambda i: i // 4 * 4 + (3, 0, 1, 2)[i % 4] + 7),
        ('ds_swizzle_b32 v5, v2 offset:swizzle(BITMASK_PERM,"01pip")', lambda i: i & 32 | 8 | i & 5 | (i & 2 ^ 2) + 0
         and (i & 32 | 8 | i & 5 | (i & 2 ^ 2)) + 7),
        ("ds_swizzle_b32 v5, v2 offset:0x401f", lambda i: (i ^ 16) + 7),
        ("v_mbcnt_lo_u32_b32 v5, -1, 0\nv_mbcnt_hi_u32_b32 v5, -1, v5", lambda i: i),
    ],
    ids=lambda x: x.split()[0] + x[-18:] if isinstance(x, str) else "",
)  # fmt: skip
def test_lane_exchange(line, want):
    np.testing.assert_array_equal(lanes(line, lambda i: i + 7), [want(i) for i in range(64)])


def test_transposing_reads():
    """ds_read_b64_tr_b16: of each 16 lanes' 4 x 16 tile, lane i gets column i; b8 and b4 likewise."""
    for bits, rows in ((16, 4), (8, 8), (4, 16)):
        data = np.random.default_rng(2).integers(0, 2**32, 128, np.uint64).astype(np.uint32)
        out = words(128)
        body = f"""
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32 v1, 3, v0
        s_waitcnt lgkmcnt(0)
        global_load_dwordx2 v[2:3], v1, s[4:5]
        s_waitcnt vmcnt(0)
        ds_write_b64 v1, v[2:3]
        s_waitcnt lgkmcnt(0)
        ds_read_b64_tr_b{bits} v[4:5], v1
        s_waitcnt lgkmcnt(0)
        global_store_dwordx2 v1, v[4:5], s[6:7]
        """
        run(body, [data, out], arguments="pp", lds=512).raise_for_findings()
        unpack = lambda x, bits=bits: [int(w) >> bits * k & (1 << bits) - 1 for w in x for k in range(32 // bits)]
        tiles = np.array(unpack(data)).reshape(4, rows, 16)
        np.testing.assert_array_equal(np.array(unpack(out)).reshape(4, 16, rows), tiles.swapaxes(1, 2))


def test_sdwa():
    (a, b, _), got = vector(
        "v_or_b32_sdwa {d}, {a}, {b} dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_1"
    )
    np.testing.assert_array_equal(got, (a >> 8 & 255) | b >> 16)
    line = (
        "v_mov_b32 v5, v4\nv_add_u32_sdwa v5, sext({a}), {b} dst_sel:BYTE_2 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0"
    )
    (a, b, c), got = vector(line + " src1_sel:DWORD")
    total = (a.astype(np.int64) & 255 ^ 128) - 128 + b
    np.testing.assert_array_equal(got, c & 0xFF00FFFF | ((total & 255) << 16).astype(np.uint32))
