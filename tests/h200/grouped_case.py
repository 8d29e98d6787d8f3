"""Runs an sm_90a grouped GEMM against float64: poisoned results, guard zones, groups of any size, device offs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch

from flykernels.codeobject import CodeObject
from flykernels.launch.current import Launcher
from flykernels.targets import sm90a
from templates.grouped_gemm.arguments import pointers, scalar_values
from templates.grouped_gemm.build import build
from templates.grouped_gemm.problem import GroupedGemmProblem
from templates.grouped_gemm.reference import bounds
from templates.grouped_gemm.sm90a_config import GroupedSm90aConfig

from .gemm_case import tensor

NAN = float("nan")


@cache
def compiled(p: GroupedGemmProblem, config: GroupedSm90aConfig) -> CodeObject:
    return build(p, config, sm90a)


def operands(p: GroupedGemmProblem, tokens: int, owned: int, pads: tuple[int, int, int], scale: float) -> dict:
    """{"a", "b", "c"}: (storage, view). A (times `scale`) and B of normal numbers, NaN where no group owns
    them; C of NaN."""
    size = {"m": p.m, "n": p.n, "k": p.k} | {"m" if p.form == "batch" else p.form: tokens}
    shapes = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}
    made = {}
    for name, pad in zip("abc", pads):
        lead = (p.groups,) if p.has_groups(name) else ()
        layout, kind = ("row", p.out_dtype) if name == "c" else (getattr(p, name), p.dtype)
        shape = (*lead, *(size[x] for x in shapes[name]))
        last = shape[-1] if layout == "row" else shape[-2]
        whole, view = tensor(shape, layout, kind, -last % 8 + pad)
        if name != "c":
            view.copy_(torch.randn(shape, device="cuda") * (scale if name == "a" else 1.0))
            if p.form in shapes[name]:
                view.narrow(shapes[name].index(p.form) - 2 + view.dim(), owned, tokens - owned).fill_(NAN)
        made[name] = whole, view
    return made


def exact(p: GroupedGemmProblem, a, b, ends: Sequence[int]) -> torch.Tensor:
    """C in f64, NaN where no group owns it; ends: reference.bounds."""
    a, b = a.double(), b.double()
    if p.form == "batch":
        return a @ b
    parts = [slice(first, end) for first, end in pairwise(ends)]
    if p.form == "k":
        return torch.stack([a[:, t] @ b[t] for t in parts])
    c = torch.full((a.shape[-2], b.shape[-1]), NAN, dtype=torch.float64, device="cuda")
    for g, t in enumerate(parts):
        if p.form == "m":
            c[t] = a[t] @ b[g]
        else:
            c[:, t] = a[g] @ b[:, t]
    return c


def run(
    p: GroupedGemmProblem, config: GroupedSm90aConfig, sizes: Sequence[int] = (), *, offs: Sequence[int] | None = None,
    past: int = 0, tokens: int | None = None, pads=(0, 0, 0), scale: float = 1.0, seed: int = 0,
) -> None:  # fmt: skip
    """Runs the kernel twice; both results must be alike, right in every element that a group owns, and nothing else may
    be written.

    sizes: of the groups; offs: instead of them; past: how much of T belongs to none; tokens: T itself"""
    torch.manual_seed(seed)
    if p.form == "batch":
        tokens, ends = tokens or 72, [0]
    else:
        offs = list(torch.tensor(sizes).cumsum(0)) if offs is None else offs
        tokens = tokens if tokens is not None else max(1, int(offs[-1]) + past)
        ends = [int(x) for x in bounds(offs, tokens)]
    held = operands(p, tokens, ends[-1] if p.form != "batch" else tokens, pads, scale)
    (_, a), (_, b), (storage, c) = (held[x] for x in "abc")
    on_device = torch.tensor([int(x) for x in offs], dtype=torch.int32, device="cuda") if p.ragged else None
    addresses = {name: view.data_ptr() for name, (_, view) in held.items()}
    if on_device is not None:
        addresses["offs"] = on_device.data_ptr()
    launch, results = Launcher(compiled(p, config)), []
    for _ in range(2):
        c.fill_(NAN)
        launch(*(addresses[n] for n in pointers(p)), *scalar_values(p, a, b, c))
        results.append(c.clone())
    torch.cuda.synchronize()

    want = exact(p, a, b, ends)
    mine = ~torch.isnan(want)
    size = exact(p, a.double().abs(), b.double().abs(), ends).nan_to_num().max().item() if want.numel() else 0.0
    # sums of K f32 products in any order, whose errors are not all of one sign, and two roundings of C
    depth = a.shape[-1]
    bound = (8 * depth**0.5 + 8) * 2.0**-24 * size + 2 * p.output_type.epsilon * want.nan_to_num().abs().max().item()
    error = (c.double() - want).abs()[mine]
    bad = torch.isnan(error).sum().item()
    assert not bad, f"{bad} of {mine.sum().item()} elements that a group owns are NaN"
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= bound, f"error {worst:.3g}, bound {bound:.3g}"
    assert torch.isnan(c[~mine]).all(), "elements that no group owns were written"
    assert torch.equal(*(r.nan_to_num() for r in results)), "the same inputs gave two results"
    outside = torch.ones_like(storage, dtype=torch.bool)
    outside.as_strided(c.shape, c.stride(), c.storage_offset()).fill_(False)
    assert torch.isnan(storage[outside]).all(), "something beside C was written"
