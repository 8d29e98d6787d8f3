"""Runs an sm_90a GEMM against float64: poisoned results, guard zones; padded, transposed, offset, broadcast inputs."""

from __future__ import annotations

from functools import cache

import torch

from flykernels.codeobject import CodeObject
from flykernels.launch.current import Launcher
from flykernels.targets import sm90a
from templates.gemm.arguments import pointers, scalar_values
from templates.gemm.build import build
from templates.gemm.problem import GemmProblem
from templates.gemm.sm90a_config import Sm90aConfig

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
GUARD = 64  # elements after a tensor's last one that nobody may touch


@cache
def compiled(p: GemmProblem, config: Sm90aConfig) -> CodeObject:
    return build(p, config, sm90a)


def tensor(shape, layout: str, dtype: str, pad: int, offset: int = 0):
    """(whole, view): ([batch,] rows, columns) of NaN in storage of NaN, rows (layout "col": columns) `pad` apart."""
    *batch, rows, columns = shape
    gap = 2 if layout == "any" else 1
    row, col = (columns * gap + pad, gap) if layout != "col" else (gap, rows * gap + pad)
    each = (rows - 1) * row + (columns - 1) * col + 1
    apart = each + pad + -(each + pad) % 8
    size = (batch[0] - 1) * apart + each if batch else each
    whole = torch.full((offset + size + GUARD,), float("nan"), dtype=TORCH[dtype], device="cuda")
    return whole, whole.as_strided(shape, (*([apart] if batch else []), row, col), offset)


def filled(*args, scale: float, **kw):
    view = tensor(*args, **kw)[1]
    return view.copy_(torch.randn(view.shape, device="cuda") * scale)


def activated(kind: str, x):
    f = torch.nn.functional
    gelu_tanh = lambda v: f.gelu(v, approximate="tanh")
    return {"none": lambda v: v, "relu": f.relu, "gelu": f.gelu, "gelu_tanh": gelu_tanh, "silu": f.silu}[kind](x)


def run(
    p: GemmProblem, config: Sm90aConfig, m: int, *,
    pads=(0, 0, 0), offsets=(0, 0, 0), batch=3, scale=1.0, broadcast=False, seed=0,
) -> None:  # fmt: skip
    """Runs the kernel twice; both results must be alike, right in every element, and nothing else may be written."""
    torch.manual_seed(seed)
    whole = lambda *shape: (batch, *shape) if p.batched else shape
    a = filled(whole(m, p.k), p.a, p.dtype, pads[0], offsets[0], scale=scale)
    b = filled(whole(p.k, p.n), p.b, p.dtype, pads[1], offsets[1], scale=1.0)
    b = b[:1].expand(b.shape) if broadcast else b
    storage, c = tensor(whole(m, p.n), "row", p.out_dtype, pads[2], offsets[2])
    held = {"a": a, "b": b, "c": c}
    if p.bias == "row":
        held["bias"] = filled((1, p.n), "row", p.out_dtype, 0, scale=scale)[0]
    elif p.bias == "full":
        held["bias"] = filled(whole(m, p.n), "any", p.out_dtype, 1, scale=scale)
    if p.residual:
        held["residual"] = filled(whole(m, p.n), "row", p.out_dtype, pads[2], scale=scale)

    launch = Launcher(compiled(p, config))
    arguments = [held[n].data_ptr() for n in pointers(p)] + list(scalar_values(p, **held))
    results = []
    for _ in range(2):
        c.fill_(float("nan"))
        launch(*arguments)
        results.append(c.clone())
    torch.cuda.synchronize()

    exact = a.double() @ b.double()
    want = activated(p.activation, exact + held["bias"].double() if "bias" in held else exact)
    want = want + held["residual"].double() if p.residual else want
    size = (a.double().abs() @ b.double().abs()).max().item()
    # sums of K f32 products in any order, whose errors are not all of one sign, and two roundings of C
    bound = (8 * p.k**0.5 + 8) * 2.0**-24 * size + 2 * p.output_type.epsilon * want.abs().max().item()
    error = (c.double() - want).abs()
    assert not torch.isnan(error).any(), f"{torch.isnan(error).sum().item()} elements of C were not written"
    assert error.max().item() <= bound, f"error {error.max().item():.3g}, bound {bound:.3g}"
    assert torch.equal(*results), "the same inputs gave two results"
    outside = torch.ones_like(storage, dtype=torch.bool)
    outside.as_strided(c.shape, c.stride(), c.storage_offset()).fill_(False)
    assert torch.isnan(storage[outside]).all(), "something beside C was written"
