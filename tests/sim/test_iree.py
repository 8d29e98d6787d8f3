"""IREE's gfx950 output, the second independent compiler: right against float64 and no false alarm."""

import pytest

from bench.simcases import iree_cases
from flykernels.sim import run_on_sim

CASES = {
    "matmul bf16": lambda: iree_cases.matmul("bf16", 256, 256, 256, (128, 64)),
    "matmul e4m3": lambda: iree_cases.matmul("e4m3", 128, 128, 256, (64, 64)),
    "scaled matmul mxfp4": lambda: iree_cases.matmul_scaled(256, 256, 512, (256, 256)),
    "softmax": lambda: iree_cases.softmax(8, 200),
    "convolution": lambda: iree_cases.convolution(18, 32, 64, 16),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]()
    args = case.arguments()
    run_on_sim(case.binary, args, case.grid, **case.options).raise_for_findings()
    assert case.wrong(args) <= 1
