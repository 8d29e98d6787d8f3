"""How compiled graphs come to scaled grouped products: aten._scaled_grouped_mm, and F.scaled_grouped_mm where torch has
it (aten._scaled_grouped_mm_v2, which torch 2.13 can neither trace nor lower).

    swizzled MX scales -> flykernels::plain_scales -> _scaled_grouped_mm's own lowering, whose candidates include ours

torch's scales of MX blocks are swizzled: tiles of 128 rows x 4 scales, each group's filled up to whole tiles. Our
kernels read (rows, blocks), so where ATen has no kernel (all but NVIDIA) a gather takes them apart first: one byte for
32 numbers. Layout: cuBLAS, "1D block scaling factors layout"; groups: torch/_meta_registrations.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flykernels.microscaling import BLOCK

BY_ROW, BLOCKWISE_1X32 = 1, 3  # torch.nn.functional.ScalingType
PLAIN, SWIZZLED = 0, 1  # torch.nn.functional.SwizzleType
TILE_ROWS, TILE_COLUMNS, BAND = 128, 4, 32  # a tile of scales: 4 bands of 32 rows stand side by side
TILE = TILE_ROWS * TILE_COLUMNS

_library = torch.library.Library("flykernels", "FRAGMENT")
_library.define("plain_scales(Tensor scales, Tensor codes, Tensor? offs, bool rows_have_groups, bool across) -> Tensor")


def plain_scales(
    scales: torch.Tensor, codes: torch.Tensor, offs: torch.Tensor | None, rows_have_groups: bool, across: bool
) -> torch.Tensor:
    """Scales as our kernels read them, of swizzled ones.

    codes  (T, K) whose rows have groups: (T, K / 32). (G, K, N), `across`: (G, N, K / 32). Else (M, T), or (T, N)
           `across`, whose T has groups: (M, T / 32) or (N, T / 32)
    What no group owns may be any scale. ValueError on a CPU if there are too few scales."""
    rows, blocks = _shape(codes, across)
    row = torch.arange(rows, device=scales.device)[:, None]
    column = torch.arange(blocks, device=scales.device)
    wide = up(blocks, TILE_COLUMNS)
    mine: Any = True
    if codes.dim() == 3:
        group = torch.arange(codes.shape[0], device=scales.device)[:, None, None]
        at = group * (up(rows, TILE_ROWS) * wide) + within(row, column, wide)
    else:
        assert offs is not None
        along, unit = (row[:, 0], 1) if rows_have_groups else (column, BLOCK)
        ends = (offs.long() // unit).clamp(0, len(along)).cummax(0).values
        begins = torch.nn.functional.pad(ends[:-1], (1, 0))
        tile = TILE_ROWS if rows_have_groups else TILE_COLUMNS
        filled = up(ends - begins, tile)
        group = torch.searchsorted(ends, along, right=True).clamp(max=len(ends) - 1)
        first, local = (filled.cumsum(0) - filled)[group], along - begins[group]
        if rows_have_groups:
            at, mine = within((first + local)[:, None], column, wide), (along < ends[-1])[:, None]
        else:
            at = up(rows, TILE_ROWS) * first + within(row, local, filled[group])
            mine = along < ends[-1]
    if scales.device.type == "cpu" and bool(((at >= scales.numel()) & mine).any()):
        raise ValueError(
            f"scales are {tuple(scales.shape)}: swizzled, each group filled up to {TILE_ROWS} x {TILE_COLUMNS}, "
            f"operands {tuple(codes.shape)} need at least {int(torch.where(torch.as_tensor(mine), at, 0).max()) + 1}"
        )
    flat = scales.reshape(-1).view(torch.uint8)
    return flat[at.clamp(max=scales.numel() - 1)].view(torch.float8_e8m0fnu)


def _shape(codes: Any, across: bool) -> tuple[Any, Any]:
    """(rows, blocks) of the scales of one matrix of codes."""
    rows, k = (codes.shape[-1], codes.shape[-2]) if across else (codes.shape[-2], codes.shape[-1])
    return rows, k * (2 if codes.dtype == torch.float4_e2m1fn_x2 else 1) // BLOCK


def within(row: Any, column: Any, wide: Any) -> Any:
    """Where a scale stands in a swizzled matrix whose rows are `wide`, a multiple of 4."""
    tile = row // TILE_ROWS * (wide // TILE_COLUMNS) + column // TILE_COLUMNS
    row = row % TILE_ROWS
    return tile * TILE + row % BAND * (TILE // BAND) + row // BAND * TILE_COLUMNS + column % TILE_COLUMNS


def up(n: Any, tile: int) -> Any:
    return (n + (tile - 1)) // tile * tile


def _fake(scales: Any, codes: Any, offs: Any, rows_have_groups: bool, across: bool) -> Any:
    lead = codes.shape[:-2]
    return scales.new_empty((*lead, *_shape(codes, across)), dtype=torch.float8_e8m0fnu)


for _key in ("CPU", "CUDA"):
    _library.impl("plain_scales", plain_scales, _key)
torch.library.register_fake("flykernels::plain_scales", _fake, lib=_library)


# -- lowerings
def lowering(original: Callable, call: Callable) -> Callable:
    """_scaled_grouped_mm's, which takes MX scales apart where ATen has no kernel for them. original: Inductor's;
    call(operator, *boxes): the lowering of a call of an operator."""

    def lowered(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any = None, *rest: Any, **more: Any) -> Any:
        from . import install

        mx = scale_a.get_dtype() == scale_b.get_dtype() == torch.float8_e8m0fnu
        forms = (len(a.get_size()), len(b.get_size())) in ((2, 3), (2, 2)) and offs is not None
        if mx and forms and install.active() and not _atens(a.get_device()):
            by_rows, op = len(b.get_size()) == 3, torch.ops.flykernels.plain_scales.default
            scale_a = call(op, scale_a, a, offs, by_rows, False)
            scale_b = call(op, scale_b, b, None if by_rows else offs, False, True)
        return original(a, b, scale_a, scale_b, offs, *rest, **more)

    return lowered


def but_ours(falls_back: Callable, ops: tuple) -> Callable:
    """Inductor's `does this node go to ATen, for its operands' types?`, which says no of `ops` where ATen has none."""

    def asked(node: Any, *args: Any, **more: Any) -> Any:
        from . import install

        if node.target in ops and install.active():
            device = getattr(node.args[0].meta.get("val"), "device", None)
            if device is not None and not _atens(device):
                return False
        return falls_back(node, *args, **more)

    return asked


def _atens(device: torch.device) -> bool:
    """Whether ATen has kernels of _scaled_grouped_mm for a device: it has for NVIDIA GPUs."""
    return device.type == "cuda" and torch.version.hip is None


def second_lowering(first: Callable, inductors: Callable, otherwise: Callable) -> Callable:
    """_scaled_grouped_mm_v2's: as a call of the first version where it says the same. first: its `lowering`; inductors:
    the original, for scales that are not swizzled; otherwise: a call of the operator itself."""

    def lowered(a: Any, b: Any, *args: Any, **more: Any) -> Any:
        found = as_first(*args, **more)
        if found is None or (found.plain and _atens(a.get_device())):
            return otherwise(a, b, *args, **more)
        go = inductors if found.plain else first
        return go(a, b, found.scale_a, found.scale_b, found.offs, None, None, found.out_dtype, found.fast)

    return lowered


class First:
    """A second version's call in the first one's words; plain: MX scales are (rows, blocks), not swizzled."""

    def __init__(self, scale_a: Any, scale_b: Any, plain: bool, offs: Any, out_dtype: Any, fast: bool):
        self.scale_a, self.scale_b, self.plain = scale_a, scale_b, plain
        self.offs, self.out_dtype, self.fast = offs, out_dtype, fast


def as_first(
    scale_a: Any, recipe_a: Any, swizzle_a: Any, scale_b: Any, recipe_b: Any, swizzle_b: Any, offs: Any = None,
    bias: Any = None, out_dtype: Any = None, contraction_dim: Any = (), use_fast_accum: bool = False,
) -> First | None:  # fmt: skip
    """One f32 scale for a row and a column, or one E8M0 scale for 32 numbers, alike for both; None otherwise."""
    numbers = lambda *xs: [[int(v) for v in x] for x in xs]
    recipes, swizzles = numbers(recipe_a, recipe_b), numbers(swizzle_a, swizzle_b)
    single = len(scale_a) == len(scale_b) == 1 and bias is None and offs is not None and not list(contraction_dim)
    if not single or swizzles[0] != swizzles[1] or swizzles[0] not in ([], [PLAIN], [SWIZZLED]):
        return None
    swizzled = swizzles[0] == [SWIZZLED]
    if recipes == [[BY_ROW]] * 2 and not swizzled:
        return First(scale_a[0], scale_b[0], False, offs, out_dtype, use_fast_accum)
    if recipes == [[BLOCKWISE_1X32]] * 2:
        return First(scale_a[0], scale_b[0], not swizzled, offs, out_dtype, use_fast_accum)
    return None


def second_meta(first: Callable) -> Callable:
    """The shape of a second version's result. first: the first version's meta function, which says what is wrong."""

    def meta(a: Any, b: Any, *args: Any, **more: Any) -> Any:
        found = as_first(*args, **more)
        if found is None:
            raise NotImplementedError(
                "_scaled_grouped_mm_v2 is traced with one float32 scale for a row (ScalingType.RowWise) or one E8M0 "
                "scale for 32 numbers (BlockWise1x32), alike for both operands, with offs and without a bias"
            )
        if not found.plain and a.dtype != torch.float4_e2m1fn_x2:
            return first(a, b, found.scale_a, found.scale_b, found.offs, None, None, found.out_dtype, found.fast)
        return plain_meta(a, b, found)

    return meta


def plain_meta(a: Any, b: Any, found: First) -> Any:
    """Of MX operands with scales (rows, blocks), or of packed FP4."""
    per = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    torch._check(
        (a.dim(), b.dim()) in ((2, 3), (2, 2)),
        lambda: f"operands of {a.dim()} and {b.dim()} axes: 2 by 3 and 2 by 2 are",
    )
    torch._check(a.dtype == b.dtype, lambda: f"A is {a.dtype} and B {b.dtype}: both of one type")
    torch._check(a.shape[1] == b.shape[-2], lambda: f"A is {tuple(a.shape)} and B {tuple(b.shape)}: sizes of K differ")
    if found.plain:
        want = ((a.shape[0], a.shape[1] * per // BLOCK), (*b.shape[:-2], b.shape[-1], b.shape[-2] * per // BLOCK))
        for name, scale, shape in (("A", found.scale_a, want[0]), ("B", found.scale_b, want[1])):
            torch._check(
                tuple(scale.shape) == tuple(shape) and scale.dtype == torch.float8_e8m0fnu,
                lambda name=name, scale=scale, shape=shape: (
                    f"scales of {name} are {scale.dtype} {tuple(scale.shape)}: not float8_e8m0fnu {tuple(shape)}"
                ),
            )
    torch._check(found.offs.dim() == 1 and found.offs.dtype == torch.int32, lambda: "offs must be (G,) int32")
    shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (found.offs.shape[0], a.shape[0], b.shape[-1])
    return a.new_empty(shape, dtype=found.out_dtype or torch.bfloat16)
