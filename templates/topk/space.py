"""Which configurations are worth compiling for a top-k problem, and why."""

from __future__ import annotations

from templates.gemm.space import Candidate, Dropped, Space

from .arguments import ENTRY
from .config import TopKConfig
from .problem import TopKProblem

SHARE_FROM = 1 << 16  # elements that a CPU thread takes at least, so that starting it pays
SPLIT_FROM = 1 << 17  # the same of one row in parts, which are merged as well


def configurations(problem: TopKProblem, target, threads: int = 1) -> Space:
    """The few configurations to try, best guess first (`.kept`: Candidates with .config and .reason).

    threads: what a CPU kernel may use. Not eligible: `kept` is empty, and `.dropped` says why."""
    reason = problem.why_not(target)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    return _x86(problem, threads) if target.name == "x86" else _gpu(problem, target)


def _x86(p: TopKProblem, threads: int) -> Space:
    most_k = next(n for n in (16, 128, 1024, 4096) if p.k <= n)
    parts = min(threads // p.rows, p.width // max(SPLIT_FROM, 8 * p.k)) if p.rows < threads else 1
    if parts > 1 and p.element.bytes <= ENTRY // 2:  # an entry in the workspace holds a key of 32 bits
        config = TopKConfig("scan", most_k, split=True, parts=parts, threads=threads)
        return Space([Candidate(config, f"{p.rows} rows for {threads} threads: each row in {parts} parts")])
    used = max(1, min(threads, p.rows, p.rows * p.width // SHARE_FROM))
    return Space([Candidate(TopKConfig("scan", most_k, threads=used), f"{used} threads share the rows")])


def _gpu(p: TopKProblem, target) -> Space:
    from . import space_gpu

    return space_gpu.configurations(p, target)
