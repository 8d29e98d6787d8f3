"""Which calls of an eager operator are ours: decided by measurement, kept in the tuning cache, never by a constant.

A *case* is a bucket of calls: operator, dtypes, flags, sizes by powers of two. Its cache entry says who won there.
What the cache does not know is, by FLYKERNELS_MODE,

    tune           measured when first met (some tenths of a second a case), as `flykernels warmup --eager` does ahead
    pinned         ATen's, and nothing is compiled or measured
    pinned-strict  an error

and ATen's while a CUDA graph is being captured, in every mode but pinned-strict. A kernel whose results differ from
ATen's on the inputs measured is quarantined and never used.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuning_cache import FAILED, Entry, Key, Timing

from . import asked, ranks, settings
from .counters import counters
from .fingerprint import versions
from .settings import PinnedMiss

log = logging.getLogger(__name__)

ATEN = "ATen"
INERTIA = 0.03  # by which ours must be faster: a tie, or noise, leaves the user with what they had
ROUNDS = 9
LONG_SECONDS = 20e-3  # a call that takes so long is not warmed up
TURN_SECONDS = 200e-6  # that one turn of a round lasts at least
CASE_SECONDS = 0.6  # that measuring a case takes at most, but for a least number of rounds
LEAST_ROUNDS = 3
VETOES = 3  # measurements that must all say that a call is slower, where the GPU's own time says it is faster
QUEUE_ROUNDS, QUEUE_CALLS = 7, 10
QUEUE_CYCLES = 800_000  # of a GPU's clock, some 0.4 ms: in which ten calls are sent
_here = threading.local()  # measuring: whether this thread does
_at_it: set[int] = set()  # threads that measure
_cut_off = False  # whether this process was forked while another thread did


class Wrong(Exception):
    """A kernel's result differs from ATen's by more than types and sizes explain."""


@dataclass
class Candidate:
    """One kernel that may serve a case.

    name      unique in the case
    config    JSON values
    artefact  digests of its code objects
    use       makes calls of the case go to it
    """

    name: str
    config: dict
    artefact: str
    use: Callable[[], None]


def drawn(seed: int, size: Sequence[int], dtype: Any, device: Any = "cpu") -> Any:
    """Random elements to measure with; integers from a type's whole range. Equal seeds give equal elements.

    They come of a generator of their own: what the user draws, and seeds that another thread sets meanwhile, are as if
    nothing had been measured."""
    import torch

    own = torch.Generator(device).manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(size, device=device, generator=own, dtype=torch.float32).to(dtype)
    ends = torch.iinfo(dtype)
    return torch.randint(ends.min, ends.max, size, dtype=dtype, device=device, generator=own)


def bucket(n: int) -> int:
    """The power of two that stands for n: the least one that is not smaller."""
    return 1 << max(0, n - 1).bit_length()


def key_for(op: str, template: str, problem: dict, device: Any) -> Key:
    """The tuning cache's key of a case. device: a devices.Device."""
    return Key(f"eager {op}", problem, device.description(), versions(template))


def decide(key: Key, measure: Callable[[], Entry], may_measure: bool = True) -> tuple[Timing | None, bool]:
    """(the winner's record if it is ours else None, whether this stands for good).

    measure() -> the case's entry with a winner; called with the key's lock held, in mode "tune" only. What is asked
    while measuring, because another thread has dropped decisions meanwhile, is ATen's: nobody may wait for that lock.
    PinnedMiss in mode "pinned-strict" for what the cache does not know."""
    if getattr(_here, "measuring", False):
        return None, False
    store, mode = settings.store(), settings.mode()
    entry = store.lookup(key)
    known = entry if entry is not None and entry.winner else None
    if known is None and mode == "tune" and not may_measure:
        _missed(key)
        return None, False
    if known is None and mode == "tune" and _cut_off:
        log.info("%s %s: forked while another thread measured, so nothing is here; ATen serves it", key.op, key.problem)
        _missed(key)
        return None, True
    turn = ranks.ask(key, known, mode == "tune")
    if turn.entry is not None:
        counters["from cache"] += 1
        return _ours(turn.entry), True
    _missed(key)
    if mode == "pinned-strict":
        raise PinnedMiss(
            f"FLYKERNELS_MODE=pinned-strict, and the cache does not know {key.op} {key.problem}. Run `flykernels "
            "warmup --eager` in mode tune, or set FLYKERNELS_MODE=pinned to have ATen serve it"
        )
    if mode == "pinned":
        log.info("%s %s: not in the pinned cache; ATen serves it", key.op, key.problem)
        return None, True
    if not turn.mine:  # the job's ranks have agreed on ATen
        return None, True
    with store.lock(key):
        entry = store.lookup(key)
        if entry is None or not entry.winner:
            try:
                found = apart(measure)
            except BaseException:
                ranks.publish(key, None)
                raise
            entry = store.update(key, lambda _: found)
    return _ours(entry) if ranks.publish(key, entry) else None, True


def settled(what: str, serve: Callable[[], None], aten: Callable[[], None]) -> str | None:
    """Decides for a door: serve() puts who serves a call. A message that the call is to fail with, or None; after any
    other failure aten(), and the log says why."""
    try:
        serve()
    except PinnedMiss as e:
        return str(e)
    except Exception as e:
        log.warning("%s: no kernel (%s: %s); ATen serves it", what, type(e).__name__, e)
        aten()
    return None


def served(
    what: str, key: Key, measure: Callable[[], Entry], use: Callable[[Timing], None], aten: Callable[[], None],
    may_measure: bool = True,
) -> str | None:  # fmt: skip
    """`decide` for a door, `settled`: use(the winner's record), or aten()."""

    def serve() -> None:
        decided, for_good = decide(key, measure, may_measure)
        if decided is not None:
            use(decided)
        elif for_good:
            aten()

    return settled(what, serve, aten)


def _missed(key: Key) -> None:
    """Notes what the cache does not know, unless a warmup asks."""
    if asked.listener() is None:
        settings.missed(key)


def apart(work: Callable[[], Any]) -> Any:
    """work() in a thread of its own, on the caller's device and stream; what it returns or raises.

    What surrounds the call that is decided (hooks of saved tensors, modes, autocast, keys that a kernel below
    autograd does without) belongs to its thread, and must neither see the measurement nor change it."""
    import torch

    outcome: list[Any] = []
    on_gpu = torch.cuda.is_initialized()
    stream = torch.cuda.current_stream() if on_gpu else None

    def run() -> None:
        torch.get_num_threads()  # a new thread learns torch's number from this
        _here.measuring = True
        _at_it.add(threading.get_ident())
        try:
            with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
                outcome.append((work(), None))
        except BaseException as e:
            outcome.append((None, e))
        _at_it.discard(threading.get_ident())

    thread = threading.Thread(target=run, name="flykernels-measure", daemon=True)
    thread.start()
    thread.join()
    found, error = outcome[0]
    if error is not None:
        raise error
    return found


def _in_child() -> None:
    """Of a measurement that another thread was in, the child has half: modules, and a compiler's memory."""
    global _cut_off
    _cut_off = _cut_off or bool(_at_it)
    _at_it.clear()


os.register_at_fork(after_in_child=_in_child)


def won(decided: Timing) -> dict:
    """The configuration of a winner that is ours."""
    assert decided.config is not None
    return decided.config


def _ours(entry: Entry) -> Timing | None:
    best = entry.best()
    return best if best is not None and best.config is not None and not best.quarantined else None


def contest(
    key: Key, candidates: Sequence[Callable[[], Candidate]], run: Callable[[], Any], aten: Callable[[], None],
    check: Callable[[], None], wait: Callable[[], None] | None = None,
) -> Entry:  # fmt: skip
    """Measures a case: the user's call, served by ATen and by each candidate in turn, interleaved.

    On a GPU its own time decides, as graphs and busy programs see it; and then the winner must not make the call as it
    is slower either.

    candidates  each builds one; one that cannot be built is quarantined
    run         the call
    aten        makes calls of the case go to ATen
    check       runs the call and compares with ATen's result; raises Wrong
    wait        on a GPU: until it has finished"""
    entry, able = Entry(key), []
    for make in candidates:
        name = getattr(make, "name", "candidate")
        try:
            candidate = make()
            candidate.use()
            check()
            able.append(candidate)
        except Exception as e:
            log.warning("%s %s %s: quarantined: %s: %s", key.op, key.problem, name, type(e).__name__, e)
            entry = entry.with_timing(Timing(name, FAILED, {}, None, f"{type(e).__name__}: {e}"))
    if not able:
        aten()
        return _won(entry.with_timing(Timing(ATEN)), ATEN)
    counters["benchmarks"] += len(able)
    ways: list[tuple[str, Callable[[], None]]] = [(ATEN, aten), *((c.name, c.use) for c in able)]
    times = interleaved(ways, run, wait) if wait is None else in_queue(ways, run, wait)
    for candidate in able:
        us = statistics.median(times[candidate.name]) * 1e6
        entry = entry.with_timing(Timing(candidate.name, round(us, 3), candidate.config, candidate.artefact))
    entry = entry.with_timing(Timing(ATEN, round(statistics.median(times[ATEN]) * 1e6, 3)))
    best = min(able, key=lambda c: statistics.median(times[c.name]))
    ratio = statistics.median(a / o for a, o in zip(times[ATEN], times[best.name], strict=True))
    winner = best.name if ratio > 1 + INERTIA else ATEN
    if winner != ATEN and wait is not None:
        ways = [(ATEN, aten), (best.name, best.use)]
        if all(_slower(interleaved(ways, run, wait), best.name) for _ in range(VETOES)):
            winner = ATEN
    (best.use if winner != ATEN else aten)()
    log.info("%s %s: %s wins; ATen takes %.2f times as long as %s", key.op, key.problem, winner, ratio, best.name)
    return _won(entry, winner)


def _slower(times: dict[str, list[float]], name: str) -> bool:
    """Whether calls are slower than ATen's, by the least of their times: what else the CPU does counts not."""
    return min(times[name]) > (1 + INERTIA) * min(times[ATEN])


def _won(entry: Entry, winner: str) -> Entry:
    return replace(entry, winner=winner)


def in_queue(
    ways: Sequence[tuple[str, Callable[[], None]]], run: Callable[[], Any], wait: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of a GPU's own time a call, one figure a round: calls that wait in its queue behind other work, so that
    the time the CPU takes to send them does not count."""
    import torch

    from . import private

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: dict[str, list[float]] = {name: [] for name, _ in ways}
    for _, use in ways:
        use()
        run()
    wait()
    for r in range(QUEUE_ROUNDS):
        for name, use in (*ways[r % len(ways) :], *ways[: r % len(ways)]):
            use()
            private.occupy_gpu(QUEUE_CYCLES)
            start.record()
            for _ in range(QUEUE_CALLS):
                run()
            end.record()
            wait()
            times[name].append(start.elapsed_time(end) * 1e-3 / QUEUE_CALLS)
    return times


def interleaved(
    ways: Sequence[tuple[str, Callable[[], None]]], run: Callable[[], Any], wait: Callable[[], None] | None
) -> dict[str, list[float]]:
    """Seconds a call for each way, one figure a round; every way has its turn in every round."""
    wait = wait or (lambda: None)
    turns, total = {}, 0.0
    for name, use in ways:
        use()
        once = math.inf  # the least of some: one that is interrupted must not stand for a short call
        for _ in range(3):
            wait()
            start = time.perf_counter()
            run()
            wait()
            once = min(once, time.perf_counter() - start)
            if once >= LONG_SECONDS:
                break
        turns[name] = max(1, int(TURN_SECONDS / max(once, 1e-7)))
        total += max(once * turns[name], once)
    rounds = max(LEAST_ROUNDS, min(ROUNDS, int(CASE_SECONDS / max(total, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name, _ in ways}
    for r in range(rounds):
        for name, use in (*ways[r % len(ways) :], *ways[: r % len(ways)]):
            use()
            if turns[name] > 1:  # one that counts for little beside what follows finds who serves it
                run()
            wait()
            start = time.perf_counter()
            for _ in range(turns[name]):
                run()
            wait()
            times[name].append((time.perf_counter() - start) / turns[name])
    return times
