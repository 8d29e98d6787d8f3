"""Acceptance cases from this project: the GEMM template, and kernels written for the simulator's sake."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flykernels.lang import trace
from flykernels.targets import gfx950

from .case import STEP, Case, bf16, excess, from_bf16
from .floats import decode, e8m0
from .hti import HtiConfig, HtiProblem, gemm_hti
from .mxfp4 import BLOCK, Mxfp4Config, Mxfp4Problem, gemm_mxfp4
from .topk import TopKConfig, TopKProblem, topk_rows


def hti(M: int = 256, N: int = 256, K: int = 512) -> Case:
    """The half-tile-interleaved GEMM on whole tiles."""
    code = gfx950.compile(trace(gemm_hti, gfx950, HtiProblem(M, N, K), HtiConfig()))
    r = np.random.default_rng(10)
    a, b = bf16(r.standard_normal((M, K))), bf16(r.standard_normal((N, K)))
    x, y = from_bf16(a), from_bf16(b)
    exact, scale = x @ y.T, np.abs(x) @ np.abs(y).T
    arguments = lambda: [a.copy(), b.copy(), np.full((M, N), 0x7FC1, np.uint16)]
    wrong = lambda got: excess(from_bf16(got[2]), exact, scale, K, STEP["bf16"])
    grid = (M // 256, N // 256, 1)
    return Case(f"ours HTI {M}x{N}x{K}", code.text, code.binary, grid, arguments, wrong)


def staged(M: int = 200, N: int = 136, K: int = 320, layout_b: str = "row", **config) -> Case:
    """The staged GEMM template with tails in M, N and K; B (K, N) by rows (transposing LDS reads) or by columns. With
    `split_k`, workgroups share a tile's K: they meet at an atomic counter, with caches flushed."""
    from templates.gemm.arguments import pointers, scalars
    from templates.gemm.build import build
    from templates.gemm.gfx950_config import Gfx950Config
    from templates.gemm.problem import GemmProblem

    p = GemmProblem(n=N, k=K, dtype="bf16", out_dtype="bf16", a="row", b=layout_b)
    code = build(p, Gfx950Config(**config), gfx950)
    r = np.random.default_rng(11)
    a, b = bf16(r.standard_normal((M, K))), bf16(r.standard_normal((K, N)))
    x, y = from_bf16(a), from_bf16(b)
    exact, scale = x @ y, np.abs(x) @ np.abs(y)
    stored = b if layout_b == "row" else np.ascontiguousarray(b.T)
    strides = {"a_row": K, "a_col": 1, "b_row": N if layout_b == "row" else 1, "b_col": 1 if layout_b == "row" else K}
    strides |= {"c_row": N, "c_col": 1, "m": M, "batch": 1, "a_batch": 0, "b_batch": 0, "c_batch": 0}
    values = [np.int64(strides[n]) for n in scalars(p)]
    place = {"a": a, "b": stored}

    def arguments():
        c = np.full((M, N), 0x7FC1, np.uint16)
        shared = [np.zeros(code.workspace_for(strides), np.uint8)] if code.workspace else []
        return [c if n == "c" else place[n].copy() for n in pointers(p)] + values + shared

    wrong = lambda got: excess(from_bf16(got[pointers(p).index("c")]), exact, scale, K, STEP["bf16"])
    grid = (*code.grid_for(strides), 1, 1)[:3]
    split = f" split K {config['split_k']}" if "split_k" in config else ""
    return Case(f"ours staged GEMM {M}x{N}x{K} B by {layout_b}{split}", code.text, code.binary, grid, arguments, wrong)


def split() -> Case:
    """A skinny GEMM whose K four workgroups share."""
    tiles = {"tile_m": 16, "tile_n": 64, "tile_k": 64, "stages": 2, "waves": (1, 2)}
    return staged(M=13, N=72, K=1024, layout_b="col", split_k=4, **tiles)


def mxfp4(M: int = 128, N: int = 128, K: int = 3072) -> Case:
    """The MXFP4 GEMM; scales from 2^-7 to 2^6."""
    code = gfx950.compile(trace(gemm_mxfp4, gfx950, Mxfp4Problem(M, N, K), Mxfp4Config()))
    r = np.random.default_rng(12)
    a, b = (r.integers(0, 256, (n, K // 2)).astype(np.uint8) for n in (M, N))
    sa, sb = (r.integers(120, 134, (n, K // BLOCK)).astype(np.uint8) for n in (M, N))
    x, y = (decode(v, "e2m1") * np.repeat(e8m0(s), BLOCK, axis=1) for v, s in ((a, sa), (b, sb)))
    exact, scale = x @ y.T, np.abs(x) @ np.abs(y).T
    arguments = lambda: [a.copy(), b.copy(), sa.copy(), sb.copy(), np.full((M, N), 0x7FC1, np.uint16)]
    wrong = lambda got: excess(from_bf16(got[4]), exact, scale, K, STEP["bf16"])
    grid = (M // Mxfp4Config.tile_m, N // Mxfp4Config.tile_n, 1)
    return Case(f"ours MXFP4 GEMM {M}x{N}x{K}", code.text, code.binary, grid, arguments, wrong)


def rms(rows: int, n: int, threads_per_row: int, rows_per_workgroup: int) -> Case:
    """RMSNorm of bf16 rows, 8 elements a load."""
    from templates.rms_norm.arguments import eps_bits
    from templates.rms_norm.build import build
    from templates.rms_norm.config import GpuConfig
    from templates.rms_norm.problem import RMSNormProblem

    cfg, eps = GpuConfig(threads_per_row, rows_per_workgroup, 8), 1e-5
    (code,) = build(RMSNormProblem(n, "bf16", "bf16"), cfg, gfx950)
    r = np.random.default_rng(13)
    x, w = bf16(r.standard_normal((rows, n))), bf16(r.standard_normal(n))
    v = from_bf16(x)
    exact = v / np.sqrt((v * v).mean(1, keepdims=True) + eps) * from_bf16(w)
    scalars = [np.int32(eps_bits(eps)), *map(np.int64, (rows, n, cfg.parts_for(rows, n)))]
    arguments = lambda: [x.copy(), w.copy(), np.full((rows, n), 0x7FC1, np.uint16), *scalars]
    # f32 sum of n squares under the root, and a few roundings, all relative to the result
    wrong = lambda got: excess(from_bf16(got[2]), exact, np.abs(exact), n, STEP["bf16"])
    grid = (-(-rows // cfg.rows_per_workgroup), 1, 1)
    return Case(f"ours RMSNorm {rows}x{n}", code.text, code.binary, grid, arguments, wrong)


def topk(rows: int, n: int, k: int, data: str = "normal") -> Case:
    """TopK of f32 rows, exact to the bit and the index. `data`: "normal", "ties" (five values: the board overflows), or
    "special" (NaN, infinities, zeros of both signs)."""
    cfg = TopKConfig()
    code = gfx950.compile(trace(topk_rows, gfx950, TopKProblem(rows, n, k), cfg))
    r = np.random.default_rng(14)
    x = r.standard_normal((rows, n)).astype(np.float32)
    if data == "ties":
        x = r.integers(0, 5, (rows, n)).astype(np.float32)
    if data == "special":
        x = r.choice(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], np.float32), (rows, n))
    # by value with NaN greatest, then by index: lexsort's last key counts most
    value = np.where(np.isnan(x), np.inf, x.astype(np.float64))
    number = np.broadcast_to(np.arange(n), x.shape)
    order = np.lexsort((number, -value, ~np.isnan(x)), axis=1)[:, :k]
    exact = np.take_along_axis(x, order, 1)
    arguments = lambda: [x.copy(), np.full((rows, k), np.nan, np.float32), np.full((rows, k), -7, np.int64)]

    def wrong(got) -> float:
        same = np.array_equal(got[1].view(np.uint32), exact.view(np.uint32)) and np.array_equal(got[2], order)
        return 0.0 if same else np.inf

    grid = (-(-rows // cfg.rows_per_workgroup), 1, 1)
    return Case(f"ours TopK {rows}x{n} k {k} {data}", code.text, code.binary, grid, arguments, wrong)


def cases() -> Iterator[Case]:
    yield hti()
    yield mxfp4()
    yield rms(3, 2000, 256, 1)
    yield rms(9, 136, 16, 8)
    yield topk(18, 128, 6)
    yield topk(3, 100, 16, "special")
    yield topk(5, 256, 8, "ties")
    yield staged()
    yield staged(layout_b="col")
    yield split()
