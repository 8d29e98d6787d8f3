"""Packed and mixed-precision vector instructions (VOP3P), and conversions to and from fp8, fp6 and fp4.

Semantics: CDNA3 ISA reference, "VOP3P"; the `scalef32` conversions, new on gfx950, from LLVM's definitions: the value
is
divided by the scale (a power of two, f32) on the way down and multiplied by it on the way up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import convert
from .arithmetic import flush, fma16, fma32, maximum_ieee, maximum_number, minimum_ieee, minimum_number
from .asm import Instruction
from .operands import Binder, Reader, bad, refuse
from .state import DENORMALS_IN, DENORMALS_OUT, LANES, OVERFLOW, Group

U32, F32, F64 = np.uint32, np.float32, np.float64
U16, I16 = np.uint16, np.int16


def bind(i: Instruction, b: Binder) -> Callable[[Group], None] | None:
    if i.name in PACKED_F32:
        return _packed_f32(i, b, PACKED_F32[i.name])
    if i.name in PACKED_16:
        return _packed_16(i, b, *PACKED_16[i.name])
    maker = OTHERS.get(i.name)
    if maker is None:
        return None
    refuse(i, "mul", "div", *([] if "mix" in i.name else ["clamp", "neg_lo", "neg_hi"]))
    return maker(i, b)


def _flags(i: Instruction, name: str, count: int, default: int) -> list[int]:
    given = i.mods.get(name, [])
    return [given[k] if k < len(given) else default for k in range(count)]


# -- two f32 values in a register pair
PACKED_F32: dict[str, Callable] = {
    "v_pk_add_f32": np.add,
    "v_pk_mul_f32": np.multiply,
    "v_pk_fma_f32": fma32,
}


def _half(i: Instruction, b: Binder, o, which: int, negate: int) -> Reader:
    """One 32-bit half of a pair operand. Of a constant only the lower half is known: compilers choose it for both."""
    read = b.raw(o, 0 if o.kind == "c" else which)
    if o.kind == "c" and o.value is None and o.literal:
        raise bad(i, "a literal in a packed f32 instruction")
    if o.kind == "c" and which and o.index:
        raise bad(i, "the upper half of a constant")
    return (lambda g: read(g) ^ U32(0x80000000)) if negate else read


def _packed_f32(i: Instruction, b: Binder, f: Callable) -> Callable[[Group], None]:
    sources, n = i.operands[1:], len(i.operands) - 1
    low, high = _flags(i, "op_sel", n, 0), _flags(i, "op_sel_hi", n, 1)
    neg_low, neg_high = _flags(i, "neg_lo", n, 0), _flags(i, "neg_hi", n, 0)
    first = [_half(i, b, o, low[k], neg_low[k]) for k, o in enumerate(sources)]
    second = [_half(i, b, o, high[k], neg_high[k]) for k, o in enumerate(sources)]
    write_low, write_high = b.writer(i.operands[0], "f32"), b.writer(i.operands[0], "f32", 1)
    clamp = bool(i.mods.get("clamp"))

    def run(g: Group) -> None:
        keep = not b.may_flush or g.mode & DENORMALS_IN
        value = lambda r: r(g).view(F32) if keep else flush(r(g).view(F32))
        x, y = f(*map(value, first)), f(*map(value, second))
        if clamp:
            x, y = (np.nan_to_num(np.clip(v, 0, 1), nan=0.0) for v in (x, y))
        write_low(g, x)
        write_high(g, y)

    return run


def _pk_mov(i: Instruction, b: Binder) -> Callable[[Group], None]:
    select = _flags(i, "op_sel", 2, 0)
    first = _half(i, b, i.operands[1], select[0], 0)
    second = _half(i, b, i.operands[2], select[1], 0)
    write_low, write_high = b.writer(i.operands[0], "u32"), b.writer(i.operands[0], "u32", 1)

    def run(g: Group) -> None:
        x, y = np.copy(first(g)), np.copy(second(g))
        write_low(g, x)
        write_high(g, y)

    return run


# -- two 16-bit values in a register
PACKED_16: dict[str, tuple[str, Callable]] = {
    "v_pk_add_f16": ("f16", np.add),
    "v_pk_mul_f16": ("f16", np.multiply),
    "v_pk_fma_f16": ("f16", fma16),
    "v_pk_min_f16": ("f16", minimum_number),
    "v_pk_max_f16": ("f16", maximum_number),
    "v_pk_minimum3_f16": ("f16", lambda a, b, c: minimum_ieee(minimum_ieee(a, b), c)),
    "v_pk_maximum3_f16": ("f16", lambda a, b, c: maximum_ieee(maximum_ieee(a, b), c)),
    "v_pk_add_u16": ("u16", np.add),
    "v_pk_add_i16": ("i16", np.add),
    "v_pk_sub_u16": ("u16", np.subtract),
    "v_pk_sub_i16": ("i16", np.subtract),
    "v_pk_mul_lo_u16": ("u16", np.multiply),
    "v_pk_mad_u16": ("u16", lambda a, b, c: a * b + c),
    "v_pk_mad_i16": ("i16", lambda a, b, c: a * b + c),
    "v_pk_min_u16": ("u16", np.minimum),
    "v_pk_max_u16": ("u16", np.maximum),
    "v_pk_min_i16": ("i16", np.minimum),
    "v_pk_max_i16": ("i16", np.maximum),
    "v_pk_lshlrev_b16": ("u16", lambda a, b: b << (a & U16(15))),
    "v_pk_lshrrev_b16": ("u16", lambda a, b: b >> (a & U16(15))),
    "v_pk_ashrrev_i16": ("i16", lambda a, b: b >> (a & I16(15))),
}
NUMPY = {"f16": np.float16, "u16": np.uint16, "i16": np.int16}


def _packed_16(i: Instruction, b: Binder, kind: str, f: Callable) -> Callable[[Group], None]:
    sources, n, dtype = i.operands[1:], len(i.operands) - 1, NUMPY[kind]
    if i.mods.get("clamp"):
        raise bad(i, "clamp on a packed 16-bit instruction")
    select = (_flags(i, "op_sel", n, 0), _flags(i, "op_sel_hi", n, 1))
    negate = (_flags(i, "neg_lo", n, 0), _flags(i, "neg_hi", n, 0))

    def reader(o, which: int, neg: int) -> Reader:
        if o.kind == "c":  # 32 bits: a float is its f16 form, or for integers its f32 form; so is an integer's sign
            short = kind == "f16" and o.value is not None
            bits = int(np.float16(o.value).view(U16)) if short else o.index & 0xFFFFFFFF
            half = bits >> 16 * which & 0xFFFF
            fixed = np.array([[half ^ (0x8000 if neg else 0)]], U16).view(dtype)
            return lambda g: fixed
        read, flip = b.raw(o), U16(0x8000 if neg else 0)
        return lambda g: ((read(g) >> U32(16 * which)).astype(U16) ^ flip).view(dtype)

    halves = [[reader(o, select[h][k], negate[h][k]) for k, o in enumerate(sources)] for h in (0, 1)]
    write = b.writer(i.operands[0], "u32")

    def run(g: Group) -> None:
        low, high = (f(*(r(g) for r in readers)).astype(dtype).view(U16).astype(U32) for readers in halves)
        write(g, low | high << U32(16))

    return run


# -- mixed precision: each source is f32, or one f16 half
def _mix(part: str):
    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        half, f16 = _flags(i, "op_sel", 3, 0), _flags(i, "op_sel_hi", 3, 0)

        def reader(k: int) -> Reader:
            o = i.operands[1 + k]
            if not f16[k]:
                return b.typed(o, "f32")
            read = b.typed(o, "f16", bool(half[k]))
            return lambda g: read(g).astype(F32)

        ra, rb, rc = (reader(k) for k in range(3))
        r = b.registers.index(i.operands[0].index)
        clamp = bool(i.mods.get("clamp"))

        def run(g: Group) -> None:
            x = fma32(*np.broadcast_arrays(ra(g), rb(g), rc(g)))
            if clamp:
                x = np.nan_to_num(np.clip(x, 0, 1), nan=0.0)
            if part == "f32":
                if b.may_flush and not g.mode & DENORMALS_OUT:
                    x = flush(x)
                bits = np.ascontiguousarray(x).view(U32)
            elif part == "low":
                bits = (g.V[r] & U32(0xFFFF0000)) | convert.half_bits(x)
            else:
                bits = (g.V[r] & U32(0xFFFF)) | convert.half_bits(x) << U32(16)
            np.copyto(g.V[r], bits, where=g.exec)

        return run

    return make


def _dot2(unpack: Callable):
    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        refuse(i, "op_sel")
        if not all(_flags(i, "op_sel_hi", 3, 1)):
            raise bad(i, "op_sel_hi on this instruction")
        write = b.writer(i.operands[0], "f32")
        ra, rb, rc = b.raw(i.operands[1]), b.raw(i.operands[2]), b.typed(i.operands[3], "f32")
        return lambda g: write(g, unpack(ra(g), rb(g), rc(g)))

    return make


# -- fp8
def _to_fp8(fmt: convert.Small):
    """v_cvt_pk_fp8_f32 / bf8: two f32 into one half of the destination (op_sel[2..3]); the other half stays. Values
    above the largest become NaN or infinity, unless the MODE register's FP16_OVFL bit saturates them."""

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        r = b.registers.index(i.operands[0].index)
        ra, rb = b.typed(i.operands[1], "f32"), b.typed(i.operands[2], "f32")
        select = i.mods.get("op_sel", [])
        high = bool(select[-1]) if select else False

        def run(g: Group) -> None:
            top = bool(g.mode & OVERFLOW)
            pair = fmt.encode(ra(g), saturate=top) | fmt.encode(rb(g), saturate=top) << U32(8)
            pair = np.broadcast_to(pair, (g.n, LANES))
            bits = (g.V[r] & U32(0xFFFF)) | pair << U32(16) if high else (g.V[r] & U32(0xFFFF0000)) | pair
            np.copyto(g.V[r], bits, where=g.exec)

        return run

    return make


def _from_fp8(fmt: convert.Small, both: bool):
    """v_cvt_f32_fp8 takes a byte (src0_sel, or op_sel), v_cvt_pk_f32_fp8 a word."""

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        read = b.raw(i.operands[1])
        select = i.mods.get("src0_sel", "BYTE_0" if not both else "WORD_0")
        shift = int(select[-1]) * (16 if both else 8)
        if i.mods.get("op_sel"):
            flags = i.mods["op_sel"]
            shift = 16 * flags[0] if both else 8 * (2 * flags[0] + (flags[1] if len(flags) > 2 else 0))
        write, write_next = b.writer(i.operands[0], "f32"), b.writer(i.operands[0], "f32", 1) if both else None

        def run(g: Group) -> None:
            x = np.broadcast_to(read(g), (g.n, LANES)) >> U32(shift)
            low, high = fmt.table[x & U32(255)], fmt.table[(x >> U32(8)) & U32(255)]
            write(g, low)
            if write_next is not None:
                write_next(g, high)

        return run

    return make


# -- conversions with a scale (gfx950)
def power(bits: np.ndarray) -> np.ndarray:
    """The power of two that a scale means, by its bits as f32: its exponent alone counts, as an E8M0 code does."""
    return convert.E8M0[(bits >> U32(23)) & U32(255)].astype(F64)


def _scaled_down(fmt: convert.Small, source: str):
    """v_cvt_scalef32_pk_{fp8,bf8,fp4}_{f32,f16,bf16}: two values / scale into a half (fp8) or a byte (fp4) of d.

    FP8 that is too large is taken to be treated as by v_cvt_pk_fp8_f32: no public text says."""

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        r = b.registers.index(i.operands[0].index)
        select = i.mods.get("op_sel", [])
        if source == "f32":
            ra, rb = b.typed(i.operands[1], "f32"), b.typed(i.operands[2], "f32")
            pair = lambda g: (ra(g), rb(g))
            scale = b.raw(i.operands[3])
        else:
            raw = b.raw(i.operands[1])
            unpack = convert.halves_f16 if source == "f16" else convert.halves_bf16
            pair = lambda g: unpack(raw(g))
            scale = b.raw(i.operands[2])
        width = 2 * fmt.bits
        if fmt.bits == 4:
            byte = (select[2] if len(select) > 2 else 0) + 2 * (select[3] if len(select) > 3 else 0)
            shift = 8 * byte
        else:
            shift = 16 * (select[-1] if select else 0)
        field = U32(((1 << width) - 1) << shift)

        def run(g: Group) -> None:
            x, y = pair(g)
            by, saturate = 1 / power(scale(g)), bool(g.mode & OVERFLOW)
            low, high = (fmt.encode(v.astype(F64) * by, saturate) for v in (x, y))
            bits = np.broadcast_to(low | high << U32(fmt.bits), (g.n, LANES)) << U32(shift)
            np.copyto(g.V[r], (g.V[r] & ~field) | bits, where=g.exec)

        return run

    return make


def _scaled_up(fmt: convert.Small, target: str):
    """v_cvt_scalef32_pk_{f32,f16,bf16}_{fp8,bf8,fp4}: two codes (selected by op_sel) times scale."""

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        read, scale = b.raw(i.operands[1]), b.raw(i.operands[2])
        select = [*i.mods.get("op_sel", []), 0, 0][:2]
        shift = 8 * (select[0] + 2 * select[1]) if fmt.bits == 4 else 16 * select[0]
        mask = U32((1 << fmt.bits) - 1)
        write = b.writer(i.operands[0], "f32" if target == "f32" else "u32")
        write_next = b.writer(i.operands[0], "f32", 1) if target == "f32" else None

        def run(g: Group) -> None:
            x = np.broadcast_to(read(g), (g.n, LANES)) >> U32(shift)
            by = power(scale(g))
            low, high = ((fmt.table[(x >> U32(fmt.bits * k)) & mask] * by).astype(F32) for k in (0, 1))
            if write_next is not None:
                write(g, low)
                write_next(g, high)
            else:
                write(g, (convert.pack_bf16 if target == "bf16" else convert.pack_half)(low, high))

        return run

    return make


def _bits6(codes: list[np.ndarray]) -> list[np.ndarray]:
    """32 codes of 6 bits -> 6 registers, low bits first."""
    words = [np.zeros(codes[0].shape, np.uint64) for _ in range(7)]
    for k, code in enumerate(codes):
        at, shift = divmod(6 * k, 32)
        wide = code.astype(np.uint64) << np.uint64(shift)
        words[at] |= wide & np.uint64(0xFFFFFFFF)
        words[at + 1] |= wide >> np.uint64(32)
    return [w.astype(U32) for w in words[:6]]


def _scaled_down_32(fmt: convert.Small, source: str):
    """v_cvt_scalef32_pk32_{fp6,bf6}_{f16,bf16}: the 32 values of 16 registers / scale -> 6 registers."""

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        raw = [b.raw(i.operands[1], k) for k in range(16)]
        scale, unpack = b.raw(i.operands[2]), convert.halves_f16 if source == "f16" else convert.halves_bf16
        write = [b.writer(i.operands[0], "u32", k) for k in range(6)]

        def run(g: Group) -> None:
            by = 1 / power(scale(g))
            values = [v for r in raw for v in unpack(np.broadcast_to(r(g), (g.n, LANES)))]
            for w, bits in zip(write, _bits6([fmt.encode(v.astype(F64) * by) for v in values]), strict=True):
                w(g, bits)

        return run

    return make


def _scaled_up_32(fmt: convert.Small, target: str):
    """v_cvt_scalef32_pk32_{f32,f16,bf16}_{fp6,bf6}: the 32 codes of 6 registers times scale."""

    def make(i: Instruction, b: Binder) -> Callable[[Group], None]:
        raw, scale = [b.raw(i.operands[1], k) for k in range(6)], b.raw(i.operands[2])
        kind, count = ("f32", 32) if target == "f32" else ("u32", 16)
        write = [b.writer(i.operands[0], kind, k) for k in range(count)]
        pack = convert.pack_bf16 if target == "bf16" else convert.pack_half

        def run(g: Group) -> None:
            by = power(scale(g))
            words = [np.broadcast_to(r(g), (g.n, LANES)).astype(np.uint64) for r in raw] + [np.uint64(0)]
            values = []
            for k in range(32):
                at, shift = divmod(6 * k, 32)
                code = (words[at] | words[at + 1] << np.uint64(32)) >> np.uint64(shift) & np.uint64(63)
                values.append((fmt.table[code.astype(np.int64)] * by).astype(F32))
            out = values if target == "f32" else [pack(values[2 * k], values[2 * k + 1]) for k in range(16)]
            for w, v in zip(write, out, strict=True):
                w(g, v)

        return run

    return make


FP8 = {"fp8": convert.E4M3, "bf8": convert.E5M2}
FP6 = {"fp6": convert.E2M3, "bf6": convert.E3M2}
OTHERS: dict[str, Callable] = {
    "v_pk_mov_b32": _pk_mov,
    "v_fma_mix_f32": _mix("f32"),
    "v_fma_mixlo_f16": _mix("low"),
    "v_fma_mixhi_f16": _mix("high"),
    "v_dot2_f32_bf16": _dot2(convert.dot2_bf16),
    "v_dot2_f32_f16": _dot2(convert.dot2_f16),
    **{f"v_cvt_pk_{n}_f32": _to_fp8(f) for n, f in FP8.items()},
    **{f"v_cvt_f32_{n}{s}": _from_fp8(f, False) for n, f in FP8.items() for s in ("", "_sdwa")},
    **{f"v_cvt_pk_f32_{n}{s}": _from_fp8(f, True) for n, f in FP8.items() for s in ("", "_sdwa")},
    **{f"v_cvt_scalef32_pk32_{n}_{s}": _scaled_down_32(f, s) for n, f in FP6.items() for s in ("f16", "bf16")},
    **{f"v_cvt_scalef32_pk32_{t}_{n}": _scaled_up_32(f, t) for n, f in FP6.items() for t in ("f32", "f16", "bf16")},
    **{
        f"v_cvt_scalef32_pk_{n}_{s}": _scaled_down(f, s)
        for n, f in {**FP8, "fp4": convert.E2M1}.items()
        for s in ("f32", "f16", "bf16")
    },
    **{
        f"v_cvt_scalef32_pk_{t}_{n}": _scaled_up(f, t)
        for n, f in {**FP8, "fp4": convert.E2M1}.items()
        for t in ("f32", "f16", "bf16")
    },
}
