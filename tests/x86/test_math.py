"""exp2 on the CPU is a polynomial of ours: exact enough everywhere, and right at the ends."""

from __future__ import annotations

import numpy as np
import pytest

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i64
from flykernels.lang import Global, exp2, trace
from flykernels.launch import host
from flykernels.targets import x86


class Config:
    workgroup_size = 1


def power(k, width, _):
    x, y, _ = k.args(x=Global(f32, (1,)), y=Global(f32, (1,)), n=i64)
    k.grid = ((Extent("n", width or 1),),)
    at = k.workgroup_id().to(i64) * (width or 1)
    y.put(exp2(x.get(at, width=width)), at)


@pytest.fixture(scope="module", params=[None, 8])
def powers(request):
    """2^x of an array by a kernel, element by element or in vectors of 8."""
    kernel = host.load(x86.compile(trace(power, x86, request.param, Config())))

    def run(x):
        x = np.ascontiguousarray(x, np.float32)
        y = np.full_like(x, 7)
        kernel(x.ctypes.data, y.ctypes.data, len(x), threads=1)
        return y

    return run


def test_error_is_about_one_step(powers):
    x = np.linspace(-125.9, 127.9, 1 << 16).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(powers(x) - exact) / exact) < 1.5 * 2**-23


def test_whole_powers_are_exact_down_to_the_smallest_number(powers):
    x = np.arange(-152, 128, dtype=np.float32)
    assert np.array_equal(powers(x), np.exp2(x.astype(np.float64)).astype(np.float32))


def test_ends(powers):
    x = np.array([128, 129, 1e30, np.inf, -151, -1e30, -np.inf, np.nan], np.float32)
    y = powers(x)
    assert np.array_equal(y[:4], np.full(4, np.inf)) and np.array_equal(y[4:7], np.zeros(3)) and np.isnan(y[7])
