"""Edges of the ISA: a scalar buffer's end, halves of constants and registers, and scales near f32's limits."""

import numpy as np
import pytest

from flykernels.sim import UnknownInstruction

from .asm_kernel import POINTER, run, words
from .test_matrix import execute
from .vectors import vector


# -- scalar buffers
def scalar_buffer(load: str, records: int, stride: int = 0, start: int = 0) -> list[int]:
    """The first four dwords that a load from a buffer of 1, 2, 3, ... gives."""
    x, out = np.arange(1, 65, dtype=np.uint32), words(64, 0x77)
    copy = "\n".join(f"v_mov_b32 v{2 + k}, s{16 + k}" for k in range(4))
    body = f"""
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_waitcnt lgkmcnt(0)
    s_mov_b32 s8, s4
    s_or_b32 s9, s5, {stride << 16:#x}
    s_mov_b32 s10, {records}
    s_mov_b32 s11, 0
    s_mov_b32 s12, {start}
    {load}
    s_waitcnt lgkmcnt(0)
    {copy}
    v_mov_b32 v1, 0
    global_store_dwordx4 v1, v[2:5], s[6:7]
    """
    run(body, [x, out], arguments="pp").raise_for_findings()
    return out[:4].tolist()


@pytest.mark.parametrize(
    ("records", "want"),
    [(256, [3, 4, 5, 6]), (24, [3, 4, 5, 6]), (23, [3, 4, 5, 0]), (12, [3, 0, 0, 0]), (11, [0, 0, 0, 0])],
)
def test_each_dword_of_a_scalar_buffer_load_has_its_own_range(records, want):
    assert scalar_buffer("s_buffer_load_dwordx4 s[16:19], s[8:11], 0x8", records) == want


def test_records_of_a_scalar_buffer_may_be_longer_than_bytes():
    assert scalar_buffer("s_buffer_load_dwordx4 s[16:19], s[8:11], 0x8", 3, stride=4) == [3, 0, 0, 0]


def test_scalar_offsets_are_unsigned():
    """A register's 32 bits reach 4 GiB; they are no step back from the base."""
    load = "s_buffer_load_dwordx4 s[16:19], s[8:11], s12"
    assert scalar_buffer(load, 256, start=8) == [3, 4, 5, 6]
    assert scalar_buffer(load, 256, start=0xFFFFFFFC) == [0, 0, 0, 0]
    body = POINTER + "s_mov_b32 s8, 0xfffffffc\ns_add_u32 s4, s4, 4\ns_addc_u32 s5, s5, 0\ns_load_dword s9, s[4:5], s8"
    result = run(body + "\ns_waitcnt lgkmcnt(0)", [words(64)])
    assert [f.kind for f in result.findings] == ["out-of-bounds"]


# -- halves
@pytest.mark.parametrize(
    ("line", "add"),
    [
        ("v_pk_add_u16 {d}, {a}, 3", 0x00000003),
        ("v_pk_add_u16 {d}, {a}, 3 op_sel_hi:[1,0]", 0x00030003),
        ("v_pk_add_u16 {d}, {a}, -3", 0xFFFFFFFD),
        ("v_pk_add_u16 {d}, {a}, 1.0", 0x3F800000),
        ("v_pk_add_u16 {d}, {a}, 1.0 op_sel:[0,1]", 0x3F803F80),
    ],
)
def test_a_constant_of_packed_integers_has_32_bits(line, add):
    """LLVM writes <3, 3> with op_sel_hi:[1,0], and takes a plain 3 for <3, 0>."""
    (a, _, _), got = vector(line)
    low, high = (
        (a + np.uint32(add)) & np.uint32(0xFFFF),
        (a >> np.uint32(16)) + np.uint32(add >> 16) & np.uint32(0xFFFF),
    )
    np.testing.assert_array_equal(got, low | high << np.uint32(16))


def test_a_constant_of_packed_f16_has_an_empty_upper_half():
    (a, _, _), got = vector("v_pk_mul_f16 {d}, {a}, 1.0")
    half = (a >> np.uint32(16)).astype(np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):
        want = (half * np.float16(0)).view(np.uint16)
    finite = np.isfinite(half)
    np.testing.assert_array_equal((got >> np.uint32(16))[finite], want[finite])


@pytest.mark.parametrize(
    "line",
    [
        "v_pk_mul_f32 v[2:3], v[4:5], 1.0",
        "v_mad_u32_u16 v2, v3, v4, v5 op_sel:[0,0,1,0]",
        "v_add_f16_e64 v2, v3, 1.0 op_sel:[0,1,0]",
    ],
)
def test_halves_that_nobody_knows_are_refused(line):
    with pytest.raises(UnknownInstruction, match=line.split()[0].removesuffix("_e64")):
        run(line, [words(1)])


@pytest.mark.parametrize("half", [0, 1])
def test_two_bytes_are_packed_into_either_half(half):
    (a, b, c), got = vector(
        f"v_mov_b32 v5, 0x12345678\nv_ashr_pk_u8_i32 {{d}}, {{a}}, {{b}}, {{c}} op_sel:[0,0,0,{half}]"
    )
    byte = lambda x: np.clip(x.view(np.int32) >> (c & np.uint32(31)).view(np.int32), 0, 255).astype(np.uint32)
    both = byte(a) | byte(b) << np.uint32(8)
    np.testing.assert_array_equal(got, 0x5678 | both << np.uint32(16) if half else 0x12340000 | both)


# -- scales
@pytest.mark.parametrize(("large", "small"), [(254, 0), (250, 7), (240, 14)])
def test_a_value_times_its_scale_may_leave_the_range_of_f32(large, small):
    """Only the sum is rounded to f32: 448 * 2^127 times 448 * 2^-127 is finite, whichever side is the large one."""
    a = np.full((8, 64), 0x7E7E7E7E, np.uint32)  # e4m3: 448
    c = np.zeros((4, 64), np.uint32)
    line = "v_mfma_scale_f32_16x16x128_f8f6f4 v[64:67], v[16:23], v[32:39], v[64:67], v2, v3 op_sel_hi:[0,0,0]"
    want = 128 * 448.0**2 * 2.0 ** (large + small - 254)
    for one, other in ((large, small), (small, large)):
        scales = np.stack([np.full(64, one, np.uint32), np.full(64, other, np.uint32)])
        got = execute(line, a, a, c, scales).view(np.float32)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    beyond = execute(line, a, a, c, np.full((2, 64), 254, np.uint32)).view(np.float32)
    nothing = execute(line, a, a, c, np.stack([np.full(64, 254, np.uint32), np.full(64, 255, np.uint32)]))
    assert np.isinf(beyond).all() and np.isnan(nothing.view(np.float32)).all()


@pytest.mark.parametrize(
    ("value", "scale", "overflow", "code"),
    [
        (500.0, 0x3F800000, 0, 0x7F),  # beyond 448: NaN, as without a scale
        (500.0, 0x3F800000, 1, 0x7E),  # FP16_OVFL: the largest
        (500.0, 0x40000000, 0, 0x78),  # 250 is 256
        (3.0, 0x3FC00000, 0, 0x44),  # 1.5 is the scale 1
        (2.0**-126, 0x00000000, 0, 0x40),  # exponent 0: 2^-127
        (2.0**-126, 0x00000001, 0, 0x40),
        (1.0, 0x7F800000, 0, 0x7F),  # exponent 255: NaN
        (0.0, 0x7FC00000, 1, 0x7F),
    ],
)
def test_of_a_conversion_s_scale_the_exponent_counts(value, scale, overflow, code):
    bits = int(np.float32(value).view(np.uint32))
    line = f"""
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {overflow}
    v_mov_b32 v6, {bits:#x}
    v_mov_b32 v7, {scale:#x}
    v_mov_b32 v5, 0
    v_cvt_scalef32_pk_fp8_f32 {{d}}, v6, v6, v7
    """
    _, got = vector(line)
    assert (got & 0x7F7F == code * 0x101).all() and (got >> 16 == 0).all()


# -- NaN
@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (0x7FC00001, 0x3F800000, 0x3F800000),  # quiet: the number
        (0x7F800001, 0x3F800000, 0x7FC00001),  # signalling: itself, made quiet
        (0x3F800000, 0xFF800001, 0xFFC00001),
        (0x7F800001, 0x7F800001, 0x7FC00001),  # how compilers make a NaN quiet
    ],
)
@pytest.mark.parametrize("name", ["v_max_f32", "v_min_f32"])
def test_a_signalling_nan_is_no_quiet_one(name, a, b, want):
    _, got = vector(f"v_mov_b32 v6, {a:#x}\nv_mov_b32 v7, {b:#x}\n{name} {{d}}, v6, v7")
    assert (got == want).all()


def test_modes_with_other_nans_are_refused():
    with pytest.raises(UnknownInstruction, match="IEEE"):
        run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 9, 1), 0", [words(1)])
