"""Vector ALU with one result: a table of name -> (result type, source types, numpy function).

Semantics: AMD CDNA3 ISA reference, chapter "VOP1/VOP2/VOP3 instructions"; gfx950's additions from LLVM's definitions of
them (`v_bitop3`, `v_maximum3`, `v_minimum3`, `v_cvt_pk_f16_f32`). Transcendentals are correctly rounded here where the
hardware is allowed 1 ulp, and flush denormals as the hardware does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import convert
from .asm import Instruction, Operand
from .operands import SDWA, Binder, Writer, bad
from .state import LANES, Group

U32, U64, I32, F32, F64 = np.uint32, np.uint64, np.int32, np.float32, np.float64
Table = dict[str, tuple[str, tuple[str, ...], Callable]]

M31, M63, M15 = U32(31), U64(63), np.uint16(15)
TINY = F32(2.0**-126)


def flush(x: np.ndarray) -> np.ndarray:
    """Denormal f32 -> zero of the same sign."""
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x).astype(F32)


def special(f: Callable) -> Callable:
    """A transcendental unit's function: computed in f64, rounded, denormals flushed on both sides."""
    return lambda x: flush(f(flush(x).astype(F64)).astype(F32))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f32 fused multiply-add with one rounding: the product is exact in f64, the sum is rounded to odd, then to f32."""
    p = a.astype(F64) * b
    c = c.astype(F64)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    inexact = np.isfinite(s) & (error != 0)
    if inexact.any():
        bits = np.broadcast_to(s, inexact.shape).copy().view(np.int64)
        even = (bits & 1) == 0
        away = (error > 0) == (s > 0)  # the true sum is larger in magnitude than s
        bits += np.where(inexact & even, np.where(away, 1, -1), 0)
        s = bits.view(F64)
    return s.astype(F32)


def fma16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f16 fused multiply-add: exact in f64 up to one rounding of the sum, which cannot round twice for f16 operands
    (11 + 11 product bits and a 40-binade spread fit 53 bits)."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(np.float16)


def minimum_number(a, b):
    """IEEE minNum: a NaN loses to a number; -0 < +0."""
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a < b) | ((a == b) & np.signbit(a)), a, b)))


def maximum_number(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a > b) | ((a == b) & ~np.signbit(a)), a, b)))


def minimum_ieee(a, b):
    """IEEE-754:2019 minimum: a NaN wins."""
    return np.where(np.isnan(a), a, np.where(np.isnan(b), b, minimum_number(a, b)))


def maximum_ieee(a, b):
    return np.where(np.isnan(a), a, np.where(np.isnan(b), b, maximum_number(a, b)))


def median(a, b, c, low=np.minimum, high=np.maximum):
    return high(low(a, b), low(high(a, b), c))


def median_float(a, b, c):
    """v_med3: with a NaN, min3 of the three; else the middle one."""
    middle = median(a, b, c, minimum_number, maximum_number)
    some = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(some, minimum_number(minimum_number(a, b), c), middle)


def multiply_legacy(a, b):
    """0 times anything is 0."""
    return np.where((a == 0) | (b == 0), F32(0), a * b)


def high_u(a, b):
    return ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32)


def high_i(a, b):
    return ((a.astype(np.int64) * b.astype(np.int64)) >> 32).astype(I32)


def u24(x):
    return x & U32(0xFFFFFF)


def i24(x):
    return ((x.view(I32) << 8) >> 8).astype(np.int64)


def extract_u(x, at, width):
    width = width & M31
    return (x >> (at & M31)) & ((U32(1) << width) - U32(1))


def extract_i(x, at, width):
    width = (width & M31).astype(np.int64)
    value = (x.view(I32).astype(np.int64) >> (at & M31).astype(np.int64)) & ((np.int64(1) << width) - 1)
    sign = np.where(width > 0, np.int64(1) << np.maximum(width - 1, 0), 0)
    return ((value ^ sign) - sign).astype(I32)


def reverse_bits(x):
    x = np.asarray(x, U32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        x = ((x >> U32(shift)) & U32(mask)) | ((x & U32(mask)) << U32(shift))
    return (x >> U32(16)) | (x << U32(16))


def find_high_u(x):
    """Position of the highest set bit from the top; -1 if none."""
    n = np.frexp(x.astype(F64))[1]
    return np.where(x == 0, -1, 32 - n).astype(I32)


def find_high_i(x):
    y = np.where(x < 0, ~x, x)
    return np.where(y == 0, -1, find_high_u(y.astype(U32))).astype(I32)


def find_low(x):
    x = np.asarray(x, U32)
    lowest = x & (~x + U32(1))
    return np.where(x == 0, -1, np.frexp(lowest.astype(F64))[1] - 1).astype(I32)


def permute_bytes(a, b, select):
    """v_perm_b32: bytes of {a, b} (b is bytes 0..3) by the selector's bytes; 8..11 sign fills, 12 zero, above 0xff."""
    pair = a.astype(U64) << U64(32) | b.astype(U64)
    out = np.zeros(np.broadcast(a, b, select).shape, U32)
    for k in range(4):
        s = ((select >> U32(8 * k)) & U32(255)).astype(U64)
        byte = (pair >> (U64(8) * np.minimum(s, U64(7)))) & U64(255)
        sign = ((pair >> (U64(15) + U64(16) * np.clip(s, 8, 11).astype(U64) - U64(128))) & U64(1)) * U64(255)
        byte = np.where(s < 8, byte, np.where(s < 12, sign, np.where(s == 12, U64(0), U64(255))))
        out |= byte.astype(U32) << U32(8 * k)
    return out


def align_bits(a, b, shift):
    return ((a.astype(U64) << U64(32) | b.astype(U64)) >> (shift & M31).astype(U64)).astype(U32)


def sad_u8(a, b, c):
    total = np.asarray(c, U32)
    for k in range(4):
        x, y = ((v >> U32(8 * k)) & U32(255) for v in (a, b))
        total = total + np.where(x > y, x - y, y - x)
    return total


def ldexp32(x, e):
    return np.ldexp(x.astype(F64), np.clip(e, -1200, 1200)).astype(F32)


def fract(x):
    return np.minimum(x - np.floor(x), np.nextafter(F32(1), F32(0)))


def frexp_exponent(x):
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32)


def frexp_mantissa(x):
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def bit_count(x, plus):
    return np.bitwise_count(x).astype(U32) + plus


def class_f32(x, mask):
    """v_cmp_class: bit per class of float: sNaN, qNaN, -Inf, -normal, -denormal, -0, +0, +denormal, +normal, +Inf."""
    bits = x.view(U32)
    magnitude, negative = bits & U32(0x7FFFFFFF), bits >> U32(31) != 0
    nan, quiet = magnitude > 0x7F800000, (bits >> U32(22)) & U32(1) != 0
    side = lambda minus, plus: np.where(negative, minus, plus)
    index = np.select(
        [nan & ~quiet, nan, magnitude == 0x7F800000, magnitude >= 0x00800000, magnitude > 0],
        [0, 1, side(2, 9), side(3, 8), side(4, 7)],
        side(5, 6),
    )
    return (mask >> index.astype(U32)) & U32(1) != 0


TWO = ("u32", "u32")
THREE = ("u32", "u32", "u32")

TABLE: Table = {
    # moves and bits
    "v_mov_b32": ("u32", ("u32",), lambda a: a),
    "v_accvgpr_read_b32": ("u32", ("u32",), lambda a: a),
    "v_accvgpr_write_b32": ("u32", ("u32",), lambda a: a),
    "v_accvgpr_mov_b32": ("u32", ("u32",), lambda a: a),
    "v_mov_b64": ("u64", ("u64",), lambda a: a),
    "v_not_b32": ("u32", ("u32",), lambda a: ~a),
    "v_bfrev_b32": ("u32", ("u32",), reverse_bits),
    "v_ffbh_u32": ("i32", ("u32",), find_high_u),
    "v_ffbh_i32": ("i32", ("i32",), find_high_i),
    "v_ffbl_b32": ("i32", ("u32",), find_low),
    "v_and_b32": ("u32", TWO, np.bitwise_and),
    "v_or_b32": ("u32", TWO, np.bitwise_or),
    "v_xor_b32": ("u32", TWO, np.bitwise_xor),
    "v_xnor_b32": ("u32", TWO, lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": ("u32", TWO, lambda a, b: b << (a & M31)),
    "v_lshrrev_b32": ("u32", TWO, lambda a, b: b >> (a & M31)),
    "v_ashrrev_i32": ("i32", ("i32", "i32"), lambda a, b: b >> (a & I32(31))),
    "v_lshlrev_b64": ("u64", ("u32", "u64"), lambda a, b: b << (a.astype(U64) & M63)),
    "v_lshrrev_b64": ("u64", ("u32", "u64"), lambda a, b: b >> (a.astype(U64) & M63)),
    "v_ashrrev_i64": ("i64", ("u32", "i64"), lambda a, b: b >> (a & U32(63)).astype(np.int64)),
    "v_and_or_b32": ("u32", THREE, lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("u32", THREE, lambda a, b, c: a | b | c),
    "v_lshl_or_b32": ("u32", THREE, lambda a, b, c: (a << (b & M31)) | c),
    "v_bfe_u32": ("u32", THREE, extract_u),
    "v_bfe_i32": ("i32", THREE, extract_i),
    "v_bfi_b32": ("u32", THREE, lambda a, b, c: (a & b) | (~a & c)),
    "v_bfm_b32": ("u32", TWO, lambda a, b: ((U32(1) << (a & M31)) - U32(1)) << (b & M31)),
    "v_perm_b32": ("u32", THREE, permute_bytes),
    "v_alignbit_b32": ("u32", THREE, align_bits),
    "v_alignbyte_b32": ("u32", THREE, lambda a, b, c: align_bits(a, b, (c & U32(3)) * U32(8))),
    "v_bcnt_u32_b32": ("u32", TWO, bit_count),
    # integers
    "v_add_u32": ("u32", TWO, np.add),
    "v_sub_u32": ("u32", TWO, np.subtract),
    "v_subrev_u32": ("u32", TWO, lambda a, b: b - a),
    "v_add3_u32": ("u32", THREE, lambda a, b, c: a + b + c),
    "v_lshl_add_u32": ("u32", THREE, lambda a, b, c: (a << (b & M31)) + c),
    "v_add_lshl_u32": ("u32", THREE, lambda a, b, c: (a + b) << (c & M31)),
    "v_xad_u32": ("u32", THREE, lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u64": ("u64", ("u64", "u32", "u64"), lambda a, b, c: (a << (b.astype(U64) & U64(7))) + c),
    "v_mul_lo_u32": ("u32", TWO, np.multiply),
    "v_mul_hi_u32": ("u32", TWO, high_u),
    "v_mul_hi_i32": ("i32", ("i32", "i32"), high_i),
    "v_mul_u32_u24": ("u32", TWO, lambda a, b: u24(a) * u24(b)),
    "v_mul_hi_u32_u24": ("u32", TWO, lambda a, b: high_u(u24(a), u24(b))),
    "v_mul_i32_i24": ("u32", TWO, lambda a, b: (i24(a) * i24(b)).astype(np.int64).view(U64).astype(U32)),
    "v_mul_hi_i32_i24": ("i32", TWO, lambda a, b: ((i24(a) * i24(b)) >> 32).astype(I32)),
    "v_mad_u32_u24": ("u32", THREE, lambda a, b, c: u24(a) * u24(b) + c),
    "v_mad_i32_i24": ("u32", THREE, lambda a, b, c: (i24(a) * i24(b)).view(U64).astype(U32) + c),
    "v_mad_legacy_u16": ("u16", ("u16",) * 3, lambda a, b, c: a * b + c),
    "v_min_u32": ("u32", TWO, np.minimum),
    "v_max_u32": ("u32", TWO, np.maximum),
    "v_min_i32": ("i32", ("i32",) * 2, np.minimum),
    "v_max_i32": ("i32", ("i32",) * 2, np.maximum),
    "v_min3_u32": ("u32", THREE, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u32", THREE, lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": ("i32", ("i32",) * 3, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("i32", ("i32",) * 3, lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": ("u32", THREE, median),
    "v_med3_i32": ("i32", ("i32",) * 3, median),
    "v_sad_u8": ("u32", THREE, sad_u8),
    "v_sad_u32": ("u32", THREE, lambda a, b, c: np.where(a > b, a - b, b - a) + c),
    # 16-bit integers
    "v_add_u16": ("u16", ("u16", "u16"), np.add),
    "v_sub_u16": ("u16", ("u16", "u16"), np.subtract),
    "v_subrev_u16": ("u16", ("u16", "u16"), lambda a, b: b - a),
    "v_mul_lo_u16": ("u16", ("u16", "u16"), np.multiply),
    "v_mad_u16": ("u16", ("u16",) * 3, lambda a, b, c: a * b + c),
    "v_lshlrev_b16": ("u16", ("u16", "u16"), lambda a, b: b << (a & M15)),
    "v_lshrrev_b16": ("u16", ("u16", "u16"), lambda a, b: b >> (a & M15)),
    "v_ashrrev_i16": ("i16", ("i16", "i16"), lambda a, b: b >> (a & np.int16(15))),
    "v_min_u16": ("u16", ("u16", "u16"), np.minimum),
    "v_max_u16": ("u16", ("u16", "u16"), np.maximum),
    "v_min_i16": ("i16", ("i16", "i16"), np.minimum),
    "v_max_i16": ("i16", ("i16", "i16"), np.maximum),
    # f32
    "v_add_f32": ("f32", ("f32", "f32"), np.add),
    "v_sub_f32": ("f32", ("f32", "f32"), np.subtract),
    "v_subrev_f32": ("f32", ("f32", "f32"), lambda a, b: b - a),
    "v_mul_f32": ("f32", ("f32", "f32"), np.multiply),
    "v_mul_legacy_f32": ("f32", ("f32", "f32"), multiply_legacy),
    "v_min_f32": ("f32", ("f32", "f32"), minimum_number),
    "v_max_f32": ("f32", ("f32", "f32"), maximum_number),
    "v_min3_f32": ("f32", ("f32",) * 3, lambda a, b, c: minimum_number(minimum_number(a, b), c)),
    "v_max3_f32": ("f32", ("f32",) * 3, lambda a, b, c: maximum_number(maximum_number(a, b), c)),
    "v_minimum3_f32": ("f32", ("f32",) * 3, lambda a, b, c: minimum_ieee(minimum_ieee(a, b), c)),
    "v_maximum3_f32": ("f32", ("f32",) * 3, lambda a, b, c: maximum_ieee(maximum_ieee(a, b), c)),
    "v_med3_f32": ("f32", ("f32",) * 3, median_float),
    "v_fma_f32": ("f32", ("f32",) * 3, fma32),
    "v_mad_f32": ("f32", ("f32",) * 3, lambda a, b, c: a * b + c),
    "v_fmamk_f32": ("f32", ("f32",) * 3, fma32),
    "v_fmaak_f32": ("f32", ("f32",) * 3, fma32),
    "v_ldexp_f32": ("f32", ("f32", "i32"), ldexp32),
    "v_rndne_f32": ("f32", ("f32",), np.rint),
    "v_trunc_f32": ("f32", ("f32",), np.trunc),
    "v_floor_f32": ("f32", ("f32",), np.floor),
    "v_ceil_f32": ("f32", ("f32",), np.ceil),
    "v_fract_f32": ("f32", ("f32",), fract),
    "v_frexp_exp_i32_f32": ("i32", ("f32",), frexp_exponent),
    "v_frexp_mant_f32": ("f32", ("f32",), frexp_mantissa),
    "v_rcp_f32": ("f32", ("f32",), special(lambda x: 1 / x)),
    "v_rcp_iflag_f32": ("f32", ("f32",), special(lambda x: 1 / x)),
    "v_rsq_f32": ("f32", ("f32",), special(lambda x: 1 / np.sqrt(x))),
    "v_sqrt_f32": ("f32", ("f32",), special(np.sqrt)),
    "v_exp_f32": ("f32", ("f32",), special(np.exp2)),
    "v_log_f32": ("f32", ("f32",), special(np.log2)),
    "v_sin_f32": ("f32", ("f32",), special(lambda x: np.sin(2 * np.pi * x))),
    "v_cos_f32": ("f32", ("f32",), special(lambda x: np.cos(2 * np.pi * x))),
    # f16
    "v_add_f16": ("f16", ("f16", "f16"), np.add),
    "v_sub_f16": ("f16", ("f16", "f16"), np.subtract),
    "v_subrev_f16": ("f16", ("f16", "f16"), lambda a, b: b - a),
    "v_mul_f16": ("f16", ("f16", "f16"), np.multiply),
    "v_min_f16": ("f16", ("f16", "f16"), minimum_number),
    "v_max_f16": ("f16", ("f16", "f16"), maximum_number),
    "v_fma_f16": ("f16", ("f16",) * 3, fma16),
    "v_rcp_f16": ("f16", ("f16",), lambda a: (1 / a.astype(F64)).astype(np.float16)),
    "v_rsq_f16": ("f16", ("f16",), lambda a: (1 / np.sqrt(a.astype(F64))).astype(np.float16)),
    "v_sqrt_f16": ("f16", ("f16",), lambda a: np.sqrt(a.astype(F64)).astype(np.float16)),
    "v_exp_f16": ("f16", ("f16",), lambda a: np.exp2(a.astype(F64)).astype(np.float16)),
    "v_log_f16": ("f16", ("f16",), lambda a: np.log2(a.astype(F64)).astype(np.float16)),
    # f64
    "v_add_f64": ("f64", ("f64", "f64"), np.add),
    "v_mul_f64": ("f64", ("f64", "f64"), np.multiply),
    "v_min_f64": ("f64", ("f64", "f64"), minimum_number),
    "v_max_f64": ("f64", ("f64", "f64"), maximum_number),
    "v_rndne_f64": ("f64", ("f64",), np.rint),
    "v_ldexp_f64": ("f64", ("f64", "i32"), lambda a, b: np.ldexp(a, np.clip(b, -3000, 3000))),
    # conversions
    "v_cvt_f32_u32": ("f32", ("u32",), lambda a: a.astype(F32)),
    "v_cvt_f32_i32": ("f32", ("i32",), lambda a: a.astype(F32)),
    "v_cvt_u32_f32": ("u32", ("f32",), lambda a: convert.to_integer(a, 0, 2**32 - 1).astype(U32)),
    "v_cvt_i32_f32": ("i32", ("f32",), lambda a: convert.to_integer(a, -(2**31), 2**31 - 1).astype(I32)),
    "v_cvt_f32_f16": ("f32", ("f16",), lambda a: a.astype(F32)),
    "v_cvt_f16_f32": ("f16", ("f32",), lambda a: a.astype(np.float16)),
    "v_cvt_f32_bf16": ("f32", ("bf16",), lambda a: a),
    "v_cvt_f64_f32": ("f64", ("f32",), lambda a: a.astype(F64)),
    "v_cvt_f32_f64": ("f32", ("f64",), lambda a: a.astype(F32)),
    "v_cvt_f64_i32": ("f64", ("i32",), lambda a: a.astype(F64)),
    "v_cvt_f64_u32": ("f64", ("u32",), lambda a: a.astype(F64)),
    "v_cvt_i32_f64": ("i32", ("f64",), lambda a: convert.to_integer(a, -(2**31), 2**31 - 1).astype(I32)),
    "v_cvt_u32_f64": ("u32", ("f64",), lambda a: convert.to_integer(a, 0, 2**32 - 1).astype(U32)),
    "v_cvt_f16_u16": ("f16", ("u16",), lambda a: a.astype(np.float16)),
    "v_cvt_f16_i16": ("f16", ("i16",), lambda a: a.astype(np.float16)),
    "v_cvt_u16_f16": ("u16", ("f16",), lambda a: convert.to_integer(a, 0, 2**16 - 1).astype(np.uint16)),
    "v_cvt_i16_f16": ("i16", ("f16",), lambda a: convert.to_integer(a, -(2**15), 2**15 - 1).astype(np.int16)),
    "v_cvt_pk_bf16_f32": ("u32", ("f32", "f32"), convert.pack_bf16),
    "v_cvt_pk_f16_f32": ("u32", ("f32", "f32"), lambda a, b: convert.pack_half(a, b)),
    "v_cvt_pkrtz_f16_f32": ("u32", ("f32", "f32"), convert.pack_half_toward_zero),
    "v_cvt_pk_u16_u32": ("u32", TWO, lambda a, b: np.minimum(a, 0xFFFF) | np.minimum(b, 0xFFFF) << U32(16)),
    "v_cvt_pk_i16_i32": ("u32", ("i32", "i32"), convert.pack_i16),
    **{
        f"v_cvt_f32_ubyte{k}": ("f32", ("u32",), lambda a, k=k: ((a >> U32(8 * k)) & U32(255)).astype(F32))
        for k in range(4)
    },
    "v_pack_b32_f16": ("u32", ("u16", "u16"), lambda a, b: a.astype(U32) | b.astype(U32) << U32(16)),
}

# The first source is also the destination's old value: d = f(a, b, d).
ACCUMULATE: Table = {
    "v_fmac_f32": ("f32", ("f32",) * 3, fma32),
    "v_mac_f32": ("f32", ("f32",) * 3, lambda a, b, c: a * b + c),
    "v_fmac_f16": ("f16", ("f16",) * 3, fma16),
    "v_fmac_f64": ("f64", ("f64",) * 3, lambda a, b, c: a * b + c),
    "v_dot2c_f32_bf16": ("f32", ("u32", "u32", "f32"), convert.dot2_bf16),
    "v_dot2c_f32_f16": ("f32", ("u32", "u32", "f32"), convert.dot2_f16),
}
FLOATS = ("f32", "f16", "f64")
SUFFIXES = ("_dpp", "_sdwa")


def bind(i: Instruction, b: Binder) -> Callable[[Group], None] | None:
    """The instruction's function, or None if it is not in this table."""
    name = i.name.removesuffix("_dpp").removesuffix("_sdwa")
    if name in TABLE:
        kind, sources, f = TABLE[name]
        operands = i.operands[1:]
    elif name in ACCUMULATE:
        kind, sources, f = ACCUMULATE[name]
        operands = (*i.operands[1:], i.operands[0])
    else:
        return None
    if len(operands) != len(sources):
        raise bad(i, f"{len(operands)} sources where {len(sources)} were expected")
    f = with_output_modifiers(i, kind, f)
    if i.name.endswith("_sdwa"):
        return bind_sdwa(i, b, kind, sources, operands, f)
    if i.name.endswith("_dpp"):
        return bind_dpp(i, b, kind, sources, operands, f)
    select = i.mods.get("op_sel", [])
    high = lambda k: bool(select[k]) if k < len(select) else False
    readers = [b.typed(o, t, high(k)) for k, (o, t) in enumerate(zip(operands, sources, strict=True))]
    write = b.writer(i.operands[0], kind)
    if len(select) > len(sources) and kind in ("f16", "u16", "i16"):
        write = write_half(b, i.operands[0], kind, bool(select[len(sources)]))
    return apply(f, readers, write)


def apply(f: Callable, readers: list, write: Writer) -> Callable[[Group], None]:
    if len(readers) == 1:
        (r0,) = readers
        return lambda g: write(g, f(r0(g)))
    if len(readers) == 2:
        r0, r1 = readers
        return lambda g: write(g, f(r0(g), r1(g)))
    r0, r1, r2 = readers
    return lambda g: write(g, f(r0(g), r1(g), r2(g)))


def with_output_modifiers(i: Instruction, kind: str, f: Callable) -> Callable:
    """Output multiplier and clamp (CDNA3 ISA 6.2.3): floats to [0, 1], NaN to 0; unsigned sums saturate."""
    scale = F32(i.mods.get("mul", 1)) / F32(i.mods.get("div", 1))
    if scale != 1:
        if kind not in FLOATS:
            raise bad(i, "output multiplier on an integer")
        inner = f
        f = lambda *a: inner(*a) * inner(*a).dtype.type(scale)
    if i.mods.get("clamp"):
        unclamped = f
        if kind in FLOATS:
            return lambda *a: np.nan_to_num(np.clip(unclamped(*a), 0, 1), nan=0.0)
        if i.name.startswith(("v_add_u", "v_sub_u")):
            top = {"u32": 2**32 - 1, "u16": 2**16 - 1}[kind]
            sign = 1 if "add" in i.name else -1
            return lambda a, b: np.clip(a.astype(np.int64) + sign * b.astype(np.int64), 0, top).astype(a.dtype)
        raise bad(i, "clamp on this instruction")
    return f


def write_half(b: Binder, o: Operand, kind: str, high: bool) -> Writer:
    """16-bit result with op_sel: the other half of the register stays."""
    r = b.registers.index(o.index)
    dtype = {"f16": np.float16, "u16": np.uint16, "i16": np.int16}[kind]

    def write(g: Group, x: np.ndarray) -> None:
        bits = x.astype(dtype).view(np.uint16).astype(U32)
        merged = (g.V[r] & U32(0xFFFF)) | bits << U32(16) if high else (g.V[r] & U32(0xFFFF0000)) | bits
        np.copyto(g.V[r], merged, where=g.exec)

    return write


def bind_dpp(i: Instruction, b: Binder, kind: str, sources, operands, f: Callable) -> Callable[[Group], None]:
    first, writable = b.dpp(operands[0], sources[0], i)
    readers = [first, *(b.typed(o, t) for o, t in zip(operands[1:], sources[1:], strict=True))]
    write = b.writer(i.operands[0], kind)

    def run(g: Group) -> None:
        x = f(*(r(g) for r in readers))
        some = writable(g)
        if some is None:
            write(g, x)
            return
        full, mask = g.full, g.exec
        g.full, g.exec = False, mask & some
        write(g, x)
        g.full, g.exec = full, mask

    return run


def bind_sdwa(i: Instruction, b: Binder, kind: str, sources, operands, f: Callable) -> Callable[[Group], None]:
    readers = [
        b.sdwa(o, t, i.mods.get(f"src{k}_sel", "DWORD")) if k < 2 else b.typed(o, t)
        for k, (o, t) in enumerate(zip(operands, sources, strict=True))
    ]
    return apply(f, readers, sdwa_writer(i, b, kind))


def sdwa_writer(i: Instruction, b: Binder, kind: str) -> Writer:
    """The result into a byte or word of the destination; the rest is zero, sign, or kept."""
    shift, width = SDWA[i.mods.get("dst_sel", "DWORD")]
    unused = i.mods.get("dst_unused", "UNUSED_PAD")
    o = i.operands[0]
    r = b.registers.index(o.index)
    store = {"f16": np.float16, "u16": np.uint16, "i16": np.int16}.get(kind)

    def write(g: Group, x: np.ndarray) -> None:
        x = x.astype(store).view(np.uint16).astype(U32) if store else np.ascontiguousarray(x).view(U32)
        field = U32(((1 << width) - 1) << shift)
        x = (np.broadcast_to(x, (g.n, LANES)) << U32(shift)) & field
        if unused == "UNUSED_PRESERVE":
            x = x | (g.V[r] & ~field)
        elif unused == "UNUSED_SEXT" and width < 32:
            top = (x >> U32(shift + width - 1)) & U32(1)
            x = x | np.where(top != 0, U32(0xFFFFFFFF << (shift + width) & 0xFFFFFFFF), U32(0))
        np.copyto(g.V[r], x, where=g.exec)

    return write
