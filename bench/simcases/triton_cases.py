"""Acceptance cases from Triton's gfx950 back end (no GPU needed to compile)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .case import STEP, Case, bf16, excess, from_bf16
from .floats import decode, e8m0

TYPES = {"bf16": "*bf16", "fp16": "*fp16", "e4m3": "*fp8e4nv", "e5m2": "*fp8e5", "f32": "*fp32"}
ALIGNED = [["tt.divisibility", 16]]
SMALL = [["tt.divisibility", 16], ["tt.pointer_range", 32]]


def compile(kernel, signature: dict[str, str], constants: dict[str, Any], warps: int, stages: int = 2, **options):
    """Triton's compiled kernel (`.asm["amdgcn"]`, `.asm["hsaco"]`) for gfx950. Pointers and ints are 16-aligned, and
    pointers reach less than 2 GiB: the attributes Triton's launcher derives for such arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = list(signature.values())
    attributes = {(i,): SMALL if t[0] == "*" else ALIGNED for i, t in enumerate(kinds) if t[0] == "*" or t == "i32"}
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("hip", "gfx950", 64), options={"num_warps": warps, "num_stages": stages, **options}
    )


def _case(name: str, made, grid, arguments: Callable[[], list], wrong: Callable[[list], float], **options) -> Case:
    hidden = [np.zeros(64, np.uint8), np.zeros(64, np.uint8)]  # global and profile scratch, which these do not use
    return Case(
        f"triton {name}",
        made.asm["amdgcn"],
        made.asm["hsaco"],
        grid,
        lambda: [*arguments(), *hidden],
        wrong,
        options={"shared_bytes": made.metadata.shared, **options},
    )


def _bits(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return bf16(x)
    if dtype == "fp16":
        return x.astype(np.float16)
    return x.astype(np.float32)


def _value(x: np.ndarray, dtype: str) -> np.ndarray:
    return from_bf16(x) if dtype == "bf16" else x.astype(np.float64)


def matmul(dtype: str, M: int, N: int, K: int, tile: tuple[int, int, int], warps: int, stages: int = 2) -> Case:
    from .triton_kernels import matmul as kernel

    BM, BN, BK = tile
    out = dtype if dtype in ("bf16", "fp16") else "f32"
    signature = {"a": TYPES[dtype], "b": TYPES[dtype], "c": TYPES[out]}
    signature |= dict.fromkeys(("M", "N", "K", "sam", "sbn", "scm"), "i32")
    made = compile(kernel, signature, {"BM": BM, "BN": BN, "BK": BK}, warps, stages, matrix_instr_nonkdim=16)
    r = np.random.default_rng(0)
    if dtype in ("bf16", "fp16"):
        a, b = (_bits(r.standard_normal((n, K)), dtype) for n in (M, N))
        x, y = _value(a, dtype), _value(b, dtype)
    else:
        a, b = (_fp8(r, (n, K), dtype) for n in (M, N))
        x, y = decode(a, dtype), decode(b, dtype)
    exact, scale = x @ y.T, np.abs(x) @ np.abs(y).T

    def arguments():
        c = np.full((M, N), 0x7FFF, np.uint16) if out == "bf16" else np.full((M, N), np.nan, _np(out))
        return [a.copy(), b.copy(), c, M, N, K, K, K, N]

    grid = (-(-M // BM), -(-N // BN), 1)
    wrong = lambda got: excess(_value(got[2], out), exact, scale, K, STEP[out])
    return _case(f"matmul {dtype} {M}x{N}x{K} tile {BM}x{BN}x{BK} w{warps}", made, grid, arguments, wrong)


def _np(dtype: str):
    return {"fp16": np.float16, "f32": np.float32}[dtype]


def _fp8(r: np.random.Generator, shape, dtype: str) -> np.ndarray:
    """Random bytes whose values are finite (no NaN, no infinity)."""
    x = r.integers(0, 256, shape).astype(np.uint8)
    v = decode(x, dtype)
    return np.where(np.isfinite(v) & (np.abs(v) < 64), x, np.uint8(0x38))


def matmul_scaled(fmt: str, M: int, N: int, K: int, tile: tuple[int, int, int], warps: int) -> Case:
    from .triton_kernels import matmul_scaled as kernel

    BM, BN, BK = tile
    pack = 2 if fmt == "e2m1" else 1
    signature = dict.fromkeys(("a", "sa", "b", "sb"), "*u8") | {"c": "*fp32", "K": "i32"}
    if fmt != "e2m1":
        signature |= {"a": TYPES[fmt], "b": TYPES[fmt]}
    made = compile(kernel, signature, {"FMT": fmt, "PACK": pack, "BM": BM, "BN": BN, "BK": BK}, warps)
    r = np.random.default_rng(1)
    a, b = (r.integers(0, 256, (n, K // 2)).astype(np.uint8) if pack == 2 else _fp8(r, (n, K), fmt) for n in (M, N))
    sa, sb = (r.integers(120, 134, (n, K // 32)).astype(np.uint8) for n in (M, N))
    x, y = (decode(v, fmt) * np.repeat(e8m0(s), 32, axis=1) for v, s in ((a, sa), (b, sb)))
    exact, scale = x @ y.T, np.abs(x) @ np.abs(y).T
    arguments = lambda: [a.copy(), sa.copy(), b.copy(), sb.copy(), np.full((M, N), np.nan, np.float32), K]
    wrong = lambda got: excess(got[4], exact, scale, K, STEP["f32"])
    name = f"dot_scaled {fmt} {M}x{N}x{K} tile {BM}x{BN}x{BK} w{warps}"
    return _case(name, made, (M // BM, N // BN, 1), arguments, wrong)


def softmax(dtype: str, rows: int, n: int, warps: int) -> Case:
    from .triton_kernels import softmax as kernel

    block = 1 << (n - 1).bit_length()
    made = compile(kernel, {"x": TYPES[dtype], "y": TYPES[dtype], "n": "i32", "stride": "i32"}, {"B": block}, warps)
    stride = -(-n // 16) * 16
    x = _bits(np.random.default_rng(2).standard_normal((rows, stride)) * 4, dtype)
    v = _value(x, dtype)[:, :n]
    e = np.exp(v - v.max(1, keepdims=True))
    exact = e / e.sum(1, keepdims=True)
    poison = np.full((rows, stride), 0x7FC0, np.uint16) if dtype == "bf16" else np.full(x.shape, np.nan, x.dtype)
    wrong = lambda got: excess(_value(got[1], dtype)[:, :n], exact, exact, 64, STEP[dtype])
    return _case(f"softmax {dtype} {rows}x{n}", made, (rows, 1, 1), lambda: [x.copy(), poison.copy(), n, stride], wrong)


def layer_norm(rows: int, n: int, warps: int = 4) -> Case:
    from .triton_kernels import layer_norm as kernel

    signature = {"x": "*bf16", "w": "*fp32", "b": "*fp32", "y": "*bf16", "n": "i32", "eps": "fp32"}
    made = compile(kernel, signature, {"B": 1024}, warps)
    r = np.random.default_rng(3)
    x, w, b = bf16(r.standard_normal((rows, n)) + 1), *(r.standard_normal((2, n)).astype(np.float32))
    v = from_bf16(x)
    d = v - v.mean(1, keepdims=True)
    exact = d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5) * w + b
    scale = np.abs(exact) + np.abs(w) * 4 + np.abs(b)
    arguments = lambda: [x.copy(), w.copy(), b.copy(), np.full((rows, n), 0x7FC0, np.uint16), n, 1e-5]
    wrong = lambda got: excess(from_bf16(got[3]), exact, scale, n, STEP["bf16"])
    return _case(f"layer norm {rows}x{n}", made, (rows, 1, 1), arguments, wrong)


def reduce_atomic(n: int, block: int = 1024) -> Case:
    from .triton_kernels import reduce_atomic as kernel

    signature = {"x": "*fp32", "total": "*fp32", "top": "*i32", "n": "i32"}
    made = compile(kernel, signature, {"B": block}, 4)
    x = np.random.default_rng(4).standard_normal(n).astype(np.float32)
    top = int((x * np.float32(1000)).astype(np.int32).max())
    arguments = lambda: [x.copy(), np.zeros(1, np.float32), np.full(1, -(2**31), np.int32), n]

    def wrong(got):
        error = excess(got[1], np.array([x.astype(np.float64).sum()]), np.abs(x).sum(), n, STEP["f32"])
        return error if got[2][0] == max(top, 0 if n % block else top) else np.inf

    return _case(f"atomic reduction {n}", made, (-(-n // block), 1, 1), arguments, wrong)


def scan(rows: int, n: int, warps: int = 4) -> Case:
    from .triton_kernels import scan as kernel

    block = 1 << (n - 1).bit_length()
    made = compile(kernel, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"B": block}, warps)
    x = np.random.default_rng(5).standard_normal((rows, n)).astype(np.float32)
    exact, scale = np.cumsum(x.astype(np.float64), 1), np.cumsum(np.abs(x), 1)
    wrong = lambda got: excess(got[1], exact, scale, n, STEP["f32"])
    arguments = lambda: [x.copy(), np.full((rows, n), np.nan, np.float32), n]
    return _case(f"scan {rows}x{n}", made, (rows, 1, 1), arguments, wrong)


def cases() -> Iterator[Case]:
    """All of them, smallest shapes that still have several K tiles, a tail and several workgroups."""
    yield matmul("bf16", 200, 136, 256, (128, 128, 64), 4)
    yield matmul("bf16", 256, 256, 192, (256, 256, 64), 8)
    yield matmul("fp16", 128, 128, 256, (128, 128, 64), 4)
    yield matmul("e4m3", 128, 128, 512, (128, 128, 128), 4)
    yield matmul("e5m2", 64, 64, 256, (64, 64, 128), 4)
    yield matmul_scaled("e4m3", 128, 128, 512, (128, 128, 128), 4)
    yield matmul_scaled("e5m2", 64, 64, 256, (64, 64, 128), 4)
    yield matmul_scaled("e2m1", 128, 128, 512, (128, 128, 256), 4)
    yield softmax("bf16", 5, 1000, 4)
    yield softmax("f32", 3, 300, 1)
    yield layer_norm(4, 1500)
    yield reduce_atomic(5000)
    yield scan(3, 1000)
