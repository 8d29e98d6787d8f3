"""Matrix instructions (MFMA): which lane holds what, and the product in f32 (f64 for f64, exact for integers).

Layouts, established as said: AMD's matrix instruction calculator and the CDNA3 ISA for the unscaled shapes (lane =
row +
rows * group, group g holds k = elements * g + e); for the scaled f8f6f4 shapes the facts probed against kernels
proven on
hardware: fp4 and fp6 lanes hold 32 consecutive k; fp8 lanes hold two runs of 16, k = half * K/2 + 16 * g + e; one E8M0
scale a lane covers the block k // 32 = lane group. EXEC is ignored. The hardware's own order of additions is not
public;
sums here are f32 over whole products, so results agree to f32 accumulation error, not bit by bit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from . import convert
from .asm import Instruction, Operand
from .operands import Binder, bad
from .state import LANES, Group

U32, F32 = np.uint32, np.float32
_NAME = re.compile(r"^v_mfma_(f32|i32|f64)_(\d+)x(\d+)x(\d+)_?(\w+)$")
_BLOCKS = re.compile(r"^v_mfma_(f32|i32)_(\d+)x(\d+)x(\d+)_(\d+)b_(f32|f16|bf16|i8)$")
_SCALED = re.compile(r"^v_mfma_(scale_)?f32_(16x16x128|32x32x64)_f8f6f4$")
INPUTS = {  # type of A, type of B, bits
    "bf16": ("bf16", "bf16", 16), "f16": ("f16", "f16", 16), "f32": ("f32", "f32", 32), "bf16_1k": ("bf16", "bf16", 16),
    "i8": ("i8", "i8", 8), "f64": ("f64", "f64", 64), "fp8_fp8": ("fp8", "fp8", 8), "fp8_bf8": ("fp8", "bf8", 8),
    "bf8_fp8": ("bf8", "fp8", 8), "bf8_bf8": ("bf8", "bf8", 8),
}  # fmt: skip
LARGE_SCALE = 127 + 127 - 15  # E8M0 code: e5m2 reaches almost 2^16
REGISTERS_OF = {0: 8, 1: 8, 2: 6, 3: 6, 4: 4}  # format code -> registers of a scaled operand


def bind(i: Instruction, b: Binder) -> Callable[[Group], None] | None:
    if match := _SCALED.match(i.name):
        return _scaled(i, b, bool(match[1]), 16 if match[2].startswith("16") else 32)
    if match := _BLOCKS.match(i.name):
        return _blocks(i, b, int(match[2]), int(match[5]), match[6], match[1])
    if match := _NAME.match(i.name):
        out, m, n, k, kind = match[1], int(match[2]), int(match[3]), int(match[4]), match[5]
        if kind not in INPUTS or m != n or m not in (16, 32):
            return None
        return _plain(i, b, m, k, *INPUTS[kind], out)
    return None


# -- registers -> operands [waves, K, rows], rows contiguous
def _bytes(x: np.ndarray, rows: int) -> np.ndarray:
    """[registers, waves, 64] -> [waves, groups, registers, 4, rows] bytes in k order within a lane."""
    registers, n, _ = x.shape
    raw = np.ascontiguousarray(x).view(np.uint8).reshape(registers, n, LANES // rows, rows, 4)
    return raw.transpose(1, 2, 0, 4, 3)


def unpack(x: np.ndarray, kind: str, rows: int) -> np.ndarray:
    """A lane's registers as values, [waves, K, rows]. The order along K is the same for A and B of one type, and
    is of no matter to a product else: 16-bit types give the registers' low halves first, others go group by group."""
    registers, n, _ = x.shape
    groups = LANES // rows
    if kind == "bf16":
        lanes, out = x.swapaxes(0, 1), np.empty((n, 2 * registers, LANES), U32)
        np.left_shift(lanes, U32(16), out=out[:, :registers])
        np.bitwise_and(lanes, U32(0xFFFF0000), out=out[:, registers:])
        return out.view(F32).reshape(n, -1, rows)
    if kind == "f16":
        halves = np.ascontiguousarray(x).view(np.float16).astype(F32).reshape(registers, n, LANES, 2)
        return np.ascontiguousarray(halves.transpose(1, 3, 0, 2)).reshape(n, -1, rows)
    if kind == "f32":
        return x.view(F32).reshape(registers, n, groups, rows).transpose(1, 2, 0, 3).reshape(n, -1, rows)
    if kind == "f64":
        pairs = x[0::2].astype(np.uint64) | x[1::2].astype(np.uint64) << np.uint64(32)
        values = pairs.view(np.float64).reshape(-1, n, groups, rows)
        return values.transpose(1, 2, 0, 3).reshape(n, -1, rows)
    if kind == "i8":
        return _bytes(x, rows).view(np.int8).astype(np.float64).reshape(n, -1, rows)
    table = (convert.E4M3 if kind == "fp8" else convert.E5M2).table
    return table[_bytes(x, rows)].reshape(n, -1, rows)


def unpack_scaled(x: np.ndarray, code: int, rows: int) -> np.ndarray:
    """Operand of a scaled instruction -> [waves, blocks, 32, rows] in k order (blocks of 32 share a scale)."""
    registers, n, _ = x.shape
    groups = LANES // rows
    fmt = convert.BY_CODE[code]
    raw = _bytes(x, rows)  # [n, groups, registers, 4, rows]
    if fmt.bits == 8:  # two runs of 16: k = half * K/2 + 16 * group + e
        values = fmt.table[raw.reshape(n, groups, 2, 16, rows)]
        return values.transpose(0, 2, 1, 3, 4).reshape(n, groups, 32, rows)
    flat = raw.reshape(n, groups, registers * 4, rows)
    if fmt.bits == 4:
        out = np.empty((n, groups, 16, 2, rows), F32)
        out[:, :, :, 0] = fmt.table[flat & 15]
        out[:, :, :, 1] = fmt.table[flat >> 4]
        return out.reshape(n, groups, 32, rows)
    three = flat.reshape(n, groups, 8, 3, rows).astype(U32)  # four 6-bit codes in three bytes
    word = three[:, :, :, 0] | three[:, :, :, 1] << U32(8) | three[:, :, :, 2] << U32(16)
    codes = np.stack([word >> U32(6 * k) & U32(63) for k in range(4)], 3)
    return fmt.table[codes].reshape(n, groups, 32, rows)


# -- D [waves, rows, columns] <-> accumulator registers [count, waves, 64]
def register_rows(x: np.ndarray, rows: int) -> np.ndarray:
    """A's rows [..., rows] in the order of D's registers: row 4 * groups * block + 4 * group + j lies in register
    4 * block + j of the lanes of `group`, so with this order a product's rows are registers with their lanes."""
    groups = LANES // rows
    split = x.reshape(*x.shape[:-1], rows // (4 * groups), groups, 4)
    return np.ascontiguousarray(split.swapaxes(-1, -2)).reshape(x.shape)


@functools.cache
def register_lanes(rows: int) -> np.ndarray:
    """Lanes in the order that gives A's rows the order of register_rows: [64]."""
    return register_rows(np.arange(LANES).reshape(LANES // rows, rows), rows).reshape(-1)


def add_into(g: Group, where: int, c: np.ndarray | None, product: np.ndarray, rows: int, dtype) -> None:
    """D = C + product, whose rows are in register order (see register_rows): [n, rows, rows] -> [registers, n, 64]."""
    count = rows * rows // LANES
    tiles = product.reshape(g.n, count, LANES).swapaxes(0, 1)
    target = (g.VF if dtype is F32 else g.VI)[where : where + count]
    if c is None:
        target[...] = tiles
    else:
        np.add(c, tiles, out=target, casting="unsafe")


def _accumulator(o: Operand, b: Binder, count: int, dtype) -> Callable[[Group], np.ndarray | None]:
    if o.kind == "c":
        if o.index == 0:
            return lambda g: None
        value = np.array([o.index & 0xFFFFFFFF], U32).view(dtype)[0]
        return lambda g: value
    r = b.registers.index(o.index)
    if dtype is F32:
        return lambda g: g.VF[r : r + count]
    return lambda g: g.VI[r : r + count]


def _cached(g: Group, first: int, form: tuple, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Unpacked operand, kept until an instruction writes one of its registers (see program.py)."""
    forms = g.unpacked.get(first)
    if forms is None:
        forms = g.unpacked[first] = {}
    found = forms.get(form)
    if found is None:
        found = forms[form] = make()
    return found


def _plain(i: Instruction, b: Binder, rows: int, k: int, ta: str, tb: str, bits: int, out: str):
    d, a, bb, c = i.operands[:4]
    if any(i.mods.get(x) for x in ("cbsz", "abid", "blgp")):
        raise bad(i, "broadcast or permutation of matrix operands")
    registers = rows * k * bits // (LANES * 32)
    if a.count != registers or bb.count != registers:
        raise bad(i, f"operands of {a.count} and {bb.count} registers where {registers} were expected")
    where, ra, rb = (b.registers.index(o.index) for o in (d, a, bb))
    if out == "f64":
        return _double(i, b, rows, where, ra, rb, registers, c)
    dtype = F32 if out == "f32" else np.int32
    accumulator = _accumulator(c, b, rows * rows // LANES, dtype)
    lanes = register_lanes(rows)
    form_a, form_b = (ta, registers, rows, "A"), (tb, registers, rows, "B")

    def run(g: Group) -> None:
        x = _cached(g, ra, form_a, lambda: unpack(g.V[ra : ra + registers].take(lanes, 2), ta, rows))
        y = _cached(g, rb, form_b, lambda: unpack(g.V[rb : rb + registers], tb, rows))
        product = np.matmul(x.swapaxes(1, 2), y)
        if dtype is not F32:
            product = product.astype(np.int64).astype(np.int32)
        add_into(g, where, accumulator(g), product, rows, dtype)

    return run


def _lane_values(x: np.ndarray, kind: str) -> np.ndarray:
    """[registers, waves, 64] -> [k, waves, 64] values that each lane holds, in k order."""
    if kind == "f32":
        return x.view(F32)
    if kind == "i8":
        raw = np.ascontiguousarray(x).view(np.int8).reshape(*x.shape, 4)
        return np.moveaxis(raw, -1, 1).reshape(-1, *x.shape[1:]).astype(np.float64)
    low, high = (x & U32(0xFFFF), x >> U32(16))
    halves = np.stack([low, high], 1).reshape(-1, *x.shape[1:])
    return halves.astype(np.uint16).view(np.float16).astype(F32) if kind == "f16" else (halves << U32(16)).view(F32)


def _blocks(i: Instruction, b: Binder, rows: int, blocks: int, kind: str, out: str):
    """Several small products side by side: lane = row + rows * block, with all of k in one lane. D's registers hold the
    blocks one after the other, each laid out as a single product's; of 4x4 blocks, register r of a block's lanes is row
    r. Layouts: AMD's matrix instruction calculator."""
    d, a, bb, c = i.operands[:4]
    if any(i.mods.get(x) for x in ("cbsz", "abid", "blgp")):
        raise bad(i, "broadcast or permutation of matrix operands")
    if rows * blocks != LANES or a.count != bb.count:
        raise bad(i, "not a shape of this instruction")
    where, ra, rb = (b.registers.index(o.index) for o in (d, a, bb))
    registers, count, dtype = a.count, rows * rows * blocks // LANES, F32 if out == "f32" else np.int32
    accumulator = _accumulator(c, b, count, dtype)

    def run(g: Group) -> None:
        x, y = (_lane_values(g.V[r : r + registers], kind).reshape(-1, g.n, blocks, rows) for r in (ra, rb))
        product = np.einsum("knbi,knbj->nbij", x, y)
        if rows == 4:
            tiles = product.transpose(2, 0, 1, 3)
        else:
            split = product.reshape(g.n, blocks, rows * rows // (4 * LANES), LANES // rows, 4, rows)
            tiles = split.transpose(1, 2, 4, 0, 3, 5)
        tiles = tiles.reshape(count, g.n, LANES)
        if dtype is not F32:
            tiles = tiles.astype(np.int64).astype(np.int32)
        old, target = accumulator(g), (g.VF if dtype is F32 else g.VI)[where : where + count]
        target[...] = tiles if old is None else old + tiles

    return run


def _double(i, b: Binder, rows: int, where: int, ra: int, rb: int, registers: int, c: Operand):
    """f64 16x16x4: D holds row 4 * j + group in register pair j."""
    if c.kind == "c" and c.index:
        raise bad(i, "a constant other than 0 as accumulator")
    rc = b.registers.index(c.index) if c.kind == "v" else None

    def run(g: Group) -> None:
        x, y = unpack(g.V[ra : ra + registers], "f64", rows), unpack(g.V[rb : rb + registers], "f64", rows)
        product = np.matmul(x.swapaxes(1, 2), y).reshape(g.n, 4, 4, rows).transpose(1, 0, 2, 3).reshape(4, g.n, LANES)
        if rc is not None:
            old = g.V[rc : rc + 8]
            product = product + (old[0::2].astype(np.uint64) | old[1::2].astype(np.uint64) << np.uint64(32)).view(
                np.float64
            )
        bits = np.ascontiguousarray(product).view(np.uint64)
        g.V[where : where + 8 : 2], g.V[where + 1 : where + 8 : 2] = (
            bits.astype(U32),
            (bits >> np.uint64(32)).astype(U32),
        )

    return run


def _scaled(i: Instruction, b: Binder, has_scale: bool, rows: int):
    d, a, bb, c = i.operands[:4]
    fa, fb = int(i.mods.get("cbsz", 0)), int(i.mods.get("blgp", 0))
    if fa not in convert.BY_CODE or fb not in convert.BY_CODE:
        raise bad(i, "unknown operand format")
    na, nb = REGISTERS_OF[fa], REGISTERS_OF[fb]
    if a.count < na or bb.count < nb:
        raise bad(i, f"operands of {a.count} and {bb.count} registers for formats {fa} and {fb}")
    where, ra, rb = (b.registers.index(o.index) for o in (d, a, bb))
    accumulator = _accumulator(c, b, rows * rows // LANES, F32)
    groups = LANES // rows
    if has_scale:
        low, high = ([*i.mods.get(n, []), 0, 0, 0][:3] for n in ("op_sel", "op_sel_hi"))
        shifts = [U32(8 * (low[k] + 2 * high[k])) for k in (0, 1)]
        scales = [b.raw(i.operands[4]), b.raw(i.operands[5])]

    def scale(g: Group, k: int, byte: np.ndarray) -> np.ndarray:
        values = convert.E8M0[byte].reshape(g.n, groups, 1, rows)
        return register_rows(values, rows) if k == 0 else values

    def run(g: Group) -> None:
        x = _cached(g, ra, (fa, "A"), lambda: register_rows(unpack_scaled(g.V[ra : ra + na], fa, rows), rows))
        y = _cached(g, rb, (fb, "B"), lambda: unpack_scaled(g.V[rb : rb + nb], fb, rows))
        if has_scale:
            raw = [(np.broadcast_to(s(g), (g.n, LANES)) >> shift) & U32(255) for s, shift in zip(scales, shifts)]
            if (
                max(int(raw[0].max()), int(raw[1].max())) >= LARGE_SCALE
            ):  # a value times its scale may leave f32's range
                x, y = x.astype(np.float64), y.astype(np.float64)
            x, y = x * scale(g, 0, raw[0]), y * scale(g, 1, raw[1])
        x, y = x.reshape(g.n, -1, rows), y.reshape(g.n, -1, rows)
        add_into(g, where, accumulator(g), np.matmul(x.swapaxes(1, 2), y), rows, F32)

    return run


def sources(i: Instruction) -> list[tuple[Operand, int]]:
    """A and B of a matrix instruction with the registers each really reads (fewer than named for narrow formats)."""
    if match := _SCALED.match(i.name):
        del match
        counts = (REGISTERS_OF.get(int(i.mods.get(n, 0)), 8) for n in ("cbsz", "blgp"))
        return [(o, min(o.count, k)) for o, k in zip(i.operands[1:3], counts, strict=True)]
    return [(o, o.count) for o in i.operands[1:3]]


def is_matrix(name: str) -> bool:
    return name.startswith(("v_mfma_", "v_smfmac_"))
