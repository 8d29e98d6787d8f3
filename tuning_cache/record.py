"""What the cache did not know where it was asked: one JSON line a problem, appended by any number of processes.

    {"format": 1, "op": "mm", "problem": {"n": 4096, ..., "m": 16}, "target": {"arch": "gfx950", ...}}
    {"format": 1, "op": "eager topk", "problem": {"dtype": "f32", ...}, "target": {...}}       a call's case

Writing costs the program nothing but a line: no exception, no line twice from a process, no more than FILE_MOST bytes.
A file that is read comes from outside: a line that is not whole (its process died, the disk was full) is passed over;
what is whole and not of this form is refused.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flykernels.forks import anew_in_children
from templates import kinds

from .entry import Key, canonical

log = logging.getLogger(__name__)

FORMAT = 1
FILE_MOST = 8 << 20  # bytes
READ_MOST = FILE_MOST + (4 << 20)  # processes that append in the same moment may go beyond by a line each
LINE_MOST = 4096  # bytes, written at once: POSIX keeps appended writes apart on local file systems
SIZE_MOST = 2**31 - 1
TEXT_MOST = 100  # characters of a name
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
EAGER = "eager "  # before the names of eager operators
DTYPES = ("f32", "bf16", "f16")
SELECTED = (*DTYPES, "f64", "i64", "i32", "i16", "i8", "u8")  # of topk, on a CPU
# What the cases of an eager operator hold, on a CPU and on a GPU, and of what type it is.
NORM = {"dtype": str, "weight_dtype": str, "rows": int, "width": int}
CASES: dict[str, list[dict[str, type]]] = {
    "rms_norm": [{**NORM, "gradient": bool}, {**NORM, "align": int}],
    "rms_norm_backward": [{**NORM, "align": int, "weight_gradient": bool}],
    "add_rms_norm": [{**NORM, "align": int, "direction": str, "residual": bool, "rstd": bool, "weight_gradient": bool}],
    "topk": [{"dtype": str, "largest": bool, "layout": str, "wide": bool, "rows": int, "width": int, "k": int}],
}
NAMES = {
    "dtype": DTYPES, "weight_dtype": (*DTYPES, "none"), "layout": ("last", "any"), "align": (2, 4, 8, 16),
    "direction": ("forward", "backward"),
}  # fmt: skip
# ATen's operation -> the template that serves it.
TEMPLATES = {
    "mm": "gemm", "addmm": "gemm", "bmm": "gemm", "baddbmm": "gemm", "_mkl_linear": "gemm", "_scaled_mm": "scaled_gemm",
    "_grouped_mm": "grouped_gemm", "_scaled_grouped_mm": "grouped_gemm.scaled",
}  # fmt: skip


class RecordError(ValueError):
    """Why a record is refused, and where."""


@dataclass(frozen=True)
class Miss:
    """One problem that the cache did not know.

    template  name of the template
    problem   the template's problem
    sizes     what the key holds beside it: {"m": 16}, {"m": "symbolic", "batch": 3}
    target    as keys hold it
    """

    op: str
    template: str
    problem: Any
    sizes: dict
    target: dict

    @property
    def name(self) -> str:
        return self.op

    def key(self, versions: dict) -> Key:
        return Key(self.op, {**self.problem.key(), **self.sizes}, self.target, versions)


@dataclass(frozen=True)
class EagerMiss:
    """One case of an eager operator that the cache did not know.

    op      "rms_norm", "rms_norm_backward", "add_rms_norm" or "topk"
    case    its bucket, as keys hold it
    target  as keys hold it"""

    op: str
    case: dict
    target: dict

    @property
    def name(self) -> str:
        """As a key's op."""
        return f"{EAGER}{self.op}"

    @property
    def template(self) -> str:
        return "rms_norm" if "rms_norm" in self.op else self.op

    def key(self, versions: dict) -> Key:
        return Key(self.name, self.case, self.target, versions)


# -- writing
_lock = threading.Lock()
anew_in_children(sys.modules[__name__], _lock=threading.Lock)
_noted: dict[str, set[str]] = {}  # by file: the lines that it is known to hold
_complained: set[str] = set()


def note(key: Key, path: str) -> None:
    """Appends a key to a record unless it is there. Never raises."""
    try:
        line = canonical({"format": FORMAT, "op": key.op, "problem": key.problem, "target": key.target})
        with _lock:
            if path not in _noted:
                _noted[path] = _lines(path)
            if line in _noted[path]:
                return
            _noted[path].add(line)  # also if it cannot be written: a program that misses is not to try each time
            _append(path, line.encode() + b"\n")
    except Exception as e:
        if path not in _complained:
            _complained.add(path)
            log.warning("FLYKERNELS_RECORD=%s: not recorded: %s: %s", path, type(e).__name__, e)


def _lines(path: str) -> set[str]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer does not block it
    except FileNotFoundError:
        return set()
    with open(file, "rb") as held:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return set()
        return set(held.read(FILE_MOST).decode(errors="replace").splitlines())


def _append(path: str, line: bytes) -> None:
    if len(line) > LINE_MOST:
        raise RecordError(f"a line of {len(line)} bytes")
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        held = os.fstat(file)
        if not stat.S_ISREG(held.st_mode):
            raise RecordError("it is not a plain file")
        if held.st_size + len(line) >= FILE_MOST:
            raise RecordError(
                f"it would be larger than {FILE_MOST} bytes; read it with `flykernels warmup`, then move it"
            )
        if held.st_size and os.pread(file, 1, held.st_size - 1) != b"\n":
            line = b"\n" + line  # after a half line, whose process could not even end it
        if os.write(file, line) != len(line):
            os.write(file, b"\n")  # the half line stays, by itself
            raise OSError("the line was not written whole")
    finally:
        os.close(file)


# -- reading
def is_record(path: Path) -> bool:
    """Whether the first whole line of a file says that it is a record: its first may have been cut off."""
    try:
        with path.open("rb") as file:
            lines = file.read(READ_MOST).splitlines()
    except OSError:
        return False
    for line in lines:
        try:
            first = json.loads(line[: LINE_MOST + 1])
        except (ValueError, RecursionError):
            continue
        return isinstance(first, dict) and {"format", "op", "problem", "target"} <= set(first)
    return False


def read(path: Path) -> tuple[list[Miss | EagerMiss], int]:
    """(the problems of a record, each once, in their order; how many lines were not whole). RecordError if it holds
    what no process of ours writes."""
    try:
        with path.open("rb") as file:
            data = file.read(READ_MOST + 1)
    except OSError as e:
        raise RecordError(f"{path} cannot be read: {e.strerror}") from None
    if len(data) > READ_MOST:
        raise RecordError(f"{path.name} has more than {READ_MOST} bytes")
    found: dict[str, Miss | EagerMiss] = {}
    torn = 0
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            held = json.loads(line)
        except (ValueError, RecursionError):
            torn += 1
            continue
        try:
            found.setdefault(canonical(held), _miss(held))
        except RecordError as e:
            raise RecordError(f"{path.name}, line {number}: {e}") from None
    if not found:
        raise RecordError(f"{path.name} holds no problem")
    return list(found.values()), torn


def _miss(held: Any) -> Miss | EagerMiss:
    if not isinstance(held, dict) or set(held) != {"format", "op", "problem", "target"}:
        raise RecordError("not an object with format, op, problem and target, and no others")
    if type(held["format"]) is not int or held["format"] != FORMAT:
        raise RecordError(f"format {_short(held['format'])}; this version reads {FORMAT}")
    op, given, target = held["op"], held["problem"], held["target"]
    if not isinstance(given, dict) or not isinstance(target, dict):
        raise RecordError("problem and target are objects")
    for name, value in target.items():
        _plain(f"target's {_short(name)}", value, None)
    if isinstance(op, str) and op.startswith(EAGER):
        return EagerMiss(op.removeprefix(EAGER), _case(op.removeprefix(EAGER), given), dict(target))
    base, _, activation = op.partition("+") if isinstance(op, str) else ("", "", "")
    if base not in TEMPLATES or (activation or "none") not in ACTIVATIONS or op.endswith("+"):
        raise RecordError(f"op is {_short(op)}; known are {', '.join(TEMPLATES)}, also with an activation")
    template = TEMPLATES[base]
    kind = kinds.problem_class(template)
    known = {f.name: f.type for f in fields(kind)}
    own = [x for x in ("m", "batch", "tokens") if x not in known]
    if not set(known) <= set(given) <= {*known, *own}:
        raise RecordError(f"a problem of {template} has {', '.join([*known, *own])}")
    for name, value in given.items():
        _plain(f"problem's {name}", value, {"int": int, "bool": bool, "str": str}.get(str(known.get(name))))
    sizes = {name: given[name] for name in own if name in given}
    if any(type(v) is not int and v != "symbolic" for v in sizes.values()):
        raise RecordError(f"sizes are {_short(str(sizes))}: whole numbers or symbolic")
    problem = kind(**{name: given[name] for name in known})
    return Miss(op, template, problem, sizes, dict(target))


def _case(op: str, given: dict) -> dict:
    """The case of an eager operator, checked."""
    if op not in CASES:
        raise RecordError(f"eager operator {_short(op)}; known are {', '.join(CASES)}")
    kinds = next((held for held in CASES[op] if set(held) == set(given)), None)
    if kinds is None:
        known = "; or ".join(", ".join(held) for held in CASES[op])
        raise RecordError(f"a case of {op} has {known}")
    for name, value in given.items():
        _plain(f"case's {name}", value, kinds[name])
        names = SELECTED if (op, name) == ("topk", "dtype") else NAMES.get(name, (value,))
        if value not in names or (kinds[name] is int and value < 1):
            raise RecordError(f"case's {name} is {_short(value)}")
    return dict(given)


def _plain(what: str, value: Any, kind: type | None) -> None:
    """A whole number, a name, or yes or no, within bounds."""
    kinds_: Sequence[type] = (kind,) if kind is not None else (int, str)
    if type(value) not in kinds_:
        raise RecordError(f"{what} is {_short(value)}, not of its type")
    if type(value) is int and not 0 <= value <= SIZE_MOST:
        raise RecordError(f"{what} is {_short(value)}, not from 0 to {SIZE_MOST}")
    if isinstance(value, str) and (len(value) > TEXT_MOST or not value.isprintable()):
        raise RecordError(f"{what} is {_short(value)}, too long or unprintable")


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 1 << 64 else f"a number of {value.bit_length()} bits"
    text = value if isinstance(value, str) else type(value).__name__
    return repr(text if len(text) < 40 else text[:40] + "...")
