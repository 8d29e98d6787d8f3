"""A functional simulator of gfx950 (AMD MI350X, MI355X): runs code objects on the CPU and proves their waits and
barriers.

from flykernels.sim import run_on_sim
result = run_on_sim(code_object, [a, b, c], grid=(2, 2, 1))
result.raise_for_findings()
"""

from .errors import (
    BadArguments,
    BadCodeObject,
    BudgetExceeded,
    FindingsError,
    SimulatorError,
    Trapped,
    UnknownInstruction,
)
from .findings import Finding, Waiver
from .run import Counters, SimResult, run_on_sim

__all__ = [
    "BadArguments",
    "BadCodeObject",
    "BudgetExceeded",
    "Counters",
    "Finding",
    "FindingsError",
    "SimResult",
    "SimulatorError",
    "Trapped",
    "UnknownInstruction",
    "Waiver",
    "run_on_sim",
]
