"""Each instruction over random and edge operands, against plain Python written from the ISA text (reference.py)."""

import re
from fractions import Fraction

import numpy as np
import pytest

from . import reference as ref
from .asm_kernel import POINTER, kernel, run, words

EDGES = [
    0, 1, 2, 3, 4, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000,
    0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F800000, 0xBF800000, 0x3F000000, 0x40200000, 0x40600000,
    0x4B000000, 0x4B800000, 0x4F000000, 0x4F7FFFFF, 0x4F800000, 0xCF000000, 0xCF000001, 0x7F7FFFFF, 0x7F800000,
    0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x80000000, 0x80000001, 0x807FFFFF, 0x80800000, 0xFF7FFFFF,
    0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0x55555555, 0x0C0D0B0A, 0x38D1B717, 0x33000000, 0x477FE000, 0x477FF000,
    0x00040302, 0x001F001F, 0x00200020,
]  # fmt: skip
COUNT = 512


def operands(seed: int) -> list[np.ndarray]:
    """Three columns: edge values against edge values, then random bits, floats of many sizes and small integers."""
    r = np.random.default_rng(seed)
    out = []
    for _ in range(3):
        floats = (r.standard_normal(96) * 10.0 ** r.integers(-30, 30, 96)).astype(np.float32).view(np.uint32)
        random = r.integers(0, 2**32, 64, np.uint64).astype(np.uint32)
        small = r.integers(0, 66, 32).astype(np.uint32)
        edges = r.choice(np.array(EDGES, np.uint32), COUNT - 96 - 64 - 32)
        out.append(r.permutation(np.concatenate([edges, random, floats, small])))
    return out


LOAD = """
s_load_dwordx8 s[4:11], s[0:1], 0x0
s_lshl_b32 s12, s2, 8
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
v_add_u32 v1, s12, v1
global_load_dword v2, v1, s[4:5]
global_load_dword v3, v1, s[6:7]
global_load_dword v4, v1, s[8:9]
s_waitcnt vmcnt(0)
"""


def vector(line: str, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Runs one vector instruction on COUNT lanes: (operands, result bits)."""
    a, b, c = operands(seed)
    d = words(COUNT, 0xDEADBEEF)
    text = line.format(d="v5", a="v2", b="v3", c="v4")
    run(f"{LOAD}{text}\ns_nop 7\nglobal_store_dword v1, v5, s[10:11]", [a, b, c, d], arguments="pppp",
        grid=(COUNT // 64,)).raise_for_findings()  # fmt: skip
    return [a, b, c], d


def expect(line: str, f, columns) -> np.ndarray:
    used = [columns["abc".index(x)] for x in dict.fromkeys(re.findall(r"\{([abc])\}", line))]
    return np.array([f(*map(int, row)) & ref.M32 for row in zip(*used, strict=True)], np.uint32)


@pytest.mark.parametrize(
    ("line", "f", "is_float"), ref.VECTOR, ids=[x[0].split(",")[0] + x[0][-14:] for x in ref.VECTOR]
)
def test_vector(line, f, is_float):
    columns, got = vector(line)
    want = expect(line, f, columns)
    if is_float:  # any NaN is as good as another
        nan = lambda u: (u & 0x7FFFFFFF) > 0x7F800000
        assert (nan(got) == nan(want)).all()
        got, want = np.where(nan(got), 0, got), np.where(nan(want), 0, want)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("line", "f"), ref.HALVES, ids=[x[0].split()[0] for x in ref.HALVES])
def test_half(line, f):
    columns, got = vector(line)
    want = expect(line, f, columns)
    nan = lambda u: (u & 0x7FFF) > 0x7C00
    assert (got >> 16 == 0).all(), "a 16-bit result clears the upper half"
    assert (nan(got) == nan(want)).all()
    np.testing.assert_array_equal(np.where(nan(got), 0, got), np.where(nan(want), 0, want))


@pytest.mark.parametrize("name", ref.COMPARES)
def test_compare(name):
    (a, b, _), got = vector(f"{name} vcc, {{a}}, {{b}}\nv_cndmask_b32 {{d}}, 0, 1, vcc")
    want = [int(ref.COMPARES[name](int(x), int(y))) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("v_rcp_f32", lambda x: 1 / x),
        ("v_rsq_f32", lambda x: 1 / np.sqrt(x)),
        ("v_sqrt_f32", np.sqrt),
        ("v_exp_f32", np.exp2),
        ("v_log_f32", np.log2),
    ],
)
def test_transcendental(name, f):
    """Within 1 ulp; denormals count as zeros on both sides."""
    (a, _, _), got = vector(f"{name} {{d}}, {{a}}")
    with np.errstate(all="ignore"):
        x = a.view(np.float32).astype(np.float64)
        x = np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)
        want = f(x)
        got = got.view(np.float32).astype(np.float64)
        normal = np.isfinite(want) & (np.abs(want) >= 2.0**-126) & (np.abs(want) < 2.0**128)
        assert (np.abs(got - want)[normal] <= np.abs(want)[normal] * 2.0**-23).all()
        assert (np.isnan(got) == np.isnan(want)).all()
        tiny = np.abs(want) < 2.0**-126
        assert (got[tiny] == 0).all()


def test_division():
    """The five-step division (v_div_scale, v_rcp, v_fma, v_div_fmas, v_div_fixup) rounds right, at both ends of the
    range."""
    lines = """
    v_div_scale_f32 v6, s[14:15], v3, v3, v2
    v_div_scale_f32 v7, vcc, v2, v3, v2
    v_rcp_f32 v8, v6
    v_fma_f32 v9, -v6, v8, 1.0
    v_fma_f32 v8, v9, v8, v8
    v_mul_f32 v9, v7, v8
    v_fma_f32 v10, -v6, v9, v7
    v_fma_f32 v9, v10, v8, v9
    v_fma_f32 v6, -v6, v9, v7
    v_div_fmas_f32 v6, v6, v8, v9
    v_div_fixup_f32 v5, v6, v3, v2
    """
    (a, b, _), got = vector(lines)
    x, y = a.view(np.float32), b.view(np.float32)
    with np.errstate(all="ignore"):
        want = (x.astype(np.float64) / y).astype(np.float32)
    ok = (got == want.view(np.uint32)) | (np.isnan(got.view(np.float32)) & np.isnan(want))
    denormal = (np.abs(want) < 2.0**-126) & (want != 0)  # one rounding more is allowed there
    near = np.abs(got.view(np.int32).astype(np.int64) - want.view(np.int32)) <= 1
    assert (ok | (denormal & near)).all()


WIDE = [
    ("v_lshlrev_b64", lambda n, x: x << (n & 63)),
    ("v_lshrrev_b64", lambda n, x: x >> (n & 63)),
    ("v_ashrrev_i64", lambda n, x: ref.s64(x) >> (n & 63)),
]


@pytest.mark.parametrize(("name", "f"), WIDE, ids=[x[0] for x in WIDE])
def test_wide_shift(name, f):
    for part in (0, 1):
        (a, b, c), got = vector(
            f"v_mov_b32 v9, v4\nv_mov_b32 v8, v3\n{name} v[6:7], v2, v[8:9]\nv_mov_b32 v5, v{6 + part}"
        )
        want = [f(int(n), int(hi) << 32 | int(lo)) >> 32 * part & ref.M32 for n, lo, hi in zip(a, b, c, strict=True)]
        np.testing.assert_array_equal(got, want)


def test_mad_u64_u32_and_carry():
    for part in (0, 1):
        (a, b, c), got = vector(
            "v_mov_b32 v8, v4\nv_mov_b32 v9, v3\nv_mad_u64_u32 v[6:7], s[14:15], v2, v3, v[8:9]\n"
            f"v_mov_b32 v5, v{6 + part}"
        )
        rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        np.testing.assert_array_equal(got, [(x * y + (y << 32 | z)) >> 32 * part & ref.M32 for x, y, z in rows])
    (a, b, c), got = vector("v_add_co_u32 v6, vcc, v2, v3\nv_addc_co_u32 {d}, vcc, v4, v3, vcc")
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    np.testing.assert_array_equal(got, [(z + y + (x + y > ref.M32)) & ref.M32 for x, y, z in rows])
    (a, b, c), got = vector("v_sub_co_u32 v6, vcc, v2, v3\nv_subbrev_co_u32 {d}, vcc, v4, v3, vcc")
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    np.testing.assert_array_equal(got, [(y - z - (x < y)) & ref.M32 for x, y, z in rows])


# -- scalar: one workgroup an operand pair
def scalar(name: str, wide_in: int, wide_out: int, count: int, with_scc: bool):
    n = 96
    r = np.random.default_rng(1)
    pool = np.array(EDGES, np.uint32)
    cells = np.where(r.random((4, n)) < 0.6, r.choice(pool, (4, n)), r.integers(0, 2**32, (4, n), np.uint64))
    cells = np.ascontiguousarray(cells.astype(np.uint32))
    out = words(2 * n)
    source = "s[12:13], s[14:15]" if wide_in else "s12, s14"
    if wide_in and ("lsh" in name or "ash" in name):
        source = "s[12:13], s14"
    source = source if count == 2 else source.split(",")[0]
    result = "s[16:17]" if wide_out else "s16"
    second = "s_cselect_b32 s17, 1, 0" if with_scc else ""
    body = f"""
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_lshl_b32 s8, s2, 4
    s_waitcnt lgkmcnt(0)
    s_add_u32 s4, s4, s8
    s_addc_u32 s5, s5, 0
    s_load_dwordx4 s[12:15], s[4:5], 0x0
    s_mov_b32 s17, 0
    s_waitcnt lgkmcnt(0)
    {name} {result}, {source}
    {second}
    s_lshl_b32 s8, s2, 3
    v_mov_b32 v0, s8
    v_mov_b32 v2, s16
    v_mov_b32 v3, s17
    global_store_dwordx2 v0, v[2:3], s[6:7]
    """
    table = np.ascontiguousarray(cells.T)
    run(body, [table, out], arguments="pp", grid=(n,)).raise_for_findings()
    a = [int(x[0]) | (int(x[1]) << 32 if wide_in else 0) for x in table]
    b = [int(x[2]) | (int(x[3]) << 32 if wide_in else 0) for x in table]
    if wide_in and ("lsh" in name or "ash" in name):
        b = [int(x[2]) for x in table]
    return a, b, out.reshape(n, 2)


@pytest.mark.parametrize("name", [*ref.SCALAR, *ref.SCALAR_ONE])
def test_scalar(name):
    count = 2 if name in ref.SCALAR else 1
    wide_in, wide_out, f, scc = (ref.SCALAR if count == 2 else ref.SCALAR_ONE)[name]
    a, b, got = scalar(name, wide_in, wide_out, count, scc is not None and not wide_out)
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        sources = (x, y)[:count]
        want = f(*sources) & (ref.M64 if wide_out else ref.M32)
        assert int(got[k, 0]) == want & ref.M32, (name, sources)
        if wide_out:
            assert int(got[k, 1]) == want >> 32, (name, sources)
        elif scc is not None:
            assert int(got[k, 1]) == int(scc(*sources)), (name, sources)


# -- lanes
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
        ("v_readfirstlane_b32 s8, v2\nv_mov_b32 v5, s8", lambda i: 7),
        ("v_readlane_b32 s8, v2, 13\nv_mov_b32 v5, s8", lambda i: 20),
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


def test_packed_f32():
    body = "v_pk_fma_f32 v[6:7], v[2:3], v[2:3], v[3:4] op_sel:[0,1,0] op_sel_hi:[1,0,1] neg_lo:[1,0,0]"
    for part in (0, 1):
        (a, b, c), got = vector(f"v_mov_b32 v9, 0\n{body}\nv_mov_b32 v5, v{6 + part}")
        rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        want = [ref.fma(x ^ 1 << 31, y, y) if part == 0 else ref.fma(y, x, z) for x, y, z in rows]
        nan = lambda u: (np.asarray(u) & 0x7FFFFFFF) > 0x7F800000
        np.testing.assert_array_equal(np.where(nan(got), 0, got), np.where(nan(want), 0, want))


def test_fp8_conversions():
    """Every code of e4m3 and e5m2 comes back; values between are rounded to the nearer, ties to even; beyond: NaN or
    Inf."""
    from bench.simcases.floats import values

    for name, fmt in (("fp8", "e4m3"), ("bf8", "e5m2")):
        table = values(fmt)
        (a, _, _), got = vector(f"v_cvt_f32_{name} {{d}}, {{a}}")
        np.testing.assert_array_equal(got.view(np.float32), table[a & 255].astype(np.float32))
        (a, b, c), got = vector(f"v_mov_b32 v5, v4\nv_cvt_pk_{name}_f32 v5, v2, v3 op_sel:[0,0,1]")
        np.testing.assert_array_equal(got & 0xFFFF, c & 0xFFFF)
        finite = np.sort(table[np.isfinite(table)])
        top = finite[-1]
        for x, code in ((a, got >> 16 & 255), (b, got >> 24)):
            x, y = x.view(np.float32).astype(np.float64), table[code]
            inside = np.abs(x) <= top
            distance = np.array([np.abs(finite - v).min() for v in np.where(inside, x, 0)])
            assert (np.abs(x - y)[inside] <= distance[inside]).all()
            assert np.isnan(y[np.isnan(x)]).all()
            far = np.abs(x) > 2 * top
            assert (~np.isfinite(y[far])).all()


def test_scaled_fp4_conversion():
    from bench.simcases.floats import values

    table = values("e2m1")
    x = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32) * 8
    out = words(64, 0xAABBCCDD)
    body = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[4:5]
    global_load_dword v3, v1, s[4:5] offset:256
    global_load_dword v5, v1, s[6:7]
    s_waitcnt vmcnt(0)
    v_mov_b32 v4, 4.0
    v_cvt_scalef32_pk_fp4_f32 v5, v2, v3, v4 op_sel:[0,0,1,0]
    global_store_dword v1, v5, s[6:7]
    """
    run(body, [x, out], arguments="pp").raise_for_findings()
    assert (out & 0xFFFF00FF == 0xAABB00DD).all(), "the other bytes stay"
    for row, code in ((0, out >> 8 & 15), (1, out >> 12 & 15)):
        nearest = np.array([np.abs(table - np.clip(v / 4, -6, 6)).min() for v in x[row]])
        np.testing.assert_allclose(np.abs(table[code] - np.clip(x[row] / 4, -6, 6)), nearest)


DOUBLE = """
s_load_dwordx8 s[4:11], s[0:1], 0x0
v_lshlrev_b32 v1, 3, v0
s_waitcnt lgkmcnt(0)
global_load_dwordx2 v[2:3], v1, s[4:5]
global_load_dwordx2 v[4:5], v1, s[6:7]
global_load_dwordx2 v[6:7], v1, s[8:9]
s_waitcnt vmcnt(0)
{body}
global_store_dwordx2 v1, v[8:9], s[10:11]
"""
DIVIDE = """
v_div_scale_f64 v[10:11], s[20:21], v[4:5], v[4:5], v[2:3]
v_rcp_f64 v[12:13], v[10:11]
v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0
v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]
v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0
v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]
v_div_scale_f64 v[16:17], vcc, v[2:3], v[4:5], v[2:3]
v_mul_f64 v[18:19], v[16:17], v[12:13]
v_fma_f64 v[10:11], -v[10:11], v[18:19], v[16:17]
v_div_fmas_f64 v[8:9], v[10:11], v[12:13], v[18:19]
v_div_fixup_f64 v[8:9], v[8:9], v[4:5], v[2:3]
"""


def doubles(body: str) -> tuple[list[np.ndarray], np.ndarray]:
    r = np.random.default_rng(0)
    edges = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 5e-324, 2.0**-1022, 1.7976931348623157e308, 3.0, 1e-200]
    columns = []
    for _ in range(3):
        x = r.standard_normal(64) * 10.0 ** r.integers(-300, 300, 64)
        x[:24] = r.choice(edges, 24)
        columns.append(x)
    out = np.zeros(64)
    run(DOUBLE.format(body=body), [*columns, out], arguments="pppp").raise_for_findings()
    return columns, out


def test_double():
    """f64: one rounding of a fused multiply-add (against exact rationals), and a division right to the last bit."""
    (a, b, c), got = doubles("v_fma_f64 v[8:9], v[2:3], v[4:5], v[6:7]")
    for x, y, z, r in zip(a, b, c, got, strict=True):
        if all(map(np.isfinite, (x, y, z))):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            try:
                want = exact.numerator / exact.denominator
            except OverflowError:
                want = np.inf if exact > 0 else -np.inf
            assert r == want
        else:
            with np.errstate(all="ignore"):
                np.testing.assert_equal(r, x * y + z)
    (a, b, _), got = doubles(DIVIDE)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, a / b)
    (a, _, _), got = doubles("v_floor_f64 v[8:9], v[2:3]")
    np.testing.assert_array_equal(got, np.floor(a))
    (a, _, _), got = doubles("v_frexp_mant_f64 v[8:9], v[2:3]")
    np.testing.assert_array_equal(got, np.where(np.isfinite(a), np.frexp(a)[0], a))


@pytest.mark.parametrize(("kind", "bits"), [("f16", 16), ("f32", 32), ("f64", 64)])
def test_classes(kind, bits):
    """Each class of float is told from the others."""
    top, mantissa = {16: (0x1F, 10), 32: (0xFF, 23), 64: (0x7FF, 52)}[bits]
    infinite, sign = top << mantissa, 1 << bits - 1
    codes = [infinite | 1, infinite | 1 << mantissa - 1, sign | infinite, sign | 1 << mantissa, sign | 1, sign, 0, 1,
             1 << mantissa, infinite]  # fmt: skip
    for k, code in enumerate(codes):
        out = words(64)
        low, high = code & 0xFFFFFFFF, code >> 32
        body = POINTER + f"v_mov_b32 v2, {low:#x}\nv_mov_b32 v3, {high:#x}\n" + "".join(
            f"v_cmp_class_{kind} vcc, {'v[2:3]' if bits == 64 else 'v2'}, v4\nv_cndmask_b32 v5, 0, 1, vcc\n"
            .replace("v4", f"v{10 + j}").replace("v5", f"v{30 + j}") for j in range(10))  # fmt: skip
        masks = "".join(f"v_mov_b32 v{10 + j}, {1 << j}\n" for j in range(10))
        bits_of = "".join(f"v_lshl_or_b32 v6, v{30 + j}, {j}, v6\n" for j in range(10))
        run(masks + body + f"v_mov_b32 v6, 0\n{bits_of}global_store_dword v1, v6, s[4:5]", [out]).raise_for_findings()
        assert (out == 1 << k).all(), (kind, k, out[0])


SIX = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_mul_u32_u24 v1, 24, v0
v_lshlrev_b32 v2, 6, v0
s_waitcnt lgkmcnt(0)
global_load_dwordx3 v[4:6], v1, s[4:5]
global_load_dwordx3 v[7:9], v1, s[4:5] offset:12
v_mov_b32 v3, 0x40800000
s_waitcnt vmcnt(0)
v_cvt_scalef32_pk32_{target}_{source} v[16:31], v[4:9], v3
v_cvt_scalef32_pk32_{source}_{target} v[4:9], v[16:31], v3
global_store_dwordx4 v2, v[16:19], s[6:7]
global_store_dwordx4 v2, v[20:23], s[6:7] offset:16
global_store_dwordx4 v2, v[24:27], s[6:7] offset:32
global_store_dwordx4 v2, v[28:31], s[6:7] offset:48
global_store_dwordx3 v1, v[4:6], s[4:5]
global_store_dwordx3 v1, v[7:9], s[4:5] offset:12
"""


@pytest.mark.parametrize(("source", "fmt"), [("fp6", "e2m3"), ("bf6", "e3m2")])
@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_six_bit_conversions(source, fmt, target):
    """32 codes a lane, times 4, and back: the same codes."""
    from bench.simcases.floats import values

    codes = np.random.default_rng(0).integers(0, 64, (64, 32))
    packed = np.zeros((64, 24), np.uint8)
    for lane in range(64):
        packed[lane] = np.frombuffer(
            sum(int(c) << 6 * k for k, c in enumerate(codes[lane])).to_bytes(24, "little"), np.uint8
        )
    before, out = packed.copy(), np.zeros((64, 32), np.uint16)
    run(SIX.format(source=source, target=target), [packed, out], arguments="pp").raise_for_findings()
    got = out.view(np.float16) if target == "f16" else (out.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got.astype(np.float64), 4 * values(fmt)[codes])
    np.testing.assert_array_equal(packed, before)


def test_traps_are_reported():
    from flykernels.sim import Trapped

    with pytest.raises(Trapped, match="s_trap 2"):
        run("s_cmp_eq_u32 s2, 0\ns_cbranch_scc0 out\ns_trap 2\nout:", [words(1)])
    assert run("s_cmp_eq_u32 s2, 1\ns_cbranch_scc0 out\ns_trap 2\nout:", [words(1)]).ok


def test_kernel_text_is_parsed_whole():
    assert "s_endpgm" in kernel("s_nop 0")
