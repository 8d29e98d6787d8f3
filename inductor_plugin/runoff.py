"""The last round of an autotuning call on a GPU: the best of ours, of ATen's and of Triton's, timed side by side.

Inductor's own times decide who takes part (see gpu_timing for why they decide no more than that)."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from . import choices, gpu_timing, measure, private
from .choices import Choice

log = logging.getLogger(__name__)
names = private.load().names
OURS, TEMPLATES = 3, 2  # that take part; of ATen's all do


def settle(timings: dict) -> dict:
    """Milliseconds by choice, those of the finalists measured anew, and nobody else's below them. What it was given
    where there is nothing to decide, or where it cannot be measured here. Never raises."""
    try:
        finalists = _finalists(timings)
        if not finalists or private.capturing() or private.tunes_elsewhere():
            return timings
        return _measured(timings, finalists)
    except Exception as e:
        log.warning("the candidates' last round was left out: %s: %s", type(e).__name__, e)
        if private.out_of_memory(e):
            private.free_memory()
        return timings


def among_ours(milliseconds: dict) -> dict:
    """Times of candidates of ours alone, the best of them measured as `settle` does, nobody else's below them. On a
    CPU, or where nothing may be measured here, what it was given. Never raises."""
    try:
        valid = sorted((c for c, t in milliseconds.items() if math.isfinite(t)), key=milliseconds.__getitem__)[:OURS]
        if not valid or valid[0].layout.device.type == "cpu" or private.capturing() or private.tunes_elsewhere():
            return milliseconds
        with private.on_device(valid[0].layout.device):
            times = gpu_timing.in_turns([c.bmreq.calls for c in valid], valid[0].bmreq.bytes)
        found = {c: t * (1 + measure.INERTIA) for c, t in zip(valid, times)}
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


def _measured(timings: dict, finalists: list[Any]) -> dict:
    with private.on_device(finalists[-1].layout.device):  # ours
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
        times = gpu_timing.in_turns(makers, finalists[-1].bmreq.bytes)
    found = {c: t * (1 + measure.INERTIA) if isinstance(c, Choice) else t for c, t in zip(kept, times)}
    slowest = max(found.values())
    settled = {c: found.get(c, max(t, slowest)) for c, t in timings.items()}
    request = next(c.request for c in kept if isinstance(c, Choice))
    told = ", ".join(f"{choices.label(c)} {t * 1e3:.1f} us" for c, t in sorted(found.items(), key=lambda x: x[1]))
    log.info("%s M=%s: last round: %s", request.op, request.m, told)
    choices.record(settled, request.op, [], list(settled))
    return settled
