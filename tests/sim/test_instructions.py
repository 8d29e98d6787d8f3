"""Each instruction over random and edge operands, against plain Python written from the ISA text (reference.py)."""

import re

import numpy as np
import pytest

from flykernels.sim.state import POISON

from . import reference as ref
from .asm_kernel import kernel, run, words
from .vectors import EDGES, vector


def expect(line: str, f, columns) -> np.ndarray:
    used = [columns["abc".index(x)] for x in dict.fromkeys(re.findall(r"\{([abc])\}", line))]
    return np.array([f(*map(int, row)) & ref.M32 for row in zip(*used, strict=True)], np.uint32)


def result(line: str, seed: int = 0):
    """(operands, result bits); the upper half of a register that an instruction leaves alone is checked and cleared."""
    columns, got = vector(line, seed)
    if line.split()[0] in ref.KEEP_UPPER_HALF:
        assert (got >> 16 == int(POISON) >> 16).all(), "the upper half stays as it was"
        got = got & 0xFFFF
    return columns, got


@pytest.mark.parametrize(
    ("line", "f", "is_float"), ref.VECTOR, ids=[x[0].split(",")[0] + x[0][-14:] for x in ref.VECTOR]
)
def test_vector(line, f, is_float):
    columns, got = result(line)
    want = expect(line, f, columns)
    if is_float:  # any NaN is as good as another
        nan = lambda u: (u & 0x7FFFFFFF) > 0x7F800000
        assert (nan(got) == nan(want)).all()
        got, want = np.where(nan(got), 0, got), np.where(nan(want), 0, want)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("line", "f"), ref.HALVES, ids=[x[0].split()[0] for x in ref.HALVES])
def test_half(line, f):
    columns, got = result(line)
    want = expect(line, f, columns)
    nan = lambda u: (u & 0x7FFF) > 0x7C00
    assert (got >> 16 == 0).all(), "a 16-bit result clears the upper half"
    assert (nan(got) == nan(want)).all()
    np.testing.assert_array_equal(np.where(nan(got), 0, got), np.where(nan(want), 0, want))


@pytest.mark.parametrize("name", ref.COMPARES)
def test_compare(name):
    (a, b, _), got = vector(f"{name} vcc, {{a}}, {{b}}\ns_nop 1\nv_cndmask_b32 {{d}}, 0, 1, vcc")
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
    s_nop 0
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
    (a, b, c), got = vector("v_add_co_u32 v6, vcc, v2, v3\ns_nop 1\nv_addc_co_u32 {d}, vcc, v4, v3, vcc")
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    np.testing.assert_array_equal(got, [(z + y + (x + y > ref.M32)) & ref.M32 for x, y, z in rows])
    (a, b, c), got = vector("v_sub_co_u32 v6, vcc, v2, v3\ns_nop 1\nv_subbrev_co_u32 {d}, vcc, v4, v3, vcc")
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


def test_packed_f32():
    body = "v_pk_fma_f32 v[6:7], v[2:3], v[2:3], v[3:4] op_sel:[0,1,0] op_sel_hi:[1,0,1] neg_lo:[1,0,0]"
    for part in (0, 1):
        (a, b, c), got = vector(f"v_mov_b32 v9, 0\n{body}\nv_mov_b32 v5, v{6 + part}")
        rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        want = [ref.fma(x ^ 1 << 31, y, y) if part == 0 else ref.fma(y, x, z) for x, y, z in rows]
        nan = lambda u: (np.asarray(u) & 0x7FFFFFFF) > 0x7F800000
        np.testing.assert_array_equal(np.where(nan(got), 0, got), np.where(nan(want), 0, want))


def test_traps_are_reported():
    from flykernels.sim import Trapped

    with pytest.raises(Trapped, match="s_trap 2"):
        run("s_cmp_eq_u32 s2, 0\ns_cbranch_scc0 out\ns_trap 2\nout:", [words(1)])
    assert run("s_cmp_eq_u32 s2, 1\ns_cbranch_scc0 out\ns_trap 2\nout:", [words(1)]).ok


def test_kernel_text_is_parsed_whole():
    assert "s_endpgm" in kernel("s_nop 0")
