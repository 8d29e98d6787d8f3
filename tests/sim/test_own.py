"""This project's kernels on the simulator: right against float64 (TopK to the bit), from text and code object, and the
checker silent."""

import pytest

from bench.simcases import own_cases
from flykernels.sim import run_on_sim

CASES = {
    "MXFP4 GEMM": own_cases.mxfp4,
    "RMSNorm, four waves a row": lambda: own_cases.rms(3, 2000, 256, 1),
    "RMSNorm, four rows a wave": lambda: own_cases.rms(9, 136, 16, 8),
    "TopK": lambda: own_cases.topk(18, 128, 6),
    "TopK, NaN and signed zeros": lambda: own_cases.topk(3, 100, 16, "special"),
    "TopK, ties overflow the board": lambda: own_cases.topk(5, 256, 8, "ties"),
    "staged GEMM, tails": own_cases.staged,
    "staged GEMM, K split over workgroups": own_cases.split,
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]()
    for code in (case.text, case.binary):
        args = case.arguments()
        run_on_sim(code, args, case.grid, **case.options).raise_for_findings()
        assert case.wrong(args) <= 1
