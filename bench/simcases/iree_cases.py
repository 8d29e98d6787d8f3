"""Acceptance cases from IREE's gfx950 back end, the second compiler (package iree-base-compiler; no GPU needed)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from . import iree_sources as source
from .case import STEP, Case, bf16, excess, from_bf16
from .floats import decode, e8m0
from .triton_cases import _fp8


def tool() -> str | None:
    """Path of iree-compile, or None if it is not installed."""
    beside = Path(sys.executable).parent / "iree-compile"
    return str(beside) if beside.exists() else shutil.which("iree-compile")


def compile(text: str) -> tuple[str, bytes]:
    """(assembly text, code object) of the one dispatch of an MLIR module."""
    exe = tool()
    if exe is None:
        raise RuntimeError("iree-compile is not installed: pip install iree-base-compiler")
    with tempfile.TemporaryDirectory() as d:
        folder = Path(d)
        (folder / "f.mlir").write_text(text)
        done = subprocess.run(
            [
                exe, str(folder / "f.mlir"), "--iree-hal-target-device=hip", "--iree-rocm-target=gfx950", "-o",
                str(folder / "f.vmfb"), f"--iree-hal-dump-executable-binaries-to={folder / 'bin'}",
                f"--iree-hal-dump-executable-intermediates-to={folder / 'int'}",
            ],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"iree-compile failed: {done.stderr[:2000]}")
        (binary,) = sorted((folder / "bin").glob("*.hsaco"))
        (asm,) = sorted((folder / "int").glob("*.rocmasm"))
        return asm.read_text(), binary.read_bytes()


# The number of workgroups is IREE's choice (kept with the host's code, which is not used here): one for what fits
# one, else one a tile. A wrong guess shows: too few leave poison, too many are reported as racing with each other.
def _case(name: str, mlir: str, workgroups: int, arguments: Callable[[], list], wrong: Callable) -> Case:
    text, binary = compile(mlir)
    return Case(f"iree {name}", text, binary, (workgroups, 1, 1), arguments, wrong)


def matmul(dtype: str, M: int, N: int, K: int, tile: tuple[int, int]) -> Case:
    kind = {"bf16": "bf16", "e4m3": "f8E4M3FN"}[dtype]
    r = np.random.default_rng(6)
    if dtype == "bf16":
        a, b = bf16(r.standard_normal((M, K))), bf16(r.standard_normal((N, K)))
        x, y = from_bf16(a), from_bf16(b)
    else:
        a, b = _fp8(r, (M, K), dtype), _fp8(r, (N, K), dtype)
        x, y = decode(a, dtype), decode(b, dtype)
    exact, scale = x @ y.T, np.abs(x) @ np.abs(y).T
    arguments = lambda: [a.copy(), b.copy(), np.full((M, N), np.nan, np.float32)]
    wrong = lambda got: excess(got[2], exact, scale, K, STEP["f32"])
    groups = -(-M // tile[0]) * -(-N // tile[1])
    return _case(f"matmul {dtype} {M}x{N}x{K}", source.MATMUL.format(M=M, N=N, K=K, T=kind), groups, arguments, wrong)


def matmul_scaled(M: int, N: int, K: int, tile: tuple[int, int]) -> Case:
    r = np.random.default_rng(7)
    a, b = (r.integers(0, 256, (n, K // 2)).astype(np.uint8) for n in (M, N))
    sa, sb = (r.integers(120, 134, (n, K // 32)).astype(np.uint8) for n in (M, N))
    x, y = (decode(v, "e2m1") * np.repeat(e8m0(s), 32, axis=1) for v, s in ((a, sa), (b, sb)))
    exact, scale = x @ y.T, np.abs(x) @ np.abs(y).T
    arguments = lambda: [a.copy(), b.copy(), sa.copy(), sb.copy(), np.full((M, N), np.nan, np.float32)]
    wrong = lambda got: excess(got[4], exact, scale, K, STEP["f32"])
    groups = -(-M // tile[0]) * -(-N // tile[1])
    return _case(
        f"scaled matmul mxfp4 {M}x{N}x{K}", source.SCALED.format(M=M, N=N, G=K // 32), groups, arguments, wrong
    )


def softmax(rows: int, n: int) -> Case:
    x = (np.random.default_rng(8).standard_normal((rows, n)) * 4).astype(np.float32)
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    exact = e / e.sum(1, keepdims=True)
    wrong = lambda got: excess(got[1], exact, exact, 128, STEP["f32"])
    arguments = lambda: [x.copy(), np.full((rows, n), np.nan, np.float32)]
    return _case(f"softmax {rows}x{n}", source.SOFTMAX.format(M=rows, N=n), 1, arguments, wrong)


def convolution(size: int, channels: int, features: int, groups: int) -> Case:
    r = np.random.default_rng(9)
    x = r.standard_normal((1, size, size, channels)).astype(np.float16)
    w = r.standard_normal((3, 3, channels, features)).astype(np.float16)
    p = size - 2
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (1, 2))
    exact = np.einsum("bpqcij,ijcf->bpqf", windows, w.astype(np.float64))
    scale = np.einsum("bpqcij,ijcf->bpqf", np.abs(windows), np.abs(w.astype(np.float64)))
    arguments = lambda: [x.copy(), w.copy(), np.full((1, p, p, features), np.nan, np.float32)]
    wrong = lambda got: excess(got[2], exact, scale, 9 * channels, STEP["f32"])
    text = source.CONV.format(H=size, W=size, P=p, Q=p, C=channels, F=features)
    return _case(f"convolution 3x3 {size}x{size}x{channels} to {features}", text, groups, arguments, wrong)


def cases() -> Iterator[Case]:
    yield matmul("bf16", 256, 256, 256, (128, 64))
    yield matmul("e4m3", 128, 128, 256, (64, 64))
    yield matmul_scaled(256, 256, 512, (256, 256))
    yield softmax(8, 200)
    yield convolution(18, 32, 64, 16)
