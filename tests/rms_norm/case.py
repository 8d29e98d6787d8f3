"""Operands inside guarded memory, a call of an RMSNorm kernel, and the float64 reference to hold it against."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch

from flykernels.launch import host
from flykernels.launch.current import Launcher
from flykernels.sim import run_on_sim
from flykernels.targets import sm90a, x86
from templates.rms_norm import reference
from templates.rms_norm.arguments import eps_bits, pointers, scalars
from templates.rms_norm.build import build, build_from_json
from templates.rms_norm.problem import VECTOR_BYTES, RMSNormProblem

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
GUARD = 64  # elements around an operand
EPS = 1e-5
PROCESSES = 16  # at most, that compile ahead


def results_of(p: RMSNormProblem) -> tuple[str, ...]:
    """Names of the pointers that the kernel writes to."""
    return ("dx", "dweight") if p.backward else ("y", "sum", "rstd")


_built: dict = {}


def codes(problem: RMSNormProblem, config, target):
    """Compiled once for all tests."""
    key = problem, config, target.name
    if key not in _built:
        _built[key] = build(problem, config, target)
    return _built[key]


def compile_ahead(wanted: list[tuple[RMSNormProblem, object]], target) -> None:
    """`codes` of these problems and configurations, in as many processes as there are cores."""
    jobs = [(p, config.key(), target.name) for p, config in wanted]
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for (p, config), made in zip(wanted, pool.map(build_from_json, *zip(*jobs))):
            _built[p, config, target.name] = made


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


def scalars_of(p: RMSNormProblem, config, made: dict[str, Guarded], parts: int, eps: float = EPS) -> dict[str, int]:
    """The scalar arguments for these operands, by name."""
    rows, width = made["x"].view.shape
    values = {f"{n}_row": g.view.stride(0) for n, g in made.items() if g.view.dim() == 2}
    values |= {"eps": eps_bits(eps), "rows": rows, "width": width, "parts": parts}
    return {n: values[n] for n in scalars(p)}


def call(
    p: RMSNormProblem, config, target, made: dict[str, Guarded], threads: int = 2, parts: int | None = None,
    eps: float = EPS,
):  # fmt: skip
    """Runs the kernel on guarded operands: on the CPU, on an H200, or in the simulator (the results of each launch)."""
    rows, width = made["x"].view.shape
    parts = config.parts_for(rows, width, threads) if parts is None else parts
    values = scalars_of(p, config, made, parts, eps)
    built = codes(p, config, target)
    workspace = torch.full((max(config.workspace_bytes(rows, width, parts) // 4, 1),), float("nan"))
    if target is sm90a:
        return on_the_device(built, made, workspace, values)
    results = []
    for code in built:
        if target is x86:
            addresses = {n: g.view.data_ptr() for n, g in made.items()} | {"workspace": workspace.data_ptr()}
            launch = host.load(code).launcher(threads)
            launch(*((addresses | values)[a.name] for a in code.arguments))
        else:
            fresh = {*results_of(p)} - ({"sum", "dx"} if code is not built[0] else set())
            fresh |= {"workspace"} if code is not built[-1] else set()
            results.append(simulate(code, made, workspace, values, fresh))
    return results


def on_the_device(built, made: dict[str, Guarded], workspace: torch.Tensor, values: dict[str, int]) -> None:
    """Launches on torch's current stream, on copies of the operands in their guard zones, which come back.

    A copy starts as far from a multiple of 16 bytes as the operand does."""
    there = {}
    for name, g in made.items():
        off = g.view.data_ptr() - g.buffer.data_ptr()
        lead = (g.view.data_ptr() - off) % VECTOR_BYTES // g.buffer.element_size()
        room = torch.empty(g.buffer.numel() + lead, dtype=g.buffer.dtype, device="cuda")[lead:]
        room.copy_(g.buffer)
        there[name] = room, room.data_ptr() + off
    addresses = {name: address for name, (_, address) in there.items()}
    space = workspace.cuda()
    for code in built:
        given = addresses | values | {"workspace": space.data_ptr()}
        Launcher(code)(*(given[a.name] for a in code.arguments))
    torch.cuda.synchronize()
    for name, g in made.items():
        g.buffer.copy_(there[name][0])


def simulate(code, made, workspace, values, results):
    """One launch in the simulator, the checker silent; results: names of what nobody has written before."""
    given, grid = listed(code, made, workspace, values)
    if 0 in grid:
        return None
    outputs = [i for i, a in enumerate(code.arguments) if a.name in results]
    return run_on_sim(code, given, grid=grid, outputs=outputs).raise_for_findings()


def listed(code, made, workspace, values):
    """(arguments in order as the simulator takes them, grid)."""
    tensors = {n: g.view for n, g in made.items()} | {"workspace": workspace}
    number = {"i32": np.int32, "i64": np.int64}
    given = [tensors[a.name] if a.kind == "pointer" else number[a.kind](values[a.name]) for a in code.arguments]
    return given, (*code.grid_for(values), 1, 1)[:3]


def arguments_of(p: RMSNormProblem, config, code, made: dict[str, Guarded]):
    """(arguments, grid) of a launch on copies of these operands that start where memory is aligned."""
    aligned = {n: Aligned(g.view.clone()) for n, g in made.items()}
    rows, width = made["x"].view.shape
    parts = config.parts_for(rows, width)
    workspace = torch.zeros(max(config.workspace_bytes(rows, width, parts) // 4, 1))
    return listed(code, aligned, workspace, scalars_of(p, config, aligned, parts))


@dataclass
class Aligned:
    """A tensor by itself."""

    view: torch.Tensor


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
