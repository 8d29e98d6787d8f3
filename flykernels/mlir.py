"""The only import of MLIR. Any upstream `mlir` package will do; the `flydsl` wheel carries the same bindings.

A machine that only runs cached kernels never imports this.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

_PACKAGES = ("mlir", "flydsl._mlir")
_DIALECTS = ("arith", "gpu", "llvm", "math", "rocdl", "scf")


class MLIRMissing(ImportError):
    """No usable MLIR bindings: kernels cannot be compiled here (cached ones can still be run)."""


def _find() -> str:
    """Name of the first package with the bindings and all dialects that we use. MLIRMissing if there is none."""
    tried = []
    for package in _PACKAGES:
        try:
            importlib.import_module(f"{package}.ir")
            for dialect in _DIALECTS:
                importlib.import_module(f"{package}.dialects.{dialect}")
            return package
        except ImportError as e:
            tried.append(f"{package}: {e}")
    raise MLIRMissing(
        "compiling kernels needs MLIR's Python bindings: pip install 'flykernels[compile]'. Tried " + "; ".join(tried)
    )


PACKAGE = _find()
FOLDER = str(Path(importlib.import_module(f"{PACKAGE}.ir").__file__ or "").parent)
ir = importlib.import_module(f"{PACKAGE}.ir")
passmanager = importlib.import_module(f"{PACKAGE}.passmanager")
execution_engine = importlib.import_module(f"{PACKAGE}.execution_engine")
arith, gpu, llvm, math, rocdl, scf = (importlib.import_module(f"{PACKAGE}.dialects.{d}") for d in _DIALECTS)
PassManager, ExecutionEngine = passmanager.PassManager, execution_engine.ExecutionEngine


def source_locations() -> AbstractContextManager:
    """Within it, operations know the Python line that made them: the innermost outside flykernels and the bindings.

    Bindings that cannot do this (older than LLVM 21) leave locations unknown."""
    if not hasattr(ir, "loc_tracebacks"):
        return nullcontext()
    for folder in (FOLDER, str(Path(__file__).parent)):
        ir._globals.register_traceback_file_exclusion(folder)
    return ir.loc_tracebacks(max_depth=1)


def intrinsic(name, result, *args):
    """Call an LLVM intrinsic: how a target reaches its instructions. `result` None: returns nothing."""
    return llvm.call_intrinsic(result, name, [getattr(a, "ssa", a) for a in args], [], [])
