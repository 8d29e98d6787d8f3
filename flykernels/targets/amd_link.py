"""From a lowered module to a linked AMD code object, without ROCm or a GPU.

Assembling and linking are small work, but MLIR's wheel brings no linker. Tried in this order, each with what it needs:

1. MLIR's own assembler, in process, and `ld.lld`: ROCm's (`$ROCM_PATH`, `/opt/rocm`), or one on PATH (`ld.lld`, or
   with a version: `ld.lld-22`).
2. Triton's assembler and linker, in process, from its wheel; from assembly text, so the back end need not run again.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from ..mlir import PassManager, gpu, ir

TRIPLE = "amdgcn-amd-amdhsa"  # of the targets that assembly names
LLD_VERSIONS = range(30, 16, -1)  # names that distributions give it; gfx950 needs 17 or newer


class LinkerMissing(RuntimeError):
    """No way to link an AMD code object on this machine; says what was tried and what to install."""

    def __init__(self, tried: list[str]):
        self.tried = tried
        super().__init__(
            "linking a gfx950 code object needs ld.lld or Triton, and this machine has neither: "
            + "; ".join(tried)
            + ". Do: pip install triton (or apt install lld, or set ROCM_PATH to a ROCm installation)"
        )

    def __reduce__(self):  # to another process and back
        return LinkerMissing, (self.tried,)


@cache
def find_lld() -> str | None:
    """Path of the first ld.lld that there is."""
    roots = [os.environ.get("ROCM_PATH"), os.environ.get("HIP_PATH"), "/opt/rocm"]
    for root in filter(None, roots):
        for inside in ("llvm/bin/ld.lld", "lib/llvm/bin/ld.lld"):
            if os.access(Path(root, inside), os.X_OK):
                return str(Path(root, inside))
    names = ["ld.lld", *(f"ld.lld-{v}" for v in LLD_VERSIONS)]
    return next(filter(None, map(shutil.which, names)), None)


@cache
def find_triton():
    """(assemble, link) of Triton's AMD back end, or None."""
    try:
        compiler = importlib.import_module("triton.backends.amd.compiler")
        library = importlib.import_module("triton._C.libtriton")
        link_files, own = library.amd.link_hsaco, getattr(compiler, "assemble_amdgcn", None)
        return own or _before_3_9(library), link_files
    except (ImportError, AttributeError):
        return None


def _before_3_9(library):
    """The assembler of older Tritons: it knows no target before it is told to, and wants another name of the system."""
    assemble, init = library.amd.assemble_amdgcn, library.llvm.init_targets

    def assemble_named(text: str, arch: str, features: str) -> bytes:
        init()
        return assemble(text.replace(f"{TRIPLE}-unknown-{arch}", f"{TRIPLE}--{arch}"), arch, features)

    return assemble_named


def linker() -> str:
    """Which way code objects are linked here, in words. LinkerMissing if there is none."""
    if find_lld():
        return "MLIR's assembler and ld.lld"
    if find_triton():
        return "Triton's assembler and linker"
    raise LinkerMissing(
        ["no ld.lld under $ROCM_PATH, $HIP_PATH, /opt/rocm or on PATH", "no triton with an AMD back end"]
    )


def link(module, text: str, arch: str) -> bytes:
    """The code object of a module that is lowered and verified; `text` is its assembly. Needs MLIR's context."""
    linker()
    return with_lld(module) if find_lld() else with_triton(text, arch)


def with_lld(module) -> bytes:
    """MLIR assembles in process, then runs DIRECTORY/llvm/bin/ld.lld."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder, "llvm", "bin")
        there.mkdir(parents=True)
        (there / "ld.lld").symlink_to(os.path.realpath(find_lld() or ""))
        quoted = f'"{folder}"'  # TMPDIR may have spaces or braces in it
        PassManager.parse(f"builtin.module(gpu-module-to-binary{{format=bin toolkit={quoted}}})").run(module.operation)
    return binary_of(module)


def with_triton(text: str, arch: str) -> bytes:
    """Triton assembles the text in process and links through files."""
    assemble, link_files = find_triton()
    with tempfile.TemporaryDirectory() as folder:
        relocatable, linked = Path(folder, "kernel.o"), Path(folder, "kernel.hsaco")
        relocatable.write_bytes(assemble(text, arch, ""))
        if not relocatable.stat().st_size:
            raise RuntimeError(f"Triton's assembler refused the assembly of a {arch} kernel; standard error says why")
        link_files(str(relocatable), str(linked))
        return linked.read_bytes()


def binary_of(module) -> bytes:
    """The bytes that gpu-module-to-binary left in the module."""
    (binary,) = [op for op in module.body.operations if op.operation.name == "gpu.binary"]
    return gpu.ObjectAttr(ir.ArrayAttr(binary.attributes["objects"])[0]).object
