"""What the cache knows of one problem on one machine: a key that a person can read, what was measured, what won.

An entry's file is JSON: `{"format": 1, "sha256": ..., "entry": {...}}`, the digest being of the entry's canonical JSON.
Anything else (cut off, altered, from a newer format) is skipped by the reader: never fatal, never rewritten in place.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

FORMAT = 1
FAILED = float("inf")
SOURCES = ("measured", "compiled")


class EntryError(ValueError):
    """A file that is not a whole, unaltered entry of this format."""


class NewerFormat(EntryError):
    """An entry written by a later version: left alone."""


def canonical(data: object) -> str:
    """The one JSON text of `data`: sorted keys, no spaces."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Key:
    """Which problem, where, for which versions.

    op        "mm", "addmm", "bmm", ...
    problem   everything a kernel is specialised for, and the sizes it is tuned for (JSON values)
    target    arch, product and what else decides speed (CU count, threads, CPU features)
    versions  plugin, template digest and MLIR. MLIR's is not part of the address, so that a machine without MLIR finds
              what one with it has stored; where both have one they must agree (see `agrees`)
    """

    op: str
    problem: dict
    target: dict
    versions: dict

    @property
    def digest(self) -> str:
        """Address in the cache: SHA-256 of the canonical key without MLIR's version, in hex."""
        versions = {k: v for k, v in self.versions.items() if k != "mlir"}
        return hashlib.sha256(canonical(asdict(replace(self, versions=versions))).encode()).hexdigest()

    def agrees(self, other: Key) -> bool:
        """Whether two keys of one address may stand for each other: same compiler, or one side has none."""
        mine, theirs = self.versions.get("mlir"), other.versions.get("mlir")
        return mine is None or theirs is None or mine == theirs


@dataclass(frozen=True)
class Timing:
    """What became of one candidate.

    name          the candidate's readable name; unique in its entry
    microseconds  median; None: not measured; inf: failed
    config        ours: the configuration (JSON values); others: None
    artefact      ours: digest of its code object in the store; of several, joined by "|" and "+"
    quarantined   why it must not win: it failed, or its result was wrong on the inputs described here
    """

    name: str
    microseconds: float | None = None
    config: dict | None = None
    artefact: str | None = None
    quarantined: str | None = None

    @property
    def artefacts(self) -> list[str]:
        """The digests of all its code objects."""
        return re.split(r"[|+]", self.artefact) if self.artefact else []


@dataclass(frozen=True)
class Entry:
    """One problem's record.

    winner   name of the candidate to use; None: not decided yet
    timings  by name
    source   how it came about: "measured" (on this target), or "compiled" (artefacts only)
    """

    key: Key
    winner: str | None = None
    timings: dict[str, Timing] = field(default_factory=dict)
    source: str = "measured"

    def with_timing(self, timing: Timing) -> Entry:
        return replace(self, timings={**self.timings, timing.name: timing})

    def best(self) -> Timing | None:
        """The winner's record, if there is one."""
        return self.timings.get(self.winner) if self.winner else None

    # -- to and from text
    def to_json(self) -> str:
        body = asdict(self)
        for t in body["timings"].values():
            if t["microseconds"] == FAILED:  # JSON has no infinity
                t["microseconds"] = "failed"
        digest = hashlib.sha256(canonical(body).encode()).hexdigest()
        return json.dumps({"format": FORMAT, "sha256": digest, "entry": body}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> Entry:
        """Reads what `to_json` wrote. NewerFormat or EntryError if it is anything else."""
        try:
            file = json.loads(text)
            if type(file["format"]) is not int or file["format"] < 1:
                raise EntryError(f"format {file['format']!r} is not a number of a format")
            if file["format"] > FORMAT:
                raise NewerFormat(f"format {file['format']}; this version reads up to {FORMAT}")
            body = file["entry"]
            if hashlib.sha256(canonical(body).encode()).hexdigest() != file["sha256"]:
                raise EntryError("the content does not match its SHA-256")
            for t in body["timings"].values():
                if t["microseconds"] == "failed":
                    t["microseconds"] = FAILED
            timings = {name: Timing(**t) for name, t in body["timings"].items()}
            entry = Entry(Key(**body["key"]), body["winner"], timings, body["source"])
        except EntryError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise EntryError(f"not an entry: {e}") from e
        wrong = next(_wrong(entry), None)
        if wrong:
            raise EntryError(f"not an entry: {wrong}")
        return entry


DIGEST = re.compile(r"[0-9a-f]{64}")  # SHA-256 in hex; full matches only: it becomes a part of a path


def is_digest(text: object) -> bool:
    """Whether it is a SHA-256 in hex, and nothing else."""
    return isinstance(text, str) and DIGEST.fullmatch(text) is not None


def _wrong(entry: Entry) -> Iterator[str]:
    """What is not of its type or range: a digest says who wrote a file whole, not that it was written in good faith."""
    key, text = entry.key, (str, type(None))
    if not isinstance(key.op, str):
        yield f"op is {key.op!r}"
    for name in ("problem", "target", "versions"):
        if not isinstance(getattr(key, name), dict):
            yield f"{name} is {getattr(key, name)!r}, not an object"
    if not isinstance(entry.winner, text):
        yield f"winner is {entry.winner!r}"
    if entry.source not in SOURCES:
        yield f"source is {entry.source!r}, not one of {', '.join(SOURCES)}"
    for name, t in entry.timings.items():
        us = t.microseconds
        if t.name != name or not isinstance(t.quarantined, text) or not isinstance(t.config, (dict, type(None))):
            yield f"the timing {name!r} is not whole"
        if us is not None and (type(us) not in (int, float) or math.isnan(us) or us < 0):
            yield f"{name}: {us!r} microseconds"
        if not isinstance(t.artefact, text) or not all(map(is_digest, t.artefacts)):
            yield f"{name}: the artefact {t.artefact!r} is not a SHA-256"
