"""Checks the records of a bundle's segments one by one, on all cores where there are many.

A part of a segment is checked by `look`, here or in a process of its own (`python -m tuning_cache.checking`: a JSON
question on standard input, a JSON answer on standard output; unlike multiprocessing it never imports the user's main
module).
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flykernels.codeobject import CodeObject, CodeObjectError

from .archive import BundleError, Limits
from .entry import EntryError, canonical, check_line
from .manifest import Accept
from .segment import Segment

ALONE_MOST = 20_000  # records that are checked sooner than a process is started
NAMED, WANTED = 1, 2  # marks of a code object: an entry names it; one that is let in does
LET_IN = 1  # mark of an entry
ROOT = Path(__file__).parents[1]


@dataclass
class Question:
    """Rows [first, end) of the segment `path`, of a bundle with the objects' segments `objects`."""

    path: str
    first: int
    end: int
    objects: list[str]
    accept: Accept
    limits: Limits
    leave_out: bool


@dataclass
class Answer:
    """reason   why the bundle is refused, if it is
    let_in   a mark for each row
    named    marks of the code objects, by segment and row
    missing  code objects that are named and not there
    targets, versions  their canonical JSON, each once"""

    reason: str | None = None
    left_out: int = 0
    missing: int = 0
    let_in: bytes = b""
    named: list[bytes] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)


def look(asked: Question) -> Answer:
    """Reads and checks the records."""
    part = Segment(asked.path)
    try:
        return _entries(part, asked) if part.kind == "entries" else _objects(part, asked)
    except BundleError as e:
        return Answer(str(e))


def _entries(part: Segment, asked: Question) -> Answer:
    objects = [Segment(path) for path in asked.objects]
    named = [bytearray(o.count) for o in objects]
    answer, let_in = Answer(), bytearray()
    targets: dict[str, None] = {}
    versions: dict[str, None] = {}
    reasons: dict[str, str | None] = {}  # by target and versions
    for address, record, content in part.records(asked.first, asked.end):
        name = f"entry {address.hex()[:12]}"
        if record.size > asked.limits.entry:
            raise BundleError(f"{name} has {record.size} bytes; at most {asked.limits.entry} are taken")
        try:
            found, key, artefacts, about = check_line(content)
        except (UnicodeDecodeError, EntryError) as e:
            raise BundleError(f"{name}: {e}") from None
        if found != address.hex():
            raise BundleError(f"{name} is the entry of another key, {found}")
        if about not in reasons:
            reasons[about] = asked.accept.why_not(key)
            targets[canonical(key.target)] = versions[canonical(key.versions)] = None
        reason = reasons[about]
        if reason and not asked.leave_out:
            raise BundleError(f"{name} ({key.op}): {reason}")
        answer.left_out += reason is not None
        let_in.append(0 if reason else LET_IN)
        for artefact in artefacts:
            answer.missing += not _mark(objects, named, artefact, NAMED if reason else NAMED | WANTED)
    answer.let_in, answer.named = bytes(let_in), [bytes(marks) for marks in named]
    answer.targets, answer.versions = sorted(targets), sorted(versions)
    return answer


def _mark(objects: list[Segment], named: list[bytearray], artefact: str, mark: int) -> bool:
    for part, marks in zip(objects, named):
        record = part.find(bytes.fromhex(artefact))
        if record is not None:
            marks[record.row] |= mark
            return True
    return False


def _objects(part: Segment, asked: Question) -> Answer:
    for address, record, content in part.records(asked.first, asked.end):
        name = f"code object {address.hex()[:12]}"
        if record.size > asked.limits.object:
            raise BundleError(f"{name} has {record.size} bytes; at most {asked.limits.object} are taken")
        try:
            digest = CodeObject.from_bytes(content).digest
        except CodeObjectError as e:
            raise BundleError(f"{name}: {e}") from None
        if digest != address.hex():
            raise BundleError(f"{name} has the digest {digest}")
    return Answer()


def look_at_all(
    parts: Sequence[Segment], objects: Sequence[Segment], accept: Accept, limits: Limits, leave_out: bool
) -> list[tuple[Segment, Answer]]:
    """The answers to all rows of all parts, in order; ends with the first that refuses."""
    jobs = len(os.sched_getaffinity(0))
    step = max(ALONE_MOST, -(-sum(p.count for p in parts) // jobs))
    named = [str(o.path) for o in objects]
    asked = [
        (part, Question(str(part.path), first, min(first + step, part.count), named, accept, limits, leave_out))
        for part in parts
        for first in range(0, part.count, step)
    ]
    alone = len(asked) == 1 or sum(p.count for p in parts) <= ALONE_MOST
    if alone:
        return [(part, look(question)) for part, question in asked]
    with ThreadPoolExecutor(jobs) as threads:
        return list(zip([part for part, _ in asked], threads.map(_elsewhere, [question for _, question in asked])))


def _elsewhere(asked: Question) -> Answer:
    """`look` in a process of its own; here, should that end without an answer."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tuning_cache.checking"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asdict(asked)).encode(),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        held = json.loads(done.stdout)
        plain = base64.b64decode
        return Answer(**{**held, "let_in": plain(held["let_in"]), "named": [plain(x) for x in held["named"]]})
    except (OSError, ValueError):
        return look(asked)


def main() -> None:
    held = json.load(sys.stdin)
    asked = Question(**{**held, "accept": Accept(**held["accept"]), "limits": Limits(**held["limits"])})
    text = lambda data: base64.b64encode(data).decode()
    answer = look(asked)
    json.dump({**vars(answer), "let_in": text(answer.let_in), "named": [text(x) for x in answer.named]}, sys.stdout)


if __name__ == "__main__":
    main()
