"""TopK on the H200: every family, exact to the bit and the index; tails, strides, NaNs, ties, many parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench._topk_cuda import launcher
from flykernels.targets import sm90a
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem
from templates.topk.space import configurations
from tests.topk.case import KINDS, Case, data


def run(p: TopKProblem, config: TopKConfig, x: np.ndarray, times: int = 1, **places):
    """Launches as often as told, each time on poisoned results, and compares."""
    case = Case(p, x, **places)
    kind = np.int32 if p.dtype == "f32" else np.int16
    device = lambda a: torch.from_numpy(a.view(kind) if a.dtype != np.int64 else a).cuda()
    storage, launch = device(case.storage), launcher(p, config)
    first = storage.data_ptr() + (len(case.storage) - len(case.x)) * storage.element_size()
    poison = case.values.copy(), case.indices.copy()
    for _ in range(times):
        values, indices = map(device, poison)
        launch(first, values.data_ptr(), indices.data_ptr(), *case.scalars(config))
        torch.cuda.synchronize()
        case.values = values.cpu().numpy().view(poison[0].dtype)
        case.indices = indices.cpu().numpy()
        case.check()


SHAPES = [
    (37, 128, 6), (5, 7, 7), (1, 1, 1), (300, 257, 16), (20, 1000, 10), (3, 1000, 500), (2, 8192, 8), (3, 9003, 100),
    (2, 32000, 50), (1, 100003, 128), (64, 2050, 33), (1, 70001, 1000), (1, 131072, 4096), (3, 5000, 4096),
]  # fmt: skip


def aligned(rows: int, width: int, k: int, dtype: str, largest: bool = True) -> TopKProblem:
    """With rows that begin at multiples of 16 bytes, if they have as many."""
    p = TopKProblem(rows, width, k, dtype, largest)
    return replace(p, align=p.element.bytes) if p.short else p


@pytest.mark.parametrize("rows, width, k", SHAPES)
@pytest.mark.parametrize("dtype, largest", [("f32", True), ("bf16", False), ("f16", True)])
def test_all_kinds_of_data_and_all_configurations(rows, width, k, dtype, largest):
    p = aligned(rows, width, k, dtype, largest)
    first, *others = (c.config for c in configurations(p, sm90a).kept)
    for config, kinds in ((first, KINDS), *((c, ("normal", "few", "special")) for c in others)):
        for kind in kinds:
            run(p, config, data(kind, rows, width), pad=-width % 8)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("kind", ["normal", "ascending", "constant"])
def test_many_results_of_many_parts(dtype, kind):
    """All of one list, or some of each."""
    p = TopKProblem(1, 1_000_000, 4096, dtype)
    for c in configurations(p, sm90a).kept:
        assert c.config.parts > 40
        run(p, c.config, data(kind, 1, p.width), times=3)


@pytest.mark.parametrize("rows, width, k", SHAPES[::2])
@pytest.mark.parametrize("dtype, align", [("f32", 4), ("bf16", 4), ("f16", 2)])
def test_rows_at_odd_places(rows, width, k, dtype, align):
    step = max(1, align // 2) if dtype != "f32" else 1
    p = TopKProblem(rows, width, k, dtype, align=align)
    config = configurations(p, sm90a).kept[0].config
    for kind in ("normal", "special"):
        run(p, config, data(kind, rows, width), pad=-width % step, offset=step)


def test_one_after_the_other_share_a_workspace():
    for rows, width, k in ((3, 40000, 20), (7, 20000, 100), (1, 300000, 50), (30, 20000, 10), (2, 90000, 700)):
        p = TopKProblem(rows, width, k)
        config = next(c.config for c in configurations(p, sm90a).kept if c.config.split)
        run(p, config, data("normal", rows, width), times=20)
