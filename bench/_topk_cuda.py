"""TopK on the H200 by graph replay: ours, every configuration, beside torch.topk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench._gpu_replay import lasting, replay_us
from flykernels.launch.current import Launcher
from flykernels.targets import sm90a
from templates.topk.arguments import scalar_values
from templates.topk.build import build, kernel_key
from templates.topk.config import TopKConfig
from templates.topk.problem import TopKProblem

L2_BYTES = 50 << 20  # the H200's L2: inputs of a graph together are larger, unless MOST_BUFFERS stand in the way
MOST_BUFFERS = 16
ROUNDS = 9

_launchers: dict[tuple, Launcher] = {}


def launcher(p: TopKProblem, config: TopKConfig) -> Launcher:
    """The kernel, compiled once for all problems that share it."""
    key = tuple(kernel_key(p, config).items())
    if key not in _launchers:
        _launchers[key] = Launcher(build(p, config, sm90a))
    return _launchers[key]


def ours(p: TopKProblem, config: TopKConfig, x, values, indices) -> Callable[[], Any]:
    """A call of one configuration on these tensors, contiguous along the last dimension."""
    launch, strides = launcher(p, config), {"x": (x.stride(0),), "values": (p.k,), "indices": (p.k,)}
    arguments = (x.data_ptr(), values.data_ptr(), indices.data_ptr(), *scalar_values(p, config, strides))
    return lambda: launch(*arguments)


def results(p: TopKProblem, x) -> tuple:
    shape = (p.rows, p.k)
    return torch.empty(shape, dtype=x.dtype, device=x.device), torch.empty(shape, dtype=torch.int64, device=x.device)


def expected(p: TopKProblem, x, rows: int = 4) -> tuple[list[int], Any]:
    """(first and last rows, their results' positions: by a stable sort of the whole rows, on the GPU)."""
    some = sorted({*range(min(rows, p.rows)), *range(max(0, p.rows - rows), p.rows)})
    lines = x[some].float() + 0.0  # -0 is +0
    lines = torch.where(lines.isnan(), torch.nan, lines)  # torch's sort on a GPU takes negative NaNs for the least
    return some, torch.sort(lines, dim=-1, descending=p.largest, stable=True).indices[:, : p.k].cpu()


def right(p: TopKProblem, config: TopKConfig, x, wanted: tuple[list[int], Any] | None = None) -> bool:
    """Whether some rows come out exactly; wanted: what `expected` returned."""
    values, indices = results(p, x)
    values.fill_(float("nan")), indices.fill_(-7)
    ours(p, config, x, values, indices)()
    torch.cuda.synchronize()
    some, at = wanted or expected(p, x)
    bits = lambda v: v.cpu().view(torch.int32 if v.element_size() == 4 else torch.int16)
    exact = bits(x[some]).gather(1, at)
    return torch.equal(indices[some].cpu(), at) and torch.equal(bits(values[some]), exact)


def buffers(x) -> list:
    """Copies of x, so many that a graph's inputs do not stay in L2."""
    size = x.numel() * x.element_size()
    return [x, *(x.clone() for _ in range(min(MOST_BUFFERS, max(1, -(-2 * L2_BYTES // size))) - 1))]


def measure(x, p: TopKProblem, configs: list[TopKConfig], torch_too: bool = True, rounds: int = ROUNDS) -> list[float]:
    """Microseconds a call of each configuration, and last of torch.topk."""
    inputs, (values, indices) = buffers(x), results(p, x)
    ways = [[ours(p, c, b, values, indices) for b in inputs] for c in configs]
    if torch_too:
        ways.append([lambda b=b: torch.topk(b, p.k, dim=-1, largest=p.largest) for b in inputs])
    return replay_us([lasting(calls) for calls in ways], rounds)
