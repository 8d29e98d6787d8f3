"""What the cache knows of one problem on one machine: a key that a person can read, what was measured, what won.

An entry's text is JSON: `{"format": 1, "sha256": ..., "entry": {...}}`, the digest being of the entry's canonical JSON.
It is indented in a file of its own, and one canonical line in a segment, where the digest is checked on the text as it
stands. Anything else (cut off, altered, from a newer format) is skipped by the reader: never fatal, never rewritten in
place.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

FORMAT = 1
FAILED = float("inf")
SOURCES = ("measured", "compiled")


class EntryError(ValueError):
    """A file that is not a whole, unaltered entry of this format."""


class NewerFormat(EntryError):
    """An entry written by a later version: left alone."""


# The one JSON text of plain data: sorted keys, no spaces.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

HEAD, TAIL = b'{"entry":', b',"format":%d,"sha256":"%s"}'  # of a line, around the entry's canonical JSON
TAIL_BYTES = len(TAIL % (FORMAT, b"0" * 64))


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

    @functools.cached_property
    def digest(self) -> str:
        """Address in the cache: SHA-256 of the canonical key without MLIR's version, in hex."""
        versions = {k: v for k, v in self.versions.items() if k != "mlir"}
        named = {"op": self.op, "problem": self.problem, "target": self.target, "versions": versions}
        return hashlib.sha256(canonical(named).encode()).hexdigest()

    def same_address(self, other: Key) -> bool:
        """Whether the digests are equal, without taking them."""
        if self.op != other.op or self.problem != other.problem or self.target != other.target:
            return False
        mine, theirs = ({k: v for k, v in x.versions.items() if k != "mlir"} for x in (self, other))
        return mine == theirs

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
    def _body(self) -> dict:
        """The entry as JSON values; JSON has no infinity, so a time of FAILED is the word."""
        timings = {}
        for name, t in self.timings.items():
            timings[name] = {**vars(t), "microseconds": "failed" if t.microseconds == FAILED else t.microseconds}
        key = {name: getattr(self.key, name) for name in ("op", "problem", "target", "versions")}
        return {"key": key, "winner": self.winner, "timings": timings, "source": self.source}

    def to_json(self) -> str:
        """For a file of its own, indented."""
        body = self._body()
        digest = hashlib.sha256(canonical(body).encode()).hexdigest()
        return json.dumps({"format": FORMAT, "sha256": digest, "entry": body}, indent=1, sort_keys=True) + "\n"

    def to_line(self) -> bytes:
        """For a segment: the same on one line."""
        body = canonical(self._body()).encode()
        return HEAD + body + TAIL % (FORMAT, hashlib.sha256(body).hexdigest().encode()) + b"\n"

    @staticmethod
    def from_json(text: str | bytes) -> Entry:
        """Reads what `to_json` or `to_line` wrote. NewerFormat or EntryError if it is anything else."""
        try:
            return _entry(_body(text))
        except EntryError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise EntryError(f"not an entry: {e}") from e


def sealed(line: bytes) -> bytes | None:
    """The canonical JSON in a line of `to_line` whose digest fits; None for anything else."""
    line = line.rstrip(b"\n")
    body = line[len(HEAD) : -TAIL_BYTES]
    if line == HEAD + body + TAIL % (FORMAT, hashlib.sha256(body).hexdigest().encode()):
        return body
    return None


def _body(text: str | bytes) -> dict:
    """The entry's JSON values, once their digest is found right."""
    data = text.encode() if isinstance(text, str) else text
    if data.startswith(HEAD):
        body = sealed(data)
        if body is not None:
            return json.loads(body)
    file = json.loads(data)
    if type(file["format"]) is not int or file["format"] < 1:
        raise EntryError(f"format {file['format']!r} is not a number of a format")
    if file["format"] > FORMAT:
        raise NewerFormat(f"format {file['format']}; this version reads up to {FORMAT}")
    if hashlib.sha256(canonical(file["entry"]).encode()).hexdigest() != file["sha256"]:
        raise EntryError("the content does not match its SHA-256")
    return file["entry"]


def _entry(body: dict) -> Entry:
    """Checks types and ranges: a digest says that it was written whole, not that it was written in good faith."""
    held = body["key"]
    if len(held) != 4 or type(held["op"]) is not str:
        raise EntryError(f"not an entry: the key is {held!r}")
    for name in ("problem", "target", "versions"):
        if type(held[name]) is not dict:
            raise EntryError(f"not an entry: {name} is {held[name]!r}, not an object")
    winner, source = body["winner"], body["source"]
    if winner is not None and type(winner) is not str:
        raise EntryError(f"not an entry: winner is {winner!r}")
    if source not in SOURCES:
        raise EntryError(f"not an entry: source is {source!r}, not one of {', '.join(SOURCES)}")
    timings = {name: _timing(name, t) for name, t in body["timings"].items()}
    return Entry(Key(held["op"], held["problem"], held["target"], held["versions"]), winner, timings, source)


def _timing(name: str, t: dict[str, Any]) -> Timing:
    us, config, artefact, why = t["microseconds"], t["config"], t["artefact"], t["quarantined"]
    if us == "failed":
        us = FAILED
    if t["name"] != name or len(t) != 5 or not (config is None or type(config) is dict):
        raise EntryError(f"not an entry: the timing {name!r} is not whole")
    if not (why is None or type(why) is str):
        raise EntryError(f"not an entry: the timing {name!r} is quarantined for {why!r}")
    if us is not None and (type(us) not in (int, float) or not us >= 0):  # NaN is neither
        raise EntryError(f"not an entry: {name}: {us!r} microseconds")
    timing = Timing(name, us, config, artefact, why)
    if artefact is not None and not (type(artefact) is str and all(map(is_digest, timing.artefacts))):
        raise EntryError(f"not an entry: {name}: the artefact {artefact!r} is not a SHA-256")
    return timing


DIGEST = re.compile(r"[0-9a-f]{64}")  # SHA-256 in hex; full matches only: it becomes a part of a path


def is_digest(text: object) -> bool:
    """Whether it is a SHA-256 in hex, and nothing else."""
    return isinstance(text, str) and DIGEST.fullmatch(text) is not None
