"""Operands inside guarded memory, one call of an RMSNorm kernel anywhere, and the float64 reference to hold it against."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from flykernels.launch import host
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950, x86
from templates.rms_norm import reference
from templates.rms_norm.arguments import eps_bits, pointers, scalars
from templates.rms_norm.build import build
from templates.rms_norm.problem import RMSNormProblem

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
GUARD = 64  # elements around an operand
EPS = 1e-5


def results_of(p: RMSNormProblem) -> tuple[str, ...]:
    """Names of the pointers that the kernel writes to."""
    return ("dx", "dweight") if p.backward else ("y", "sum", "rstd")


@cache
def codes(problem: RMSNormProblem, config, target):
    """Compiled once for all tests."""
    return build(problem, config, target)


class Guarded:
    """A tensor in a larger buffer full of NaN; `intact` says whether nothing around it has changed.

    offset: elements by which it misses the alignment of memory; pad: elements between rows."""

    def __init__(self, values: torch.Tensor, offset: int = 0, pad: int = 0):
        rows, width = (1, *values.shape) if values.dim() == 1 else values.shape
        self.buffer = torch.full((rows * (width + pad) + 2 * GUARD + offset,), float("nan"), dtype=values.dtype)
        stride = (1,) if values.dim() == 1 else (width + pad, 1)
        self.view = self.buffer.as_strided(values.shape, stride, GUARD + offset)
        self.view.copy_(values)
        self.before = self.buffer.clone()

    def intact(self) -> bool:
        inside = torch.zeros(self.buffer.shape, dtype=torch.bool)
        inside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())[...] = True
        bits = lambda x: x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
        return bool(((bits(self.buffer) == bits(self.before)) | inside).all())


def operands(
    p: RMSNormProblem, rows: int, width: int, scale: float = 1.0, offset=0, pad=0, seed=0
) -> dict[str, Guarded]:
    """Random operands by name; results are full of NaN. offset, pad: of the inputs."""
    make = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=make)
    made = {}
    for name in pointers(p):
        kind = TORCH[{"weight": p.weight_dtype, "dweight": p.weight_dtype, "rstd": "f32"}.get(name, p.dtype)]
        shape = (width,) if "weight" in name else (rows,) if name == "rstd" else (rows, width)
        if name in results_of(p):
            made[name] = Guarded(torch.full(shape, float("nan"), dtype=kind))
        elif name == "rstd":
            made[name] = Guarded((made["x"].view.double().pow(2).mean(-1) + EPS).rsqrt().float())
        else:
            values = draw(*shape) * (scale if name in ("x", "residual") else 1.0)
            made[name] = Guarded(values.to(kind), offset, pad if len(shape) == 2 else 0)
    return made


def call(p: RMSNormProblem, config, target, made: dict[str, Guarded], threads=2, run: Callable | None = None):
    """Runs the kernel on guarded operands. On gfx950 in the simulator; returns its counters, one for each launch.

    run(codes, tensors by name, scalars by name, workspace bytes): how to launch elsewhere."""
    rows, width = made["x"].view.shape
    parts = config.parts_for(rows, width, threads)
    values = {f"{n}_row": g.view.stride(0) for n, g in made.items() if g.view.dim() == 2}
    values |= {"eps": eps_bits(EPS), "rows": rows, "width": width, "parts": parts}
    values = {n: values[n] for n in scalars(p)}
    built = codes(p, config, target)
    space = config.workspace_bytes(rows, width, parts)
    if run is not None:
        return run(built, {n: g.view for n, g in made.items()}, values, space)
    workspace = torch.full((max(space // 4, 1),), float("nan"))
    results = []
    for code in built:
        tensors = {n: g.buffer for n, g in made.items()} | {"workspace": workspace}
        if target is x86:
            addresses = {n: g.view.data_ptr() for n, g in made.items()} | {"workspace": workspace.data_ptr()}
            host.load(code).launcher()(*((addresses | values)[a.name] for a in code.arguments))
        else:
            fresh = {*results_of(p)} - ({"sum", "dx"} if code is not built[0] else set())
            fresh |= {"workspace"} if code is not built[-1] else set()
            results.append(simulate(code, made, tensors, values, fresh))
    return results


def simulate(code, made, tensors, values, results):
    """One launch in the simulator, the checker silent; results: what nobody has written before."""
    grid = (*code.grid_for(values), 1, 1)[:3]
    given = []
    for a in code.arguments:
        if a.kind == "pointer":
            given.append(made[a.name].view if a.name in made else tensors[a.name])
        else:
            given.append(np.int32(values[a.name]) if a.kind == "i32" else np.int64(values[a.name]))
    if 0 in grid:
        return None
    outputs = [i for i, a in enumerate(code.arguments) if a.name in results]
    return run_on_sim(code, given, grid=grid, outputs=outputs).raise_for_findings()


def check(p: RMSNormProblem, made: dict[str, Guarded], eps: float = EPS):
    """Every result against float64, and nothing written around it."""
    view = {n: g.view for n, g in made.items()}
    rows, width = view["x"].shape
    if p.backward:
        want = reference.backward(view["x"], view.get("weight"), view["rstd"], view["dy"], view.get("dsum"))
    else:
        want = reference.forward(view["x"], view.get("weight"), view.get("residual"), eps)
    for name in pointers(p):
        assert made[name].intact(), f"something around {name} was written"
        if name not in results_of(p):
            continue
        limit = reference.bound(p, name, want, rows if name == "dweight" else width)
        error = (view[name].double() - want[name]).abs()
        good = (error <= limit) | (view[name].double() == want[name]) | (view[name].isnan() & want[name].isnan())
        assert bool(good.all()), f"{name}: {(error / limit).nan_to_num(1e9).max():.3g} times its bound at {p}"


def run(p: RMSNormProblem, config, target, rows: int, width: int | None = None, **how):
    """One call on random operands, checked; the simulator's results on gfx950."""
    made = operands(p, rows, width or p.width, **how)
    out = call(p, config, target, made)
    check(p, made)
    return out


TARGETS = {"x86": x86, "gfx950": gfx950}
