"""Many entries, or many code objects, in one file that is written once: how a million of them are imported and found.

    flykernels segment 1 entries        a line
    {"entry":{...},"format":1,...}      the records, one after the other; of entries a line each, so that a person and
    ...                                 `grep` can read them; of code objects their files' bytes
    rows                                ROW each: address, where its record begins, how long it is; sorted by address
    fan-out                             U32 each: how many rows have an address below each of 2**bits equal parts
    footer                              FOOTER: counts, and SHA-256 of all before it

Addresses are SHA-256, so equally spread: the fan-out leads to about FAN rows, and a look-up takes three short reads of
a file that stays open and is mapped nowhere (a mapped file that goes away on a network file system kills the process).
Whoever reads a record checks it by what it is: an entry by its own digest and key, a code object by its address. So no
changed byte of index or footer can bring up a wrong record; it can only hide one, and `check` finds it.

Files are named after their content: `entries-00000007-<SHA-256>.fks`. A higher number hides a lower one's records.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import secrets
import struct
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FORMAT = 1
KINDS = ("entries", "objects")
NAME = re.compile(r"(entries|objects)-(\d{8})-([0-9a-f]{64})\.fks")
NEWER = re.compile(rb"flykernels segment (?!%d )\d+ " % FORMAT)  # another format's first line
ROW = struct.Struct("<32sQI")  # address, offset, bytes
FOOTER = struct.Struct("<QQB32s8s")  # rows, where the rows begin, bits of the fan-out, SHA-256, END
END = b"fks1 end"
FAN = 16  # rows that share a part of the fan-out, about
FAN_MOST = 4096  # more of them are no SHA-256s
BITS_MOST = 24
FAN_HELD = 1 << 20  # bytes of a fan-out that are kept in memory, enough for four million rows; a larger one is read
PAIR = struct.Struct("<II")  # of the fan-out: where a part begins, and the next one
BLOCK = 1 << 20  # bytes that are read at a time from end to end
PART_BYTES = 1 << 30  # of records, after which a further file is begun
HOUR = 3600.0  # how exactly the time of last use is kept


class SegmentError(ValueError):
    """A file that is not a whole segment of this format."""


class NewerSegment(SegmentError):
    """One that a later version has written: left alone."""


class Record(NamedTuple):
    """Where a record lies: its row's number, first byte and bytes."""

    row: int
    offset: int
    size: int


def magic(kind: str) -> bytes:
    """The first line."""
    return b"flykernels segment %d %s\n" % (FORMAT, kind.encode())


def name_of(kind: str, number: int, digest: str) -> str:
    return f"{kind}-{number:08d}-{digest}.fks"


class Segment:
    """One file, open for reading. SegmentError or OSError if it cannot be one. notes: `use` is to be noted.

    A record's time of last use (hours since 1970, U32, by row) is kept beside it in NAME.used: advice for pruning, not
    part of what is checked."""

    def __init__(self, path: str | os.PathLike, notes: bool = False):
        self.path = Path(path)
        self._used, self._fan = -1, b""
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.bytes = os.fstat(self._file).st_size
            head = os.pread(self._file, 64, 0)
            self.kind = next((kind for kind in KINDS if head.startswith(magic(kind))), "")
            if not self.kind:
                raise (NewerSegment if NEWER.match(head) else SegmentError)(f"it begins with {head[:24]!r}")
            tail = os.pread(self._file, FOOTER.size, self.bytes - FOOTER.size) if self.bytes > FOOTER.size else b""
            if len(tail) != FOOTER.size or not tail.endswith(END):
                raise SegmentError("it is cut off: it has no footer")
            self.count, self.rows_at, self.bits, self.digest, _ = FOOTER.unpack(tail)
            self.fan_at = self.rows_at + ROW.size * self.count
            if self.bits > BITS_MOST or self.fan_at + 4 * ((1 << self.bits) + 1) + FOOTER.size != self.bytes:
                raise SegmentError(f"its footer speaks of {self.count} rows at {self.rows_at}, which do not fit it")
            fan_bytes = self.bytes - FOOTER.size - self.fan_at
            if notes and fan_bytes <= FAN_HELD:
                self._fan = os.pread(self._file, fan_bytes, self.fan_at)
        except BaseException:
            self.close()
            raise
        if notes:
            with contextlib.suppress(OSError):
                self._used = os.open(f"{self.path}.used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def close(self) -> None:
        for file in (self._file, self._used):
            if file >= 0:
                os.close(file)
        self._file = self._used = -1

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    # -- one record
    def find(self, address: bytes) -> Record | None:
        """Where the record of an address (32 bytes) lies, if it is here. OSError if the file cannot be read."""
        part = _part(address, self.bits)
        if self._fan:
            first, end = PAIR.unpack_from(self._fan, 4 * part)
        else:
            first, end = PAIR.unpack(os.pread(self._file, PAIR.size, self.fan_at + 4 * part).ljust(PAIR.size, b"\0"))
        if not first < end <= self.count or end - first > FAN_MOST:
            return None
        rows = os.pread(self._file, ROW.size * (end - first), self.rows_at + ROW.size * first)
        at = rows.find(address)
        while at >= 0 and at % ROW.size:
            at = rows.find(address, at + 1)
        if at < 0:
            return None
        _, offset, size = ROW.unpack_from(rows, at)
        return Record(first + at // ROW.size, offset, size)

    def read(self, record: Record) -> bytes:
        """A record's bytes, unchecked; fewer where the row leads out of the file."""
        room = self.rows_at - record.offset
        return os.pread(self._file, min(record.size, room), record.offset) if room > 0 else b""

    # -- all of them
    def rows(self, first: int = 0, end: int | None = None) -> Iterator[tuple[bytes, Record]]:
        """(address, record) of the rows [first, end), in order."""
        end = self.count if end is None else min(end, self.count)
        step = BLOCK // ROW.size
        for begin in range(first, end, step):
            block = os.pread(self._file, ROW.size * (min(begin + step, end) - begin), self.rows_at + ROW.size * begin)
            for n, (address, offset, size) in enumerate(ROW.iter_unpack(block[: len(block) // ROW.size * ROW.size])):
                yield address, Record(begin + n, offset, size)

    def records(self, first: int = 0, end: int | None = None) -> Iterator[tuple[bytes, Record, bytes]]:
        """(address, record, content) of the rows [first, end), in order, read in blocks where they lie in order."""
        block, start = b"", 0
        for address, record in self.rows(first, end):
            if record.offset >= self.rows_at:
                yield address, record, b""
                continue
            at = record.offset - start
            if at < 0 or at + record.size > len(block):
                start, at = record.offset, 0
                block = os.pread(self._file, max(BLOCK, min(record.size, self.bytes)), start)
            most = max(0, self.rows_at - record.offset)
            yield address, record, block[at : at + min(record.size, most)]

    @property
    def number(self) -> int:
        """Its place among others, from its name."""
        found = NAME.fullmatch(self.path.name)
        return int(found[2]) if found else 0

    def first(self) -> bytes:
        """The lowest address."""
        return os.pread(self._file, 32, self.rows_at)

    def last(self) -> bytes:
        """The highest address."""
        return os.pread(self._file, 32, self.fan_at - ROW.size)

    def check(self) -> None:
        """Reads it whole: its digest and form. SegmentError with the reason."""
        digest, left = hashlib.sha256(), self.bytes - FOOTER.size
        for at in range(0, left, BLOCK):
            digest.update(os.pread(self._file, min(BLOCK, left - at), at))
        if digest.digest() != self.digest:
            raise SegmentError("its content does not match its SHA-256")
        self.check_form()

    def check_form(self) -> None:
        """That it has the one form that `Writer` gives it: addresses rising, records one after the other with nothing
        between, a fan-out that fits. SegmentError with the reason."""
        before, at, counts = b"", len(magic(self.kind)), array("I", bytes(4 * ((1 << self.bits) + 1)))
        for address, record in self.rows():
            if address <= before or record.offset != at:
                raise SegmentError(f"row {record.row} is out of order")
            before, at = address, at + record.size
            counts[_part(address, self.bits) + 1] += 1
        if at != self.rows_at or self.bits != _bits(self.count):
            raise SegmentError("its records do not end where its rows begin")
        if _fan(counts) != os.pread(self._file, 4 * len(counts), self.fan_at):
            raise SegmentError("its fan-out does not fit its rows")

    # -- last use
    def use(self, record: Record) -> None:
        """Notes that a record is in use now, to the hour; not where that cannot be written."""
        if self._used < 0:
            return
        hour = int(time.time() // HOUR)
        try:
            if int.from_bytes(os.pread(self._used, 4, 4 * record.row), "little") < hour:
                os.pwrite(self._used, hour.to_bytes(4, "little"), 4 * record.row)
        except OSError:
            pass

    def used(self) -> list[float]:
        """Seconds since 1970 of each row's last use: as noted, or when the file was written."""
        written = os.fstat(self._file).st_mtime
        noted = b""
        with contextlib.suppress(OSError):
            noted = Path(f"{self.path}.used").read_bytes()
        hours = _numbers(noted[: len(noted) // 4 * 4])[: self.count]
        return [max(written, hour * HOUR) for hour in hours] + [written] * (self.count - len(hours))


def note_used(path: Path, seconds: Iterable[float]) -> None:
    """Writes the rows' times of last use beside a new segment; not where that cannot be written."""
    hours = array("I", [min(max(0, int(s // HOUR)), 2**32 - 1) for s in seconds])  # a file's time may be before 1970
    with contextlib.suppress(OSError):
        Path(f"{path}.used").write_bytes(_numbers(hours.tobytes()).tobytes())


def _numbers(data: bytes) -> array:
    """U32s in little-endian order."""
    found = array("I", data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _part(address: bytes, bits: int) -> int:
    return int.from_bytes(address[:4], "big") >> (32 - bits) if bits else 0


def _bits(count: int) -> int:
    return min(BITS_MOST, max(0, (count // FAN).bit_length()))


def _fan(counts: array) -> bytes:
    """The fan-out's bytes, of how many rows lie in each part, shifted by one."""
    below = array("I", itertools.accumulate(counts))
    return _numbers(below.tobytes()).tobytes()


def temporary(folder: Path, prefix: str) -> tuple[int, Path]:
    """A new file, open for writing, that whoever the umask lets may read: a cache is shared (mkstemp's is not)."""
    path = folder / f"{prefix}{secrets.token_hex(8)}.part"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path


class Writer:
    """Writes one segment: a temporary file in `folder` until `close`, which returns it whole."""

    def __init__(self, folder: Path, kind: str):
        self.kind = kind
        fd, self._part = temporary(folder, f".{kind}-")
        self._file = os.fdopen(fd, "wb", BLOCK)
        self._digest = hashlib.sha256()
        self._rows = bytearray()
        self._before, self._at = b"", 0
        self._put(magic(kind))

    @property
    def size(self) -> int:
        return self._at

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._at += len(data)

    def add(self, address: bytes, content: bytes) -> None:
        """A record; addresses (32 bytes) come in rising order, or it is a ValueError."""
        if address <= self._before:
            raise ValueError("addresses are added in rising order, each once")
        self._before = address
        self._rows += ROW.pack(address, self._at, len(content))
        self._put(content)

    def close(self) -> tuple[Path, str]:
        """(file, SHA-256 of all of it in hex)."""
        rows_at, count = self._at, len(self._rows) // ROW.size
        bits = _bits(count)
        counts = array("I", bytes(4 * ((1 << bits) + 1)))
        for address, *_ in ROW.iter_unpack(self._rows):
            counts[_part(address, bits) + 1] += 1
        self._put(bytes(self._rows))
        self._put(_fan(counts))
        self._put(FOOTER.pack(count, rows_at, bits, self._digest.digest(), END))
        self._file.close()
        return self._part, self._digest.hexdigest()

    def abandon(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink()


def write(folder: Path, kind: str, records: Iterable[tuple[bytes, bytes]]) -> list[tuple[Path, str]]:
    """Writes (address, content) records, in rising order, to as many files in `folder` as are needed; their paths and
    SHA-256. Nothing is left there if it fails."""
    done: list[tuple[Path, str]] = []
    writer: Writer | None = None
    try:
        for address, content in records:
            if writer is None:
                writer = Writer(folder, kind)
            writer.add(address, content)
            if writer.size > PART_BYTES:
                done.append(writer.close())
                writer = None
        if writer is not None:
            done.append(writer.close())
        return done
    except BaseException:
        if writer is not None:
            writer.abandon()
        for path, _ in done:
            path.unlink(missing_ok=True)
        raise
