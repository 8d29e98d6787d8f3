"""A problem as a program for torch.compile: one product and what follows it, on operands that lie as the problem says.

A warmup measures problems that no model brought along through these: Inductor then offers what it would offer anyone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from flykernels.microscaling import BLOCK, FORMATS

from . import grouped, kernels, private_ahead, scaled
from .lowering import Program
from .strides import WIDEST, alignments
from .wanted import Problem

PADDING_MOST = 17  # elements that a row may be longer, or operands begin later, to be no better aligned than asked


class NoProgram(ValueError):
    """Why no program asks for a problem, in words."""


def program_of(problem: Problem) -> Program:
    """NoProgram where operands cannot be made that lie so."""
    sizes, op = problem.key.problem, problem.key.op
    make = {scaled.OP: _scaled, grouped.OP: _grouped}.get(op, _dense)
    return make(problem.problem, op, sizes, problem.target != "x86")


def _dense(p: Any, op: str, sizes: dict, gpu: bool) -> Program:
    base, _, activation = op.partition("+")
    symbolic = sizes["m"] == "symbolic"
    m = p.m_hint if symbolic else sizes["m"]
    batch = sizes.get("batch", 1)
    if batch == "symbolic":
        raise NoProgram("a symbolic batch: only a model says what it stands for")
    dtype = kernels.torch_dtype(p.dtype)
    lead = (batch,) if p.batched else ()
    a = _strides((*lead, m, p.k), p.a, p.align_a if gpu else None, dtype)
    b = _strides((*lead, p.k, p.n), p.b, p.align_b if gpu else None, dtype)
    activate = kernels.activation(activation or "none")
    frozen = p.packed_b or base == "_mkl_linear"
    added = "full" if base in ("addmm", "baddbmm") and not activation and p.residual and p.bias == "none" else p.bias

    def product(x: Any, y: Any, bias: Any) -> Any:
        if base == "_mkl_linear":
            return torch.nn.functional.linear(x, y.t(), bias)
        if bias is None:
            return torch.bmm(x, y) if p.batched else torch.mm(x, y)
        return torch.baddbmm(bias, x, y) if p.batched else torch.addmm(bias, x, y)

    def whole(x: Any, y: Any, bias: Any, residual: Any) -> Any:
        value = product(x, y, bias)
        value = activate(value) if activate is not None else value
        return value if residual is None else value + residual

    class Layer(torch.nn.Module):
        def __init__(self, weight: Any):
            super().__init__()
            self.weight = torch.nn.Parameter(weight, requires_grad=False)

        def forward(self, x: Any, bias: Any, residual: Any) -> Any:
            return whole(x, self.weight, bias, residual)

    def make() -> tuple[Any, tuple, dict]:
        x, y = _made(a, dtype), _made(b, dtype)
        out = (*lead, m, p.n)
        bias = {"none": lambda: None, "row": lambda: torch.empty(p.n, dtype=dtype)}.get(
            added, lambda: torch.empty(out, dtype=dtype)
        )()
        beside = p.residual and added != "full"
        residual = torch.empty(out, dtype=dtype) if beside else None
        if symbolic:
            for tensor in (x, residual, bias if added == "full" else None):
                if tensor is not None:
                    private_ahead.symbolic(tensor, len(lead))
        return (Layer(y), (x, bias, residual), {}) if frozen else (whole, (x, y, bias, residual), {})

    return Program(make, freezing=frozen)


def _scaled(p: Any, op: str, sizes: dict, gpu: bool) -> Program:
    symbolic = sizes["m"] == "symbolic"
    m = p.m_hint if symbolic else sizes["m"]
    dtype = kernels.torch_dtype(p.out_dtype)
    kinds = [kernels.torch_dtype(x) for x in (p.a_dtype, p.b_dtype)]
    widths = [p.k // FORMATS[x].per_byte for x in (p.a_type, p.b_type)]
    if getattr(p, "a", "row") != "row" or getattr(p, "b", "col") != "col":
        raise NoProgram("operands that do not run along K")
    scales = {
        "block": ((m * (p.k // BLOCK),), (p.n * (p.k // BLOCK),)), "tensor": ((1,), (1,)), "row": ((m, 1), (1, p.n)),
    }[p.scaling]  # fmt: skip
    scale_dtype = torch.float8_e8m0fnu if p.scaling == "block" else torch.float32
    a = _strides((m, widths[0]), "row", p.align_a if gpu else None, kinds[0])
    b = _strides((widths[1], p.n), "col", p.align_b if gpu else None, kinds[1])

    def whole(x: Any, y: Any, scale_a: Any, scale_b: Any, bias: Any) -> Any:
        return torch._scaled_mm(x, y, scale_a, scale_b, bias=bias, out_dtype=dtype)

    def make() -> tuple[Any, tuple, dict]:
        bias = torch.empty(p.n, dtype=dtype) if p.bias == "row" else None
        made = [torch.empty(size, dtype=scale_dtype) for size in scales]
        if symbolic and p.scaling == "block":
            made[0] = torch.empty(m, p.k // BLOCK, dtype=scale_dtype)
        x = _made(a, kinds[0])
        if symbolic:
            private_ahead.symbolic(x, 0)
            if p.scaling != "tensor":
                private_ahead.symbolic(made[0], 0)
        return whole, (x, _made(b, kinds[1]), *made, bias), {}

    return Program(make)


def _made(held: tuple, dtype: Any) -> Any:
    """A fake tensor of (sizes, strides)."""
    return torch.empty_strided(*held, dtype=dtype)


def _strides(size: Sequence[int], unit: str, align: int | None, dtype: Any) -> tuple[tuple, tuple]:
    """(sizes, strides) of a dense operand whose neighbours lie as asked, padded so that it is aligned to `align` bytes
    and no more (None: as it comes). NoProgram where no padding does that."""
    *lead, rows, columns = size
    least, width = (columns, rows) if unit != "col" else (rows, columns)
    step = 2 if unit == "any" else 1
    for extra in range(PADDING_MOST):
        pitch = least * step + extra
        stride: tuple = (pitch, step) if unit != "col" else (step, pitch)
        if lead:
            stride = (pitch * width, *stride)
        if align is None:
            return tuple(size), stride
        held = SimpleNamespace(dtype=dtype, size=size, stride=stride, offset=0)
        if alignments(held, held, [held])["align_a"] == min(align, WIDEST):
            return tuple(size), stride
    raise NoProgram(f"no {math.prod(size)} elements lie so that they are aligned to {align} bytes and no more")


def _grouped(p: Any, op: str, sizes: dict, gpu: bool) -> Program:
    symbolic = sizes["tokens"] == "symbolic"
    tokens = p.tokens_hint if symbolic else sizes["tokens"]
    dtype = kernels.torch_dtype(p.dtype)
    if p.out_dtype != p.dtype or p.c != "row":
        raise NoProgram("a result of another type or layout")
    m, n, k = (tokens if x == ("m" if p.form == "batch" else p.form) else getattr(p, x) for x in "mnk")
    lead = lambda operand: (p.groups,) if p.has_groups(operand) else ()
    a = _strides((*lead("a"), m, k), p.a, p.align_a if gpu else None, dtype)
    b = _strides((*lead("b"), k, n), p.b, p.align_b if gpu else None, dtype)

    def whole(x: Any, y: Any, offs: Any) -> Any:
        return torch._grouped_mm(x, y, offs)

    def make() -> tuple[Any, tuple, dict]:
        x, y = _made(a, dtype), _made(b, dtype)
        if symbolic:
            axes = {"m": ((x, 0),), "n": ((y, 1),), "k": ((x, 1), (y, 0)), "batch": ((x, 1),)}[p.form]
            for tensor, axis in axes:
                private_ahead.symbolic(tensor, axis)
        return whole, (x, y, torch.empty(p.groups, dtype=torch.int32) if p.ragged else None), {}

    return Program(make)
