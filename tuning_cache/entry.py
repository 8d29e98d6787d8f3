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
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

from flykernels.forks import anew_in_children

try:  # three times as fast, where it is installed: flykernels[fast]
    import orjson
    from orjson import loads
except ImportError:
    orjson = None  # type: ignore[assignment]
    from json import loads  # type: ignore[assignment]

log = logging.getLogger(__name__)

FORMAT = 1
FAILED = float("inf")
SOURCES = ("measured", "compiled")
NUMBERS = (float, int)  # no booleans


class EntryError(ValueError):
    """A file that is not a whole, unaltered entry of this format."""


class NewerFormat(EntryError):
    """An entry written by a later version: left alone."""


# The one JSON text of plain data: sorted keys, no spaces.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

PLAIN = frozenset((int, str, bool, type(None)))  # types whose values have one JSON text, whoever writes it
VERSIONS = '"versions":'
DECODER = json.JSONDecoder()
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
        return hashlib.sha256("".join((*self.text, "}")).encode()).hexdigest()

    @functools.cached_property
    def text(self) -> tuple[str, str]:
        """The canonical key's text: as far as its versions, and these without MLIR's."""
        versions = {k: v for k, v in self.versions.items() if k != "mlir"}
        op, problem, target = _quoted(self.op), _plain(self.problem), _common(self.target)
        return f'{{"op":{op},"problem":{problem},"target":{target},{VERSIONS}', _common(versions)

    def same_address(self, other: Key) -> bool:
        """Whether the digests are equal, without taking them."""
        if self is other:
            return True
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
        return digests(self.artefact) if self.artefact else []


@dataclass(frozen=True)
class Entry:
    """One problem's record.

    winner   name of the candidate to use; None: not decided yet
    timings  by name
    source   how it came about: "measured" (on this target), or "compiled" (artefacts only)
    """

    key: Key
    winner: str | None = None
    timings: Mapping[str, Timing] = field(default_factory=dict)
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
        """Reads what `to_json` or `to_line` wrote. NewerFormat or EntryError if it is anything else.

        A line's timings are read when somebody asks for them (see `Later`)."""
        try:
            if isinstance(text, bytes) and text.startswith(HEAD):
                entry = _of_line(text)
                if entry is not None:
                    return entry
            return _entry(_body(text))
        except EntryError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise EntryError(f"not an entry: {e}") from e


def sealed(line: bytes) -> bytes | None:
    """The canonical JSON in a line of `to_line` whose digest fits; None for anything else."""
    end = len(line) - line.endswith(b"\n")
    body = line[len(HEAD) : max(0, end - TAIL_BYTES)]
    tail = TAIL % (FORMAT, hashlib.sha256(body).hexdigest().encode())
    return body if line.startswith(HEAD) and line[end - TAIL_BYTES : end] == tail else None


def entry_of(line: bytes, key: Key) -> Entry | None:
    """The entry in a line of `to_line`, if it is of the key's address: told by the key's text, without parsing it. None
    for anything else, of which `Entry.from_json` says what it is."""
    cut = _cut(line) if line.startswith(HEAD) else None
    before, own = key.text
    if cut is None or not cut[0].startswith(before):
        return None
    named, winner, source, timings = cut
    versions = _versions(named[len(before) :])
    if versions is None or versions[0] != own or source not in SOURCES:
        return None
    try:
        won = loads(winner)
    except ValueError:
        return None
    theirs = key if versions[1] == key.versions else replace(key, versions=versions[1])
    return Entry(theirs, won, Later(timings), source) if won is None or type(won) is str else None


def check_line(line: bytes) -> tuple[str, Key, list[str], str]:
    """(address, key, code objects' digests, a text that is the same where target and versions are) of a line of
    `to_line` of which everything is read and found right: for imports, where a million are. NewerFormat or EntryError,
    as `Entry.from_json`."""
    try:
        cut = _cut(line)
        if cut is None:
            entry = _entry(_body(line))
            found = [digest for t in entry.timings.values() for digest in t.artefacts]
            return entry.key.digest, entry.key, found, canonical([entry.key.target, entry.key.versions])
        named, winner, source, timings = cut
        key = _checked(loads(named), loads(winner), source, {}).key
        artefacts = [digest for name, t in loads(timings).items() for digest in _artefacts(name, t)]
        return _address(named, key), key, artefacts, named[named.find('"target":') :]
    except EntryError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise EntryError(f"not an entry: {e}") from e


def _address(named: str, key: Key) -> str:
    """`Key.digest` of the key's canonical JSON: what is not canonical has another."""
    at = named.rfind(VERSIONS)
    versions = _versions(named[at + len(VERSIONS) :])
    if versions is None:
        return key.digest
    return hashlib.sha256(f"{named[:at]}{VERSIONS}{versions[0]}}}".encode()).hexdigest()


@functools.lru_cache(1024)
def _versions(text: str) -> tuple[str, dict] | None:
    """(canonical JSON of versions without MLIR's, all of them), from what follows VERSIONS in a key's; None if that is
    not all of it."""
    try:
        held = json.loads(text[:-1])
        return canonical({k: v for k, v in held.items() if k != "mlir"}), held
    except (ValueError, AttributeError):
        return None


def _plain(values: dict) -> str:
    """`canonical` of a flat object, by orjson where both write the same: whole numbers of 64 bits, ASCII."""
    if orjson is not None and PLAIN.issuperset(map(type, values.values())):
        try:
            text = orjson.dumps(values, option=orjson.OPT_SORT_KEYS).decode()
        except TypeError:
            return canonical(values)
        if text.isascii() and "\x7f" not in text:
            return text
    return canonical(values)


def _common(values: dict) -> str:
    """`canonical` of what many keys share, such as their target: remembered where all of it is plain."""
    kinds = tuple(map(type, values.values()))
    return _remembered(tuple(values.items()), kinds) if PLAIN.issuperset(kinds) else canonical(values)


@functools.lru_cache(256)
def _remembered(items: tuple[tuple[str, Any], ...], _kinds: tuple[type, ...]) -> str:
    """Types belong to what is asked, since True == 1."""
    return canonical(dict(items))


class Later(Mapping[str, Timing]):
    """The timings in an entry's line, parsed when somebody asks for them; one by its name without the others, since a
    look-up wants the winner alone. What is sealed and yet not right (so somebody wrote it) holds none."""

    def __init__(self, text: str):
        self._text = text  # canonical JSON

    def read(self) -> dict[str, Timing]:
        """All of them. EntryError, or what parsing raises, where they are not right."""
        return {name: _timing(name, t) for name, t in loads(self._text).items()}

    @functools.cached_property
    def _all(self) -> dict[str, Timing]:
        try:
            return self.read()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            log.warning("an entry's timings are passed over: %s", e)
            return {}

    def __getitem__(self, name: str) -> Timing:
        if "_all" not in self.__dict__:
            start = canonical(name) + ':{"artefact":'
            at = self._text.find(start)
            if at >= 0 and self._text.find(start, at + 1) < 0:
                try:
                    return _timing(name, DECODER.raw_decode(self._text, at + len(start) - len('{"artefact":'))[0])
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    pass  # something else of that name
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return repr(self._all)


def _cut(line: bytes) -> tuple[str, str, str, str] | None:
    """The JSON of a sealed line's key and winner, its source, and its timings' JSON; None where it is not of the form
    that `to_line` writes. If the text up to `},"source"` is one whole JSON value, it is the key's."""
    body = sealed(line)
    if body is None or not body.startswith(b'{"key":'):
        return None
    text = body.decode()
    end, last = text.find('},"source":"') + 1, text.rfind(',"winner":')
    source, comma, timings = text[end + len(',"source":"') : last].partition('","timings":')
    if not 0 < end < last or not comma:
        return None
    return text[len('{"key":') : end], text[last + len(',"winner":') : -1], source, timings


def _of_line(line: bytes) -> Entry | None:
    """The entry in a sealed line, its timings unread; None where `_cut` finds none."""
    cut = _cut(line)
    if cut is None:
        return None
    key, winner, source, timings = cut
    try:
        return _checked(loads(key), loads(winner), source, Later(timings))
    except ValueError as e:
        if isinstance(e, EntryError):
            raise
        return None


def _body(text: str | bytes) -> dict:
    """The entry's JSON values, once their digest is found right."""
    data = text.encode() if isinstance(text, str) else text
    file = json.loads(data)
    if type(file["format"]) is not int or file["format"] < 1:
        raise EntryError(f"format {file['format']!r} is not a number of a format")
    if file["format"] > FORMAT:
        raise NewerFormat(f"format {file['format']}; this version reads up to {FORMAT}")
    if hashlib.sha256(canonical(file["entry"]).encode()).hexdigest() != file["sha256"]:
        raise EntryError("the content does not match its SHA-256")
    return file["entry"]


def _entry(body: dict) -> Entry:
    timings = {name: _timing(name, t) for name, t in body["timings"].items()}
    return _checked(body["key"], body["winner"], body["source"], timings)


def _checked(held: dict, winner: Any, source: Any, timings: Mapping[str, Timing]) -> Entry:
    """Types and ranges: a digest says that it was written whole, not that it was written in good faith."""
    if len(held) != 4 or type(held["op"]) is not str:
        raise EntryError(f"not an entry: the key is {held!r}")
    for name in ("problem", "target", "versions"):
        if type(held[name]) is not dict:
            raise EntryError(f"not an entry: {name} is {held[name]!r}, not an object")
    if winner is not None and type(winner) is not str:
        raise EntryError(f"not an entry: winner is {winner!r}")
    if source not in SOURCES:
        raise EntryError(f"not an entry: source is {source!r}, not one of {', '.join(SOURCES)}")
    return Entry(Key(held["op"], held["problem"], held["target"], held["versions"]), winner, timings, source)


def _timing(name: str, t: dict[str, Any]) -> Timing:
    _artefacts(name, t)
    timing = Timing.__new__(Timing)  # a frozen dataclass's __init__ takes longer than all else here
    timing.__dict__.update(t)
    return timing


def _artefacts(name: str, t: dict[str, Any]) -> list[str]:
    """The digests that a timing's JSON values name. EntryError where it is not right; "failed" becomes FAILED."""
    us, config, artefact, why = t["microseconds"], t["config"], t["artefact"], t["quarantined"]
    if us == "failed":
        us = t["microseconds"] = FAILED
    if t["name"] != name or len(t) != 5 or not (config is None or type(config) is dict):
        raise EntryError(f"not an entry: the timing {name!r} is not whole")
    if not (why is None or type(why) is str):
        raise EntryError(f"not an entry: the timing {name!r} is quarantined for {why!r}")
    if us is not None and (type(us) not in NUMBERS or not us >= 0):  # NaN is neither
        raise EntryError(f"not an entry: {name}: {us!r} microseconds")
    if artefact is None:
        return []
    found = digests(artefact) if type(artefact) is str else []
    if not found or not all(map(is_digest, found)):
        raise EntryError(f"not an entry: {name}: the artefact {artefact!r} is not a SHA-256")
    return found


def digests(artefact: str) -> list[str]:
    """Of a timing's artefact: one, or several joined by "|" and "+"."""
    return [artefact] if len(artefact) == 64 else re.split(r"[|+]", artefact)


for _cached in (Key.__dict__["digest"], Key.__dict__["text"], Later.__dict__["_all"]):
    if hasattr(_cached, "lock"):  # Python 3.11's has one for all keys
        anew_in_children(_cached, lock=threading.RLock)

DIGEST = re.compile(r"[0-9a-f]{64}")  # SHA-256 in hex; full matches only: it becomes a part of a path


def is_digest(text: object) -> bool:
    """Whether it is a SHA-256 in hex, and nothing else."""
    return isinstance(text, str) and DIGEST.fullmatch(text) is not None
