"""In a torch.distributed job one rank decides a problem, and all use its choice.

Ranks compile when they like, and some not at all (their graph comes from Inductor's cache), so nothing here waits for
all of them: no collective operation (vllm#57423 is what those lead to when caches differ). The job's key-value store
holds, for each problem, who decides it or what was decided:

1. Whoever asks first puts down what its cache knows, or that it tunes the problem now. That is one atomic step, so
   there is one first.
2. Whoever finds a decision uses it, also against its own cache, and keeps it.
3. Whoever finds that another rank is tuning waits, LOCK_SECONDS at most (FLYKERNELS_RANK_SECONDS). After that it puts
   down that ATen serves the problem, again in one step: the rank that was tuning then finds this, and does the same.

A decision is an entry's text, so what it names is checked as what lies in the cache is; the winner's code object goes
along. Ranks on other hardware ask under other keys."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import Any

from tuning_cache import LOCK_SECONDS, Entry, Key, merge, parcel

from . import settings

log = logging.getLogger(__name__)

ATEN = "aten"  # the decision that nothing of ours is to be used
TUNING = "tuning "  # + the rank that does it
POLL_SECONDS = 0.05
PREFIX = "flykernels/"


@dataclass(frozen=True)
class Turn:
    """What a rank is to do about a problem.

    entry  use what this decides, or
    mine   tune it, then `publish`; neither: ATen serves it"""

    entry: Entry | None
    mine: bool


def ask(key: Key, known: Entry | None, may_tune: bool = True) -> Turn:
    """Whose turn it is to decide a problem. Outside a job of several ranks: what is known, else this process's. Never
    raises, and waits no longer than the limit.

    known     an entry with a winner from this rank's cache, if it has one
    may_tune  False: a problem that nobody knows is not tuned here (a pinned cache, a graph that is being captured)"""
    store = _store()
    if store is None:
        return Turn(known, known is None and may_tune)
    mine = _text(known) if known is not None else f"{TUNING}{_rank()}" if may_tune else ATEN
    name = PREFIX + key.digest
    try:
        held = store.compare_set(name, "", mine).decode()
        if held == mine:
            return Turn(known, known is None and may_tune)
        held = _waited(store, name, held, key)
    except Exception as e:
        log.warning("%s: the job's ranks could not be asked (%s: %s); ATen serves it", key.op, type(e).__name__, e)
        return Turn(None, False)
    return Turn(_entry(held, key), False)


def publish(key: Key, decided: Entry | None) -> bool:
    """Tells the other ranks what was decided (None: ATen serves it), for whoever's turn it was. False if they have gone
    on without: then ATen serves it here as well. Never raises."""
    store = _store()
    if store is None:
        return True
    try:
        mine = _text(decided) if decided is not None and decided.winner else ATEN
        return store.compare_set(PREFIX + key.digest, f"{TUNING}{_rank()}", mine).decode() == mine
    except Exception as e:
        log.warning("%s: the job's ranks were not told (%s: %s)", key.op, type(e).__name__, e)
        return False


def seconds() -> float:
    """How long a rank waits for another's decision."""
    text = os.environ.get("FLYKERNELS_RANK_SECONDS", "")
    try:
        found = float(text) if text else LOCK_SECONDS
        return found if found >= 0 else LOCK_SECONDS
    except ValueError:
        return LOCK_SECONDS


def _waited(store: Any, name: str, held: str, key: Key) -> str:
    """What is decided. It is asked for again and again: a blocking call would keep the store from other threads, whose
    communication may be what the deciding rank waits for."""
    end = time.monotonic() + seconds()
    while held.startswith(TUNING):
        if time.monotonic() >= end:
            log.warning("%s: rank %s has not decided it in %.0f s; ATen serves it", key.op, held[7:], seconds())
            held = store.compare_set(name, held, ATEN).decode()
            continue
        time.sleep(POLL_SECONDS)
        held = store.get(name).decode()
    return held


def _store() -> Any:
    """The job's key-value store; None outside a job of several ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return dist.distributed_c10d._get_default_store()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _text(entry: Entry) -> str:
    return parcel.pack(settings.store(), entry).decode()


def _entry(text: str, key: Key) -> Entry | None:
    """The decision of another rank, kept in this one's cache; None for ATEN, and for what is not for this key."""
    if text == ATEN:
        return None
    keep = settings.mode() == "tune"
    decided = lambda here, theirs: replace(merge(theirs, here), winner=theirs.winner)
    try:
        return parcel.unpack(settings.store(), text.encode(), key, keep, decided)
    except parcel.ParcelError as e:
        log.warning("%s: another rank's decision cannot be read (%s); ATen serves it", key.op, e)
        return None
