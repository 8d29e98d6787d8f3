"""How two entries of one key become one: what was measured is never lost, and what is here goes before what comes.

1. A candidate with a time goes before one without; of two times the one here stays. A quarantine is a time: failed.
2. An artefact that is missing here is taken over where both have the same configuration.
3. The winner here stays. Without one here, theirs is taken, unless its candidate is quarantined here.
4. The result counts as measured if either does.
5. Entries of two compilers do not mix: the measured one is kept whole, and the one here if both or neither are.
"""

from __future__ import annotations

from dataclasses import replace

from .entry import FAILED, Entry, Timing


def merge(here: Entry, theirs: Entry) -> Entry:
    """One entry of two. ValueError if their keys have different addresses."""
    if here.key.digest != theirs.key.digest:
        raise ValueError(f"entries of different keys: {here.key} and {theirs.key}")
    if not here.key.agrees(theirs.key):
        return theirs if is_measured(theirs) and not is_measured(here) else here
    timings = dict(here.timings)
    for name, t in theirs.timings.items():
        timings[name] = _timing(timings[name], t) if name in timings else t
    winner = here.winner or theirs.winner
    if not here.winner and winner in timings and timings[winner].quarantined:
        winner = None
    versions = {k: here.key.versions.get(k) or v for k, v in theirs.key.versions.items()}
    key = replace(here.key, versions={**here.key.versions, **versions})
    source = "measured" if is_measured(here) or is_measured(theirs) else "compiled"
    return Entry(key, winner, timings, source)


def is_measured(entry: Entry) -> bool:
    """Whether a winner is known, or at least a time: that a candidate failed says nothing of the others."""
    return bool(entry.winner) or any(t.microseconds not in (None, FAILED) for t in entry.timings.values())


def _timing(here: Timing, theirs: Timing) -> Timing:
    if here.microseconds is None and theirs.microseconds is not None:
        here, theirs = theirs, here
    if here.artefact is None and here.quarantined is None and here.config == theirs.config:
        return replace(here, artefact=theirs.artefact)
    return here
