"""Scalar ALU and control flow. Semantics: CDNA3 ISA reference, SOP1, SOP2, SOPC, SOPK and SOPP chapters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .asm import EXEC, VCC, Instruction
from .errors import Trapped
from .operands import bad, scalar, write_scalar
from .state import MASK32, Group

I64, U64 = np.int64, np.uint64
Function = Callable[[Group], None]

i32 = lambda x: ((x & MASK32) ^ 0x80000000) - 0x80000000
i16 = lambda x: ((x & 0xFFFF) ^ 0x8000) - 0x8000
u64 = lambda x: np.asarray(x).view(U64)
nonzero32 = lambda r: (r & MASK32) != 0
nonzero64 = lambda r: r != 0


def _overflow(r: np.ndarray) -> np.ndarray:
    return (r < -(2**31)) | (r > 2**31 - 1)


def extract(x: np.ndarray, control: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    """s_bfe: offset in control[5:0] (4:0 for 32 bits), width in control[22:16]."""
    at, width = control & (bits - 1), control >> 16 & 127
    out = []
    for v, a, w in zip(*(np.broadcast_arrays(x, at, width)), strict=True):
        value, a, w = int(v) & ((1 << bits) - 1), int(a), min(int(w), bits)
        value = (value >> a) & ((1 << w) - 1)
        if signed and w and value >> (w - 1):
            value -= 1 << w
        out.append(value & (2**64 - 1))
    return np.array(out, U64).view(I64)


def _shift_left64(a, n):
    return (u64(a) << (u64(n) & U64(63))).view(I64)


def _shift_right64(a, n):
    return (u64(a) >> (u64(n) & U64(63))).view(I64)


def per_value(f: Callable[[int], int], bits: int) -> Callable:
    """A function of one Python integer, for the rare instructions that numpy has no name for."""
    return lambda x: np.array([f(int(v) & ((1 << bits) - 1)) for v in np.atleast_1d(x)], I64)


lowest = lambda v: (v & -v).bit_length() - 1
highest = lambda bits: lambda v: bits - v.bit_length() if v else -1
reverse = lambda bits: lambda v: int(f"{v:0{bits}b}"[::-1], 2)


def whole_quads(mask: np.ndarray) -> np.ndarray:
    """All four bits of each group of four that has one set."""
    m = u64(mask)
    return (((m | m >> U64(1) | m >> U64(2) | m >> U64(3)) & U64(0x1111111111111111)) * U64(15)).view(I64)


def signed64(v: int) -> int:
    return v - (1 << 64) if v >> 63 else v


def signed_high(bits: int):
    def f(v: int) -> int:
        if v >> (bits - 1):
            v = ~v & ((1 << bits) - 1)
        return bits - v.bit_length() if v else -1

    return f


# name -> (64-bit destination, source widths as w/n and u/s, function, SCC from result or None)
#   sources: "u" 32-bit unsigned, "s" 32-bit signed, "w" 64-bit pattern
U, S, W = "u", "s", "w"
NZ, NZ64 = nonzero32, nonzero64
TWO: dict[str, tuple[bool, str, Callable, Callable | None]] = {
    "s_add_u32": (False, U + U, lambda a, b: a + b, lambda r: r > MASK32),
    "s_sub_u32": (False, U + U, lambda a, b: a - b, lambda r: r < 0),
    "s_add_i32": (False, S + S, lambda a, b: a + b, _overflow),
    "s_sub_i32": (False, S + S, lambda a, b: a - b, _overflow),
    "s_and_b32": (False, U + U, lambda a, b: a & b, NZ),
    "s_or_b32": (False, U + U, lambda a, b: a | b, NZ),
    "s_xor_b32": (False, U + U, lambda a, b: a ^ b, NZ),
    "s_andn2_b32": (False, U + U, lambda a, b: a & ~b, NZ),
    "s_orn2_b32": (False, U + U, lambda a, b: a | (~b & MASK32), NZ),
    "s_nand_b32": (False, U + U, lambda a, b: ~(a & b), NZ),
    "s_nor_b32": (False, U + U, lambda a, b: ~(a | b), NZ),
    "s_xnor_b32": (False, U + U, lambda a, b: ~(a ^ b), NZ),
    "s_and_b64": (True, W + W, lambda a, b: a & b, NZ64),
    "s_or_b64": (True, W + W, lambda a, b: a | b, NZ64),
    "s_xor_b64": (True, W + W, lambda a, b: a ^ b, NZ64),
    "s_andn2_b64": (True, W + W, lambda a, b: a & ~b, NZ64),
    "s_orn2_b64": (True, W + W, lambda a, b: a | ~b, NZ64),
    "s_nand_b64": (True, W + W, lambda a, b: ~(a & b), NZ64),
    "s_nor_b64": (True, W + W, lambda a, b: ~(a | b), NZ64),
    "s_xnor_b64": (True, W + W, lambda a, b: ~(a ^ b), NZ64),
    "s_lshl_b32": (False, U + U, lambda a, b: a << (b & 31), NZ),
    "s_lshr_b32": (False, U + U, lambda a, b: a >> (b & 31), NZ),
    "s_ashr_i32": (False, S + U, lambda a, b: a >> (b & 31), NZ),
    "s_lshl_b64": (True, W + U, _shift_left64, NZ64),
    "s_lshr_b64": (True, W + U, _shift_right64, NZ64),
    "s_ashr_i64": (True, W + U, lambda a, b: a >> (b & 63), NZ64),
    "s_mul_i32": (False, U + U, lambda a, b: (u64(a) * u64(b)).view(I64), None),
    "s_mul_hi_u32": (False, U + U, lambda a, b: (u64(a) * u64(b) >> U64(32)).view(I64), None),
    "s_mul_hi_i32": (False, S + S, lambda a, b: (a * b) >> 32, None),
    "s_bfe_u32": (False, U + U, lambda a, b: extract(a, b, 32, False), NZ),
    "s_bfe_i32": (False, U + U, lambda a, b: extract(a, b, 32, True), NZ),
    "s_bfe_u64": (True, W + U, lambda a, b: extract(a, b, 64, False), NZ64),
    "s_bfe_i64": (True, W + U, lambda a, b: extract(a, b, 64, True), NZ64),
    "s_bfm_b32": (False, U + U, lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), None),
    "s_bfm_b64": (
        True,
        U + U,
        lambda a, b: (((U64(1) << u64(a & 63)) - U64(1)) << u64(b & 63)).view(I64),
        None,
    ),
    "s_absdiff_i32": (False, S + S, lambda a, b: np.abs(a - b), NZ),
    "s_pack_ll_b32_b16": (False, U + U, lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": (False, U + U, lambda a, b: (a & 0xFFFF) | (b >> 16) << 16, None),
    "s_pack_hh_b32_b16": (False, U + U, lambda a, b: (a >> 16) | (b >> 16) << 16, None),
    **{
        f"s_lshl{k}_add_u32": (False, U + U, lambda a, b, k=k: (a << k) + b, lambda r: r > MASK32) for k in (1, 2, 3, 4)
    },
}
ONE: dict[str, tuple[bool, str, Callable, Callable | None]] = {
    "s_mov_b32": (False, U, lambda a: a, None),
    "s_mov_b64": (True, W, lambda a: a, None),
    "s_not_b32": (False, U, lambda a: ~a & MASK32, NZ),
    "s_not_b64": (True, W, lambda a: ~a, NZ64),
    "s_brev_b32": (False, U, per_value(reverse(32), 32), None),
    "s_brev_b64": (True, W, per_value(lambda v: signed64(reverse(64)(v)), 64), None),
    "s_ff0_i32_b64": (False, W, per_value(lambda v: lowest(~v) if v != 2**64 - 1 else -1, 64), None),
    "s_flbit_i32_i64": (False, W, per_value(signed_high(64), 64), None),
    "s_abs_i32": (False, S, lambda a: np.abs(a), NZ),
    "s_sext_i32_i8": (False, U, lambda a: ((a & 0xFF) ^ 0x80) - 0x80, None),
    "s_sext_i32_i16": (False, U, i16, None),
    "s_bcnt0_i32_b32": (False, U, lambda a: 32 - np.bitwise_count(a).astype(I64), NZ),
    "s_bcnt1_i32_b32": (False, U, lambda a: np.bitwise_count(a).astype(I64), NZ),
    "s_bcnt1_i32_b64": (False, W, lambda a: np.bitwise_count(u64(a)).astype(I64), NZ),
    "s_bcnt0_i32_b64": (False, W, lambda a: 64 - np.bitwise_count(u64(a)).astype(I64), NZ),
    "s_ff1_i32_b32": (False, U, per_value(lambda v: lowest(v) if v else -1, 32), None),
    "s_ff1_i32_b64": (False, W, per_value(lambda v: lowest(v) if v else -1, 64), None),
    "s_ff0_i32_b32": (False, U, per_value(lambda v: lowest(~v & MASK32) if ~v & MASK32 else -1, 32), None),
    "s_flbit_i32_b32": (False, U, per_value(highest(32), 32), None),
    "s_flbit_i32_b64": (False, W, per_value(highest(64), 64), None),
    "s_flbit_i32": (False, U, per_value(signed_high(32), 32), None),
    "s_wqm_b64": (True, W, whole_quads, NZ64),
}
SAVE_EXEC = {
    "s_and_saveexec_b64": lambda s, e: s & e,
    "s_or_saveexec_b64": lambda s, e: s | e,
    "s_xor_saveexec_b64": lambda s, e: s ^ e,
    "s_andn2_saveexec_b64": lambda s, e: s & ~e,
    "s_andn1_saveexec_b64": lambda s, e: ~s & e,
    "s_orn1_saveexec_b64": lambda s, e: ~s | e,
    "s_orn2_saveexec_b64": lambda s, e: s | ~e,
    "s_nand_saveexec_b64": lambda s, e: ~(s & e),
    "s_nor_saveexec_b64": lambda s, e: ~(s | e),
    "s_xnor_saveexec_b64": lambda s, e: ~(s ^ e),
}
CONDITIONS = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
}  # fmt: skip
MIN_MAX = {"min": np.less, "max": np.greater}

BRANCHES: dict[str, Callable[[Group], np.ndarray] | None] = {
    "s_branch": None,
    "s_cbranch_scc0": lambda g: g.scc == 0,
    "s_cbranch_scc1": lambda g: g.scc != 0,
    "s_cbranch_vccz": lambda g: (g.S[VCC] | g.S[VCC + 1]) == 0,
    "s_cbranch_vccnz": lambda g: (g.S[VCC] | g.S[VCC + 1]) != 0,
    "s_cbranch_execz": lambda g: (g.S[EXEC] | g.S[EXEC + 1]) == 0,
    "s_cbranch_execnz": lambda g: (g.S[EXEC] | g.S[EXEC + 1]) != 0,
}
# Nothing that a functional simulation sees: scheduling, priorities, cache control, traps that are off.
NOTHING = {
    "s_nop", "s_setprio", "s_sleep", "s_inst_prefetch", "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_ttracedata",
    "s_incperflevel", "s_wakeup", "s_decperflevel", "s_sethalt", "s_clause", "buffer_wbinvl1", "buffer_wbinvl1_vol",
    "v_nop", "s_setvskip",
}  # fmt: skip


def bind(i: Instruction) -> Function | None:
    name = i.name
    if name in NOTHING:
        return lambda g: None
    if name in TWO:
        return _arithmetic(i, *TWO[name], i.operands[1:])
    if name in ONE:
        return _arithmetic(i, *ONE[name], i.operands[1:])
    if name in SAVE_EXEC:
        return _save_exec(i, SAVE_EXEC[name])
    maker = OTHERS.get(name)
    if maker is not None:
        return maker(i)
    if name.startswith(("s_cmp_", "s_cmpk_")):
        return _compare(i)
    if name.startswith("s_") and name[2:5] in MIN_MAX and name[5:] in ("_i32", "_u32"):
        return _min_max(i)
    return None


def flag(x: np.ndarray, n: int) -> np.ndarray:
    """Conditions [n] or [1] as SCC holds them."""
    x = np.asarray(x)
    return x.astype(I64) if x.shape == (n,) else np.broadcast_to(x, n).astype(I64)


def _reader(o, kind: str):
    return scalar(o, wide=kind == W, signed=kind == S)


def _arithmetic(i: Instruction, wide: bool, kinds: str, f: Callable, scc: Callable | None, operands) -> Function:
    readers = [_reader(o, k) for o, k in zip(operands, kinds, strict=True)]
    write = write_scalar(i.operands[0], wide)

    def run(g: Group) -> None:
        r = f(*(x(g) for x in readers))
        write(g, r)
        if scc is not None:
            g.scc = flag(scc(r), g.n)

    return run


def _carry(sign: int):
    def make(i: Instruction) -> Function:
        ra, rb, write = scalar(i.operands[1]), scalar(i.operands[2]), write_scalar(i.operands[0])

        def run(g: Group) -> None:
            r = ra(g) + sign * (rb(g) + g.scc)
            write(g, r)
            g.scc = flag((r < 0) | (r > MASK32), g.n)

        return run

    return make


def _compare(i: Instruction) -> Function:
    _, kind, condition, dtype = i.name.split("_")
    if condition not in CONDITIONS:
        raise bad(i, "unknown comparison")
    f, wide, signed = CONDITIONS[condition], dtype == "u64", dtype == "i32"
    ra, rb = (scalar(o, wide, signed) for o in i.operands)
    if kind == "cmpk" and signed:
        inner = rb
        rb = lambda g: i16(inner(g))
    if wide:

        def run(g: Group) -> None:
            g.scc = flag(f(u64(ra(g)), u64(rb(g))), g.n)

        return run

    def run32(g: Group) -> None:
        g.scc = flag(f(ra(g), rb(g)), g.n)

    return run32


def _min_max(i: Instruction) -> Function:
    better, signed = MIN_MAX[i.name[2:5]], i.name.endswith("i32")
    ra, rb = (scalar(o, signed=signed) for o in i.operands[1:])
    write = write_scalar(i.operands[0])

    def run(g: Group) -> None:
        a, b = ra(g), rb(g)
        first = better(a, b)
        write(g, np.where(first, a, b))
        g.scc = flag(first, g.n)  # SCC says whether the first source was chosen

    return run


def _save_exec(i: Instruction, f: Callable) -> Function:
    read, write = scalar(i.operands[1], wide=True), write_scalar(i.operands[0], wide=True)

    def run(g: Group) -> None:
        old = g.S[EXEC] | g.S[EXEC + 1] << 32
        new = np.broadcast_to(f(read(g), old), g.n)
        write(g, old)
        g.S[EXEC], g.S[EXEC + 1] = new & MASK32, (new >> 32) & MASK32
        g.refresh_exec()
        g.scc = (new != 0).astype(I64)

    return run


def _select(wide: bool):
    def make(i: Instruction) -> Function:
        ra, rb, write = scalar(i.operands[1], wide), scalar(i.operands[2], wide), write_scalar(i.operands[0], wide)
        return lambda g: write(g, np.where(g.scc != 0, ra(g), rb(g)))

    return make


def _cmov(wide: bool):
    def make(i: Instruction) -> Function:
        ra, old, write = scalar(i.operands[1], wide), scalar(i.operands[0], wide), write_scalar(i.operands[0], wide)
        return lambda g: write(g, np.where(g.scc != 0, ra(g), old(g)))

    return make


def _with_immediate(f: Callable, scc: Callable | None):
    """SOPK: d = f(d, sign-extended 16-bit immediate)."""

    def make(i: Instruction) -> Function:
        old, imm, write = scalar(i.operands[0], signed=True), scalar(i.operands[1]), write_scalar(i.operands[0])

        def run(g: Group) -> None:
            r = f(old(g), i16(imm(g)))
            write(g, r)
            if scc is not None:
                g.scc = flag(scc(r), g.n)

        return run

    return make


def _bit_set(value: int, wide: bool):
    def make(i: Instruction) -> Function:
        old, write, last = scalar(i.operands[0], wide), write_scalar(i.operands[0], wide), 63 if wide else 31
        at = scalar(i.operands[1])
        if value:
            return lambda g: write(g, old(g) | (np.int64(1) << (at(g) & last)))
        return lambda g: write(g, old(g) & ~(np.int64(1) << (at(g) & last)))

    return make


def _bit_test(value: int, wide: bool):
    def make(i: Instruction) -> Function:
        read, at = scalar(i.operands[0], wide), scalar(i.operands[1])

        def run(g: Group) -> None:
            g.scc = flag((read(g) >> (at(g) & (63 if wide else 31)) & 1) == value, g.n)

        return run

    return make


def _cmov_immediate(i: Instruction) -> Function:
    old, imm, write = scalar(i.operands[0]), scalar(i.operands[1]), write_scalar(i.operands[0])
    return lambda g: write(g, np.where(g.scc != 0, i16(imm(g)), old(g)))


def _trap(i: Instruction) -> Function:
    def run(g: Group) -> None:
        waves = ", ".join(str(int(w)) for w in g.local[:8])
        raise Trapped(f"{i.where}: {i.text}: the kernel trapped, as it does where an assertion fails (wave {waves})")

    return run


OTHERS: dict[str, Callable[[Instruction], Function]] = {
    "s_addc_u32": _carry(1),
    "s_subb_u32": _carry(-1),
    "s_cselect_b32": _select(False),
    "s_cselect_b64": _select(True),
    "s_cmov_b32": _cmov(False),
    "s_cmov_b64": _cmov(True),
    "s_movk_i32": _with_immediate(lambda d, k: k, None),
    "s_addk_i32": _with_immediate(lambda d, k: d + k, _overflow),
    "s_mulk_i32": _with_immediate(lambda d, k: d * k, None),
    "s_cmovk_i32": _cmov_immediate,
    "s_trap": _trap,
    "s_bitset0_b32": _bit_set(0, False),
    "s_bitset1_b32": _bit_set(1, False),
    "s_bitset0_b64": _bit_set(0, True),
    "s_bitset1_b64": _bit_set(1, True),
    "s_bitcmp0_b32": _bit_test(0, False),
    "s_bitcmp1_b32": _bit_test(1, False),
    "s_bitcmp0_b64": _bit_test(0, True),
    "s_bitcmp1_b64": _bit_test(1, True),
}
