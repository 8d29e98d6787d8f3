"""The artefact: a compiled kernel and all one must know to launch it, in one file that a person can read the head of.

File format, version 1: the line `flykernels code object 1`, one line of JSON (the header), then the binary's bytes.
Never pickled; the binary's SHA-256 is in the header and checked before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

MAGIC = b"flykernels code object 1\n"
NOT_IN_HEADER = ("binary", "text", "seconds")
MAX_HEADER_BYTES = 1 << 20  # a header is a few KiB; more is not ours


class CodeObjectError(ValueError):
    """A file or bytes that are not a whole, unaltered code object of this format."""


@dataclass(frozen=True)
class Argument:
    """One argument of the entry, in order.

    kind  "pointer", "i32", "i64" or "f32": how it is passed
    dtype element type behind a pointer (its `DType.name`); for scalars the same as kind
    """

    name: str
    kind: str
    dtype: str


@dataclass(frozen=True)
class TensorMap:
    """A parameter that the launcher makes from the arguments: a CUtensorMap (cuTensorMapEncodeTiled), for TMA.

    It describes a tensor in device memory whose elements lie next to each other along its first axis. Interleave is
    none, element strides are 1, and what lies outside the tensor reads as zeros.

    name       the parameter's
    of         the pointer argument it looks through; that argument's dtype is the elements'
    axes       (size, stride), innermost first, at most 5: ints, or names of scalar arguments; strides count elements,
               the first is 1. An axis of stride 0 (a broadcast) is encoded with size 1, and the kernel stays at
               coordinate 0 of it; an axis of size 1 may have any stride, and is encoded with one that is legal.
    box        elements that one transfer moves along each axis (1 to 256)
    swizzle    of the box in shared memory: 0 (none), 32, 64 or 128 bytes, which box[0] elements do not exceed
    promotion  bytes that L2 fetches at least: 0 (none), 64, 128 or 256

    What the CUDA driver demands and a launcher must see to: an address that is a multiple of 16, strides of further
    axes that are multiples of 16 bytes and below 2**40, sizes of at most 2**32."""

    name: str
    of: str
    axes: tuple[tuple[int | str, int | str], ...]
    box: tuple[int, ...]
    swizzle: int = 128
    promotion: int = 256

    def encoded(self, arguments: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(sizes, strides in elements) to encode for these scalar arguments, innermost axis first.

        Axes of stride 0 have size 1; axes of size 1 have the stride of the axis before them times its size, rounded up
        to what is a multiple of 16 bytes for every element type."""
        value = lambda x: arguments[x] if isinstance(x, str) else x
        sizes: list[int] = []
        strides: list[int] = []
        for i, (size, stride) in enumerate((value(n), value(s)) for n, s in self.axes):
            sizes.append(1 if i and stride == 0 else size)
            if i and sizes[-1] == 1:
                before = strides[-1] * sizes[i - 1]
                stride = -(-before // LEGAL_STRIDE) * LEGAL_STRIDE
            strides.append(stride)
        return tuple(sizes), tuple(strides)


LEGAL_STRIDE = 16  # elements: 16 bytes of any type that has whole bytes


@dataclass(frozen=True)
class Extent:
    """One factor of a grid axis: ceil(of / per), where `of` is a number or an argument's name."""

    of: int | str
    per: int = 1

    def count(self, arguments: Mapping[str, int]) -> int:
        """The factor's value for these arguments; at least 0."""
        size = arguments[self.of] if isinstance(self.of, str) else self.of
        return max(0, -(-size // self.per))


@dataclass(frozen=True)
class CodeObject:
    """A compiled kernel.

    target          "gfx950", "sm90a" or "x86"
    features        what the machine must have: arch string, or CPU features, comma-separated and sorted
    entry           symbol to launch
    arguments       signature, in order
    grid            for each axis (1 to 3) the factors whose product is the number of workgroups along it
    workgroup_size  threads a workgroup (1 on x86)
    shared_bytes    LDS or shared memory a workgroup
    registers       vector registers a thread (gfx950: arch VGPRs + AGPRs as allocated); 0 where it has no meaning
    agprs, sgprs    gfx950's accumulation and scalar registers
    spills          registers spilled to memory
    scratch_bytes   private memory a thread
    workspace       factors whose product is the bytes of workspace that the launcher hands over (empty: none)
    tensor_maps     parameters that follow all arguments (128 bytes each, by value): the launcher makes them
    dynamic_bytes   of shared memory asked for at the launch, not part of shared_bytes (sm90a)
    cluster         workgroups of a cluster; the grid's first axis is a multiple of it (sm90a; the binary asks for it)
    overlaps        the launch may begin while the kernel before it in the stream ends: the kernel itself waits for that
                    one before it reads or writes memory (sm90a)
    grid_most       workgroups launched at most along the first axis, a multiple of `cluster`: the kernel walks through
                    the rest (0: one each)
    source          what it was built from, readable: template, problem, configuration, versions
    binary          ELF object (x86), code object (gfx950), cubin or PTX (sm90a)

    Two by-products of compiling are not part of the artefact: not saved, not compared, empty after loading.

    text            assembly, where the target has one
    seconds         how long each step of compiling took
    """

    target: str
    features: str
    entry: str
    arguments: tuple[Argument, ...]
    grid: tuple[tuple[Extent, ...], ...]
    workgroup_size: int
    shared_bytes: int = 0
    registers: int = 0
    agprs: int = 0
    sgprs: int = 0
    spills: int = 0
    scratch_bytes: int = 0
    workspace: tuple[Extent, ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()
    dynamic_bytes: int = 0
    cluster: int = 1
    overlaps: bool = False
    grid_most: int = 0
    source: dict = field(default_factory=dict)
    binary: bytes = field(default=b"", repr=False)
    text: str = field(default="", compare=False, repr=False)
    seconds: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the whole file as `to_bytes` writes it, in hex: the artefact's name in a cache."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def grid_for(self, arguments: Mapping[str, int]) -> tuple[int, ...]:
        """Workgroups along each axis for these scalar arguments."""
        first, *others = (math.prod(e.count(arguments) for e in axis) for axis in self.grid)
        return min(first, self.grid_most or first), *others

    def workspace_for(self, arguments: Mapping[str, int]) -> int:
        """Bytes of workspace for these scalar arguments."""
        return math.prod(e.count(arguments) for e in self.workspace) if self.workspace else 0

    # -- to and from bytes
    def to_bytes(self) -> bytes:
        """The file's content: the same object gives the same bytes."""
        header = {k: v for k, v in asdict(self).items() if k not in NOT_IN_HEADER}
        header["sha256"], header["bytes"] = hashlib.sha256(self.binary).hexdigest(), len(self.binary)
        return MAGIC + json.dumps(header, sort_keys=True, separators=(",", ":")).encode() + b"\n" + self.binary

    @staticmethod
    def from_bytes(data: bytes) -> CodeObject:
        """Reads what `to_bytes` wrote. CodeObjectError if the header is not understood, or a byte of the binary
        is missing or changed. A changed header that still reads as one has another `digest`."""
        if not data.startswith(MAGIC):
            raise CodeObjectError(f"not a code object: it begins with {data[: len(MAGIC)]!r}, not with {MAGIC!r}")
        end = data.find(b"\n", len(MAGIC), len(MAGIC) + MAX_HEADER_BYTES)
        if end < 0:
            raise CodeObjectError("the header is cut off")
        try:
            header = json.loads(data[len(MAGIC) : end])
            sha256, size = header.pop("sha256"), header.pop("bytes")
            extents = lambda axis: tuple(Extent(**e) for e in axis)
            header["arguments"] = tuple(Argument(**a) for a in header["arguments"])
            header["grid"] = tuple(extents(axis) for axis in header["grid"])
            header["workspace"] = extents(header["workspace"])
            header["tensor_maps"] = tuple(_tensor_map(t) for t in header.get("tensor_maps", ()))
            binary = data[end + 1 :]
            code = CodeObject(**header, binary=binary)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CodeObjectError(f"the header cannot be read: {e}") from e
        if len(binary) != size or hashlib.sha256(binary).hexdigest() != sha256:
            raise CodeObjectError(
                f"the binary is damaged: {len(binary)} bytes where the header says {size}, or altered"
            )
        return code

    def save(self, path: str | os.PathLike) -> None:
        """Writes the file whole or not at all (temporary file, fsync, rename)."""
        path = Path(path)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as f:
            try:
                f.write(self.to_bytes())
                f.flush()
                os.fsync(f.fileno())
                os.replace(f.name, path)
            except BaseException:
                Path(f.name).unlink(missing_ok=True)
                raise

    @staticmethod
    def load(path: str | os.PathLike) -> CodeObject:
        """Reads a file. OSError if there is none, CodeObjectError if it is damaged."""
        return CodeObject.from_bytes(Path(path).read_bytes())


def _tensor_map(t: dict) -> TensorMap:
    return TensorMap(**{**t, "axes": tuple(tuple(a) for a in t["axes"]), "box": tuple(t["box"])})
