"""Runs a traced kernel on this CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flykernels.codeobject import Extent
from flykernels.lang import trace
from flykernels.launch.host import load
from flykernels.targets import x86


@dataclass(frozen=True)
class One:
    """A workgroup of one thread: all there is on a CPU."""

    workgroup_size: int = 1


def run(kernel, *arguments, workgroups: int = 1, problem=None, config=None):
    """Compiles kernel(k, problem, config) for x86 and calls it once; numpy arrays are passed by address."""

    def with_grid(k, p, c):
        k.grid = ((Extent(workgroups),),)
        kernel(k, p, c)

    code = x86.compile(trace(with_grid, x86, problem, config or One(), name="kernel"))
    values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    load(code)(*values, threads=1)
    return code
