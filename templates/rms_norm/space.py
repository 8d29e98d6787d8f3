"""Which configurations are worth compiling for a problem, each with the limit that speaks for it."""

from __future__ import annotations

from math import ceil

from flykernels.dtypes import f32
from templates.gemm.space import Candidate, Dropped, Space

from .config import GpuConfig, X86Config
from .problem import RMSNormProblem

WORKGROUP = 256  # threads of a workgroup where rows are narrow: 4 waves of a SIMD each, or 8 warps
PIECES = (2, 4, 1, 8)  # vectors of a row that a thread holds: more hide latency, fewer leave room for more waves
FEW_ROWS = 1.0  # rows a compute unit: with fewer, a row's time is what counts, and more threads share it
OTHER_REGISTERS = 24  # addresses, sums, the vector that is being worked on
STREAMED_PIECES = 4  # vectors a thread and turn, where rows are read twice


def configurations(problem: RMSNormProblem, target) -> Space:
    """The few configurations to try on `target`, best guess first: `Space.kept` holds Candidate(config, reason).

    Empty `kept` where the problem is not eligible, with that reason in `dropped`."""
    reason = problem.why_not(target)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    if target.name == "x86":
        why = "four sums in flight hide the latency of an addition"
        return Space(kept=[Candidate(X86Config(), why)])
    return _gpu(problem, target)


def registers(p: RMSNormProblem, cfg: GpuConfig) -> int:
    """What a thread needs, about: rows in f32, what is fetched ahead and the weight as they are stored."""
    elements = ceil(p.width / (cfg.threads_per_row * cfg.vector)) * cfg.vector
    words = lambda kind: max(1, elements * kind.bytes // f32.bytes)
    rows_read = 1 + p.backward + p.residual
    held = elements * rows_read
    ahead = rows_read * words(p.type) if cfg.parts else 0
    sums = elements if p.weight_gradient else 0
    weight = words(p.weight_type) if p.weight_type else 0
    return OTHER_REGISTERS + (held + ahead + sums + weight if cfg.held else 0)


def _gpu(p: RMSNormProblem, target) -> Space:
    space, limits, vector = Space(), target.limits, p.widest_vector
    few = p.rows_hint < FEW_ROWS * limits.compute_units
    for pieces in sorted(PIECES) if few else PIECES:
        threads = min(_power_of_two(ceil(p.width / (vector * pieces))), limits.max_workgroup)
        rows = max(1, WORKGROUP // threads)
        for parts in _parts(p, limits, threads * rows, few):
            config = GpuConfig(threads, rows, vector, parts=parts)
            waves = limits.waves_with(registers(p, config)) * limits.simds
            needed = config.workgroup_size // limits.lanes
            way = f"{ceil(p.width / (threads * vector))} vectors a thread, {threads} threads a row"
            way += f", {parts} workgroups that stay" if parts else ""
            if any(c.config == config for c in space.kept):
                continue
            if waves < needed:
                why = f"{way}: {needed} waves with {registers(p, config)} registers each, and {waves} fit"
                space.dropped.append(Dropped(config, why))
            else:
                space.kept.append(Candidate(config, way))
    if not space.kept:
        threads = min(_power_of_two(ceil(p.width / (vector * STREAMED_PIECES))), limits.max_workgroup)
        for parts in _parts(p, limits, threads, few):
            config = GpuConfig(threads, max(1, WORKGROUP // threads), vector, held=False, parts=parts)
            space.kept.append(Candidate(config, f"no registers hold rows of {p.width}: they are read twice"))
    return space


def _parts(p: RMSNormProblem, limits, workgroup: int, few: bool) -> tuple[int, ...]:
    """Choices of `parts`: one workgroup a tile, or as many as stay resident, which fetch ahead."""
    resident = max(1, limits.lanes * limits.simds * limits.max_waves // workgroup // 2) * limits.compute_units
    if p.backward:
        return (resident,)
    return (0,) if few else (0, resident)


def _power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << max(0, n - 1).bit_length()
