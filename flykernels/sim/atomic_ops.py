"""What atomic instructions make of a value in memory or LDS: the arithmetic, on Python integers, one lane at a time.

Semantics: CDNA3 ISA reference, "DS instructions" and "Vector memory atomics". Floats flush nothing; minima and maxima
prefer a number to a NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .convert import half_bits, halves_bf16, halves_f16, pack_bf16

U32 = np.uint32
Function = Callable[[int, tuple[int, ...], int], int]  # old value, data operands, bits -> new value


class Atomic(NamedTuple):
    """apply: what becomes of the old value (bits beyond `size` are to be cut off); size: bytes; data: data operands."""

    apply: Function
    size: int
    data: int


def _signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def _float(f: Callable) -> Function:
    def apply(old: int, x: tuple[int, ...], bits: int) -> int:
        kind, raw = (np.float32, U32) if bits == 32 else (np.float64, np.uint64)
        a, c = np.array([old, x[0]], raw).view(kind)
        return int(np.array([f(a, c)], kind).view(raw)[0])

    return apply


def _packed(kind: str) -> Function:
    def apply(old: int, x: tuple[int, ...], bits: int) -> int:
        unpack = halves_f16 if kind == "f16" else halves_bf16
        (a0, a1), (b0, b1) = unpack(np.array([old], U32)), unpack(np.array([x[0]], U32))
        if kind == "bf16":
            return int(pack_bf16(a0 + b0, a1 + b1)[0])
        return int((half_bits(a0 + b0) | half_bits(a1 + b1) << U32(16))[0])

    return apply


def _same(old: int, compare: int, bits: int, floats: bool) -> bool:
    if not floats:
        return old == compare
    kind, raw = (np.float32, U32) if bits == 32 else (np.float64, np.uint64)
    a, c = np.array([old, compare], raw).view(kind)
    return bool(a == c)


def _least(old: int, x: tuple[int, ...], bits: int) -> int:
    return min(_signed(old, bits), _signed(x[0], bits))


def _greatest(old: int, x: tuple[int, ...], bits: int) -> int:
    return max(_signed(old, bits), _signed(x[0], bits))


OPERATIONS: dict[str, Function] = {
    "swap": lambda old, x, n: x[0],
    "add": lambda old, x, n: old + x[0],
    "sub": lambda old, x, n: old - x[0],
    "rsub": lambda old, x, n: x[0] - old,
    "and": lambda old, x, n: old & x[0],
    "or": lambda old, x, n: old | x[0],
    "xor": lambda old, x, n: old ^ x[0],
    "umin": lambda old, x, n: min(old, x[0]),
    "umax": lambda old, x, n: max(old, x[0]),
    "smin": _least,
    "smax": _greatest,
    "inc": lambda old, x, n: 0 if old >= x[0] else old + 1,
    "dec": lambda old, x, n: x[0] if old == 0 or old > x[0] else old - 1,
    "fadd": _float(lambda a, c: a + c),
    "fmin": _float(np.fmin),
    "fmax": _float(np.fmax),
    "pk_add_f16": _packed("f16"),
    "pk_add_bf16": _packed("bf16"),
    # two data operands. Memory has the new value first, LDS the value to compare with.
    "cmpswap": lambda old, x, n: x[0] if old == x[1] else old,
    "cmpst": lambda old, x, n: x[1] if old == x[0] else old,
    "fcmpst": lambda old, x, n: x[1] if _same(old, x[0], n, True) else old,
    "mskor": lambda old, x, n: old & ~x[0] | x[1],
    "wrap": lambda old, x, n: old - x[0] if old >= x[0] else old + x[1],
}
TWO = {"cmpswap", "cmpst", "fcmpst", "mskor", "wrap"}


def _made(name: str, size: int) -> Atomic | None:
    return Atomic(OPERATIONS[name], size, 2 if name in TWO else 1) if name in OPERATIONS else None


def of_memory(what: str) -> Atomic | None:
    """By the part of a mnemonic after `_atomic_`: add, add_x2, add_f32, max_f64, pk_add_bf16, cmpswap_x2."""
    if what.startswith("pk_add"):
        return _made(what, 4)
    if match := re.fullmatch(r"(add|min|max)_f(32|64)", what):
        return _made("f" + match[1], int(match[2]) // 8)
    return _made(what.removesuffix("_x2"), 8 if what.endswith("_x2") else 4)


def of_lds(mnemonic: str) -> Atomic | None:
    """By the mnemonic: ds_add_u32, ds_max_rtn_i64, ds_cmpst_b32, ds_wrxchg_rtn_b32, ds_pk_add_f16."""
    body = mnemonic.removeprefix("ds_").replace("_rtn", "")
    if body.startswith("pk_add"):
        return _made(body, 4)
    match = re.fullmatch(r"([a-z]+)_([uibf])(32|64)", body)
    if match is None:
        return None
    name, kind = match[1], match[2]
    name = {"wrxchg": "swap"}.get(name, name)
    if kind == "f":
        name = "f" + name
    elif name in ("min", "max"):
        name = ("s" if kind == "i" else "u") + name
    return _made(name, int(match[3]) // 8)
