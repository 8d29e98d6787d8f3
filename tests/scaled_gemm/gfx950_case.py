"""Runs the gfx950 scaled GEMM in the simulator against float64: random scales, poisoned C, guard zones, checker."""

from __future__ import annotations

from functools import cache

import numpy as np

from flykernels.codeobject import CodeObject
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.gemm.gfx950_output import slot_bytes
from templates.gemm.order import tile_of
from templates.scaled_gemm.arguments import pointers
from templates.scaled_gemm.build import build
from templates.scaled_gemm.gfx950_config import WORD, ScaledConfig
from templates.scaled_gemm.problem import ScaledGemmProblem
from templates.scaled_gemm.reference import wrong
from tests.gemm.gfx950_case import decode, poison

from .x86_case import exact_of, operands, padded


@cache
def compiled(p: ScaledGemmProblem, cfg: ScaledConfig) -> CodeObject:
    return build(p, cfg, gfx950)


def whole_words(scales: np.ndarray) -> np.ndarray:
    """The same bytes in memory that ends with a whole word, as allocations do; what follows them there is NaN."""
    return np.concatenate([scales.reshape(-1), np.full(-scales.size % WORD, 0xFF, np.uint8)])


def run(
    p: ScaledGemmProblem, cfg: ScaledConfig, m: int, *, pad=0, pad_c=0, workgroups=None, seed=0, found=None, code=None
):
    """Runs the kernel; C is checked element by element, with what lies around it and what other workgroups own."""
    found = found or operands(p, m, seed=seed)
    code = code or compiled(p, cfg)
    assert code.spills == 0 and code.scratch_bytes == 0, f"{cfg}: {code.spills} spills"
    held = dict(found)
    for name in ("a", "b"):
        held[name] = padded(found[name], pad)
    if p.scaling == "block":
        held |= {name: whole_words(found[name]) for name in ("scale_a", "scale_b")}
    row = p.n + pad_c
    c = poison(m * row + 2, p.out_dtype)
    memory = {name: x.base if name in ("a", "b") and x.base is not None else x for name, x in held.items()} | {"c": c}
    numbers = [np.int64(x) for x in (m, held["a"].strides[0], held["b"].strides[0], row)]
    arguments = [memory[name] for name in pointers(p)] + numbers
    workspace = np.full(code.workspace_for({"m": m}) // 4, np.nan, np.float32)
    workspace.view(np.int32)[:: slot_bytes(cfg) // 4] = 0
    arguments += [workspace] if code.workspace else []
    grid = code.grid_for({"m": m})
    written = None if code.workspace else [pointers(p).index("c")]
    result = run_on_sim(code, arguments, (*grid, 1, 1)[:3], workgroups=workgroups, outputs=written)
    result.raise_for_findings()

    got = decode(c[: m * row], p.out_dtype).reshape(m, row)
    touched = np.ones((m, p.n), bool)
    if workgroups is not None:
        touched[:] = False
        rows, columns = -(-m // cfg.tile_m), -(-p.n // cfg.tile_n)
        for i, *_ in workgroups:
            _, x, y = tile_of(i, rows, columns, grid[0] // (rows * columns), cfg.group_m, gfx950.limits.dies)
            touched[x * cfg.tile_m : (x + 1) * cfg.tile_m, y * cfg.tile_n : (y + 1) * cfg.tile_n] = True
    assert np.isnan(got[:, p.n :]).all() and np.isnan(decode(c[m * row :], p.out_dtype)).all(), (
        "wrote between rows of C"
    )
    got = got[:, : p.n]
    assert np.isnan(got[~touched]).all(), "elements of other workgroups were written"
    exact, allowed = exact_of(p, found)
    here = touched & np.isfinite(exact)
    if p.out_dtype == "bf16" and here.sum() > 1000:  # the Frobenius norm, of enough roundings to be typical
        assert np.linalg.norm(got[here] - exact[here]) <= 2e-3 * np.linalg.norm(exact[here])
    bad = wrong(p, got, exact, allowed) & touched
    assert not bad.any(), f"{bad.sum()} of {bad.size} wrong, the first at {np.argwhere(bad)[0]}: {p} {cfg} M={m}"
    return got
