"""Comparisons, selects, carries, wide multiplies and division steps: vector ALU instructions with masks or several
results.

Semantics: CDNA3 ISA reference, VOPC and VOP3 chapters. `v_div_scale`/`v_div_fmas` disagree between ISA editions on the
rescaling; here it is the rule under which a division comes out right at both ends of the range (2^64 or 2^-64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import class_f32, fma32
from .asm import EXEC, VCC, Instruction, Operand
from .double import class_f64, fma64
from .half import class_f16
from .operands import Binder, Writer, bad, mask_reader, mask_writer, refuse
from .state import LANES, Group, pack_mask
from .valu import sdwa_writer, with_output_modifiers, write_half

U32, U64, F32, F64 = np.uint32, np.uint64, np.float32, np.float64
VCC_OPERAND = Operand("s", VCC, 2)

nan = lambda a, b: np.isnan(a) | np.isnan(b)
CONDITIONS: dict[str, Callable] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "ne": np.not_equal,
    "o": lambda a, b: ~nan(a, b),
    "u": nan,
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "t": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
    "f": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    "tru": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
}


def bind(i: Instruction, b: Binder) -> Callable[[Group], None] | None:
    name = i.name.removesuffix("_sdwa").removesuffix("_dpp")
    if name.startswith(("v_cmp_", "v_cmpx_")):
        refuse(i, "clamp", "op_sel")
        return _compare(i, b, name)
    maker = OTHERS.get(name)
    if maker is None:
        return None
    if not name.startswith(("v_div_fmas", "v_div_fixup")):
        refuse(i, "clamp", "mul", "div", "op_sel")
    return maker(i, b)


def _sources(i: Instruction, b: Binder, operands, kinds) -> list:
    if i.name.endswith("_sdwa"):
        return [
            b.sdwa(o, t, i.mods.get(f"src{k}_sel", "DWORD"))
            for k, (o, t) in enumerate(zip(operands, kinds, strict=True))
        ]
    if i.name.endswith("_dpp"):
        raise bad(i, "DPP on an instruction with a mask")
    return [b.typed(o, t) for o, t in zip(operands, kinds, strict=True)]


def _compare(i: Instruction, b: Binder, name: str) -> Callable[[Group], None]:
    _, _, condition, kind = name.split("_", 3)
    write = mask_writer(i.operands[0])
    also_exec = name.startswith("v_cmpx_")
    if condition == "class":
        test, kinds = {"f32": class_f32, "f16": class_f16, "f64": class_f64}[kind], (kind, "u32")
    elif condition in CONDITIONS:
        test, kinds = CONDITIONS[condition], (kind, kind)
    else:
        raise bad(i, "unknown comparison")
    ra, rb = _sources(i, b, i.operands[1:], kinds)

    def run(g: Group) -> None:
        result = test(ra(g), rb(g))
        write(g, result)
        if also_exec:
            g.S[EXEC], g.S[EXEC + 1] = pack_mask(np.broadcast_to(result, (g.n, LANES)) & g.exec)
            g.refresh_exec()

    return run


def _cndmask(i: Instruction, b: Binder) -> Callable[[Group], None]:
    mask = mask_reader(i.operands[3]) if len(i.operands) > 3 else mask_reader(VCC_OPERAND)
    ra, rb = _sources(i, b, i.operands[1:3], ("u32", "u32"))
    if i.name.endswith("_sdwa"):
        write = sdwa_writer(i, b, "u32")
    else:
        write = b.writer(i.operands[0], "u32")
    return lambda g: write(g, np.where(mask(g), rb(g), ra(g)))


def _carry(sign: int, reverse: bool, with_carry: bool):
    """v_add_co, v_sub_co, v_subrev_co and their carry-in forms: operands d, carry out, a, b[, carry in]."""

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        operands = i.operands
        if i.name.endswith("_dpp"):
            raise bad(i, "DPP on an instruction with a carry")
        write, carry = b.writer(operands[0], "u32"), mask_writer(operands[1])
        ra, rb = _sources(i, b, operands[2:4], ("u32", "u32"))
        enter = mask_reader(operands[4]) if with_carry else None

        def run(g: Group) -> None:
            x, y = ra(g).astype(np.int64), rb(g).astype(np.int64)
            if reverse:
                x, y = y, x
            total = x + sign * y
            if enter is not None:
                total = total + sign * enter(g)
            out = (total < 0) | (total > 0xFFFFFFFF)
            write(g, (total & 0xFFFFFFFF).astype(U32))
            carry(g, out)

        return run

    return make


def _mad_wide(signed: bool):
    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        kind = "i32" if signed else "u32"
        write, carry = b.writer(i.operands[0], "u64"), mask_writer(i.operands[1])
        ra, rb, rc = b.typed(i.operands[2], kind), b.typed(i.operands[3], kind), b.typed(i.operands[4], "u64")

        def run(g: Group) -> None:
            wide = np.int64 if signed else U64
            product = np.ascontiguousarray(ra(g).astype(wide) * rb(g).astype(wide)).view(U64)
            c = rc(g)
            total = product + c
            write(g, total)
            if signed:
                p, s, t = product.view(np.int64) < 0, np.asarray(c).view(np.int64) < 0, total.view(np.int64) < 0
                carry(g, (p == s) & (p != t))
            else:
                carry(g, total < c)

        return run

    return make


class Wide(NamedTuple):
    """What division needs to know of a float type: its kind, numpy type and bits, mantissa bits, top exponent, smallest
    normal; by how much operands are scaled, from which difference of exponents a quotient is large, up to which
    exponent a numerator is small, and from which difference a quotient is zero."""

    kind: str
    dtype: Any
    raw: Any
    mantissa: int
    top: int
    normal: float
    scale: int
    large: int
    small: int
    zero: int


SINGLE = Wide("f32", F32, U32, 23, 255, 2.0**-126, 64, 96, 23, -150)
DOUBLE = Wide("f64", F64, U64, 52, 2047, 2.0**-1022, 128, 768, 53, -1075)


def _exponent(x: np.ndarray, t: Wide = SINGLE) -> np.ndarray:
    return (np.ascontiguousarray(x).view(t.raw) >> t.raw(t.mantissa) & t.raw(t.top)).astype(np.int64)


def _scale_for(t: Wide):
    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        write, carry = b.writer(i.operands[0], t.kind), mask_writer(i.operands[1])
        readers = [b.typed(o, t.kind) for o in i.operands[2:5]]

        def run(g: Group) -> None:
            s0, s1, s2 = (np.broadcast_to(r(g), (g.n, LANES)).astype(t.dtype) for r in readers)
            n, d = s2.astype(F64), s1.astype(F64)
            up, down = (np.ldexp(s0.astype(F64), e).astype(t.dtype) for e in (t.scale, -t.scale))
            same_d, same_n = s0.view(t.raw) == s1.view(t.raw), s0.view(t.raw) == s2.view(t.raw)
            zero = (s1 == 0) | (s2 == 0)
            large = _exponent(s2, t) - _exponent(s1, t) >= t.large
            tiny_d = np.abs(d) < t.normal
            tiny_reciprocal, tiny_quotient = (~np.isinf(d) & (np.abs(x / d) < t.normal) for x in (1, n))
            conditions = [zero, large, tiny_d, tiny_reciprocal & tiny_quotient, tiny_reciprocal, tiny_quotient]
            conditions.append(_exponent(s2, t) <= t.small)
            on_d, on_n = np.where(same_d, up, s0), np.where(same_n, up, s0)
            result = np.select(conditions, [t.dtype(np.nan), on_d, up, on_d, down, on_n, up], s0)
            flag = np.select(conditions, [False, True, False, True, False, True, False], False)
            write(g, result)
            carry(g, flag)

        return run

    return make


def _modified(i: Instruction, b: Binder, t: Wide) -> Writer:
    """Writes a result with the output multiplier and clamp: compilers fold x / y clamped to [0, 1] so."""
    write, modify = b.writer(i.operands[0], t.kind), with_output_modifiers(i, t.kind, lambda x: x)
    return lambda g, x: write(g, modify(x))


def _fmas_for(t: Wide):
    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        write, vcc = _modified(i, b, t), mask_reader(VCC_OPERAND)
        readers = [b.typed(o, t.kind) for o in i.operands[1:4]]

        def run(g: Group) -> None:
            s0, s1, s2 = (np.broadcast_to(r(g), (g.n, LANES)) for r in readers)
            scale = np.where(_exponent(s2, t) > t.top // 2, t.scale, -t.scale)
            if t is DOUBLE:
                write(g, fma64(s0, s1, s2, np.where(vcc(g), scale, 0)))
                return
            plain = fma32(s0, s1, s2)
            exact = s0.astype(F64) * s1 + s2
            write(g, np.where(vcc(g), np.ldexp(exact, scale).astype(F32), plain))

        return run

    return make


def _fixup_for(t: Wide):
    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        write = _modified(i, b, t)
        readers = [b.typed(o, t.kind) for o in i.operands[1:4]]
        infinity = t.dtype(np.inf)

        def run(g: Group) -> None:
            q, d, n = (np.broadcast_to(r(g), (g.n, LANES)).astype(t.dtype) for r in readers)
            sign = np.where(np.signbit(d) ^ np.signbit(n), t.dtype(-1), t.dtype(1))
            invalid = ((d == 0) & (n == 0)) | (np.isinf(d) & np.isinf(n))
            result = np.select(
                [np.isnan(n), np.isnan(d), invalid, (d == 0) | np.isinf(n), np.isinf(d) | (n == 0),
                 _exponent(n, t) - _exponent(d, t) < t.zero, _exponent(d, t) == t.top, np.isnan(q)],
                [n, d, t.dtype(np.nan), sign * infinity, sign * t.dtype(0), sign * t.dtype(0), sign * infinity,
                 sign * infinity],
                np.copysign(np.abs(q), sign),
            )  # fmt: skip
            write(g, result)

        return run

    return make


_div_scale, _div_fmas, _div_fixup = (f(SINGLE) for f in (_scale_for, _fmas_for, _fixup_for))


def _bitop3(kind: str):
    """Any function of three bits: bit 4a + 2b + c of the table (LLVM's definition; a, b, c have tables f0, cc, aa)."""

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        write = b.writer(i.operands[0], kind) if kind == "u32" else write_half(b, i.operands[0], kind, False)
        ra, rb, rc = (b.typed(o, kind) for o in i.operands[1:4])
        table = i.mods.get("bitop3", 0)

        def run(g: Group) -> None:
            x, y, z = ra(g), rb(g), rc(g)
            result = np.zeros((g.n, LANES), U32 if kind == "u32" else np.uint16)
            for k in range(8):
                if table >> k & 1:
                    result |= (x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z)
            write(g, result)

        return run

    return make


def _swap(i: Instruction, b: Binder) -> Callable[[Group], None]:
    first, second = i.operands
    ra, rb = b.typed(first, "u32"), b.typed(second, "u32")
    wa, wb = b.writer(first, "u32"), b.writer(second, "u32")

    def run(g: Group) -> None:
        x, y = ra(g).copy(), rb(g).copy()
        wa(g, y)
        wb(g, x)

    return run


def _mbcnt(upper: bool):
    """Counts the mask's bits below this lane, in its lower or upper half, and adds the second source."""

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        write = b.writer(i.operands[0], "u32")
        ra, rb = b.typed(i.operands[1], "u32"), b.typed(i.operands[2], "u32")
        lane = np.arange(LANES)
        count = np.clip(lane - 32, 0, 32) if upper else np.minimum(lane, 32)
        below = np.array([(1 << int(c)) - 1 for c in count], U64).astype(U32)
        return lambda g: write(g, np.bitwise_count(ra(g) & below).astype(U32) + rb(g))

    return make


OTHERS: dict[str, Callable] = {
    "v_cndmask_b32": _cndmask,
    "v_add_co_u32": _carry(1, False, False),
    "v_sub_co_u32": _carry(-1, False, False),
    "v_subrev_co_u32": _carry(-1, True, False),
    "v_addc_co_u32": _carry(1, False, True),
    "v_subb_co_u32": _carry(-1, False, True),
    "v_subbrev_co_u32": _carry(-1, True, True),
    "v_mad_u64_u32": _mad_wide(False),
    "v_mad_i64_i32": _mad_wide(True),
    "v_div_scale_f32": _div_scale,
    "v_div_fmas_f32": _div_fmas,
    "v_div_fixup_f32": _div_fixup,
    "v_bitop3_b16": _bitop3("u16"),
    "v_bitop3_b32": _bitop3("u32"),
    "v_swap_b32": _swap,
    "v_mbcnt_lo_u32_b32": _mbcnt(False),
    "v_mbcnt_hi_u32_b32": _mbcnt(True),
    "v_div_scale_f64": _scale_for(DOUBLE),
    "v_div_fmas_f64": _fmas_for(DOUBLE),
    "v_div_fixup_f64": _fixup_for(DOUBLE),
}
