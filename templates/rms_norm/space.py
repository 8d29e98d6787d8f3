"""Which configurations are worth compiling for a problem, each with the limit that speaks for it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from flykernels.dtypes import f32
from templates.gemm.space import Candidate, Dropped, Space

from .config import GpuConfig, X86Config
from .problem import VECTOR_BYTES, RMSNormProblem

# What follows was read off a sweep of all widths from 512 to 16384 on an H200; AMD's chip has the same shape.
WORKGROUP_LEAST = 128  # threads: where rows are narrow, several share a workgroup
THREADS_A_ROW = 256  # with fewer a row takes long, with more they wait for each other
VECTORS_LEAST, VECTORS_MOST = 2, 8  # of a row that a thread holds, where threads can be chosen so
STAY_AHEAD, STAY = 4, 2  # workgroups that stay fill a 4th of the wave slots where they fetch ahead, half where not
CACHED_BYTES = 32 << 20  # of x, at most, for which workgroups that stay are the first guess: x and y in an L2 of 50 MB
ONCE_BYTES = 16 * 1024  # of a row, from which going past the caches is tried where they do not hold all rows
# Of x, at most: what is the first to be evicted does not displace what other kernels left in L2, which pays while some
# of x may stay there too. Beyond that it costs 4% between other kernels, though not where the same call is repeated.
ONCE_MOST = 64 << 20
THREADS_ONCE = 512  # that share such a row
STAY_ONCE = (0, 1, 2)  # workgroups a unit that stay then; 0: one a row
FEW_ROWS = 1.0  # rows a compute unit: with fewer, units idle
ALONE_ROWS = 4  # up to which one workgroup may take them all, backward: a second launch takes longer
OTHER_REGISTERS, STREAMED_REGISTERS = 15, 48  # addresses, sums, the vector that is being worked on
STREAMED_VECTORS = 4  # a thread, where rows are read twice
SLICE_BYTES = 8 * 1024  # of a row, at least: less is read in a fraction of a launch's time
SLICED_FROM = 128 * 1024  # bytes of a row: one workgroup reads this in about the time of a launch


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
    """What a thread needs, about: rows in f32; where workgroups stay the weight and what is fetched ahead; sums."""
    if not cfg.held:
        return STREAMED_REGISTERS
    elements = ceil(p.columns / (cfg.slices * cfg.threads_per_row * cfg.vector)) * cfg.vector
    words = lambda kind: max(1, elements * kind.bytes // f32.bytes)
    rows_read = 1 + p.backward + p.residual
    ahead = rows_read * words(p.type) if cfg.parts and cfg.ahead else 0
    weight = words(p.weight_type) if p.weight_type and cfg.parts else 0
    sums = 2 * elements if p.weight_gradient and cfg.sums else 0
    return OTHER_REGISTERS + elements // 16 + rows_read * elements + ahead + weight + sums


def fitting(p: RMSNormProblem, cfg: GpuConfig, limits) -> int:
    """Workgroups that a compute unit has registers for; 0 if not even for one."""
    return limits.waves_with(registers(p, cfg)) * limits.simds * limits.lanes // cfg.workgroup_size


def _gpu(p: RMSNormProblem, target) -> Space:
    """Rows held in registers; read twice where none hold them; in slices where few wide rows leave units idle."""
    space, limits = Space(), target.limits
    few = p.rows_hint < FEW_ROWS * limits.compute_units
    held, once = [*_held(p, limits)], [*_once(p, limits)] if target.name == "sm90a" else []
    for config in (*held, *once):
        fit = fitting(p, config, limits)
        if not fit:
            why = f"{config.workgroup_size} threads with {registers(p, config)} registers each do not fit on a unit"
            space.dropped.append(Dropped(config, f"{_words(p, config)}: {why}"))
            continue
        if target.name == "sm90a" and not few:  # with few rows, loads in flight count for more than workgroups
            stay = config.parts // limits.compute_units
            config = replace(config, beside=min(fit, stay or fit))
        if all(c.config != config for c in space.kept):
            space.kept.append(Candidate(config, _words(p, config)))
    if not space.kept:
        threads = min(_power_of_two(ceil(p.columns / (p.widest_vector * STREAMED_VECTORS))), limits.max_workgroup)
        for parts in dict.fromkeys(_parts(p, limits, threads)):
            config = GpuConfig(threads, max(1, WORKGROUP_LEAST // threads), p.widest_vector, held=False, parts=parts)
            space.kept.append(Candidate(config, f"no registers hold rows of {p.width}: they are read twice"))
    space.kept = [*_sliced(p, limits), *space.kept]
    return space


def _threads(p: RMSNormProblem, limits) -> int:
    """That hold a row in registers."""
    most, least = (_power_of_two(ceil(p.columns / (p.widest_vector * n))) for n in (VECTORS_LEAST, VECTORS_MOST))
    return min(max(least, min(THREADS_A_ROW, most)), limits.max_workgroup)


def _once(p: RMSNormProblem, limits):
    """Wide rows that caches do not hold: they go past them."""
    row = p.columns * p.type.bytes
    if (
        p.backward
        or not CACHED_BYTES <= p.rows_hint * row <= ONCE_MOST
        or row < ONCE_BYTES
        or p.widest_vector * p.type.bytes < VECTOR_BYTES
    ):
        return
    threads = max(_threads(p, limits), THREADS_ONCE)
    for stay in STAY_ONCE:
        yield GpuConfig(threads, 1, p.widest_vector, parts=stay * limits.compute_units, once=True)


def _held(p: RMSNormProblem, limits):
    """Configurations with rows in registers, best guess first."""
    vector, best = p.widest_vector, _threads(p, limits)
    choices = dict.fromkeys((best, min(2 * best, limits.max_workgroup), max(1, best // 2)))
    if p.weight_gradient and p.rows_hint <= ALONE_ROWS:
        for threads in dict.fromkeys(max(limits.lanes, min(n * best, limits.max_workgroup)) for n in (2, 1)):
            yield GpuConfig(threads, 1, vector, parts=1, ahead=False, sums=True)
        choices = {best: None}
    for threads in choices:
        rows = max(1, WORKGROUP_LEAST // threads)
        for parts in _parts(p, limits, threads * rows):
            ahead = parts == _resident(limits, threads * rows, STAY_AHEAD)
            yield GpuConfig(threads, rows, vector, parts=parts, ahead=ahead, sums=p.weight_gradient)
            if p.weight_gradient and not ahead:
                yield GpuConfig(threads, rows, vector, parts=parts, ahead=False)


def _sliced(p: RMSNormProblem, limits):
    """Rows cut into slices so that all compute units have one, and registers hold it."""
    row = p.columns * p.type.bytes
    slices = min(row // SLICE_BYTES, limits.compute_units // p.rows_hint)
    if slices < 2 or row < SLICED_FROM or p.backward:
        return
    for n in (slices, 2 * slices, 4 * slices):
        threads = min(_power_of_two(ceil(p.columns / (n * p.widest_vector))), limits.max_workgroup)
        config = GpuConfig(max(threads, limits.lanes), 1, p.widest_vector, slices=n)
        if fitting(p, config, limits):
            yield Candidate(config, f"{p.rows_hint} rows would leave units idle: {n} workgroups share each")
            return


def _parts(p: RMSNormProblem, limits, workgroup: int) -> tuple[int, ...]:
    """Choices of `parts`: one workgroup a tile, or as many as stay."""
    stay = tuple(_resident(limits, workgroup, share) for share in (STAY_AHEAD, STAY))
    if p.backward:
        return stay
    if p.rows_hint < FEW_ROWS * limits.compute_units:
        return (0,)
    cached = p.rows_hint * p.columns * p.type.bytes <= CACHED_BYTES
    return (*stay, 0) if cached else (0, stay[0])


def _resident(limits, workgroup: int, share: int) -> int:
    """Workgroups that fill 1 / share of the device's wave slots, at least one on each unit."""
    slots = limits.lanes * limits.simds * limits.max_waves
    return max(1, slots // (workgroup * share)) * limits.compute_units


def _words(p: RMSNormProblem, cfg: GpuConfig) -> str:
    vectors = ceil(p.columns / (cfg.threads_per_row * cfg.vector))
    stay = f", {cfg.parts} workgroups that stay{' and fetch ahead' if cfg.ahead else ''}" if cfg.parts else ""
    once = ", past the caches" if cfg.once else ""
    return f"{vectors} vectors a thread, {cfg.threads_per_row} threads a row{stay}{once}"


def _power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << max(0, n - 1).bit_length()
