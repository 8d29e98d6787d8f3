"""Operands for one vector instruction, and the kernel that runs it over them."""

from __future__ import annotations

import numpy as np

from .asm_kernel import run, words

EDGES = [
    0, 1, 2, 3, 4, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000,
    0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F800000, 0xBF800000, 0x3F000000, 0x40200000, 0x40600000,
    0x4B000000, 0x4B800000, 0x4F000000, 0x4F7FFFFF, 0x4F800000, 0xCF000000, 0xCF000001, 0x7F7FFFFF, 0x7F800000,
    0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x80000000, 0x80000001, 0x807FFFFF, 0x80800000, 0xFF7FFFFF,
    0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0x55555555, 0x0C0D0B0A, 0x38D1B717, 0x33000000, 0x477FE000, 0x477FF000,
    0x00040302, 0x001F001F, 0x00200020,
]  # fmt: skip
COUNT = 512


def operands(seed: int) -> list[np.ndarray]:
    """Three columns: edge values against edge values, then random bits, floats of many sizes and small integers."""
    r = np.random.default_rng(seed)
    out = []
    for _ in range(3):
        floats = (r.standard_normal(96) * 10.0 ** r.integers(-30, 30, 96)).astype(np.float32).view(np.uint32)
        random = r.integers(0, 2**32, 64, np.uint64).astype(np.uint32)
        small = r.integers(0, 66, 32).astype(np.uint32)
        edges = r.choice(np.array(EDGES, np.uint32), COUNT - 96 - 64 - 32)
        out.append(r.permutation(np.concatenate([edges, random, floats, small])))
    return out


LOAD = """
s_load_dwordx8 s[4:11], s[0:1], 0x0
s_lshl_b32 s12, s2, 8
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
v_add_u32 v1, s12, v1
global_load_dword v2, v1, s[4:5]
global_load_dword v3, v1, s[6:7]
global_load_dword v4, v1, s[8:9]
s_waitcnt vmcnt(0)
"""


def vector(line: str, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Runs one vector instruction on COUNT lanes: (operands, result bits)."""
    a, b, c = operands(seed)
    d = words(COUNT, 0xDEADBEEF)
    text = line.format(d="v5", a="v2", b="v3", c="v4")
    run(f"{LOAD}{text}\ns_nop 7\nglobal_store_dword v1, v5, s[10:11]", [a, b, c, d], arguments="pppp",
        grid=(COUNT // 64,)).raise_for_findings()  # fmt: skip
    return [a, b, c], d
