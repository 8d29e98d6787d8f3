"""RMSNorm on the H200: every way of dealing out rows, forward and backward; tails, starts, special values, graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.targets import sm90a
from templates.rms_norm.config import GpuConfig
from templates.rms_norm.problem import DTYPES, RMSNormProblem
from templates.rms_norm.space import configurations
from tests.rms_norm.case import EPS, TORCH, call, codes, compile_ahead, operands, run
from tests.rms_norm.test_gfx950 import BACK, BACKWARD, FORWARD

P = RMSNormProblem


ONCE = {  # rows that go past the caches
    "past the caches": (P(16384, "f32", "f32", residual=True, rstd=True), GpuConfig(512, 1, 4, once=True), 5, {}),
    "past the caches, tails": (
        P(8200, "bf16", "f32", rstd=True),
        GpuConfig(512, 1, 8, parts=3, once=True),
        3,
        {"pad": 8},
    ),
    "past the caches, too narrow": (P(4098, "f32", "f32", align=8), GpuConfig(256, 1, 2, once=True), 2, {"pad": 2}),
}


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD, *ONCE])
def test_every_way(name):
    problem, config, rows, how = (FORWARD | BACKWARD | ONCE)[name]
    run(problem, config, sm90a, 3 * rows, **how)


SIZES = (
    (700, 3), (2000, 512), (1000, 1536), (314, 4096), (64, 4097), (9, 16385), (1, 262144), (9, 65536), (131, 16384),
)  # fmt: skip
KINDS = ("f32", False), ("bf16", False), ("bf16", True), ("f32", True)  # dtype, backward


def every_kind(rows: int, width: int, dtype: str, back: bool):
    """(problem, one configuration of each way of dealing out rows that the space has for it)."""
    size = TORCH[dtype].itemsize
    align = 16 if width * size % 16 == 0 else size
    problem = P(width, dtype, dtype, residual=True, align=align, rows_hint=rows, **(BACK if back else {"rstd": True}))
    kinds: dict = {}
    for c in (candidate.config for candidate in configurations(problem, sm90a).kept):
        kinds.setdefault((c.held, c.slices > 1, c.parts > 0, c.ahead, c.sums), c)
    return problem, list(kinds.values())


@pytest.fixture(scope="module")
def compiled():
    """Everything that `test_all_configurations` runs, compiled beside one another."""
    found = [every_kind(*size, *kind) for size in SIZES for kind in KINDS]
    compile_ahead([(problem, config) for problem, configs in found for config in configs], sm90a)


@pytest.mark.parametrize("rows, width", SIZES)
@pytest.mark.parametrize("dtype, back", KINDS)
def test_all_configurations(compiled, rows, width, dtype, back):
    problem, configs = every_kind(rows, width, dtype, back)
    ran = 0
    for config in configs:
        if all(c.spills == 0 for c in codes(problem, config, sm90a)):
            run(problem, config, sm90a, rows)
            ran += 1
    assert ran


@given(
    st.integers(1, 400), st.integers(1, 3000), st.sampled_from(DTYPES), st.sampled_from((*DTYPES, "none")),
    st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_shape(rows, width, dtype, weight, residual, back, offset, pad):
    more = {"direction": "backward", "weight_gradient": weight != "none"} if back else {"rstd": True}
    size = TORCH[dtype].itemsize
    align = 16 if not offset and (width + pad) * size % 16 == 0 else size
    problem = P(width, dtype, weight, residual=residual, align=align, rows_hint=rows, **more)
    run(problem, configurations(problem, sm90a).kept[0].config, sm90a, rows, offset=offset, pad=pad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_are_atens(dtype):
    kind = TORCH[dtype]
    problem = P(1024, dtype, dtype)
    made = operands(problem, 12, 1024)
    x = made["x"].view
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"), torch.finfo(kind).max, 0.0)):
        x[row, 77] = value
    x[6], x[7] = 0, torch.finfo(kind).max
    made["weight"].view[3], made["weight"].view[-1] = float("nan"), float("inf")
    want = F.rms_norm(x.cuda(), (1024,), made["weight"].view.cuda(), EPS).cpu()
    call(problem, GpuConfig(128, 1, 16 // kind.itemsize), sm90a, made)
    assert torch.equal(made["y"].view.isnan(), want.isnan())
    torch.testing.assert_close(made["y"].view, want, rtol=4 * torch.finfo(kind).eps, atol=0, equal_nan=True)


def test_the_weight_gradient_is_the_same_every_time():
    problem, config = P(4096, "bf16", "bf16", **BACK), GpuConfig(256, 1, 8, parts=264, sums=True)
    seen = []
    for _ in range(20):
        made = operands(problem, 3000, 4096)
        call(problem, config, sm90a, made)
        seen.append(made["dweight"].view.view(torch.int16).clone())
    assert all(torch.equal(seen[0], x) for x in seen)
