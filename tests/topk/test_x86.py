"""TopK on this CPU, against the numpy reference: bit for bit, index for index, and nothing written beside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels import dtypes
from flykernels.targets import x86
from templates.topk.arguments import scalar_values, workspace_bytes
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem
from templates.topk.reference import reference
from templates.topk.space import configurations

from .case import KINDS, data
from .x86_case import kernel_for, run

SHAPES = [(3, 1, 1), (2, 7, 7), (5, 63, 6), (3, 128, 6), (2, 300, 100), (3, 4096, 8), (2, 9003, 100), (1, 70001, 50)]


def best(p: TopKProblem, threads: int = 1) -> TopKConfig:
    return configurations(p, x86, threads).kept[0].config


@pytest.mark.parametrize("rows, width, k", SHAPES)
@pytest.mark.parametrize("dtype, largest", [("f32", True), ("f32", False), ("bf16", True), ("f16", False)])
def test_all_kinds_of_data(rows, width, k, dtype, largest):
    p = TopKProblem(rows, width, k, dtype, largest, align=2 if dtype != "f32" else 4)
    for kind in KINDS:
        run(p, best(p), data(kind, rows, width), pad=3, offset=1)


@pytest.mark.parametrize("width, k", [(1000, 1000), (5000, 4096), (9003, 1000), (4096, 4096), (200, 129)])
@pytest.mark.parametrize("largest", [True, False])
def test_large_k(width, k, largest):
    p = TopKProblem(2, width, k, largest=largest)
    for kind in KINDS:
        run(p, best(p), data(kind, 2, width))


@pytest.mark.parametrize("k", [1, 100, 1000])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_rows_in_parts(k, largest, parts):
    """Parts that are shorter than k, and parts without any element, as well."""
    for width in (k + 1, 20003):
        p = TopKProblem(2, width, k, largest=largest)
        config = replace(best(p), split=True, parts=parts, threads=2)
        for kind in KINDS:
            run(p, config, data(kind, 2, width), threads=2)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("split", [False, True])
def test_a_dimension_in_the_middle(dtype, split):
    p = TopKProblem(2 * 5, 2500, 20, dtype, layout="any")
    config = replace(best(p), split=split, parts=2 if split else 1, threads=2)
    for kind in ("normal", "ascending", "special"):
        run(p, config, data(kind, 10, 2500), threads=2, inner=5, pad=2)


def test_many_rows_on_several_threads():
    p = TopKProblem(1000, 130, 7)
    run(p, best(p, 4), data("normal", 1000, 130), threads=4)
    run(p, best(p, 4), data("few", 1000, 130), threads=4)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 6), width=st.integers(1, 3000), k=st.integers(1, 128), kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(["f32", "bf16", "f16"]), largest=st.booleans(), pad=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_shape(rows, width, k, kind, dtype, largest, pad, seed):
    p = TopKProblem(rows, width, min(k, width), dtype, largest, align=2 if dtype != "f32" else 4)
    config = TopKConfig("scan", 128)
    run(p, config, data(kind, rows, width, seed), pad=pad)


def test_nan_of_either_sign_is_greatest():
    """pytorch#117617: NaN and -NaN rank alike, above infinity; the first ones come first, with their signs."""
    x = np.array([[1.0, -np.nan, np.inf, np.nan, -np.inf, -np.nan, 0.0, -0.0]], np.float32)
    for largest in (True, False):
        for k in range(1, 9):
            p = TopKProblem(1, 8, k, largest=largest)
            run(p, best(p), x)


@pytest.mark.parametrize("dtype", ["f64", "i64", "i32", "i8"])
@pytest.mark.parametrize("largest", [True, False])
def test_doubles_and_integers(dtype, largest):
    """Keys of 64 bits, and integers whose least one has the key of nobody: short rows, cuts, a sort of the board, rows
    in parts, and the best at the end."""
    kind = np.dtype(dtypes.dtype(dtype).torch)
    r = np.random.default_rng(3)
    for width, k in ((7, 7), (128, 6), (4000, 30), (4000, 3000)):
        if kind.kind == "f":
            x = r.standard_normal((2, width)) * 1e300
            x[:, ::7], x[:, 1::11], x[:, 2::13] = np.nan, -np.inf, -0.0
        else:
            ends = np.iinfo(kind)
            x = r.integers(ends.min, ends.max, (2, width), kind, endpoint=True)
            x[:, ::7], x[:, 1::11] = ends.min, ends.max
        for held in (x, np.sort(x, axis=1)[:, :: 1 if largest else -1], np.full_like(x, x[0, 0])):
            held = np.ascontiguousarray(held)
            p = TopKProblem(2, width, k, dtype, largest, align=kind.itemsize)
            for threads in (1, 2):
                config = best(p, threads)
                if kind.itemsize == 4 and threads == 2 and width == 4000:
                    config = replace(config, split=True, parts=2)
                values, indices = np.empty((2, k), kind), np.full((2, k), -1)
                space = np.zeros(workspace_bytes(config, 2) // 4 + 1, np.uint32)
                strides = {"x": (width,), "values": (k,), "indices": (k,)}
                given = [a.ctypes.data for a in (held, values, indices)] + list(scalar_values(p, config, strides))
                kernel_for(p, config)(*given, *([space.ctypes.data] if config.split else []), threads=threads)
                want = reference(held, k, largest)
                assert np.array_equal(indices, want)
                assert values.tobytes() == np.take_along_axis(held, want, 1).tobytes()
