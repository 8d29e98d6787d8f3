"""Operands inside guarded memory, one call of a kernel, and the f64 reference to hold it against."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from flykernels.launch import host
from flykernels.targets import x86
from templates.gemm.arguments import pointers, scalar_values
from templates.gemm.build import build
from templates.gemm.config import X86Config
from templates.gemm.packing import pack_b
from templates.gemm.problem import GemmProblem
from templates.gemm.reference import reference, tolerance

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
GUARD = 64  # elements around an operand


@cache
def kernel(problem: GemmProblem, config: X86Config) -> host.HostKernel:
    """Compiled once for all tests."""
    return host.load(build(problem, config, x86))


@dataclass
class Guarded:
    """A tensor inside a larger buffer, at an odd offset; `intact` says whether nothing around it has changed."""

    view: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def intact(self) -> bool:
        inside = torch.zeros(self.buffer.shape, dtype=torch.bool)
        inside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())[...] = True
        same = bits(self.buffer) == bits(self.before)
        return bool((same | inside).all())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def guarded(values: torch.Tensor, layout: str = "row", pad: int = 0) -> Guarded:
    """values (one to three axes) copied into NaN-filled memory. pad: elements between rows (or columns)."""
    *outer, rows, columns = (1, *values.shape) if values.dim() == 1 else values.shape
    stride = {"row": (columns + pad, 1), "col": (1, rows + pad), "any": (2 * columns + pad, 2)}[layout]
    one = (rows - 1) * stride[0] + (columns - 1) * stride[1] + 1 if min(rows, columns) else 0
    stride = (*((one + pad,) if outer else ()), *stride)
    size = (outer[0] if outer else 1) * (one + pad) + 2 * GUARD + 1
    buffer = torch.full((size,), float("nan"), dtype=values.dtype)
    view = buffer.as_strided((*outer, rows, columns), stride, GUARD + 1)
    view.copy_(values)
    view = view[0] if values.dim() == 1 else view
    return Guarded(view, buffer, buffer.clone())


def operands(p: GemmProblem, m: int, batch: int = 0, scale: float = 1.0, pad: int = 0, seed: int = 0):
    """Random operands of a problem by name, in the layouts it states; C is full of NaN."""
    make = torch.Generator().manual_seed(seed)
    lead = (batch,) if p.batched else ()

    def draw(*shape, of=None, layout="row"):
        values = torch.randn(*lead, *shape, generator=make) * scale
        return guarded(values.to(TORCH[of or p.dtype]), layout, pad)

    found = {"a": draw(m, p.k, layout=p.a), "b": draw(p.k, p.n, layout=p.b)}
    if p.bias == "row":
        found["bias"] = guarded((torch.randn(p.n, generator=make) * scale).to(TORCH[p.out_dtype]))
    elif p.bias == "full":
        found["bias"] = draw(m, p.n, of=p.out_dtype, layout="any")
    if p.residual:
        found["residual"] = draw(m, p.n, of=p.out_dtype)
    found["c"] = guarded(torch.full((*lead, m, p.n), float("nan"), dtype=TORCH[p.out_dtype]), "row", pad)
    return found


def launch(p: GemmProblem, config: X86Config, found, threads: int = 1) -> None:
    """One call; with packed_b, B is packed first. Workspace is full of NaN: a kernel reads what it has written."""
    tensors = {name: g.view for name, g in found.items()}
    if p.packed_b:
        tensors["b"] = pack_b(p, config, tensors["b"])
    addresses = [tensors[name].data_ptr() for name in pointers(p)]
    loaded = kernel(p, config)
    if loaded.workspace(threads) is not None:
        ctypes.memset(loaded.workspace(threads), 0xFF, loaded.workspace_bytes * threads)
    loaded(*addresses, *scalar_values(p, **tensors), threads=threads)


def expected(p: GemmProblem, found) -> tuple[torch.Tensor, float]:
    """C in f64, and the absolute error it may show."""
    arrays = {n: g.view.double().numpy() for n, g in found.items() if n != "c"}
    extra = {n: arrays[n] for n in ("bias", "residual") if n in arrays}
    exact = torch.from_numpy(reference(p, arrays["a"], arrays["b"], **extra))
    allowed = tolerance(p, arrays["a"], arrays["b"])
    largest = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0.0
    return exact, allowed + 2 * p.output_type.epsilon * largest


def check(p: GemmProblem, config: X86Config, m: int, threads: int = 1, **how) -> None:
    """Runs one case: right within the bound, every element written, nothing around C touched."""
    found = operands(p, m, **how)
    launch(p, config, found, threads)
    exact, allowed = expected(p, found)
    got = found["c"].view.double()
    assert found["c"].intact(), f"wrote outside C: {p} {config} M={m}"
    assert got.isfinite().all(), f"not all of C was written: {p} {config} M={m}"
    error = (got - exact).abs().max().item() if got.numel() else 0.0
    assert error <= allowed, f"error {error:.3g} > {allowed:.3g}: {p} {config} M={m}"
