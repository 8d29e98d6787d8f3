"""A problem's program asks Inductor for that very problem, on the CPU and on GPUs that are not here."""

from __future__ import annotations

import pytest

from inductor_plugin import lowering, wanted
from inductor_plugin.programs import NoProgram, program_of
from templates.gemm.problem import GemmProblem
from tuning_cache import Key
from tuning_cache.shapes import Shape

SHAPES = {
    "mm, transposed, symbolic": Shape("mm", None, 64, 40, "bf16", "TN", bias="none", hint=24),
    "addmm, gelu, residual": Shape("addmm+gelu", 8, 48, 40, "bf16", bias="row", residual=True),
    "addmm, whole bias": Shape("addmm", 8, 48, 40, "bf16", bias="full"),
    "baddbmm": Shape("baddbmm", 5, 16, 24, "bf16", "NN", batch=3, bias="row"),
    "MXFP8": Shape("scaled_mm", 32, 64, 64, "f8E4M3FN", scaling="block", out_dtype="bf16", bias="none"),
    "FP8, a scale a row": Shape("scaled_mm", 32, 64, 64, "f8E4M3FN", scaling="row", out_dtype="bf16", bias="row"),
    "grouped": Shape("grouped_mm", 16, 64, 64, "bf16", bias="none", groups=4),
}


def asked(problem):
    here = problem.target == "x86"
    seen = lowering.lower(program_of(problem), problem.target, wanted.description_of(problem.target), here)
    assert not seen.failed, seen.failed
    return {wanted.of_heard(r, problem.target, problem.key.target).key.digest for r in seen.requests.values()}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("target", ["x86", "gfx950"])
def test_what_is_asked_for(name, target):
    problems = wanted.problems_of(SHAPES[name], target, wanted.description_of(target))
    found = asked(problems[1] if len(problems) > 1 else problems[0])
    known = [p.key.digest in found for p in problems]
    assert all(known) if len(problems) < 3 else any(known[::2]) and any(known[1::2])


def test_operands_that_are_less_aligned():
    p = GemmProblem(64, 36, "bf16", "bf16", b="col", m_hint=8, align_a=8, align_b=4)
    description = wanted.ELSEWHERE["gfx950"]
    key = Key("mm", {**p.key(), "m": 8}, description, {})
    problem = wanted.Problem("odd", "gfx950", p, Key(key.op, key.problem, description, wanted.versions("gemm")))
    assert problem.key.digest in asked(problem)


def test_what_has_no_program():
    p = GemmProblem(64, 32, "bf16", "bf16", batched=True)
    key = Key("bmm", {**p.key(), "m": 8, "batch": "symbolic"}, wanted.ELSEWHERE["gfx950"], {})
    with pytest.raises(NoProgram, match="only a model"):
        program_of(wanted.Problem("x", "gfx950", p, key))
