"""Triton's own gfx950 output: right against float64, from text and from the code object, and no false alarm."""

import pytest

from bench.simcases import triton_cases
from flykernels.sim import run_on_sim

CASES = {
    "matmul bf16, tails": lambda: triton_cases.matmul("bf16", 200, 136, 256, (128, 128, 64), 4),
    "matmul bf16, 8 waves": lambda: triton_cases.matmul("bf16", 256, 256, 192, (256, 256, 64), 8),
    "matmul fp16": lambda: triton_cases.matmul("fp16", 128, 128, 256, (128, 128, 64), 4),
    "matmul e4m3": lambda: triton_cases.matmul("e4m3", 128, 128, 512, (128, 128, 128), 4),
    "matmul e5m2": lambda: triton_cases.matmul("e5m2", 64, 64, 256, (64, 64, 128), 4),
    "dot_scaled e4m3": lambda: triton_cases.matmul_scaled("e4m3", 128, 128, 512, (128, 128, 128), 4),
    "dot_scaled e5m2": lambda: triton_cases.matmul_scaled("e5m2", 64, 64, 256, (64, 64, 128), 4),
    "dot_scaled e2m1": lambda: triton_cases.matmul_scaled("e2m1", 128, 128, 512, (128, 128, 256), 4),
    "softmax bf16": lambda: triton_cases.softmax("bf16", 5, 1000, 4),
    "softmax f32": lambda: triton_cases.softmax("f32", 3, 300, 1),
    "layer norm": lambda: triton_cases.layer_norm(4, 1500),
    "atomic reduction": lambda: triton_cases.reduce_atomic(5000),
    "scan": lambda: triton_cases.scan(3, 1000),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]()
    for code in (case.text, case.binary):
        args = case.arguments()
        result = run_on_sim(code, args, case.grid, **case.options).raise_for_findings()
        assert case.wrong(args) <= 1
        assert result.counters.instructions > 0
