"""From what a user holds (a CodeObject, code object bytes, a path, assembly text) to instructions and a kernel."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..codeobject import CodeObject
from .asm import Code, parse
from .errors import BadArguments, BadCodeObject, SimulatorError
from .kernel import KernelInfo, check_text, kernels_of_text


@dataclass
class Loaded:
    """Code, the kernel to run, and (for code objects) the constant data that code may read: [(address, bytes)]."""

    code: Code
    kernel: KernelInfo
    data: list[tuple[int, np.ndarray]]


def load(what: CodeObject | bytes | str | os.PathLike, entry: str | None = None) -> Loaded:
    """Reads a gfx950 kernel. `entry` names it where there are several.

    BadCodeObject if it is truncated, foreign or for another architecture; BadArguments if `entry` is not in it.
    """
    if isinstance(what, CodeObject):
        if what.target != "gfx950":
            raise BadCodeObject(f"a code object for {what.target}: this simulator runs gfx950 only")
        loaded = load(what.binary, entry or what.entry)
        loaded.kernel.lds_bytes = max(loaded.kernel.lds_bytes, what.shared_bytes)
        loaded.kernel.workgroup_size = what.workgroup_size
        return loaded
    if isinstance(what, os.PathLike) or (isinstance(what, str) and "\n" not in what):
        path = Path(what)
        if not path.exists():
            raise BadCodeObject(f"no file {path}")
        data = path.read_bytes()
        if data.startswith(b"flykernels code object"):
            return load(CodeObject.from_bytes(data), entry)
        return load(data if data[:4] == b"\x7fELF" else data.decode("utf-8", "replace"), entry)
    if isinstance(what, (bytes, bytearray, memoryview)):
        from .elf import read

        code, kernels, segments = read(bytes(what))
        return Loaded(code, choose(kernels, entry), segments)
    if isinstance(what, str):
        check_text(what)
        try:
            code = parse(what)
            kernels = kernels_of_text(what, code.labels)
        except SimulatorError:
            raise
        except (LookupError, TypeError, ValueError, AssertionError) as e:
            raise BadCodeObject(f"the text cannot be read: {type(e).__name__}: {e}; give what LLVM printed") from e
        return Loaded(code, choose(kernels, entry), [])
    raise BadCodeObject(f"cannot read a kernel from {type(what).__name__}: give a CodeObject, bytes, a path or text")


def choose(kernels: dict[str, KernelInfo], entry: str | None) -> KernelInfo:
    names = ", ".join(sorted(kernels)) or "none"
    if entry is not None:
        if entry not in kernels:
            raise BadArguments(f"no kernel {entry!r} in this code object; it has {names}")
        return kernels[entry]
    if len(kernels) != 1:
        raise BadArguments(f"the code object has several kernels ({names}): name one with entry=")
    return next(iter(kernels.values()))
