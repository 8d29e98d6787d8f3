"""Which configurations are worth compiling for a problem, each with the limit that speaks for it."""

from __future__ import annotations

from math import ceil

from flykernels.dtypes import f32
from templates.gemm.space import Candidate, Dropped, Space

from .config import GpuConfig, X86Config
from .problem import RMSNormProblem

WORKGROUP = 256  # threads of a workgroup where rows are narrow: 4 waves of gfx950's, 8 warps
PIECES = (2, 4, 1, 8)  # vectors of a row that a thread holds: more hide latency, fewer leave room for more waves
FEW_ROWS = 1.0  # rows a compute unit: with fewer, a row's time is what counts, and more threads share it
OTHER_REGISTERS = 24  # addresses, sums, the vector that is being worked on
STREAMED_PIECES = 4  # vectors a thread and turn, where rows are read twice
SLICE_BYTES = 32 * 1024  # of a row, at least: what one workgroup reads in about the time of a launch


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
    """What a thread needs, about: rows in f32, the weight as stored, what is fetched ahead, the weight's sums and terms."""
    if not cfg.held:
        return OTHER_REGISTERS
    elements = ceil(p.width / (cfg.threads_per_row * cfg.vector)) * cfg.vector
    words = lambda kind: max(1, elements * kind.bytes // f32.bytes)
    rows_read = 1 + p.backward + p.residual
    ahead = rows_read * words(p.type) if cfg.parts and cfg.ahead else 0
    sums = 2 * elements if p.weight_gradient and cfg.sums else 0
    weight = words(p.weight_type) if p.weight_type else 0
    return OTHER_REGISTERS + rows_read * elements + ahead + sums + weight


def _gpu(p: RMSNormProblem, target) -> Space:
    """Rows held by few or many threads; where no registers hold them, or few wide rows leave units idle, otherwise."""
    space, limits = Space(), target.limits
    few = p.rows_hint < FEW_ROWS * limits.compute_units
    for config in _held(p, limits, few):
        waves = limits.waves_with(registers(p, config)) * limits.simds
        needed = config.workgroup_size // limits.lanes
        way = _words(p, config)
        if waves < needed:
            why = f"{way}: {needed} waves with {registers(p, config)} registers each, and {waves} fit"
            space.dropped.append(Dropped(config, why))
        elif all(c.config != config for c in space.kept):
            space.kept.append(Candidate(config, way))
    sliced = list(_sliced(p, limits)) if few and not p.backward else []
    space.kept = [*sliced, *space.kept] if not space.kept else [*space.kept, *sliced]
    if all(c.config.slices > 1 for c in space.kept):
        threads = min(_power_of_two(ceil(p.width / (p.widest_vector * STREAMED_PIECES))), limits.max_workgroup)
        for parts in _parts(p, limits, threads, few):
            config = GpuConfig(threads, max(1, WORKGROUP // threads), p.widest_vector, held=False, parts=parts)
            space.kept.append(Candidate(config, f"no registers hold rows of {p.width}: they are read twice"))
    return space


def _held(p: RMSNormProblem, limits, few: bool):
    """Configurations with rows in registers, best guess first."""
    vector = p.widest_vector
    for pieces in sorted(PIECES) if few else PIECES:
        threads = min(_power_of_two(ceil(p.width / (vector * pieces))), limits.max_workgroup)
        rows = max(1, WORKGROUP // threads)
        for parts in _parts(p, limits, threads * rows, few):
            for sums, ahead in ((True, True), (True, False), (False, False)) if p.weight_gradient else ((False, True),):
                yield GpuConfig(threads, rows, vector, parts=parts, ahead=ahead and parts > 0, sums=sums)


def _sliced(p: RMSNormProblem, limits):
    """Rows cut into slices so that all compute units have one."""
    slices = min(p.width * p.type.bytes // SLICE_BYTES, limits.compute_units // p.rows_hint)
    if slices > 1:
        threads = min(_power_of_two(ceil(p.width / (slices * p.widest_vector))), limits.max_workgroup)
        config = GpuConfig(threads, 1, p.widest_vector, slices=slices)
        yield Candidate(config, f"{p.rows_hint} rows would leave units idle: {slices} workgroups share each")


def _words(p: RMSNormProblem, cfg: GpuConfig) -> str:
    vectors = ceil(p.width / (cfg.threads_per_row * cfg.vector))
    stay = f", {cfg.parts} workgroups that stay{' and fetch ahead' if cfg.ahead else ''}" if cfg.parts else ""
    return f"{vectors} vectors a thread, {cfg.threads_per_row} threads a row{stay}"


def _parts(p: RMSNormProblem, limits, workgroup: int, few: bool) -> tuple[int, ...]:
    """Choices of `parts`: one workgroup a tile, or as many as half fill the device with waves, which stay."""
    resident = max(1, limits.lanes * limits.simds * limits.max_waves // workgroup // 2) * limits.compute_units
    if p.backward:
        return (resident,)
    return (0,) if few else (0, resident)


def _power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << max(0, n - 1).bit_length()
