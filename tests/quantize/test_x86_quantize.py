"""The x86 quantisers against the numpy reference, byte by byte."""

from __future__ import annotations

import ctypes
import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.launch import host
from flykernels.targets import gfx950, sm90a, x86
from templates.quantize.arguments import outputs, shapes
from templates.quantize.problem import FORMAT_NAMES, INPUTS, MODES, QuantizeProblem, native_e4m3

from .case import GUARD, compare, compiled, guarded, numbers, stored

ORIENTATIONS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}


def run(p: QuantizeProblem, x: np.ndarray, pad: int = 0, threads: int = 1) -> dict[str, np.ndarray]:
    kernel = host.load(compiled(p, x86))
    memory, row = stored(p, x, pad)
    out = guarded(p, len(x))
    if kernel.workspace(threads) is not None:
        ctypes.memset(kernel.workspace(threads), 0xFF, kernel.workspace_bytes * threads)
    kernel(memory.ctypes.data, *(out[n][GUARD:].ctypes.data for n in outputs(p)), len(x), row, threads=threads)
    compare(p, x, out)
    return {n: out[n][GUARD:-GUARD].reshape(shapes(p, len(x))[n]) for n in outputs(p)}


def problem(n: int, format: str, **more) -> QuantizeProblem:
    return QuantizeProblem(n=n, format=format, consumer="gfx942" if format == "f8E4M3FNUZ" else "gfx950", **more)


@pytest.mark.parametrize("which", ORIENTATIONS)
@pytest.mark.parametrize(("format", "mode"), list(product(FORMAT_NAMES, MODES)))
def test_formats_and_modes(format, mode, which):
    rows, columns = ORIENTATIONS[which]
    p = problem(96, format, rows=rows, columns=columns, mode=mode, dtype="f32")
    run(p, numbers(p, 96), pad=3)


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("format", ["f8E4M3FN", "f4E2M1FN"])
def test_inputs(dtype, format):
    p = problem(160, format, rows=True, columns=True, dtype=dtype)
    run(p, numbers(p, 224), threads=2)


def test_every_bf16_number():
    """Each of the 2^16 bf16 patterns, one block each, so that its own size decides the scale; NaN and infinity too."""
    for mode in MODES:
        p = problem(32, "f8E4M3FN", mode=mode)
        patterns = np.arange(1 << 16, dtype=np.uint32) << 16
        x = np.zeros((1 << 16, 32))
        x[:, 7] = patterns.view(np.float32).astype(np.float64)
        x[:, 8] = np.where(np.isfinite(x[:, 7]), x[:, 7] / 3, 0)
        x[:, 8] = (x[:, 8].astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        got = run(p, x)
        bad = ~np.isfinite(x[:, 7])
        assert (got["scales"][bad] == 255).all() and (got["codes"][bad] == 0).all()
        assert (got["scales"][~bad] < 255).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", ["f8E4M3FN", "f8E5M2", "f4E2M1FN"])
def test_nan_and_infinity_poison_their_block(format, bad):
    p = problem(64, format, rows=True, columns=True)
    x = numbers(p, 64)
    x[5, 40] = bad
    got = run(p, x)
    assert got["scales"][5, 1] == 255 and (got["scales"] == 255).sum() == 1
    assert got["scales_t"][40, 0] == 255 and (got["scales_t"] == 255).sum() == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", ["f8E4M3FN", "f8E5M2", "f4E2M1FN"])
def test_zero_subnormal_and_largest_blocks(format, mode):
    p = problem(32, format, dtype="f32", mode=mode)
    x = np.zeros((6, 32))
    x[1] = -0.0
    x[2, 3] = 2.0**-149  # f32's least
    x[3] = 2.0**-127
    x[4] = 2.0**-126 * np.arange(32)
    x[5] = p.input_type.largest
    got = run(p, x)
    assert (got["scales"][:3] == 0).all() and (got["codes"][0] == 0).all()
    sign = 0x88 if p.per_byte == 2 else 0x80
    assert (got["codes"][1] == sign).all()
    assert got["scales"][5, 0] < 254, "f32's largest number has a scale"


@pytest.mark.parametrize("format", ["f8E4M3FN", "f8E5M2", "f4E2M1FN"])
def test_round_up_never_saturates_and_floor_does(format):
    """Just above the largest number: floor clips it, round_up takes the next scale."""
    largest = problem(32, format).output_type.largest
    x = np.zeros((1, 32))
    x[0, 0] = np.nextafter(np.float32(largest), np.float32(np.inf))
    floor, up = (run(problem(32, format, dtype="f32", mode=m), x)["scales"][0, 0] for m in MODES)
    assert (floor, up) == (127, 128)
    x[0, 0] = largest
    assert run(problem(32, format, dtype="f32", mode="round_up"), x)["scales"][0, 0] == 127


def test_empty():
    p = problem(64, "f8E4M3FN", rows=True, columns=True)
    run(p, np.zeros((0, 64)))


def test_columns_need_no_whole_blocks_along_rows():
    for n in (1, 37, 90):
        p = problem(n, "f4E2M1FN", rows=False, columns=True)
        run(p, numbers(p, 64), pad=1)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    m=st.integers(0, 5), blocks=st.integers(1, 6), format=st.sampled_from(FORMAT_NAMES), pad=st.integers(0, 9),
    which=st.sampled_from(sorted(ORIENTATIONS)), dtype=st.sampled_from(INPUTS),
)  # fmt: skip
def test_shapes(m, blocks, format, pad, which, dtype):
    rows, columns = ORIENTATIONS[which]
    p = problem(32 * blocks, format, rows=rows, columns=columns, dtype=dtype)
    run(p, numbers(p, m * (32 if columns else 7), seed=m), pad=pad)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 33}, "not a multiple of 32"),
        ({"dtype": "i8"}, "dtype"),
        ({"format": "bf16"}, "format"),
        ({"mode": "even"}, "mode"),
        ({"rows": False}, "neither"),
        ({"align_x": 1}, "align_x"),
        ({"format": "f8E4M3FNUZ"}, "240.*448"),
        ({"consumer": "gfx942"}, "448.*240"),
    ],
)
@pytest.mark.parametrize("target", [gfx950, x86, sm90a], ids=lambda t: t.name)
def test_not_eligible(change, words, target):
    reason = QuantizeProblem(**({"n": 64} | change)).why_not(target)
    assert reason and re.search(words, reason)


def test_the_format_comes_from_the_target():
    assert native_e4m3("gfx950").name == "f8E4M3FN" and native_e4m3("gfx942").name == "f8E4M3FNUZ"
    assert QuantizeProblem(n=32, format="f8E4M3FNUZ", consumer="gfx942").why_not(x86) is None


def test_rows_that_are_no_blocks_of_a_column():
    with pytest.raises(ValueError, match="M = 40 is not a multiple of 32"):
        shapes(problem(32, "f8E4M3FN", columns=True), 40)
