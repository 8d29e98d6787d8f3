"""What a launch costs the CPU on the H200: ours, each way in, beside Triton's, torch's and an empty Python call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

ROUNDS, CALLS = 7, 2000


def microseconds(run: Callable[[int], Any]) -> float:
    """Of one call, the least of ROUNDS means: run(i) enqueues work i; the GPU is idle before and keeps up."""
    import torch

    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(CALLS):
            run(i)
        best = min(best, (time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return best


def ways() -> dict[str, Callable[[int], Any]]:
    """Each way to launch an almost empty kernel, by what it is called in the table."""
    import torch
    import triton

    from flykernels.launch.current import Launcher
    from tests.h200 import ptx

    @triton.jit
    def nothing(a):
        pass

    out = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    plain, spaced, mapped = (Launcher(c) for c in (ptx.nothing, ptx.count, ptx.tma(64)))
    base, stream = out.data_ptr(), torch.cuda.current_stream().cuda_stream
    plain(0), spaced(base, 1), mapped(base, base, 8, 64)
    kernel = plain.kernels[torch.cuda.current_device()]
    small = [torch.zeros(8, 8, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return {
        "Python: a call of nothing": lambda i: None,
        "ours, stream given": lambda i: kernel(0, stream=stream),
        "ours, torch's stream": lambda i: plain(0),
        "ours, other arguments each time": lambda i: plain(i % 100_000_007),
        "ours, with workspace": lambda i: spaced(base, 1),
        "ours, with a tensor map": lambda i: mapped(base, base, 8, 64),
        "ours, a tensor map of another tensor each time": lambda i: mapped(base + 16 * (i % 8000), base, 8, 64),
        "Triton": lambda i: nothing[(1,)](out),
        "torch.mm of 8x8, out=": lambda i: torch.mm(small[0], small[1], out=small[2]),
    }


def rows() -> list[dict[str, Any]]:
    return [{"call": name, "us": round(microseconds(run), 2)} for name, run in ways().items()]


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)
