"""Instructions on other numbers than f32 and 32-bit integers: fp8, fp4, fp6 and bf6, doubles, classes of floats."""

from fractions import Fraction

import numpy as np
import pytest

from .asm_kernel import POINTER, run, words
from .vectors import vector


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
s_nop 0
v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0
v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]
v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0
v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]
v_div_scale_f64 v[16:17], vcc, v[2:3], v[4:5], v[2:3]
v_mul_f64 v[18:19], v[16:17], v[12:13]
v_fma_f64 v[10:11], -v[10:11], v[18:19], v[16:17]
s_nop 1
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
            f"v_cmp_class_{kind} vcc, {'v[2:3]' if bits == 64 else 'v2'}, v4\ns_nop 1\nv_cndmask_b32 v5, 0, 1, vcc\n"
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
