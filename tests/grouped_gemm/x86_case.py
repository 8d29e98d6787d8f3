"""One call of an x86 grouped kernel."""

from __future__ import annotations

import ctypes
from functools import cache

from flykernels.launch import host
from flykernels.targets import x86
from templates.gemm.config import X86Config
from templates.grouped_gemm.arguments import pointers, scalar_values
from templates.grouped_gemm.build import build
from templates.grouped_gemm.problem import GroupedGemmProblem

from .case import Case


@cache
def kernel(problem: GroupedGemmProblem, config: X86Config) -> host.HostKernel:
    """Compiled once for all tests."""
    return host.load(build(problem, config, x86))


def launch(case: Case, config: X86Config, threads: int = 1) -> None:
    """One call. Workspace is full of NaN: a kernel reads what it has written."""
    p = case.problem
    tensors = {name: g.view for name, g in case.operands.items()}
    addresses = {name: x.data_ptr() for name, x in tensors.items()}
    if case.offs is not None:
        addresses["offs"] = case.offs.data_ptr()
    loaded = kernel(p, config)
    if loaded.workspace(threads) is not None:
        ctypes.memset(loaded.workspace(threads), 0xFF, loaded.workspace_bytes * threads)
    loaded(*(addresses[x] for x in pointers(p)), *scalar_values(p, **tensors), threads=threads)


def check(case: Case, config: X86Config, threads: int = 1) -> None:
    launch(case, config, threads)
    case.check()
