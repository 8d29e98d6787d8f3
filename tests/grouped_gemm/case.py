"""Grouped operands inside guarded memory, and the f64 reference to hold a result against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.reference import reference, tolerance
from tests.gemm.x86_case import GUARD, TORCH, Guarded

SIZES = {
    "even": (8, 8, 8),
    "uneven": (1, 0, 37, 5, 0),
    "last": (0, 0, 9),
    "single": (1, 1, 1, 1),
    "none": (0, 0),
    "long": (70, 3),
}


@dataclass
class Case:
    """Operands of a problem by name, in guarded memory; C is full of NaN, as is what no group may read."""

    problem: GroupedGemmProblem
    operands: dict[str, Guarded]
    offs: torch.Tensor | None
    tokens: int

    def expected(self) -> tuple[np.ndarray, float]:
        """C in f64, NaN where it must be left alone, and the absolute error it may show."""
        a, b = (np.nan_to_num(self.operands[x].view.double().numpy()) for x in ("a", "b"))
        offs = None if self.offs is None else self.offs.numpy()
        return reference(self.problem, a, b, offs), tolerance(self.problem, a, b, offs)

    def check(self, got: np.ndarray | None = None) -> None:
        """C is right within the bound, every element of a group is written, and nothing else."""
        c = self.operands["c"]
        if got is None:
            assert c.intact(), f"wrote outside C: {self.problem}"
            got = c.view.double().numpy()
        exact, allowed = self.expected()
        mine = ~np.isnan(exact)
        assert np.isnan(got[~mine]).all(), f"wrote what no group owns: {self.problem}"
        assert np.isfinite(got[mine]).all(), f"not all of C was written, or poison read: {self.problem} {self.offs}"
        error = np.abs(got - exact)[mine].max(initial=0.0)
        assert error <= allowed, f"error {error:.3g} > {allowed:.3g}: {self.problem} {self.offs}"


def offsets(sizes) -> torch.Tensor:
    """offs of groups of these sizes."""
    return torch.tensor(np.cumsum(sizes), dtype=torch.int32)


def placed(values: torch.Tensor, layout: str, pad: int, align: int) -> Guarded:
    """values ([groups,] rows, columns) copied into NaN-filled memory whose first element lies, and whose rows and
    groups begin, at multiples of `align` elements and no more. pad: elements between rows (or columns)."""
    up = lambda n: -(-n // align) * align
    *outer, rows, columns = values.shape
    stride = {"row": (up(columns + pad), 1), "col": (1, up(rows + pad))}[layout]
    one = up((rows - 1) * stride[0] + (columns - 1) * stride[1] + 1 + pad) if min(rows, columns) else align
    offset = GUARD + align
    buffer = torch.full((up(one * (outer[0] if outer else 1)) + 2 * offset,), float("nan"), dtype=values.dtype)
    view = buffer.as_strided(values.shape, (*((one,) if outer else ()), *stride), offset)
    view.copy_(values)
    return Guarded(view, buffer, buffer.clone())


def case(p: GroupedGemmProblem, offs=None, tokens: int = 0, scale: float = 1.0, pad: int = 0, seed: int = 0) -> Case:
    """Random operands in the layouts that a problem states. tokens: T (default: where offs end)."""
    assert offs is None or len(offs) == p.groups, f"{len(offs)} values of offs for {p.groups} groups"
    make = torch.Generator().manual_seed(seed)
    tokens = tokens or int(offs[-1])
    form, g = p.form, (p.groups,)
    m, n, k = (tokens if form in ("m", "batch") else p.m), (tokens if form == "n" else p.n), p.k
    k = tokens if form == "k" else k
    lead = lambda x: g if p.has_groups(x) else ()

    def draw(lead, rows, columns, layout, align, axis=None):
        values = torch.randn(*lead, rows, columns, generator=make) * scale
        if axis is not None and offs is not None:  # what no group owns must not be read into a result
            past = slice(int(np.clip(offs.numpy(), 0, tokens).max(initial=0)), None)
            values[(past,) if axis == 0 else (slice(None), past)] = float("nan")
        return placed(values.to(TORCH[p.dtype]), layout, pad, align // p.input_type.bytes)

    a = draw(lead("a"), m, k, p.a, p.align_a, {"m": 0, "k": 1}.get(form))
    b = draw(lead("b"), k, n, p.b, p.align_b, {"n": 1, "k": 0}.get(form))
    nothing = torch.full((*lead("c"), m, n), float("nan"), dtype=TORCH[p.out_dtype])
    c = placed(nothing, p.c, pad, p.align_c // p.output_type.bytes)
    return Case(p, {"a": a, "b": b, "c": c}, offs, tokens)
