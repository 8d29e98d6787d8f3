"""What a scaled grouped GEMM kernel is called with, in order: the same for every configuration of a problem.

    a, b              bytes; see problem.py for shapes
    scale_a, scale_b  E8M0 bytes; with a scale for each row, f32
    offs              G values of i32, neighbours in memory, on the device that the kernel runs on
    c                 pointer to the first element
    tokens            T, in numbers
    a_row, b_col      bytes from a row of A to the next, from a column of B to the next
    c_row             elements from a row of C to the next
    scale_a_row, scale_b_col    with block scaling: bytes from the scales of a row (column) to the next one's
    b_group, scale_b_group      form "m": elements from group to group
    c_group                     form "k": elements from group to group

Scalars are i64.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import dtype, f4e2m1, f8e8m0, f32, i32, i64, u8
from flykernels.microscaling import BLOCK

from ..arguments import ALIGN, groups_of
from .problem import ScaledGroupedProblem

POINTERS = ("a", "b", "scale_a", "scale_b", "offs", "c")
WORD = 4  # scales that GPU kernels move together


def scalars(p: ScaledGroupedProblem) -> tuple[str, ...]:
    """Names of the scalar arguments, in order."""
    groups = ("b_group", "scale_b_group") if p.form == "m" else ("c_group",)
    rows = ("scale_a_row", "scale_b_col") if p.scaling == "block" else ()
    return ("tokens", "a_row", "b_col", "c_row", *rows, *groups)


def declared(p: ScaledGroupedProblem) -> dict[str, Any]:
    """The kernel's arguments as `Kernel.args` takes them."""
    from flykernels.lang.memory import Global  # needs MLIR; naming arguments does not

    kinds = {"offs": i32, "c": p.output_type}
    if p.scaling == "row":
        kinds |= dict.fromkeys(("scale_a", "scale_b"), f32)
    memory = {}
    for name in POINTERS:
        kind = kinds.get(name, u8)
        memory[name] = Global(kind, (p.groups,) if name == "offs" else (), alignment=kind.bytes)
    return memory | dict.fromkeys(scalars(p), i64)


def scalar_values(p: ScaledGroupedProblem, a, b, scale_a, scale_b, c) -> tuple[int, ...]:
    """The scalar arguments for these tensors (anything with `shape` and torch's `stride()`), shaped as problem.py says:
    scales (rows, blocks) and ([G,] columns, blocks), or (T,) and (G, N)."""
    tokens = a.shape[0] if p.form == "m" else a.shape[1] * p.per_byte("a")
    values = {
        "tokens": tokens,
        "a_row": a.stride()[0],
        "b_col": b.stride()[-1],
        "c_row": c.stride()[-2],
        "scale_a_row": scale_a.stride()[0],
        "scale_b_col": scale_b.stride()[-2] if p.scaling == "block" else 0,
        "b_group": b.stride()[0],
        "scale_b_group": scale_b.stride()[0],
        "c_group": c.stride()[0],
    }
    return tuple(values[name] for name in scalars(p))


def problem_of(
    a, b, scale_a, scale_b, offs, out_dtype="bfloat16", tokens_hint: int | None = None
) -> ScaledGroupedProblem:
    """The problem that these tensors pose (torch tensors, or anything with shape, dtype, device, stride(), data_ptr()).

    a (T, K) row-major and b (G, K, N), each group column-major; or a (M, T) row-major and b (T, N) column-major.
    float8_e4m3fn, float8_e5m2 or float4_e2m1fn_x2 (sizes of what is summed over then count pairs); scales
    float8_e8m0fnu (T, K / 32) and (G, N, K / 32), or (M, T / 32) and (N, T / 32), of any strides but the last axis';
    or float32 (T,) and (G, N). offs (G,) int32. C is taken to be fresh and dense. ValueError that says what is wrong,
    and what to do."""
    ranks = len(a.shape), len(b.shape)
    if ranks not in ((2, 3), (2, 2)):
        raise ValueError(
            f"A has {ranks[0]} dimensions and B {ranks[1]}: scaled grouped products are of a (T, K) and a (G, K, N), "
            "or of a (M, T) and a (T, N)"
        )
    form = "m" if ranks[1] == 3 else "k"
    kinds = [dtype(str(x.dtype)) for x in (a, b)]
    per = [2 if kind == f4e2m1 else 1 for kind in kinds]
    depths = [a.shape[1] * per[0], b.shape[-2] * per[1]]
    if depths[0] != depths[1]:
        raise ValueError(
            f"A has {depths[0]} numbers to sum over and B {depths[1]}: A is {tuple(a.shape)} and B {tuple(b.shape)} "
            "(FP4 counts pairs)"
        )
    by_row = form == "m" and all(dtype(str(s.dtype)) == f32 for s in (scale_a, scale_b))
    if depths[0] % BLOCK and not by_row:
        raise ValueError(
            f"{'K' if form == 'm' else 'T'} = {depths[0]} is not a multiple of {BLOCK}, the numbers that share a scale"
        )
    if a.stride()[1] != 1 and a.shape[1] > 1:
        raise ValueError(f"A has strides {a.stride()}: it must be row-major. Do: a.contiguous()")
    if b.stride()[-2] != 1 and b.shape[-2] > 1:
        raise ValueError(f"B has strides {b.stride()}: each group must be column-major: what is summed over contiguous")
    groups = groups_of(offs, a)
    if form == "m" and b.shape[0] != groups:
        raise ValueError(f"B has {b.shape[0]} groups and offs {groups}: the same number for both")
    blocks, n = depths[0] // BLOCK, b.shape[-1]
    lead = (groups,) if form == "m" else ()
    wanted = ((a.shape[0],), (*lead, n)) if by_row else ((a.shape[0], blocks), (*lead, n, blocks))
    for name, scale, want in (("A", scale_a, wanted[0]), ("B", scale_b, wanted[1])):
        if not by_row and dtype(str(scale.dtype)) != f8e8m0:
            raise ValueError(
                f"the scales of {name} are {scale.dtype}: they must be float8_e8m0fnu, one for {BLOCK}, or both "
                "float32, one for a row of A and a column of B"
            )
        if tuple(scale.shape) != want:
            raise ValueError(f"the scales of {name} are {tuple(scale.shape)}: they must be {want}, not swizzled")
        if scale.stride()[-1] != 1 and scale.shape[-1] > 1:
            raise ValueError(f"the scales of {name} have strides {scale.stride()}: a row's must be neighbours")
    tokens = a.shape[0] if form == "m" else depths[0]
    sizes = {"m": a.shape[0], "n": n, "k": depths[0]}
    sizes[form] = 0
    return ScaledGroupedProblem(
        form, groups, **sizes, a_dtype=kinds[0].name, b_dtype=kinds[1].name, out_dtype=dtype(str(out_dtype)).name,
        tokens_hint=tokens_hint or max(1, tokens), align_a=alignment(a), align_b=alignment(b),
        align_scales=WORD if by_row else min(WORD, alignment(scale_a), alignment(scale_b)),
        scaling="row" if by_row else "block",
    )  # fmt: skip


def alignment(x) -> int:
    """The largest power of two up to 16 that pointer and strides (but those along which bytes are neighbours) are
    multiples of, in bytes of one-byte elements."""
    at = x.data_ptr() | ALIGN
    for n, stride in zip(x.shape, x.stride()):
        if n > 1 and stride != 1:
            at |= stride
    return at & -at
