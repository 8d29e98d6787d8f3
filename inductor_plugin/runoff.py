"""The last round of an autotuning call on a GPU: the best of ours, of ATen's and of Triton's, timed side by side.

Inductor's own times decide who takes part (see gpu_timing for why they decide no more than that). Each is timed with
operands that L2 does not hold and with operands that it does: a model's layers see both. One of ours wins only if it is
no slower than the others in either."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from . import choices, devices, gpu_timing, measure, private, settings
from .choices import Choice
from .gpu_timing import Pair

log = logging.getLogger(__name__)
names = private.load().names
LOSS_MOST = 0.02  # of INERTIA in one state, where the other makes up for it: the others are never faster
OURS, TEMPLATES = 8, 2  # that take part; of ATen's all do
CLOSE_OURS, CLOSE_OTHERS = 3, 2  # that are timed at length, where the best of both sides
APART = 0.08  # are no further apart than this
BEHIND_MS = 1e3  # what Inductor takes in of other kernels never saves as much


def settle(timings: dict) -> dict:
    """Milliseconds by choice as Inductor is to know them (see `_told`), after the finalists were measured anew. What it
    was given where there is nothing to decide, or where it cannot be measured here. Never raises."""
    try:
        finalists = _finalists(timings)
        if not finalists or devices.capturing() or private.tunes_elsewhere():
            return timings
        return _known(timings, finalists) or _measured(timings, finalists)
    except Exception as e:
        log.warning("the candidates' last round was left out: %s: %s", type(e).__name__, e)
        if devices.out_of_memory(e):
            devices.free_memory()
        return timings


def among_ours(milliseconds: dict) -> dict:
    """Times of candidates of ours alone, the best of them measured as `settle` does, nobody else's below them. On a
    CPU, or where nothing may be measured here, what it was given. Never raises."""
    try:
        valid = sorted((c for c, t in milliseconds.items() if math.isfinite(t)), key=milliseconds.__getitem__)[:OURS]
        if not valid or valid[0].layout.device.type == "cpu" or devices.capturing() or private.tunes_elsewhere():
            return milliseconds
        with devices.on_device(valid[0].layout.device):
            times = gpu_timing.in_turns([c.bmreq.calls for c in valid], valid[0].bmreq.bytes)
        timed = {c: t for c, t in zip(valid, times) if t is not None}
        found = {c: t.mean * (1 + measure.INERTIA) for c, t in timed.items()}
        _remember(valid[0].request.key, timed)
        return {c: found.get(c, max(t, *found.values())) for c, t in milliseconds.items()}
    except Exception as e:
        log.warning("our candidates were not measured again: %s: %s", type(e).__name__, e)
        return milliseconds


def _finalists(timings: dict) -> list[Any]:
    """Empty where it is no contest between ours and others on a GPU."""
    valid = sorted((c for c, t in timings.items() if math.isfinite(t)), key=timings.__getitem__)
    ours = [c for c in valid if isinstance(c, Choice)][:OURS]
    aten = [c for c in valid if isinstance(c, names.ExternKernelCaller)]
    others = [c for c in valid if c not in aten and not isinstance(c, Choice)][:TEMPLATES]
    if not ours or not (aten or others) or ours[0].layout.device.type == "cpu":
        return []
    return [*aten, *others, *ours]


_decided: dict[tuple, dict[str, float]] = {}  # what `settle` has found in this process, for a model's equal layers
_together: dict[str, frozenset[str]] = {}  # of a problem, by its key's digest, who was timed in the last round


def _question(timings: dict, finalists: list[Any]) -> tuple:
    request = next(c.request for c in finalists if isinstance(c, Choice))
    followed = any(isinstance(c, Choice) and c.followed for c in finalists)
    # of those that failed Inductor tells the first time alone
    return request.key.digest, followed, frozenset(choices.label(c) for c, t in timings.items() if math.isfinite(t))


def _known(timings: dict, finalists: list[Any]) -> dict | None:
    """What was found for the same candidates of the same problem, if the cache still holds what came of it."""
    found = _decided.get(_question(timings, finalists))
    request = next(c.request for c in finalists if isinstance(c, Choice))
    entry = settings.store().lookup(request.key) if found is not None else None
    if found is None or entry is None or not entry.winner:
        return None
    return {c: found.get(choices.label(c), math.inf) for c in timings}


def comparable(key: Any, microseconds: dict[str, float]) -> dict[str, float]:
    """A problem's times by name, none of those that this process's last round left out below those that it took.

    Those are of single calls, between which a GPU cools: at its power limit they are up to a fifth shorter than the
    same kernel's in a row, as the last round and `among_ours` time it."""
    timed = _together.get(key.digest, frozenset()) & microseconds.keys()
    least = max((microseconds[name] for name in timed), default=0.0)
    return {name: us if name in timed else max(us, least) for name, us in microseconds.items()}


def decided(timings: dict) -> bool:
    """Whether these candidates were settled before in this process. Never raises."""
    try:
        finalists = _finalists(timings)
        return bool(finalists) and _known(timings, finalists) is not None
    except Exception as e:
        log.debug("not known whether this was settled: %s: %s", type(e).__name__, e)
        return False


def _measured(timings: dict, finalists: list[Any]) -> dict:
    with devices.on_device(finalists[-1].layout.device):  # ours
        makers, kept = [], []
        sane = functools.partial(measure.sane, finalists[-1].spec)
        for choice in finalists:
            make = choice.bmreq.calls if isinstance(choice, Choice) else functools.partial(private.calls, choice, sane)
            try:
                make(1)[0]()
            except Exception as e:
                log.info("%s takes no part in the last round: %s: %s", choices.label(choice), type(e).__name__, e)
                continue
            makers.append(make)
            kept.append(choice)
        of = lambda times: {c: t for c, t in zip(kept, times) if t is not None}
        likely = lambda times: [kept.index(c) for c in _close(of(times))]
        timed = of(gpu_timing.in_turns(makers, finalists[-1].bmreq.bytes, measure.variants(finalists[-1].spec), likely))
        followed = any(isinstance(c, Choice) and c.followed for c in kept)
        apart = _pass(finalists[-1].bmreq.output_tensor_meta) if followed else Pair(0.0, 0.0)
    found = judged(timed)
    counted = judged({c: t if _takes_in(c) else t.plus(apart) for c, t in timed.items()})
    slowest = max(found.values())
    settled = {c: found.get(c, max(t, slowest)) for c, t in timings.items()}
    request = next(c.request for c in kept if isinstance(c, Choice))
    words = [f"{choices.label(c)} {t.cold * 1e3:.1f} us cold, {t.hot * 1e3:.1f} hot" for c, t in timed.items()]
    log.info("%s M=%s: last round: %s", request.op, request.m, "; ".join(words))
    choices.record(settled, request.op, [], list(settled))
    _remember(request.key, timed)
    _together[request.key.digest] = frozenset(map(choices.label, timed))
    sure = isinstance(min(counted, key=counted.__getitem__), Choice)
    told = _told(timings, found, {c: t.mean for c, t in timed.items()}, sure)
    _decided[_question(timings, finalists)] = {choices.label(c): t for c, t in told.items()}
    return told


def _told(timings: dict, judged: dict, alone: dict, sure: bool) -> dict:
    """Milliseconds by choice for Inductor: who won, and nothing that would mislead it in what it decides next.

    It then times its templates with what follows, or what comes before, taken in, and takes such a kernel if it is
    faster than the times here and the other kernel's together. It times single calls: small ones take a few
    microseconds longer than in the last round, large ones, which power holds back in a row, a sixth less. Beside the
    last round's times it would take in nothing of small products, and whatever there is of large ones. So times stay
    on its own scale, and only who of the finalists is faster comes from the last round. Where one of ours won though
    all that could be taken in was counted, nothing that is timed later comes before it.

    judged: milliseconds that order the finalists; alone: theirs as they are; sure: whether ours won with that counted
    """
    theirs = {c: t for c, t in timings.items() if not isinstance(c, Choice)}
    winner = min(judged, key=judged.__getitem__)
    ours = {winner: judged[winner]} if isinstance(winner, Choice) else {}
    if ours and sure:
        return {c: ours.get(c, max(t, judged[winner] + BEHIND_MS)) for c, t in timings.items()}
    timed = {c: t for c, t in alone.items() if c in theirs}
    scale = min(theirs.values()) / min(timed.values())
    found = {c: t * scale for c, t in {**timed, **ours}.items()}
    slowest = max(found.values())
    return {c: found.get(c, max(t, slowest + (0.0 if c in theirs else BEHIND_MS))) for c, t in timings.items()}


def _remember(key: Any, timed: dict[Any, Pair]) -> None:
    """Puts what was timed in a row into the cache, in place of single calls' times."""
    choices.remember(key, {choices.label(c): t.mean * 1e3 for c, t in timed.items()})


def _close(times: dict[Any, Pair]) -> list[Any]:
    """The few that are to be timed at length: none where quick times tell who is faster, ours or the others."""
    mean = lambda choice: times[choice].mean
    others = sorted((c for c in times if not isinstance(c, Choice)), key=mean)
    ours = [c for c in times if isinstance(c, Choice)]
    if not ours or not others or mean(min(ours, key=mean)) > mean(others[0]) * (1 + APART):
        return []
    order = judged(times)  # one that is no slower in either state comes before one that is faster in the mean alone
    return [*others[:CLOSE_OTHERS], *sorted(ours, key=order.__getitem__)[:CLOSE_OURS]]


def _pass(held: Any) -> Pair:
    """What one more kernel takes that reads and writes C once: a template of Inductor's takes such a one in."""
    return _pass_over(tuple(held.sizes), held.dtype, held.device)


@functools.cache
def _pass_over(sizes: tuple[int, ...], dtype: Any, device: Any) -> Pair:
    import torch

    made = lambda: torch.ones(sizes, dtype=dtype, device=device)
    calls: Any = lambda count: [functools.partial(torch.relu, made()) for _ in range(count)]
    (found,) = gpu_timing.in_turns([calls], 2 * math.prod(sizes) * dtype.itemsize)
    assert found is not None  # all are timed at length
    return found


def _takes_in(choice: Any) -> bool:
    """Whether it is a template of Inductor's, whose kernel computes what follows as well."""
    return not isinstance(choice, (Choice, names.ExternKernelCaller))


def judged(times: dict[Any, Pair]) -> dict[Any, float]:
    """Milliseconds that order the finalists: the mean of both states; of ours with INERTIA added; of one that in one
    state is slower than what would win without ours, more than that one's."""
    rival = min((t for c, t in times.items() if not isinstance(c, Choice)), key=lambda t: t.mean)
    found = {}
    for choice, t in times.items():
        found[choice] = t.mean
        if isinstance(choice, Choice):
            slower = 1 + measure.INERTIA
            found[choice] *= slower
            if max(t.cold / rival.cold, t.hot / rival.hot) * slower > 1 + LOSS_MOST:
                found[choice] = max(found[choice], rival.mean * (1 + LOSS_MOST))
    return found
