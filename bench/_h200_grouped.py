"""One grouped product on the H200: ours beside ATen's and Inductor's Triton template, however tokens are shared out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ._grouped_suite import SHARES, Case
from ._h200_gemm import entries

ALL, TRITON = "ATEN,TRITON,FLYKERNELS", "TRITON"
BYTES = 2  # of a bf16
MEMORY, COMPUTE = 4.25e6, 790e6  # bytes and operations a microsecond: the ceilings measured on this machine
ROWS_CHECKED = 64  # of each group


def floor_us(case: Case) -> float:
    """Of memory traffic (weights of groups that have rows, rows in and out) and of arithmetic at the ceilings."""
    weights = sum(n > 0 for n in case.sizes) * case.n * case.k
    moved = (weights + case.total * (case.n + case.k)) * BYTES
    return max(moved / MEMORY, 2 * case.total * case.n * case.k / COMPUTE)


def moe(x, w, offs):
    """The program that is compiled."""
    import torch.nn.functional as F

    return F.grouped_mm(x, w.transpose(-2, -1), offs=offs)


def compiled(backends: str) -> Callable:
    import torch

    options = {"max_autotune": True, "max_autotune_gemm_backends": backends}
    return torch.compile(moe, dynamic=False, options=options)


def operands(case: Case) -> tuple[Any, Any, Any]:
    """(x, w, offs) of normal numbers, scaled so that results are about 1."""
    import torch

    rand = lambda *size: torch.randn(size, device="cuda", dtype=torch.bfloat16)
    offs = torch.tensor(case.offs, device="cuda", dtype=torch.int32)
    return rand(case.total, case.k), rand(case.groups, case.n, case.k) * case.k**-0.5, offs


def run(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Compiles, checks and times one size for all shares; a row of figures each.

    Tuning knows the sizes and not how tokens will be shared out: what it chose on groups that are alike serves all."""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w, _ = operands(case)
    ends = {share: Case(case.groups, case.tokens, share, case.n, case.k) for share in SHARES}
    offs = {share: torch.tensor(c.offs, device="cuda", dtype=torch.int32) for share, c in ends.items()}
    ways: dict[str, Callable] = {"ATen": lambda offs: torch._grouped_mm(x, w.transpose(-2, -1), offs)}
    seconds = {}
    for name, backends in (("with us", ALL), ("Triton", TRITON)):
        start = time.perf_counter()
        function = compiled(backends)
        function(x, w, offs["balanced"])
        torch.cuda.synchronize()
        seconds[name] = round(time.perf_counter() - start, 2)
        ways[name] = lambda offs, function=function: function(x, w, offs)
    ours, entry = best_of_ours(case)
    if ours is not None:
        out = torch.empty(case.total, case.n, device="cuda", dtype=torch.bfloat16)
        ways["ours"] = lambda offs: ours[1](x, w.transpose(-2, -1), offs, out=out)
    rows = []
    for share, c in ends.items():
        errors = {name: error(c, x, w, way(offs[share])) for name, way in ways.items()}
        us = times({name: lambda way=way, share=share: way(offs[share]) for name, way in ways.items()}, c, rounds)
        best = min(("ATen", "Triton"), key=lambda name: us[name])
        row: dict[str, Any] = {"G": c.groups, "tokens": c.tokens, "share": share, "N": c.n, "K": c.k}
        row |= {"floor us": round(floor_us(c), 1), "us": {n: round(t, 2) for n, t in us.items()}, "best other": best}
        row |= {f"{n} ratio": round(us[best] / us[n], 4) for n in ("ours", "with us") if n in us}
        row |= {"errors": errors, "winner": entry.winner if entry else None, "ours": ours[0] if ours else None}
        rows.append(row | {"compile s": seconds, "candidates": len(entry.timings) if entry else 0})
    return rows


def times(ways: dict[str, Callable], case: Case, rounds: int) -> dict[str, float]:
    """Microseconds of a call by replaying graphs in turn. Weights alone are more than L2 holds."""
    from ._gpu_replay import repeated, replay_us

    graphs = [repeated(way, floor_us(case)) for way in ways.values()]
    return dict(zip(ways, replay_us(graphs, rounds)))


def error(case: Case, x: Any, w: Any, result: Any) -> float:
    """Relative to a f64 reference of the first rows of every group, in the Frobenius norm."""
    import torch

    wrong, whole, first = 0.0, 0.0, 0
    for g, size in enumerate(case.sizes):
        part = slice(first, first + min(size, ROWS_CHECKED))
        exact = x[part].double() @ w[g].t().double()
        wrong += (result[part].double() - exact).square().sum().item()
        whole += exact.square().sum().item()
        first += size
    torch.cuda.synchronize()
    return (wrong / whole) ** 0.5


def best_of_ours(case: Case) -> tuple[tuple[str, Callable] | None, Any]:
    """((name, callable), entry): the winner, if it is one of ours, else our fastest as the plugin measured it alone."""
    from inductor_plugin import grouped, kernels

    for entry in entries():
        p = entry.key.problem
        if entry.key.op != grouped.OP or p["form"] != "m":
            continue
        if (p["groups"], p["tokens"], p["n"], p["k"]) != (case.groups, case.total, case.n, case.k):
            continue
        ours = [t for t in entry.timings.values() if t.config is not None and t.microseconds and not t.quarantined]
        if not ours:
            return None, entry
        best = min(ours, key=lambda t: (t.name != entry.winner, t.microseconds))
        problem = grouped.PROBLEM(**{k: v for k, v in p.items() if k != grouped.RUN_TIME_SIZE})
        spec = kernels.Spec(entry.key.op, "sm90a", problem, best.config, best.artefact or "")
        return (best.name.removeprefix("flykernels "), kernels.callable_for(spec)), entry
    return None, None
