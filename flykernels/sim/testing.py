"""For kernel tests: a pytest fixture that runs a kernel on the simulator and fails on any finding.

    pytest_plugins = ["flykernels.sim.testing"]

    def test_add(sim_run):
        sim_run(code_object, [a, b, c], grid=(4, 1, 1))        # numpy arrays or CPU torch tensors, changed in place
        assert (c == a + b).all()

Without pytest, `checked` does the same.
"""

from __future__ import annotations

from typing import Any

import pytest

from .run import SimResult, run_on_sim


def checked(code: Any, args: Any, grid: Any = (1, 1, 1), **options: Any) -> SimResult:
    """run_on_sim, then FindingsError if the checker found an error that no waiver excuses."""
    return run_on_sim(code, args, grid, **options).raise_for_findings()


@pytest.fixture
def sim_run():
    """`run_on_sim` that fails the test on an unwaived finding."""
    return checked
