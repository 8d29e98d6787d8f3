"""What a bundle holds, said before it: formats, versions, targets, and each file's size and SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .archive import SEGMENT, BundleError
from .entry import Key, canonical, is_digest

FORMAT = 2  # 1 had a file for every entry and code object: unpacked, such a bundle is a cache directory still


@dataclass(frozen=True)
class Manifest:
    """A bundle's table of contents.

    files     segments: name -> (bytes, SHA-256 in hex)
    entries   of all of them together
    objects   code objects, likewise
    targets   the targets that entries are for, each once
    versions  the versions that entries are of, each once
    made_by   version of flykernels that wrote it
    """

    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    entries: int = 0
    objects: int = 0
    targets: tuple[dict, ...] = ()
    versions: tuple[dict, ...] = ()
    made_by: str = ""

    @property
    def total_bytes(self) -> int:
        """Of all files together."""
        return sum(size for size, _ in self.files.values())

    def to_bytes(self) -> bytes:
        body = {
            "files": {name: list(f) for name, f in self.files.items()},
            "entries": self.entries, "objects": self.objects,
            "targets": list(self.targets), "versions": list(self.versions), "made_by": self.made_by,
        }  # fmt: skip
        digest = hashlib.sha256(canonical(body).encode()).hexdigest()
        return canonical({"format": FORMAT, "sha256": digest, "manifest": body}).encode() + b"\n"

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Reads what `to_bytes` wrote, and nothing else. BundleError with the reason."""
        try:
            file = json.loads(data)
            if type(file["format"]) is not int or file["format"] < 1:
                raise BundleError(f"the manifest's format is {file['format']!r}")
            if file["format"] > FORMAT:
                raise BundleError(
                    f"the bundle has format {file['format']}; this version reads up to {FORMAT}: update flykernels"
                )
            if file["format"] < FORMAT:
                raise BundleError(
                    f"the bundle has format {file['format']}, and this version reads {FORMAT}: unpack it with `tar xf` "
                    "into a directory, name that in FLYKERNELS_CACHE_DIR, and export it again"
                )
            body = file["manifest"]
            files = {name: (f[0], f[1]) for name, f in body["files"].items()}
            counts = body["entries"], body["objects"]
            made = Manifest(files, *counts, tuple(body["targets"]), tuple(body["versions"]), body["made_by"])
            if made.to_bytes() != data:
                raise BundleError("the manifest does not match its SHA-256")
        except BundleError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as e:
            raise BundleError(f"the manifest cannot be read: {type(e).__name__}: {e}") from None
        for name, (size, digest) in made.files.items():
            named = SEGMENT.fullmatch(name)
            if not named:
                raise BundleError(f"the manifest names {name!r}, which is no name that a bundle has")
            if type(size) is not int or size < 0 or not is_digest(digest) or digest != named[2]:
                raise BundleError(f"the manifest says {size!r} bytes and SHA-256 {digest!r} of {name}")
        if not all(type(count) is int and count >= 0 for count in counts):
            raise BundleError(f"the manifest says that there are {counts[0]!r} entries and {counts[1]!r} code objects")
        if not all(isinstance(x, dict) for x in (*made.targets, *made.versions)) or not isinstance(made.made_by, str):
            raise BundleError("the manifest's targets or versions are not objects")
        return made


def each_once(found: Iterable[dict]) -> tuple[dict, ...]:
    """Without repetitions, in the order of their JSON."""
    by_text: dict[str, Any] = {canonical(x): x for x in found}
    return tuple(by_text[text] for text in sorted(by_text))


@dataclass(frozen=True)
class Accept:
    """Which keys are let in. A pattern fits what has all its items; None lets anything in.

    targets   patterns, such as {"arch": "gfx950", "compute_units": 256}
    versions  patterns; MLIR's version is compared only where both sides have one
    """

    targets: tuple[dict, ...] | None = None
    versions: tuple[dict, ...] | None = None

    def why_not(self, key: Key) -> str | None:
        """The reason a key is refused, in words; None if it is let in."""
        if self.targets is not None and not any(_fits(p, key.target) for p in self.targets):
            return f"it is for {_text(key.target)}, and this is {' or '.join(map(_text, self.targets)) or 'nothing'}"
        if self.versions is not None and not any(self._agrees(p, key) for p in self.versions):
            return f"it was made by {_text(key.versions)}, and here are {'; '.join(map(_text, self.versions))}"
        return None

    def _agrees(self, pattern: dict, key: Key) -> bool:
        fixed = {k: v for k, v in pattern.items() if k != "mlir"}
        return _fits(fixed, key.versions) and Key("", {}, {}, pattern).agrees(key)


def _fits(pattern: dict, held: dict) -> bool:
    return all(k in held and held[k] == v for k, v in pattern.items())


def _text(held: dict) -> str:
    short = lambda v: v[:12] if is_digest(v) else v
    return ", ".join(f"{k} {short(v)}" for k, v in held.items())
