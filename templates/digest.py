"""A digest of the sources that a kernel is made from: part of every cache key, so no cache outlives its compiler."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import flykernels

HERE = Path(__file__).parent
USES = {  # templates made of parts of others
    "scaled_gemm": ("gemm",),
    "quantize": ("gemm",),
    "grouped_gemm": ("gemm", "scaled_gemm"),
}


@cache
def digest(template: str) -> str:
    """SHA-256, in hex, over the names and contents of flykernels', one template's and its parts' Python files.

    template: a folder beside this file, such as "gemm"; a part of one, "grouped_gemm.scaled", has the whole one's.
    ValueError if there is none."""
    template = template.partition(".")[0]
    folder = HERE / template
    if not (folder / "__init__.py").is_file():
        raise ValueError(f"there is no template {template!r} in {HERE.name}")
    core = Path(flykernels.__file__).parent
    return of_folders(core, folder, *(HERE / used for used in USES.get(template, ())))


def of_folders(*folders: Path) -> str:
    """SHA-256, in hex, over the names and contents of all Python files in these folders."""
    total = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            data = file.read_bytes()
            name = f"{folder.name}/{file.relative_to(folder).as_posix()}"
            total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()
