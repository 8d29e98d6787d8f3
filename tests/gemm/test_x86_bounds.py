"""No operand is read or written beyond its ends: each lies against a page that may not be touched.

Run in a process of its own, since what it looks for ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve()

CHECK = """
import ctypes, mmap
import torch
from tests.gemm.x86_case import TORCH, kernel
from flykernels.targets import x86
from templates.gemm.arguments import pointers, scalar_values
from templates.gemm.problem import DTYPES, GemmProblem
from templates.gemm.space import candidates

libc, page, kept = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, []
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def fenced(shape, dtype, layout, at_end):
    '''A tensor whose memory begins (or ends) at a page without access.'''
    rows, columns = shape
    size = rows * columns * dtype.itemsize
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    kept.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = page + (pages * page - size if at_end else 0)
    flat = torch.frombuffer(memory, dtype=dtype, count=rows * columns, offset=start)
    flat.copy_(torch.randn(rows * columns))
    for fence in (base, base + (pages + 1) * page):
        assert libc.mprotect(fence, page, 0) == 0
    return flat.view(rows, columns) if layout == "row" else flat.view(columns, rows).t()


count = 0
for dtype in DTYPES:
    for b in ("row", "col"):
        for m, n, k in ((1, 5, 16), (3, 29, 37), (7, 9, 3)):
            p = GemmProblem(n=n, k=k, dtype=dtype, out_dtype=dtype, b=b, bias="row", residual=True, m_hint=m)
            for candidate in candidates(p, x86, 1).kept:
                for at_end in (False, True):
                    t = dict(
                        a=fenced((m, k), TORCH[dtype], "row", at_end),
                        b=fenced((k, n), TORCH[dtype], b, at_end),
                        bias=fenced((1, n), TORCH[dtype], "row", at_end)[0],
                        residual=fenced((m, n), TORCH[dtype], "row", at_end),
                        c=fenced((m, n), TORCH[dtype], "row", at_end),
                    )
                    kernel(p, candidate.config)(*[t[x].data_ptr() for x in pointers(p)], *scalar_values(p, **t))
                    want = t["a"].double() @ t["b"].double() + t["bias"].double() + t["residual"].double()
                    assert (t["c"].double() - want).abs().max() < 0.2
                    count += 1
print("cases", count)
"""


def test_operands_against_forbidden_pages():
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    done = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 60
