"""16-bit vector instructions, and products of small integers: name -> (result type, source types, numpy function).

Semantics: AMD CDNA3 ISA reference, VOP1, VOP2, VOP3 and VOP3P chapters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .arithmetic import F32, F64, I32, U32, class_of, maximum_number, median, minimum_number

F16, I16, U16 = np.float16, np.int16, np.uint16


def _special(f: Callable) -> Callable:
    return lambda x: f(x.astype(F64)).astype(F16)


def _median_float(a, b, c):
    middle = median(a, b, c, minimum_number, maximum_number)
    some = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(some, minimum_number(minimum_number(a, b), c), middle)


def _three(f: Callable) -> Callable:
    return lambda a, b, c: f(f(a, b), c)


def _ldexp(x, e):
    return np.ldexp(x.astype(F64), np.clip(e.astype(I32), -60, 60)).astype(F16)


def class_f16(x, mask):
    return class_of(x.view(U16), mask, 5, 10)


def fields(x: np.ndarray, bits: int, signed: bool) -> list[np.ndarray]:
    """The fields of so many bits of a register, low first, as int64."""
    out = []
    for k in range(0, 32, bits):
        v = ((x >> U32(k)) & U32((1 << bits) - 1)).astype(np.int64)
        out.append((v ^ (1 << (bits - 1))) - (1 << (bits - 1)) if signed else v)
    return out


def _dot(bits: int, signed: bool) -> Callable:
    """Products of fields added to a 32-bit integer, modulo 2^32."""

    def f(a, b, c):
        total = np.asarray(c).astype(np.int64)
        for x, y in zip(fields(a, bits, signed), fields(b, bits, signed), strict=True):
            total = total + x * y
        return (total & 0xFFFFFFFF).astype(U32)

    return f


def _pack(a, b, low: int, high: int, shift):
    """Two arithmetic right shifts, saturated to bytes."""
    x, y = (np.clip(v >> (shift & U32(31)).astype(I32), low, high).astype(I32).view(U32) & U32(255) for v in (a, b))
    return x | y << U32(8)


def _normal(low: float, top: int) -> Callable:
    """[low, 1] -> integers up to `top`, nearest even, NaN to 0."""
    one = lambda x: np.rint(np.clip(np.nan_to_num(x.astype(F64), nan=0.0), low, 1) * top).astype(np.int64) & 0xFFFF
    return lambda a, b: (one(a) | one(b) << 16).astype(U32)


def _sum_of_differences(x, y, c, masked: bool = False):
    total = np.asarray(c, U32)
    for p, q in zip(fields(x, 8, False), fields(y, 8, False), strict=True):
        counts = np.abs(p - q).astype(U32)
        total = total + (np.where(q == 0, U32(0), counts) if masked else counts)
    return total


H, S, U, HH, SS, UU = ("f16",), ("i16",), ("u16",), ("f16",) * 2, ("i16",) * 2, ("u16",) * 2
THREE, DOT = ("u32",) * 3, ("u32", "u32", "u32")
TABLE: dict[str, tuple[str, tuple[str, ...], Callable]] = {
    "v_floor_f16": ("f16", H, np.floor),
    "v_ceil_f16": ("f16", H, np.ceil),
    "v_trunc_f16": ("f16", H, np.trunc),
    "v_rndne_f16": ("f16", H, np.rint),
    "v_fract_f16": ("f16", H, lambda x: np.minimum(x - np.floor(x), np.nextafter(F16(1), F16(0)))),
    "v_frexp_mant_f16": ("f16", H, lambda x: np.where(np.isfinite(x), np.frexp(x)[0], x)),
    "v_frexp_exp_i16_f16": ("i16", H, lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I16)),
    "v_sin_f16": ("f16", H, _special(lambda x: np.sin(2 * np.pi * x))),
    "v_cos_f16": ("f16", H, _special(lambda x: np.cos(2 * np.pi * x))),
    "v_ldexp_f16": ("f16", ("f16", "i16"), _ldexp),
    "v_mad_f16": ("f16", ("f16",) * 3, lambda a, b, c: a * b + c),
    "v_madmk_f16": ("f16", ("f16",) * 3, lambda a, b, c: a * b + c),
    "v_madak_f16": ("f16", ("f16",) * 3, lambda a, b, c: a * b + c),
    "v_min3_f16": ("f16", ("f16",) * 3, _three(minimum_number)),
    "v_max3_f16": ("f16", ("f16",) * 3, _three(maximum_number)),
    "v_med3_f16": ("f16", ("f16",) * 3, _median_float),
    "v_min3_i16": ("i16", ("i16",) * 3, _three(np.minimum)),
    "v_max3_i16": ("i16", ("i16",) * 3, _three(np.maximum)),
    "v_med3_i16": ("i16", ("i16",) * 3, median),
    "v_min3_u16": ("u16", ("u16",) * 3, _three(np.minimum)),
    "v_max3_u16": ("u16", ("u16",) * 3, _three(np.maximum)),
    "v_med3_u16": ("u16", ("u16",) * 3, median),
    "v_add_i16": ("i16", SS, np.add),
    "v_sub_i16": ("i16", SS, np.subtract),
    "v_mad_i16": ("i16", ("i16",) * 3, lambda a, b, c: a * b + c),
    "v_mad_u32_u16": ("u32", ("u16", "u16", "u32"), lambda a, b, c: a.astype(U32) * b.astype(U32) + c),
    "v_mad_i32_i16": ("i32", ("i16", "i16", "i32"), lambda a, b, c: a.astype(I32) * b.astype(I32) + c),
    "v_add_i32": ("i32", ("i32", "i32"), np.add),
    "v_sub_i32": ("i32", ("i32", "i32"), np.subtract),
    "v_dot2_i32_i16": ("u32", DOT, _dot(16, True)),
    "v_dot2_u32_u16": ("u32", DOT, _dot(16, False)),
    "v_dot4_i32_i8": ("u32", DOT, _dot(8, True)),
    "v_dot4_u32_u8": ("u32", DOT, _dot(8, False)),
    "v_dot8_i32_i4": ("u32", DOT, _dot(4, True)),
    "v_dot8_u32_u4": ("u32", DOT, _dot(4, False)),
    "v_ashr_pk_i8_i32": ("u16", ("i32", "i32", "u32"), lambda a, b, c: _pack(a, b, -128, 127, c)),
    "v_ashr_pk_u8_i32": ("u16", ("i32", "i32", "u32"), lambda a, b, c: _pack(a, b, 0, 255, c)),
    "v_cvt_pknorm_i16_f32": ("u32", ("f32", "f32"), _normal(-1, 32767)),
    "v_cvt_pknorm_u16_f32": ("u32", ("f32", "f32"), _normal(0, 65535)),
    "v_sad_u16": ("u32", THREE, lambda a, b, c: c + sum(
        np.abs(x - y).astype(U32) for x, y in zip(fields(a, 16, False), fields(b, 16, False), strict=True))),
    "v_sad_hi_u8": ("u32", THREE, lambda a, b, c: (_sum_of_differences(a, b, U32(0)) << U32(16)) + c),
    "v_msad_u8": ("u32", THREE, lambda a, b, c: _sum_of_differences(a, b, c, masked=True)),
    "v_cvt_flr_i32_f32": ("i32", ("f32",), lambda x: np.clip(
        np.floor(np.nan_to_num(x.astype(F64), nan=0.0)), -(2**31), 2**31 - 1).astype(I32)),
    "v_cvt_rpi_i32_f32": ("i32", ("f32",), lambda x: np.clip(
        np.floor(np.nan_to_num(x.astype(F64), nan=0.0) + 0.5), -(2**31), 2**31 - 1).astype(I32)),
    "v_cvt_off_f32_i4": ("f32", ("u32",), lambda x: ((((x & U32(15)).astype(I32) ^ 8) - 8) / 16).astype(F32)),
}  # fmt: skip
ACCUMULATE: dict[str, tuple[str, tuple[str, ...], Callable]] = {
    "v_mac_f16": ("f16", ("f16",) * 3, lambda a, b, c: a * b + c),
    "v_dot2c_i32_i16": ("u32", DOT, _dot(16, True)),
    "v_dot4c_i32_i8": ("u32", DOT, _dot(8, True)),
    "v_dot8c_i32_i4": ("u32", DOT, _dot(4, True)),
}
