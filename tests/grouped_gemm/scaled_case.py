"""Scaled grouped operands inside guarded memory, calls of kernels, and the f64 reference to hold C against."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np

from flykernels.dtypes import dtype
from flykernels.launch import host
from flykernels.microscaling import BLOCK
from flykernels.targets import x86
from templates.gemm.config import X86Config
from templates.grouped_gemm.scaled.arguments import POINTERS
from templates.grouped_gemm.scaled.build import build
from templates.grouped_gemm.scaled.problem import ScaledGroupedProblem
from templates.grouped_gemm.scaled.reference import reference
from templates.grouped_gemm.scaled.space import candidates
from templates.scaled_gemm.reference import wrong
from tests.gemm.gfx950_case import decode, poison
from tests.scaled_gemm.x86_case import random_codes

GUARD = 64  # elements around C
TINY = np.finfo(np.float64).tiny
NAN_CODE = 0xFF  # NaN as a scale and as e4m3


@dataclass
class Case:
    """A problem's operands as bytes, rows `pad` bytes apart; what no group owns is full of NaN."""

    problem: ScaledGroupedProblem
    held: dict[str, np.ndarray]
    offs: np.ndarray
    tokens: int
    pad: int
    error: float = np.nan  # relative, in the Frobenius norm, of the C that was checked last

    @property
    def shape(self) -> tuple[int, ...]:
        p = self.problem
        return (self.tokens, p.n) if p.form == "m" else (p.groups, p.m, p.n)

    @property
    def c_row(self) -> int:
        return self.problem.n + self.pad

    def empty_c(self) -> np.ndarray:
        return poison(int(np.prod(self.shape[:-1])) * self.c_row + 2 * GUARD, self.problem.out_dtype)

    def numbers(self) -> list[int]:
        """The scalar arguments."""
        h = self.held
        first = [self.tokens, h["a"].strides[0], h["b"].strides[-2], self.c_row]
        scales = [h["scale_a"].strides[0], h["scale_b"].strides[-2]] if self.problem.scaling == "block" else []
        groups = [h[x].strides[0] // h[x].itemsize for x in ("b", "scale_b")]
        groups = groups if self.problem.form == "m" else [self.shape[1] * self.c_row]
        return first + scales + groups

    def check(self, c: np.ndarray) -> None:
        """C, with guards as `empty_c` made it, is the exact result rounded once, within what f32 sums allow."""
        p, rows = self.problem, int(np.prod(self.shape[:-1]))
        got = decode(c, p.out_dtype)
        inside = got[GUARD : GUARD + rows * self.c_row].reshape(rows, self.c_row)
        assert np.isnan(got[:GUARD]).all() and np.isnan(got[GUARD + rows * self.c_row :]).all(), "wrote outside C"
        assert np.isnan(inside[:, p.n :]).all(), "wrote between rows of C"
        got = inside[:, : p.n].reshape(self.shape)
        exact, allowed = reference(p, **self.held, offs=self.offs)
        mine = ~np.isnan(exact)
        assert np.isnan(got[~mine]).all(), f"wrote what no group owns: {p} {self.offs}"
        bad = wrong(p, got, exact, allowed) & mine
        assert not bad.any(), f"{bad.sum()} of {bad.size} wrong, the first at {np.argwhere(bad)[0]}: {p} {self.offs}"
        self.error = np.linalg.norm((got - exact)[mine]) / max(np.linalg.norm(exact[mine]), TINY)


def apart(x: np.ndarray, pad: int) -> np.ndarray:
    """The same rows `pad` elements apart, in memory whose other bytes are NaN."""
    whole = np.full((*x.shape[:-1], x.shape[-1] + pad), NAN_CODE if x.dtype == np.uint8 else np.nan, x.dtype)
    whole[..., : x.shape[-1]] = x
    return whole[..., : x.shape[-1]]


def case(
    p: ScaledGroupedProblem, offs, tokens: int = 0, pad: int = 0, seed: int = 0, spread: int = 6, centre: int = 127
) -> Case:
    """Random bytes and scales. tokens: T (default: where offs end)."""
    rng, offs = np.random.default_rng(seed), np.asarray(offs, np.int32)
    tokens = tokens or int(offs[-1])
    m, k = (tokens, p.k) if p.form == "m" else (p.m, tokens)
    lead = (p.groups,) if p.form == "m" else ()
    held = {
        "a": random_codes(rng, (m, k // p.per_byte("a")), dtype(p.a_dtype)),
        "b": random_codes(rng, (*lead, p.n, k // p.per_byte("b")), dtype(p.b_dtype)),
    }
    for name, shape in (("scale_a", (m, k // BLOCK)), ("scale_b", (*lead, p.n, k // BLOCK))):
        held[name] = rng.integers(centre - spread, centre + spread + 1, shape).astype(np.uint8)
    if p.scaling == "row":
        draw = lambda *shape: rng.uniform(0.5, 2.0, shape).astype(np.float32)
        held |= {"scale_a": draw(m), "scale_b": draw(p.groups, p.n)}
    past = int(np.clip(offs // p.unit * p.unit, 0, tokens).max(initial=0))
    if p.form == "m":
        held["scale_a"][past:] = NAN_CODE if p.scaling == "block" else np.nan
    else:
        for name in ("scale_a", "scale_b"):
            held[name][:, past // BLOCK :] = NAN_CODE
    return Case(p, {name: apart(x, pad) for name, x in held.items()}, offs, tokens, pad)


@cache
def kernel(p: ScaledGroupedProblem, config: X86Config | None, threads: int) -> host.HostKernel:
    """Compiled once for all tests; config None: the space's first."""
    return host.load(build(p, config or candidates(p, x86, threads).kept[0].config, x86))


def check_x86(found: Case, config: X86Config | None = None, threads: int = 1) -> np.ndarray:
    """One call. Workspace is full of NaN: a kernel reads what it has written. C's bits."""
    loaded, c = kernel(found.problem, config, threads), found.empty_c()
    if loaded.workspace(threads) is not None:
        ctypes.memset(loaded.workspace(threads), 0xFF, loaded.workspace_bytes * threads)
    memory = found.held | {"offs": found.offs, "c": c[GUARD:]}
    loaded(*(memory[x].ctypes.data for x in POINTERS), *found.numbers(), threads=threads)
    found.check(c)
    return c
