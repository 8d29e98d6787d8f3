"""Which configurations are worth compiling for a problem, each with the limit that speaks for it."""

from __future__ import annotations

from templates.gemm.space import Candidate, Dropped, Space

from .config import X86Config
from .problem import RMSNormProblem


def configurations(problem: RMSNormProblem, target) -> Space:
    """The few configurations to try on `target`, best guess first: `Space.kept` holds Candidate(config, reason).

    Empty `kept` where the problem is not eligible, with that reason in `dropped`."""
    reason = problem.why_not(target)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    if target.name == "x86":
        why = "four sums in flight hide the latency of an addition"
        return Space(kept=[Candidate(X86Config(), why)])
    raise NotImplementedError
