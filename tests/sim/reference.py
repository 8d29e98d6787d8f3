"""What gfx950 instructions do, a second time: plain Python on one lane's bits, written from the ISA text (CDNA3
instruction
set reference, chapters VOP and SOP; LLVM's definitions for what gfx950 adds). Nothing here uses the simulator's
code."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
QUIET = 0x7FC00000


def f32(u: int) -> float:
    return struct.unpack("<f", struct.pack("<I", u & M32))[0]


def bits32(x: float) -> int:
    """Nearest even f32 of a double; overflow to infinity."""
    try:
        return struct.unpack("<I", struct.pack("<f", x))[0]
    except OverflowError:
        return 0x7F800000 | (0x80000000 if x < 0 else 0)


def f16(u: int) -> float:
    return struct.unpack("<e", struct.pack("<H", u & 0xFFFF))[0]


def bits16(x: float) -> int:
    try:
        return struct.unpack("<H", struct.pack("<e", x))[0]
    except OverflowError:
        return 0x7C00 | (0x8000 if x < 0 else 0)


def s32(u: int) -> int:
    return (u & M32) - ((u & 0x80000000) << 1)


def s64(u: int) -> int:
    return (u & M64) - ((u & (1 << 63)) << 1)


def isnan(u: int) -> bool:
    return (u & 0x7FFFFFFF) > 0x7F800000


def round_fraction(x: Fraction, negative_zero: bool = False) -> int:
    """Exact rational -> f32 bits, nearest even, denormals kept."""
    if x == 0:
        return 0x80000000 if negative_zero else 0
    sign, x = (0x80000000, -x) if x < 0 else (0, x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    if Fraction(2) ** e > x:
        e -= 1
    e = max(e, -126)
    unit = Fraction(2) ** (e - 23)
    n = x / unit
    whole = n.numerator // n.denominator
    rest = n - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1):
        whole += 1
    value = whole * unit
    if value >= Fraction(2) ** 128:
        return sign | 0x7F800000
    return sign | bits32(float(value))


def fma(a: int, b: int, c: int) -> int:
    x, y, z = f32(a), f32(b), f32(c)
    if any(map(math.isnan, (x, y, z))) or (math.isinf(x) and y == 0) or (x == 0 and math.isinf(y)):
        return QUIET
    if math.isinf(x) or math.isinf(y) or math.isinf(z):
        product = math.inf * math.copysign(1, x) * math.copysign(1, y) if math.isinf(x) or math.isinf(y) else 0.0
        return bits32(product + z) if not (math.isinf(z) and product == -z) else QUIET
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    minus = math.copysign(1, x) * math.copysign(1, y) < 0 and math.copysign(1, z) < 0
    product_zero = x == 0 or y == 0
    return round_fraction(exact, minus and (product_zero and z == 0))


def add(a: int, b: int) -> int:
    x, y = f32(a), f32(b)
    if math.isnan(x) or math.isnan(y) or (math.isinf(x) and math.isinf(y) and x != y):
        return QUIET
    return bits32(x + y)


def mul(a: int, b: int) -> int:
    x, y = f32(a), f32(b)
    if math.isnan(x) or math.isnan(y) or (math.isinf(x) and y == 0) or (x == 0 and math.isinf(y)):
        return QUIET
    if math.isinf(x) or math.isinf(y):
        return bits32(x * y)
    negative = math.copysign(1, x) != math.copysign(1, y)
    return round_fraction(Fraction(x) * Fraction(y), negative)


def signals(u: int) -> bool:
    """Whether the code is a signalling NaN's: a minimum or maximum with one is NaN."""
    return isnan(u) and not u >> 22 & 1


def number_min(a: int, b: int) -> int:
    if signals(a) or signals(b):
        return QUIET
    if isnan(a):
        return b if not isnan(b) else QUIET
    if isnan(b):
        return a
    if f32(a) == f32(b):
        return a | b if f32(a) == 0 else a
    return a if f32(a) < f32(b) else b


def number_max(a: int, b: int) -> int:
    if signals(a) or signals(b):
        return QUIET
    if isnan(a):
        return b if not isnan(b) else QUIET
    if isnan(b):
        return a
    if f32(a) == f32(b):
        return a & b if f32(a) == 0 else a
    return a if f32(a) > f32(b) else b


def to_int(u: int, low: int, high: int) -> int:
    x = f32(u)
    if math.isnan(x):
        return 0
    if math.isinf(x):
        return low if x < 0 else high
    return max(low, min(high, math.trunc(x)))


def bf16(u: int) -> int:
    if isnan(u):
        return u >> 16 | 0x40
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16 & 0xFFFF


def half(u: int) -> int:
    x = f32(u)
    return 0x7E00 if math.isnan(x) else bits16(x)


def perm(a: int, b: int, select: int) -> int:
    data, out = a << 32 | b, 0
    for k in range(4):
        s = select >> 8 * k & 0xFF
        if s >= 13:
            byte = 0xFF
        elif s == 12:
            byte = 0
        elif s >= 8:
            byte = 0xFF * (data >> (16 * (s - 8) + 15) & 1)
        else:
            byte = data >> 8 * s & 0xFF
        out |= byte << 8 * k
    return out


def bfe_u(x: int, at: int, width: int) -> int:
    return x >> (at & 31) & ((1 << (width & 31)) - 1)


def bfe_i(x: int, at: int, width: int) -> int:
    width &= 31
    value = s32(x) >> (at & 31) & ((1 << width) - 1)
    return value - (1 << width) if width and value >> (width - 1) else value


def rndne(u: int) -> int:
    x = f32(u)
    if math.isnan(x) or math.isinf(x) or abs(x) >= 2**23:
        return u
    return bits32(math.copysign(float(round(x)), x))


def ldexp(u: int, e: int) -> int:
    x = f32(u)
    if math.isnan(x) or math.isinf(x) or x == 0:
        return u
    e = s32(e)
    if e > 400:
        return bits32(math.copysign(math.inf, x))
    return round_fraction(Fraction(x) * Fraction(2) ** max(e, -400), x < 0)


def ffbh(u: int) -> int:
    return 32 - u.bit_length() if u else M32


def ffbl(u: int) -> int:
    return (u & -u).bit_length() - 1 if u else M32


def bitop3(table: int):
    def f(a: int, b: int, c: int) -> int:
        out = 0
        for k in range(32):
            index = (a >> k & 1) << 2 | (b >> k & 1) << 1 | (c >> k & 1)
            out |= (table >> index & 1) << k
        return out

    return f


def pk16(f):
    return lambda a, b: f(a & 0xFFFF, b & 0xFFFF) & 0xFFFF | (f(a >> 16, b >> 16) & 0xFFFF) << 16


def s16(u: int) -> int:
    return (u & 0xFFFF) - ((u & 0x8000) << 1)


def half_op(f):
    def g(a: int, b: int) -> int:
        x, y = f16(a), f16(b)
        try:
            r = f(x, y)
        except OverflowError:
            r = math.inf
        return 0x7E00 if math.isnan(r) else bits16(r)

    return g


def half_maximum(a: int, b: int) -> int:
    """The greater of two f16, +0 above -0; the first NaN if there is one, made a quiet one."""
    x, y = f16(a), f16(b)
    if math.isnan(x) or math.isnan(y):
        return (a if math.isnan(x) else b) | 1 << 9
    return a if (x, math.copysign(1, x)) > (y, math.copysign(1, y)) else b


def med3(a: int, b: int, c: int) -> int:
    if isnan(a) or isnan(b) or isnan(c):
        return number_min(number_min(a, b), c)
    return number_max(number_min(a, b), number_min(number_max(a, b), c))


def dot(bits: int, signed: bool):
    """Sum of products of the fields of two registers, added to the third."""
    field = lambda x, k: x >> k & (1 << bits) - 1
    value = lambda x, k: field(x, k) - ((field(x, k) >> bits - 1) << bits if signed else 0)
    return lambda a, b, c: c + sum(value(a, k) * value(b, k) for k in range(0, 32, bits))


def floor_int(a: int) -> int:
    if isnan(a):
        return 0
    x = f32(a)
    return max(-(2**31), min(2**31 - 1, math.floor(x))) if math.isfinite(x) else (2**31 - 1 if x > 0 else -(2**31))


def half_number(pick):
    """Minimum or maximum of f16 numbers, -0 below +0: a quiet NaN loses, with a signalling one the result is a NaN."""
    key = lambda u: (f16(u), -(u >> 15 & 1))

    def two(a: int, b: int) -> int:
        a, b = a & 0xFFFF, b & 0xFFFF
        nan = [u for u in (a, b) if math.isnan(f16(u))]
        if any(not u >> 9 & 1 for u in nan) or len(nan) == 2:
            return 0x7E00
        return pick([u for u in (a, b) if u not in nan], key=key)

    return lambda a, b, c: two(two(a, b), c)


def half_one(f):
    """A function of one f16, kept where it is not finite."""
    return lambda a: a & 0xFFFF if not math.isfinite(f16(a)) else bits16(math.copysign(f(f16(a)), f16(a)))


# (instruction text with {d} {a} {b} {c}, function of the source bits, float result?)
VECTOR = [
    ("v_mov_b32 {d}, {a}", lambda a: a, False),
    ("v_not_b32 {d}, {a}", lambda a: ~a, False),
    ("v_bfrev_b32 {d}, {a}", lambda a: int(f"{a:032b}"[::-1], 2), False),
    ("v_ffbh_u32 {d}, {a}", ffbh, False),
    ("v_ffbl_b32 {d}, {a}", ffbl, False),
    ("v_add_u32 {d}, {a}, {b}", lambda a, b: a + b, False),
    ("v_sub_u32 {d}, {a}, {b}", lambda a, b: a - b, False),
    ("v_subrev_u32 {d}, {a}, {b}", lambda a, b: b - a, False),
    ("v_and_b32 {d}, {a}, {b}", lambda a, b: a & b, False),
    ("v_or_b32 {d}, {a}, {b}", lambda a, b: a | b, False),
    ("v_xor_b32 {d}, {a}, {b}", lambda a, b: a ^ b, False),
    ("v_lshlrev_b32 {d}, {a}, {b}", lambda a, b: b << (a & 31), False),
    ("v_lshrrev_b32 {d}, {a}, {b}", lambda a, b: b >> (a & 31), False),
    ("v_ashrrev_i32 {d}, {a}, {b}", lambda a, b: s32(b) >> (a & 31), False),
    ("v_mul_lo_u32 {d}, {a}, {b}", lambda a, b: a * b, False),
    ("v_mul_hi_u32 {d}, {a}, {b}", lambda a, b: a * b >> 32, False),
    ("v_mul_hi_i32 {d}, {a}, {b}", lambda a, b: s32(a) * s32(b) >> 32, False),
    ("v_mul_u32_u24 {d}, {a}, {b}", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF), False),
    ("v_mul_i32_i24 {d}, {a}, {b}", lambda a, b: (s32(a << 8) >> 8) * (s32(b << 8) >> 8), False),
    ("v_min_u32 {d}, {a}, {b}", min, False),
    ("v_max_u32 {d}, {a}, {b}", max, False),
    ("v_min_i32 {d}, {a}, {b}", lambda a, b: min(s32(a), s32(b)), False),
    ("v_max_i32 {d}, {a}, {b}", lambda a, b: max(s32(a), s32(b)), False),
    ("v_bfm_b32 {d}, {a}, {b}", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), False),
    ("v_bcnt_u32_b32 {d}, {a}, {b}", lambda a, b: a.bit_count() + b, False),
    ("v_add3_u32 {d}, {a}, {b}, {c}", lambda a, b, c: a + b + c, False),
    ("v_lshl_add_u32 {d}, {a}, {b}, {c}", lambda a, b, c: (a << (b & 31)) + c, False),
    ("v_add_lshl_u32 {d}, {a}, {b}, {c}", lambda a, b, c: (a + b & M32) << (c & 31), False),
    ("v_lshl_or_b32 {d}, {a}, {b}, {c}", lambda a, b, c: a << (b & 31) | c, False),
    ("v_and_or_b32 {d}, {a}, {b}, {c}", lambda a, b, c: a & b | c, False),
    ("v_or3_b32 {d}, {a}, {b}, {c}", lambda a, b, c: a | b | c, False),
    ("v_xad_u32 {d}, {a}, {b}, {c}", lambda a, b, c: (a ^ b) + c, False),
    ("v_bfi_b32 {d}, {a}, {b}, {c}", lambda a, b, c: a & b | ~a & c, False),
    ("v_bfe_u32 {d}, {a}, {b}, {c}", bfe_u, False),
    ("v_bfe_i32 {d}, {a}, {b}, {c}", bfe_i, False),
    ("v_perm_b32 {d}, {a}, {b}, {c}", perm, False),
    ("v_alignbit_b32 {d}, {a}, {b}, {c}", lambda a, b, c: (a << 32 | b) >> (c & 31), False),
    ("v_mad_u32_u24 {d}, {a}, {b}, {c}", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c, False),
    ("v_max3_u32 {d}, {a}, {b}, {c}", lambda a, b, c: max(a, b, c), False),
    ("v_min3_i32 {d}, {a}, {b}, {c}", lambda a, b, c: min(s32(a), s32(b), s32(c)), False),
    ("v_med3_u32 {d}, {a}, {b}, {c}", lambda a, b, c: sorted((a, b, c))[1], False),
    ("v_sad_u32 {d}, {a}, {b}, {c}", lambda a, b, c: abs(a - b) + c, False),
    ("v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0x6c", bitop3(0x6C), False),
    ("v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0xe8", bitop3(0xE8), False),
    ("v_bitop3_b16 {d}, {a}, {b}, {c} bitop3:0xec", lambda a, b, c: bitop3(0xEC)(a, b, c) & 0xFFFF, False),
    ("v_add_u32 {d}, {a}, {b} clamp", lambda a, b: min(a + b, M32), False),
    ("v_sub_u32 {d}, {a}, {b} clamp", lambda a, b: max(a - b, 0), False),
    # f32
    ("v_add_f32 {d}, {a}, {b}", add, True),
    ("v_sub_f32 {d}, {a}, {b}", lambda a, b: add(a, b ^ 0x80000000), True),
    ("v_mul_f32 {d}, {a}, {b}", mul, True),
    ("v_min_f32 {d}, {a}, {b}", number_min, True),
    ("v_max_f32 {d}, {a}, {b}", number_max, True),
    ("v_fma_f32 {d}, {a}, {b}, {c}", fma, True),
    ("v_fma_f32 {d}, -{a}, |{b}|, {c}", lambda a, b, c: fma(a ^ 0x80000000, b & 0x7FFFFFFF, c), True),
    ("v_max3_f32 {d}, {a}, {b}, {c}", lambda a, b, c: number_max(number_max(a, b), c), True),
    ("v_med3_f32 {d}, {a}, {b}, {c}", med3, True),
    ("v_rndne_f32 {d}, {a}", rndne, True),
    ("v_trunc_f32 {d}, {a}", lambda a: a if not math.isfinite(f32(a)) else bits32(
        math.copysign(float(math.trunc(f32(a))), f32(a))), True),
    ("v_floor_f32 {d}, {a}", lambda a: a if not math.isfinite(f32(a)) else bits32(
        math.copysign(float(math.floor(f32(a))), f32(a))), True),
    ("v_ldexp_f32 {d}, {a}, {b}", ldexp, True),
    ("v_max_f32 {d}, {a}, {a}", lambda a: QUIET if isnan(a) else a, True),
    # conversions
    ("v_cvt_f32_u32 {d}, {a}", lambda a: round_fraction(Fraction(a)), True),
    ("v_cvt_f32_i32 {d}, {a}", lambda a: round_fraction(Fraction(s32(a))), True),
    ("v_cvt_u32_f32 {d}, {a}", lambda a: to_int(a, 0, M32), False),
    ("v_cvt_i32_f32 {d}, {a}", lambda a: to_int(a, -(2**31), 2**31 - 1), False),
    ("v_cvt_pk_bf16_f32 {d}, {a}, {b}", lambda a, b: bf16(a) | bf16(b) << 16, False),
    ("v_cvt_f32_f16 {d}, {a}", lambda a: bits32(f16(a)) if not math.isnan(f16(a)) else QUIET, True),
    ("v_cvt_f32_ubyte2 {d}, {a}", lambda a: bits32(float(a >> 16 & 255)), True),
    # packed 16-bit
    ("v_pk_add_u16 {d}, {a}, {b}", pk16(lambda a, b: a + b), False),
    ("v_pk_mul_lo_u16 {d}, {a}, {b}", pk16(lambda a, b: a * b), False),
    ("v_pk_max_i16 {d}, {a}, {b}", pk16(lambda a, b: max(s16(a), s16(b))), False),
    ("v_pk_min_u16 {d}, {a}, {b}", pk16(min), False),
    ("v_pk_lshlrev_b16 {d}, {a}, {b}", pk16(lambda a, b: b << (a & 15)), False),
    ("v_pk_lshlrev_b16 {d}, {a}, {b} op_sel_hi:[0,1]", lambda a, b: (b & 0xFFFF) << (a & 15) & 0xFFFF
        | ((b >> 16) << (a & 15) & 0xFFFF) << 16, False),
    ("v_pk_ashrrev_i16 {d}, {a}, {b}", pk16(lambda a, b: s16(b) >> (a & 15)), False),
    ("v_add_i32 {d}, {a}, {b}", lambda a, b: a + b, False),
    ("v_add_i32 {d}, {a}, {b} clamp", lambda a, b: max(-(2**31), min(2**31 - 1, s32(a) + s32(b))), False),
    ("v_sub_i32 {d}, {a}, {b} clamp", lambda a, b: max(-(2**31), min(2**31 - 1, s32(a) - s32(b))), False),
    ("v_mad_u32_u16 {d}, {a}, {b}, {c}", lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c, False),
    ("v_mad_i32_i16 {d}, {a}, {b}, {c}", lambda a, b, c: s16(a) * s16(b) + s32(c), False),
    ("v_med3_i16 {d}, {a}, {b}, {c}", lambda a, b, c: sorted((s16(a), s16(b), s16(c)))[1] & 0xFFFF, False),
    ("v_max3_u16 {d}, {a}, {b}, {c}", lambda a, b, c: max(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF), False),
    ("v_mad_i16 {d}, {a}, {b}, {c}", lambda a, b, c: s16(a) * s16(b) + s16(c) & 0xFFFF, False),
    ("v_dot4_i32_i8 {d}, {a}, {b}, {c}", dot(8, True), False),
    ("v_dot4_u32_u8 {d}, {a}, {b}, {c}", dot(8, False), False),
    ("v_dot8_i32_i4 {d}, {a}, {b}, {c}", dot(4, True), False),
    ("v_dot8_u32_u4 {d}, {a}, {b}, {c}", dot(4, False), False),
    ("v_dot2_i32_i16 {d}, {a}, {b}, {c}", dot(16, True), False),
    ("v_sad_u16 {d}, {a}, {b}, {c}", lambda a, b, c: abs((a & 0xFFFF) - (b & 0xFFFF)) + abs((a >> 16) - (b >> 16)) + c,
        False),
    ("v_msad_u8 {d}, {a}, {b}, {c}", lambda a, b, c: c + sum(
        abs((a >> k & 255) - (b >> k & 255)) for k in (0, 8, 16, 24) if b >> k & 255), False),
    ("v_ashr_pk_i8_i32 {d}, {a}, {b}, {c}", lambda a, b, c: (max(-128, min(127, s32(a) >> (c & 31))) & 255)
        | (max(-128, min(127, s32(b) >> (c & 31))) & 255) << 8, False),
    ("v_cvt_flr_i32_f32 {d}, {a}", floor_int, False),
    ("v_cvt_off_f32_i4 {d}, {a}", lambda a: bits32(((a & 15 ^ 8) - 8) / 16), True),
    ("v_pk_maximum3_f16 {d}, {a}, {b}, {a}", pk16(half_maximum), False),
    ("v_add_u16 {d}, {a}, {b}", lambda a, b: a + b & 0xFFFF, False),
    ("v_lshrrev_b16 {d}, {a}, {b}", lambda a, b: (b & 0xFFFF) >> (a & 15), False),
]  # fmt: skip

# 16-bit results that leave the register's upper half alone; the others clear it
KEEP_UPPER_HALF = (
    "v_min3_f16", "v_max3_f16", "v_med3_i16", "v_max3_u16", "v_fma_f16", "v_mad_u16", "v_mad_i16", "v_add_i16",
    "v_bitop3_b16", "v_ashr_pk_i8_i32",
)  # fmt: skip

# 16-bit float instructions, compared as f16 in the low half
HALVES = [
    ("v_add_f16 {d}, {a}, {b}", half_op(lambda x, y: x + y)),
    ("v_mul_f16 {d}, {a}, {b}", half_op(lambda x, y: x * y)),
    ("v_cvt_f16_f32 {d}, {a}", half),
    ("v_floor_f16 {d}, {a}", half_one(lambda x: float(math.floor(x)))),
    ("v_ceil_f16 {d}, {a}", half_one(lambda x: float(math.ceil(x)))),
    ("v_trunc_f16 {d}, {a}", half_one(lambda x: float(math.trunc(x)))),
    ("v_rndne_f16 {d}, {a}", half_one(lambda x: float(round(x)))),
    ("v_min3_f16 {d}, {a}, {b}, {c}", half_number(min)),
    ("v_max3_f16 {d}, {a}, {b}, {c}", half_number(max)),
    ("v_frexp_mant_f16 {d}, {a}", half_one(lambda x: math.frexp(x)[0])),
]

COMPARES = {
    "v_cmp_lt_i32": lambda a, b: s32(a) < s32(b),
    "v_cmp_ge_u32": lambda a, b: a >= b,
    "v_cmp_ne_u32": lambda a, b: a != b,
    "v_cmp_lt_f32": lambda a, b: f32(a) < f32(b),
    "v_cmp_nge_f32": lambda a, b: not f32(a) >= f32(b),
    "v_cmp_lg_f32": lambda a, b: f32(a) < f32(b) or f32(a) > f32(b),
    "v_cmp_o_f32": lambda a, b: not (isnan(a) or isnan(b)),
    "v_cmp_u_f32": lambda a, b: isnan(a) or isnan(b),
    "v_cmp_eq_u16": lambda a, b: a & 0xFFFF == b & 0xFFFF,
    "v_cmp_gt_i16": lambda a, b: s16(a) > s16(b),
}


def sbfe(x: int, control: int, bits: int, signed: bool) -> int:
    at, width = control & (bits - 1), control >> 16 & 127
    width = min(width, bits)
    value = x >> at & ((1 << width) - 1)
    return value - (1 << width) if signed and width and value >> (width - 1) else value


def first_high(x: int, bits: int) -> int:
    return bits - x.bit_length() if x else M32


def overflows(x: int) -> bool:
    return not -(2**31) <= x < 2**31


# name -> (64-bit sources?, 64-bit result?, function, SCC or None)
SCALAR = {
    "s_add_u32": (0, 0, lambda a, b: a + b, lambda a, b: a + b > M32),
    "s_sub_u32": (0, 0, lambda a, b: a - b, lambda a, b: a < b),
    "s_add_i32": (0, 0, lambda a, b: a + b, lambda a, b: overflows(s32(a) + s32(b))),
    "s_sub_i32": (0, 0, lambda a, b: a - b, lambda a, b: overflows(s32(a) - s32(b))),
    "s_mul_i32": (0, 0, lambda a, b: a * b, None),
    "s_mul_hi_u32": (0, 0, lambda a, b: a * b >> 32, None),
    "s_mul_hi_i32": (0, 0, lambda a, b: s32(a) * s32(b) >> 32, None),
    "s_absdiff_i32": (0, 0, lambda a, b: abs(s32(a) - s32(b)), lambda a, b: a != b),
    "s_bfm_b64": (0, 1, lambda a, b: ((1 << (a & 63)) - 1) << (b & 63), None),
    "s_and_b32": (0, 0, lambda a, b: a & b, lambda a, b: a & b != 0),
    "s_andn2_b32": (0, 0, lambda a, b: a & ~b, lambda a, b: a & ~b != 0),
    "s_lshl_b32": (0, 0, lambda a, b: a << (b & 31), lambda a, b: a << (b & 31) & M32 != 0),
    "s_lshr_b32": (0, 0, lambda a, b: a >> (b & 31), lambda a, b: a >> (b & 31) != 0),
    "s_ashr_i32": (0, 0, lambda a, b: s32(a) >> (b & 31), lambda a, b: s32(a) >> (b & 31) != 0),
    "s_bfe_u32": (0, 0, lambda a, b: sbfe(a, b, 32, False), lambda a, b: sbfe(a, b, 32, False) != 0),
    "s_bfe_i32": (0, 0, lambda a, b: sbfe(a, b, 32, True), lambda a, b: sbfe(a, b, 32, True) != 0),
    "s_min_i32": (0, 0, lambda a, b: min(s32(a), s32(b)), lambda a, b: s32(a) < s32(b)),
    "s_max_u32": (0, 0, max, lambda a, b: a > b),
    "s_lshl2_add_u32": (0, 0, lambda a, b: (a << 2) + b, lambda a, b: (a << 2) + b > M32),
    "s_and_b64": (1, 1, lambda a, b: a & b, lambda a, b: a & b != 0),
    "s_xor_b64": (1, 1, lambda a, b: a ^ b, lambda a, b: a != b),
    "s_orn2_b64": (1, 1, lambda a, b: a | ~b, lambda a, b: (a | ~b) & M64 != 0),
    "s_lshl_b64": (1, 1, lambda a, b: a << (b & 63), lambda a, b: a << (b & 63) & M64 != 0),
    "s_lshr_b64": (1, 1, lambda a, b: a >> (b & 63), lambda a, b: a >> (b & 63) != 0),
    "s_ashr_i64": (1, 1, lambda a, b: s64(a) >> (b & 63), lambda a, b: s64(a) >> (b & 63) != 0),
}
SCALAR_ONE = {
    "s_not_b32": (0, 0, lambda a: ~a, lambda a: a != M32),
    "s_brev_b32": (0, 0, lambda a: int(f"{a:032b}"[::-1], 2), None),
    "s_brev_b64": (1, 1, lambda a: int(f"{a:064b}"[::-1], 2), None),
    "s_ff0_i32_b64": (1, 0, lambda a: next((k for k in range(64) if not a >> k & 1), M32), None),
    "s_flbit_i32_i64": (1, 0, lambda a: next((k for k in range(64) if a >> 63 - k & 1 != a >> 63), M32), None),
    "s_abs_i32": (0, 0, lambda a: abs(s32(a)), lambda a: a != 0),
    "s_bcnt1_i32_b32": (0, 0, int.bit_count, lambda a: a != 0),
    "s_bcnt1_i32_b64": (1, 0, int.bit_count, lambda a: a != 0),
    "s_ff1_i32_b32": (0, 0, ffbl, None),
    "s_ff1_i32_b64": (1, 0, lambda a: (a & -a).bit_length() - 1 if a else M32, None),
    "s_flbit_i32_b32": (0, 0, lambda a: first_high(a, 32), None),
    "s_sext_i32_i8": (0, 0, lambda a: (a & 0xFF) - ((a & 0x80) << 1), None),
    "s_sext_i32_i16": (0, 0, s16, None),
}
