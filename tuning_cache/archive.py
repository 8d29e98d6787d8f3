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
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

BLOCK = 512  # bytes, tar's unit
END = bytes(2 * BLOCK)
GZIP = b"\x1f\x8b"
MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
ENTRY = re.compile(r"entries/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json")
OBJECT = re.compile(r"objects/([0-9a-f]{2})/(\1[0-9a-f]{62})\.fko")
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

    manifest: int = 512 << 20  # about 3 million files
    entry: int = 4 << 20
    object: int = 256 << 20
    total: int = 64 << 30

    def of(self, name: str) -> int:
        """The limit for a member of that name."""
        if ENTRY.fullmatch(name):
            return self.entry
        return self.object if OBJECT.fullmatch(name) else self.manifest


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

    def add(self, name: str, data: bytes) -> None:
        self._file.write(header(name, len(data)))
        self._file.write(data)
        self._file.write(bytes(-len(data) % BLOCK))

    def close(self) -> None:
        self._file.write(END)
        if self._gzip is not None:
            self._gzip.close()


def members(path: Path, limits: Limits) -> Generator[tuple[str, bytes], None, None]:
    """(name, content) of each member in order. BundleError with the reason for anything but what `Writer` writes."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(GZIP)) == GZIP
            raw.seek(0)
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            yield from _members(file, limits)
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise BundleError(f"{path.name}: the compressed data is damaged: {e}") from None
    except OSError as e:
        raise BundleError(f"{path.name} cannot be read: {e.strerror or e}") from None


def _members(file: IO[bytes], limits: Limits) -> Iterator[tuple[str, bytes]]:
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
        data = file.read(size)
        rest = file.read(-size % BLOCK)
        if len(data) != size or len(rest) != -size % BLOCK:
            raise BundleError(f"{name} is cut off: {len(data)} bytes of {size}")
        if any(rest):
            raise BundleError(f"{name}: the padding after it is not empty")
        yield name, data


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
    if name not in (MANIFEST, SIGNATURE) and not ENTRY.fullmatch(name) and not OBJECT.fullmatch(name):
        raise BundleError(f"{name!r} is no name that a bundle has")
    if not 0 <= info.size <= limits.of(name):
        raise BundleError(f"{name} says that it has {info.size} bytes; at most {limits.of(name)} are taken")
    if head != header(name, info.size):
        raise BundleError(f"{name}: its tar header is not one that `flykernels cache export` writes")
    return name, info.size
