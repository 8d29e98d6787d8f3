"""What a scaled GEMM kernel is called with, in order: the same for every configuration of a problem.

    a, b              bytes of A (M, K) and, column by column, of B (K, N)
    scale_a, scale_b  "block": E8M0 bytes (M, K / 32), (N, K / 32); "tensor": one f32; "row": f32 (M,), (N,); contiguous
    [bias]            (N,), C's type
    c                 (M, N)
    m                 rows of A and C
    a_row, b_col      bytes from a row of A to the next, from a column of B to the next
    c_row             elements from a row of C to the next

Scalars are i64.
"""

from __future__ import annotations

from typing import Any

from flykernels.dtypes import dtype, f4e2m1, f8e8m0, f32, i64, u8

from .problem import ScaledGemmProblem

SCALARS = ("m", "a_row", "b_col", "c_row")


def pointers(p: ScaledGemmProblem) -> tuple[str, ...]:
    """Names of the pointer arguments, in order."""
    return ("a", "b", "scale_a", "scale_b", *(("bias",) if p.bias != "none" else ()), "c")


def declared(p: ScaledGemmProblem) -> dict[str, Any]:
    """The kernel's arguments as `Kernel.args` takes them."""
    from flykernels.lang.memory import Global  # needs MLIR; naming arguments does not

    scale = u8 if p.scaling == "block" else f32
    kinds = {"a": u8, "b": u8, "scale_a": scale, "scale_b": scale}
    memory = {}
    for name in pointers(p):
        kind = kinds.get(name, p.output_type)
        memory[name] = Global(kind, (), alignment=kind.bytes)
    return memory | dict.fromkeys(SCALARS, i64)


def scalar_values(a, b, c) -> tuple[int, ...]:
    """The scalar arguments for tensors a (M, K), b (K, N), c (M, N) with `shape` and torch's `stride()`."""
    return a.shape[0], a.stride()[0], b.stride()[1], c.stride()[0]


def problem_of(a, b, scale_a, scale_b, bias=None, out_dtype="bfloat16", m_hint: int | None = None) -> ScaledGemmProblem:
    """The problem that these tensors pose (torch tensors, or anything with shape, dtype, stride() and data_ptr()).

    a (M, K) row-major and b (K, N) column-major: float8_e4m3fn, float8_e5m2 or float4_e2m1fn_x2 (K then counts
    pairs). scale_a, scale_b: float8_e8m0fnu of M * K / 32 and N * K / 32, or float32 of one, or of M and N values.
    ValueError that says what is wrong with type, orientation, count or arrangement, and what to do."""
    kinds = [_operand_type(x, name) for x, name in ((a, "A"), (b, "B"))]
    per = [2 if kind == f4e2m1 else 1 for kind in kinds]
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ValueError(f"A is {tuple(a.shape)} and B {tuple(b.shape)}: scaled products are of two matrices")
    (m, ka), (kb, n) = a.shape, b.shape
    if ka * per[0] != kb * per[1]:
        raise ValueError(f"A has K = {ka * per[0]} and B {kb * per[1]}: A is (M, K), B is (K, N), FP4 counts pairs")
    k = ka * per[0]
    if ka > 1 and a.stride()[1] != 1:
        raise ValueError(f"A has strides {a.stride()}: it must be row-major, K contiguous. Do: a.contiguous()")
    if kb > 1 and b.stride()[0] != 1:
        raise ValueError(
            f"B has strides {b.stride()}: it must be column-major, K contiguous. Do: b.t().contiguous().t()"
        )
    scaling = _scaling(scale_a, scale_b, m, n, k)
    p = ScaledGemmProblem(
        n=n, k=k, a_dtype=kinds[0].name, b_dtype=kinds[1].name, scaling=scaling, out_dtype=dtype(str(out_dtype)).name,
        bias="none" if bias is None else "row", m_hint=m_hint or max(1, m), align_a=_alignment(a, a.stride()[0]),
        align_b=_alignment(b, b.stride()[1]),
    )  # fmt: skip
    if bias is not None and (tuple(bias.shape) != (n,) or dtype(str(bias.dtype)) != p.output_type):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}: it must be {p.output_type.torch} ({n},)")
    return p


def _operand_type(x, name: str):
    try:
        return dtype(str(x.dtype))
    except ValueError as e:
        raise ValueError(f"{name} is {x.dtype}: {e}") from e


def _alignment(x, stride: int) -> int:
    """The largest power of two up to 16 that pointer and stride are multiples of, in bytes of one-byte elements."""
    at = x.data_ptr() | stride if x.shape[0] * x.shape[1] else 0
    return min(16, at & -at) if at else 16


def _scaling(scale_a, scale_b, m: int, n: int, k: int) -> str:
    """Which kind of scaling these scales are. ValueError if none."""
    kinds = [dtype(str(s.dtype)) for s in (scale_a, scale_b)]
    counts = [_count(s) for s in (scale_a, scale_b)]
    if kinds == [f8e8m0, f8e8m0]:
        for name, scale, count, rows, other in (("A", scale_a, counts[0], m, n), ("B", scale_b, counts[1], n, m)):
            want = rows * (k // 32)
            if len(scale.shape) == 2 and tuple(scale.shape) == (k // 32, rows) != (rows, k // 32):
                raise ValueError(
                    f"the scales of {name} are {tuple(scale.shape)}: they must be (rows, K / 32) = {(rows, k // 32)}. "
                    "Do: transpose them and make them contiguous"
                )
            if count == want and _contiguous(scale):
                continue
            if count == want:
                raise ValueError(f"the scales of {name} have strides {scale.stride()}: they must be contiguous")
            raise ValueError(
                f"{name} has {count} scales{_likely(count, rows, other, k)}; one for 32 numbers along K, not swizzled, "
                f"is {rows} x {k // 32} = {want}"
            )
        return "block"
    if kinds != [f32, f32]:
        raise ValueError(
            f"scales are {scale_a.dtype} and {scale_b.dtype}: both float8_e8m0fnu (one for 32 along K) or both float32"
        )
    if counts == [1, 1]:
        return "tensor"
    if counts == [m, n] and all(map(_contiguous, (scale_a, scale_b))):
        return "row"
    raise ValueError(
        f"float32 scales have {counts[0]} and {counts[1]} values: one each, or contiguous M = {m} (of A, (M, 1)) and "
        f"N = {n} (of B, (1, N))"
    )


def _likely(count: int, rows: int, other: int, k: int) -> str:
    """What a wrong number of scales looks like."""
    up = lambda x, to: -(-x // to) * to
    if count == up(rows, 128) * up(k // 32, 4):
        return ", the number of the swizzled arrangement (padded to 128 x 4): pass them as they were before swizzling"
    if count == other * (k // 32):
        return ", the other operand's number: the two are exchanged"
    if count == rows * (k // 16):
        return ", one for 16 numbers, which is NVFP4's block"
    return ""


def _count(x) -> int:
    out = 1
    for s in x.shape:
        out *= s
    return out


def _contiguous(x) -> bool:
    """Row-major and dense; axes of size 1 may have any stride, and so may those of nothing."""
    if 0 in x.shape:
        return True
    expected = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride())):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
