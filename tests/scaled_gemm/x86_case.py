"""Scaled operands inside guarded memory, one call of an x86 kernel, and the f64 reference to hold it against."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from flykernels.dtypes import DType, f8e4m3fn, f8e5m2
from flykernels.launch import host
from flykernels.targets import x86
from templates.scaled_gemm.arguments import pointers
from templates.scaled_gemm.build import build
from templates.scaled_gemm.problem import ScaledGemmProblem
from templates.scaled_gemm.reference import bound, reference, wrong
from templates.scaled_gemm.space import candidates
from tests.gemm.gfx950_case import decode, encode, poison

GUARD = 64  # elements around an operand


@cache
def kernel(p: ScaledGemmProblem, config=None) -> host.HostKernel:
    """Compiled once for all tests; config: default is the space's first."""
    return host.load(build(p, config or candidates(p, x86).kept[0].config, x86))


def random_codes(rng, shape, dtype: DType) -> np.ndarray:
    """Bytes of finite numbers, all codes alike but for those of NaN and infinity."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    if dtype == f8e4m3fn:
        codes[(codes & 0x7F) == 0x7F] = 0x38
    elif dtype == f8e5m2:
        codes[(codes & 0x7F) >= 0x7C] = 0x3C
    return codes


def operands(p: ScaledGemmProblem, m: int, seed: int = 0, spread: int = 6, centre: int = 127) -> dict[str, np.ndarray]:
    """Random bytes and scales of a problem; block scales lie within centre - spread ... centre + spread."""
    rng = np.random.default_rng(seed)
    found = {
        "a": random_codes(rng, (m, p.row_bytes("a")), p.a_type),
        "b": random_codes(rng, (p.n, p.row_bytes("b")), p.b_type),
    }
    for name, rows in (("scale_a", m), ("scale_b", p.n)):
        if p.scaling == "block":
            found[name] = rng.integers(centre - spread, centre + spread + 1, (rows, p.blocks)).astype(np.uint8)
        else:
            found[name] = rng.uniform(0.1, 3, 1 if p.scaling == "tensor" else rows).astype(np.float32)
    if p.bias == "row":
        found["bias"] = encode(rng.standard_normal(p.n) * 100, p.out_dtype)
    return found


def padded(x: np.ndarray, pad: int) -> np.ndarray:
    """The same rows `pad` bytes apart, in memory whose other bytes are NaN codes."""
    whole = np.full((x.shape[0], x.shape[1] + pad), 0xFF, np.uint8)
    whole[:, : x.shape[1]] = x
    return whole[:, : x.shape[1]]


def launch(p: ScaledGemmProblem, m: int, found: dict, pad: int = 0, threads: int = 1, config=None) -> np.ndarray:
    """One call; C as float64. Checks that nothing outside C was written, and that the kernel reads what it wrote."""
    held = dict(found)
    for name in ("a", "b"):
        held[name] = padded(found[name], pad)
    row = p.n + pad
    c = poison(m * row + 2 * GUARD, p.out_dtype)
    before = c.copy()
    address = {name: x.ctypes.data for name, x in held.items()} | {"c": c[GUARD:].ctypes.data}
    loaded = kernel(p, config)
    if loaded.workspace(threads) is not None:
        ctypes.memset(loaded.workspace(threads), 0xFF, loaded.workspace_bytes * threads)
    arguments = [address[name] for name in pointers(p)]
    loaded(*arguments, m, held["a"].strides[0], held["b"].strides[0], row, threads=threads)
    inside = np.zeros(len(c), bool)
    inside[GUARD : GUARD + m * row] = (np.arange(m * row) % row < p.n) if row else False
    same = c.view(np.uint32 if p.out_dtype == "f32" else np.uint16) == before.view(
        np.uint32 if p.out_dtype == "f32" else np.uint16
    )
    assert same[~inside].all(), f"wrote outside C: {p} M={m}"
    return decode(c[GUARD : GUARD + m * row], p.out_dtype).reshape(m, row)[:, : p.n]


def exact_of(p: ScaledGemmProblem, found: dict) -> tuple[np.ndarray, np.ndarray]:
    """(C in f64, its accumulation bound)."""
    values = dict(found)
    if "bias" in values:
        values["bias"] = decode(values["bias"], p.out_dtype)
    return reference(p, **values), bound(p, **values)


def check(p: ScaledGemmProblem, m: int, pad: int = 0, threads: int = 1, config=None, **how) -> None:
    """One case: C is the exact result rounded once, within what f32 sums allow."""
    found = operands(p, m, **how)
    got = launch(p, m, found, pad, threads, config)
    exact, allowed = exact_of(p, found)
    bad = wrong(p, got, exact, allowed)
    assert not bad.any(), f"{bad.sum()} of {bad.size} wrong, the first at {np.argwhere(bad)[0]}: {p} M={m}"
    if p.out_dtype == "bf16" and got.size > 1000:  # the Frobenius norm, of enough roundings to be typical
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert error <= 2e-3, f"relative error {error}"
