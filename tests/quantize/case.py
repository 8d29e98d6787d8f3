"""Inputs that try the quantisers' every path, in guarded memory, and the reference to hold results against."""

from __future__ import annotations

from functools import cache

import numpy as np

from flykernels.microscaling import BLOCK
from templates.quantize.arguments import outputs, shapes
from templates.quantize.build import build, default
from templates.quantize.problem import QuantizeProblem
from templates.quantize.reference import reference
from tests.gemm.gfx950_case import decode, encode, poison

GUARD = 64  # bytes around an output
POISON = 0xA5


@cache
def compiled(p: QuantizeProblem, target, config=None):
    return build(p, config or default(p, target), target)


def numbers(p: QuantizeProblem, m: int, seed: int = 0) -> np.ndarray:
    """(m, n) as X holds them, float64: blocks of every size, ties, zeros, subnormals, the largest; all finite."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, p.n)) * 2.0 ** rng.integers(-8, 9, (m, p.n))
    least = {"bf16": -133, "f32": -149, "f16": -24}[p.dtype]
    most = {"bf16": 127, "f32": 127, "f16": 15}[p.dtype]
    bands = 2.0 ** rng.integers(least, most - 12, (-(-m // BLOCK), -(-p.n // BLOCK)))
    wild = np.kron(bands, np.ones((BLOCK, BLOCK)))[:m, : p.n]
    kind = np.kron(rng.integers(0, 5, bands.shape), np.ones((BLOCK, BLOCK)))[:m, : p.n]
    x = np.where(kind == 0, x * wild, x)
    x = np.where(kind == 1, np.rint(x * 4) / 4, x)  # many ties
    x = np.where(kind == 2, np.copysign(0.0, x), x)
    x[:1] = np.where(rng.random((1, p.n)) < 0.1, -p.input_type.largest, x[:1]) if m else x[:1]
    limit = p.output_type.largest
    x = np.where((kind == 3) & (rng.random(x.shape) < 0.05), limit * 1.001, x)
    x = np.where((kind == 4) & (rng.random(x.shape) < 0.05), limit, np.where(kind == 4, np.clip(x, -limit, limit), x))
    x = np.clip(x, -p.input_type.largest, p.input_type.largest)
    return decode(encode(x, p.dtype), p.dtype)


def stored(p: QuantizeProblem, x: np.ndarray, pad: int) -> tuple[np.ndarray, int]:
    """(memory with X's rows n + pad apart and NaN between them, that distance)."""
    row = p.n + pad
    memory = poison(x.shape[0] * row + row, p.dtype)
    for r in range(x.shape[0]):
        memory[r * row : r * row + p.n] = encode(x[r], p.dtype)
    return memory, row


def guarded(p: QuantizeProblem, m: int) -> dict[str, np.ndarray]:
    """Poisoned memory for each output, with GUARD bytes before and after."""
    return {name: np.full(rows * cols + 2 * GUARD, POISON, np.uint8) for name, (rows, cols) in shapes(p, m).items()}


def compare(p: QuantizeProblem, x: np.ndarray, memory: dict[str, np.ndarray]) -> None:
    """Every byte of every output is the reference's, and nothing around them has changed."""
    with np.errstate(all="ignore"):
        want = reference(p, x)
    for name in outputs(p):
        got = memory[name][GUARD:-GUARD].reshape(want[name].shape)
        bad = got != want[name]
        assert not bad.any(), (
            f"{name}: {bad.sum()} of {bad.size} bytes differ, the first at {np.argwhere(bad)[0]}: "
            f"{got[bad][0]:#x} for {want[name][bad][0]:#x}; {p}"
        )
        outside = np.concatenate([memory[name][:GUARD], memory[name][-GUARD:]])
        assert (outside == POISON).all(), f"{name}: bytes around it were written; {p}"
