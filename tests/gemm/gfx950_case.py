"""Runs the gfx950 GEMM on the simulator against float64: poisoned outputs, guard zones, tails, strides."""

from __future__ import annotations

from functools import cache

import numpy as np

from flykernels.codeobject import CodeObject
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.gemm.arguments import pointers, scalars
from templates.gemm.build import build
from templates.gemm.gfx950_config import Gfx950Config
from templates.gemm.gfx950_output import slot_bytes
from templates.gemm.order import tile_of
from templates.gemm.problem import GemmProblem
from templates.gemm.reference import reference, tolerance

NAN_16 = 0x7FC1  # a NaN as bf16, and as f16


@cache
def compiled(p: GemmProblem, cfg: Gfx950Config) -> CodeObject:
    return build(p, cfg, gfx950)


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """float -> storage (bf16 and f16 as uint16), rounded to nearest even."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype == "f32":
        return x
    if dtype == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """storage -> float64."""
    if dtype == "f16":
        return stored.view(np.float16).astype(np.float64)
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def poison(count: int, dtype: str) -> np.ndarray:
    return np.full(count, np.nan, np.float32) if dtype == "f32" else np.full(count, NAN_16, np.uint16)


class Operand:
    """A ([batch,] rows, columns) matrix in storage full of NaNs: layout "row", "col" or "any", rows `pad` apart."""

    def __init__(self, rng, shape, layout: str, dtype: str, pad: int, scale: float, offset: int = 0, fill=True):
        *batch, rows, columns = shape
        gap = 2 if layout == "any" else 1
        self.dtype = dtype
        self.row, self.col = ((columns * gap + pad), gap) if layout != "col" else (gap, (rows * gap + pad))
        each = (rows - 1) * self.row + (columns - 1) * self.col + 1
        self.batch = each + pad + (-(each + pad)) % 8
        count = (batch[0] - 1) * self.batch + each if batch else each
        self.storage = poison(count + offset + (count + offset) % 2, dtype)  # allocations end at whole words
        self.data = self.storage[offset:]
        at = np.arange(rows)[:, None] * self.row + np.arange(columns) * self.col
        self.index = at + np.arange(batch[0])[:, None, None] * self.batch if batch else at
        if fill:
            self.data[self.index] = encode(rng.standard_normal(shape) * scale, dtype)

    @property
    def values(self) -> np.ndarray:
        return decode(self.data[self.index], self.dtype)


def run(
    p: GemmProblem, cfg: Gfx950Config, m: int, *, pads=(0, 0, 0), batch=2, scale=1.0, workgroups=None, seed=0, code=None
):
    """Runs the kernel, checks findings, every element of C and that nothing else was written; returns C."""
    rng = np.random.default_rng(seed)
    code = code or compiled(p, cfg)
    whole = lambda *shape: (batch, *shape) if p.batched else shape
    a = Operand(rng, whole(m, p.k), p.a, p.dtype, pads[0], scale)
    b = Operand(rng, whole(p.k, p.n), p.b, p.dtype, pads[1], 1.0)
    c = Operand(rng, whole(m, p.n), "row", p.out_dtype, pads[2], 1.0, fill=False)
    held = {"a": a, "b": b, "c": c}
    if p.bias == "row":
        held["bias"] = Operand(rng, (1, p.n), "row", p.out_dtype, 0, scale)
    elif p.bias == "full":
        held["bias"] = Operand(rng, whole(m, p.n), "any", p.out_dtype, 1, scale)
    if p.residual:
        held["residual"] = Operand(rng, whole(m, p.n), "row", p.out_dtype, pads[2], scale)
    number = {"m": m, "batch": batch}
    for name, x in held.items():
        number |= {f"{name}_row": x.row, f"{name}_col": x.col, f"{name}_batch": x.batch}
    args = [held[n].data for n in pointers(p)] + [np.int64(number[n]) for n in scalars(p)]
    workspace = np.zeros(code.workspace_for(number) // 4, np.float32)
    workspace[:] = np.nan  # what was left there says nothing ...
    workspace.view(np.int32)[:: slot_bytes(cfg) // 4] = 0  # ... but each tile's counter is 0
    args += [workspace] if code.workspace else []
    grid = code.grid_for(number)
    written = None if code.workspace else [pointers(p).index("c")]  # workspace is read as well
    result = run_on_sim(code, args, (*grid, 1, 1)[:3], workgroups=workgroups, outputs=written)
    result.raise_for_findings()

    extra = {
        n: held[n].values if n == "residual" or p.bias == "full" else held[n].values[0]
        for n in ("bias", "residual")
        if n in held
    }
    want = reference(p, a.values, b.values, **extra)
    got, touched = c.values, np.ones(want.shape, bool)
    if workgroups is not None:
        touched[:] = False
        rows, columns = -(-m // cfg.tile_m), -(-p.n // cfg.tile_n)
        for i, *_ in workgroups:
            _, x, y = tile_of(i, rows, columns, grid[0] // (rows * columns), cfg.group_m, gfx950.limits.dies)
            touched[..., x * cfg.tile_m : (x + 1) * cfg.tile_m, y * cfg.tile_n : (y + 1) * cfg.tile_n] = True
    assert np.isnan(got[~touched]).all(), "elements of other workgroups were written"
    error = np.abs(got - want)[touched].max()
    rounding = p.output_type.epsilon * np.abs(want).max()
    assert error <= tolerance(p, a.values, b.values) + 2 * rounding, (
        f"error {error} where C reaches {np.abs(want).max()}"
    )
    outside = np.ones(len(c.data), bool)
    outside[c.index.ravel()] = False
    assert np.isnan(decode(c.data[outside], p.out_dtype)).all(), "bytes between the rows of C were written"
    return got
