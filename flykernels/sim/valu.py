"""Vector ALU with one result: binds the instructions of the tables, with DPP, SDWA, half selection and output
modifiers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import double, half, valu_table
from .asm import Instruction, Operand
from .operands import SDWA, Binder, Writer, bad
from .state import LANES, Group
from .valu_table import Table

TABLE: Table = {**valu_table.TABLE, **half.TABLE, **double.TABLE}
# The first source is also the destination's old value: d = f(a, b, d).
ACCUMULATE: Table = {**valu_table.ACCUMULATE, **half.ACCUMULATE, **double.ACCUMULATE}
U32, F32 = np.uint32, np.float32
FLOATS = ("f32", "f16", "f64")
HALVES = ("f16", "u16", "i16", "bf16")
# 16-bit results that leave the register's other half as it is, with op_sel or without: gfx9's three-operand forms and
# those that only exist there. All others clear the upper half (LLVM knows of those; see also the ISA's "op_sel").
KEEP = frozenset(
    [f"v_{f}_{t}" for f in ("min3", "max3", "med3") for t in ("f16", "i16", "u16")]
    + ["v_fma_f16", "v_mad_f16", "v_mad_u16", "v_mad_i16", "v_add_i16", "v_sub_i16", "v_ashr_pk_i8_i32"]
    + ["v_ashr_pk_u8_i32"]
)


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
    select = [*i.mods.get("op_sel", []), 0, 0, 0, 0]
    halves = [o.kind != "c" and t in HALVES for o, t in zip(operands, sources, strict=True)]
    if any(s and not half for s, half in zip(select, [*halves, kind in HALVES], strict=False)):
        raise bad(i, "op_sel of an operand that has no halves")
    high = lambda k: bool(select[k])
    readers = [b.typed(o, t, high(k)) for k, (o, t) in enumerate(zip(operands, sources, strict=True))]
    write = b.writer(i.operands[0], kind)
    if kind in HALVES and (select[len(sources)] or name in KEEP):
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
        if i.name in ("v_add_i32", "v_sub_i32", "v_add_i16", "v_sub_i16"):
            limits = np.iinfo(np.int32 if kind == "i32" else np.int16)
            sign = 1 if "add" in i.name else -1
            return lambda a, b: np.clip(
                a.astype(np.int64) + sign * b.astype(np.int64), limits.min, limits.max
            ).astype(limits.dtype)  # fmt: skip
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
