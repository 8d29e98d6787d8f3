"""Whole kernels, one source each: run on the CPU and on the gfx950 simulator, compiled for sm_90a."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from flykernels.lang import Global, Mode, ThreadValues, bf16, f32, trace
from flykernels.launch.host import load
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950, sm90a, x86
from tests.gemm.gfx950_case import NAN_16, decode, encode

from .kernels.direct_gemm import DirectConfig, direct_gemm
from .kernels.rows import RowsConfig, RowsProblem, choose
from .kernels.softmax import softmax

SHAPES = [(1, 1), (3, 7), (5, 33), (4, 100), (2, 1001), (3, 4099)]


def case(rows, n, dtype, pad, scale, seed=0):
    """(stored x with NaNs between rows, x as float64, poisoned output with one guard row)"""
    x = (np.random.default_rng(seed).standard_normal((rows, n)) * scale).astype(np.float32)
    kind = np.float32 if dtype is f32 else np.uint16
    stored = np.full((rows, n + pad), np.nan if dtype is f32 else NAN_16, kind)
    stored[:, :n] = encode(x, dtype.name)
    out = np.full((rows + 1, n + pad), np.nan if dtype is f32 else NAN_16, kind)
    return stored, decode(stored[:, :n].copy(), dtype.name), out


def check(out, want, rows, n, dtype):
    got = decode(out.copy().reshape(-1), dtype.name).reshape(out.shape)
    assert np.isnan(got[rows:]).all() and np.isnan(got[:, n:]).all(), "something outside the rows was written"
    error = np.abs(got[:rows, :n] - want) / np.maximum(np.abs(want), np.abs(want).max() * 1e-3)
    # one rounding of the result; f32 sums over n terms, whose errors grow with sqrt(n); a few steps of exp2 and rsqrt
    assert error.max() <= dtype.epsilon + (16 + 4 * n**0.5) * f32.epsilon


def soft(x):
    power = np.exp(x - x.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True)


@pytest.mark.parametrize("rows, n", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0])
def test_softmax_on_the_cpu(rows, n, scale):
    p = RowsProblem(n, f32)
    code = x86.compile(trace(softmax, x86, p, choose(p, x86)))
    stored, x, y = case(rows, n, f32, 0, scale)
    load(code)(stored.ctypes.data, y.ctypes.data, rows)
    check(y, soft(x), rows, n, f32)


@pytest.mark.parametrize("rows, n, config", [
    (3, 33, None), (2, 1001, None), (70, 64, RowsConfig(8, 32, 4)), (2, 4096, RowsConfig(256, 1, 4)),
    (3, 1000, RowsConfig(128, 2, 4, streamed=True)),
])  # fmt: skip
def test_softmax_on_the_simulator(rows, n, config):
    """Part of a wave, a wave, several waves a row; held and streamed."""
    p = RowsProblem(n, f32)
    code = gfx950.compile(trace(softmax, gfx950, p, config or choose(p, gfx950)))
    stored, x, y = case(rows, n, f32, 0, 3.0)
    grid = (*code.grid_for({"rows": rows}), 1, 1)
    run_on_sim(code, [stored, y, np.int32(rows)], grid=grid, outputs=[1]).raise_for_findings()
    check(y, soft(x), rows, n, f32)


@dataclass(frozen=True)
class Shared:
    """How a tile is dealt out: rows and columns of threads, elements of a vector."""

    down: int
    across: int
    vector: int

    @property
    def workgroup_size(self) -> int:
        return self.down * self.across


def column_sums(k, rows: int, cfg: Shared):
    """y = the sums of x's columns."""
    width = cfg.across * cfg.vector
    x, y = k.args(x=Global(f32, (rows, width)), y=Global(f32, (1, width)))
    threads = (Mode(cfg.across, 1, cfg.vector), Mode(cfg.down, 0, 1))
    tile = ThreadValues((cfg.down, width), threads, Mode(cfg.vector, 1, 1)).repeat(rows // cfg.down, 1)
    total = k.fragment(tile).load(x).sum(axis=0)
    k.fragment(total.layout).store(y, total)


@pytest.mark.parametrize("config", [Shared(4, 16, 4), Shared(16, 16, 4), Shared(8, 64, 1), Shared(4, 128, 2)])
def test_sums_over_waves_whose_lanes_hold_other_columns(config):
    """Lanes of a wave, waves side by side, waves that lie apart."""
    code = gfx950.compile(trace(column_sums, gfx950, 2 * config.down, config))
    x = np.random.default_rng(0).standard_normal((2 * config.down, config.across * config.vector)).astype(np.float32)
    y = np.full((1, x.shape[1]), np.nan, np.float32)
    run_on_sim(code, [x, y], outputs=[1]).raise_for_findings()
    assert np.abs(y[0] - x.sum(0, dtype=np.float64)).max() < 1e-5


@pytest.mark.parametrize("m, n, depth", [(128, 128, 256), (100, 72, 64), (1, 4, 32)])
def test_direct_gemm_on_the_simulator(m, n, depth):
    code = gfx950.compile(trace(direct_gemm, gfx950, (n, depth), DirectConfig((2, 2), (4, 4), 64)))
    rng = np.random.default_rng(0)
    a, b = (encode(rng.standard_normal((rows, depth)), "bf16") for rows in (m, n))
    c = np.full((m + 1, n), NAN_16, np.uint16)
    grid = (*code.grid_for({"m": m}), 1)
    run_on_sim(code, [a, b, c, np.int32(m)], grid=grid, outputs=[2]).raise_for_findings()
    want = decode(a, "bf16") @ decode(b, "bf16").T
    got = decode(c, "bf16")
    assert np.isnan(got[m:]).all()
    assert np.abs(got[:m] - want).max() <= bf16.epsilon * np.abs(want).max() * 1.1


@pytest.mark.parametrize("kernel, problem, config", [
    (softmax, RowsProblem(4096, bf16), None), (softmax, RowsProblem(1000, f32), None),
    (direct_gemm, (128, 256), DirectConfig((2, 2), (4, 8), 32)),
], ids=["softmax bf16", "softmax f32", "direct_gemm"])  # fmt: skip
def test_sm90a_compiles(kernel, problem, config):
    code = sm90a.compile(trace(kernel, sm90a, problem, config or choose(problem, sm90a)))
    assert code.binary.startswith(b"\x7fELF") and ".target sm_90a" in code.text
    assert 0 < code.registers <= 255 and code.spills == 0 and code.shared_bytes <= sm90a.limits.shared_bytes
    assert kernel is not direct_gemm or "mma.sync" in code.text
