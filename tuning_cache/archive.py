"""A bundle's file, as bytes: a tar of plain files under fixed names, in order, in one form only. Also with gzip.

Tar, because image builders unpack it (`ADD cache.tar /cache/` in a Dockerfile): a bundle is a read-only layer of the
cache as it stands. The writer's form is the reader's rule: whatever is not, byte for byte, what `Writer` writes for the
same names and contents (links, devices, directories, owners, long names, padding, something after the end) is refused,
so there is nothing to interpret, and nothing that two readers could understand differently.
"""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from .segment import BLOCK as PIECE

BLOCK = 512  # bytes, tar's unit
END = bytes(2 * BLOCK)
GZIP = b"\x1f\x8b"
MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
SEGMENT = re.compile(r"segments/(entries|objects)-\d{8}-([0-9a-f]{64})\.fks")
KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a directory",
}


class BundleError(ValueError):
    """Why a bundle is refused. Nothing of it has been written."""


@dataclass(frozen=True)
class Limits:
    """Bytes that are read at most; what a bundle declares and what really comes are both held against them."""

    manifest: int = 16 << 20
    entry: int = 4 << 20
    object: int = 256 << 20
    total: int = 64 << 30


def header(name: str, size: int) -> bytes:
    """The one tar header of a file: mode 0644, no owner, no time."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


class Writer:
    """Writes members to a binary file, which `close` ends but does not close."""

    def __init__(self, file: IO[bytes], compress: bool):
        self._gzip = gzip.GzipFile("", "wb", 6, file, mtime=0) if compress else None
        self._file: IO[bytes] = cast(IO[bytes], self._gzip) if self._gzip is not None else file

    def add(self, name: str, size: int, pieces: Iterable[bytes]) -> None:
        """A member of `size` bytes."""
        self._file.write(header(name, size))
        for piece in pieces:
            self._file.write(piece)
        self._file.write(bytes(-size % BLOCK))

    def close(self) -> None:
        self._file.write(END)
        if self._gzip is not None:
            self._gzip.close()


def members(path: Path, limits: Limits) -> Generator[tuple[str, int, Iterator[bytes]], None, None]:
    """(name, bytes, content in pieces) of each member in order; the pieces are read before the next member is asked
    for, or passed over. BundleError with the reason for anything but what `Writer` writes."""
    try:
        raw = path.open("rb")
    except OSError as e:
        raise BundleError(f"{path.name} cannot be read: {e.strerror or e}") from None
    with raw:
        yield from _members(_Reader(raw, path.name), limits)


class _Reader:
    """Reads a file, unpacked where it is compressed. BundleError where that fails."""

    def __init__(self, raw: IO[bytes], name: str):
        self._file, self._name = raw, name
        packed = self.read(len(GZIP)) == GZIP
        raw.seek(0)
        self._file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except (gzip.BadGzipFile, EOFError, zlib.error) as e:
            raise BundleError(f"{self._name}: the compressed data is damaged: {e}") from None
        except OSError as e:
            raise BundleError(f"{self._name} cannot be read: {e.strerror or e}") from None


def _members(file: _Reader, limits: Limits) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    seen: set[str] = set()
    total = 0
    while True:
        head = file.read(BLOCK)
        if head == END[:BLOCK]:
            if file.read(BLOCK) != END[:BLOCK]:
                raise BundleError("the end of the archive is cut off")
            if file.read(1):
                raise BundleError("something follows the end of the archive")
            return
        name, size = _understood(head, limits)
        if name in seen:
            raise BundleError(f"{name} is there twice")
        seen.add(name)
        total += BLOCK + size
        if total > limits.total:
            raise BundleError(f"it holds more than {limits.total} bytes, the limit (raise it with --max-size)")
        pieces = _pieces(file, name, size)
        yield name, size, pieces
        for _ in pieces:
            pass
        rest = file.read(-size % BLOCK)
        if len(rest) != -size % BLOCK:
            raise BundleError(f"{name} is cut off in its padding")
        if any(rest):
            raise BundleError(f"{name}: the padding after it is not empty")


def _pieces(file: _Reader, name: str, size: int) -> Iterator[bytes]:
    left = size
    while left:
        piece = file.read(min(PIECE, left))
        if not piece:
            raise BundleError(f"{name} is cut off: {size - left} bytes of {size}")
        left -= len(piece)
        yield piece


def _understood(head: bytes, limits: Limits) -> tuple[str, int]:
    """A header's name and size, when it is one that `header` makes."""
    if len(head) < BLOCK:
        raise BundleError("the archive is cut off: it has no end")
    try:
        info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError, OverflowError) as e:
        raise BundleError(f"not a bundle, or a damaged one: {e}") from None
    name = info.name
    if info.type in KINDS:
        raise BundleError(f"{name!r} is {KINDS[info.type]}; a bundle holds plain files only")
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        raise BundleError(f"{name!r} leads out of the cache's directory")
    if info.type != tarfile.REGTYPE:
        raise BundleError(f"{name!r} is a tar extension (type {info.type!r}); a bundle holds plain files only")
    if name not in (MANIFEST, SIGNATURE) and not SEGMENT.fullmatch(name):
        raise BundleError(f"{name!r} is no name that a bundle has")
    most = limits.total if SEGMENT.fullmatch(name) else limits.manifest
    if not 0 <= info.size <= most:
        raise BundleError(f"{name} says that it has {info.size} bytes; at most {most} are taken")
    if head != header(name, info.size):
        raise BundleError(f"{name}: its tar header is not one that `flykernels cache export` writes")
    return name, info.size
