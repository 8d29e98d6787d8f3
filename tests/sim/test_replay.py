"""The timing model against real MI350X traces: the warm main loop of each recorded kernel."""

import json
import re

import pytest

from flykernels.sim.asm import Code, parse_instruction
from flykernels.sim.findings import Collector
from flykernels.sim.machine import Machine
from flykernels.sim.memory import Memory
from flykernels.sim.program import Program
from flykernels.sim.replay import compare, load_recorded

RECORDINGS = [
    ("blockscale_preshuffle_gemm", "se2"),
    ("flash_attn_func", "se0"),
    ("hgemm_splitk", "se1"),
    ("hgemm_splitk", "se3"),
    ("moe_gemm", "se0"),
    ("moe_gemm", "se1"),
    ("pa_mqa_logits_fp4", "se0"),
    ("preshuffle_gemm", "se0"),
]


@pytest.mark.parametrize(("kernel", "engine"), RECORDINGS)
def test_warm_loop(traces, kernel, engine):
    folder = next(traces.rglob(kernel))
    found = compare(load_recorded(folder, f"{engine}_*.json"))
    assert 0.85 <= found.ratio <= 1.15


@pytest.mark.parametrize("kernel", sorted({name for name, _ in RECORDINGS}))
def test_instructions_of_published_kernels_are_known(traces, kernel):
    rows = json.loads((next(traces.rglob(kernel)) / "code.json").read_text())["code"]
    lines = (re.sub(r"^(s_c?branch\w*) \d+$", r"\1 L0", r[0].split(";")[0].strip()) for r in rows)
    instructions = [parse_instruction(x) for x in lines if x]
    made = Program(Code(instructions, {"L0": 0}), Machine(instructions, Memory(), Collector(kernel), str))
    assert len(made.bound) == len(instructions) > 100
