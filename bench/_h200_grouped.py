"""One grouped product on the H200: ours beside ATen's and Inductor's Triton template, however tokens are shared out.

    python -m bench._h200_grouped LOCK SECONDS ROUNDS NAME ...

tunes and measures each NAME, forward,G,TOKENS,N,K or gradient,G,TOKENS,N,K, when it is its turn on the GPU, and prints
rows as JSON, one a line; it begins nothing new after so many SECONDS since 1970.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ._grouped_suite import SHARES, Case
from ._h200_gemm import entries
from ._h200_turns import Turn

ALL, TRITON, WITHOUT_TRITON = "ATEN,TRITON,FLYKERNELS", "TRITON", "ATEN,FLYKERNELS"
BYTES = 2  # of a bf16
MEMORY, COMPUTE = 4.25e6, 790e6  # bytes and operations a microsecond: the ceilings measured on this machine
ROWS_CHECKED = 64  # of each group
FORMS = {"forward": "m", "gradient": "k"}
STEP = 8  # tokens that a group's are a multiple of in gradients: ATen's kernel asks for 16 bytes
NEAR, AGAIN = 0.03, 2  # with a ratio so near to 1 the rounds are repeated so many times
SPREAD = 0.02  # and where half of the samples are not within so much of each other


def floor_us(case: Case, kind: str) -> float:
    """Of memory traffic (weights of groups that have rows, rows in and out; of gradients all are written) and of
    arithmetic at the ceilings."""
    weights = (case.groups if kind == "gradient" else sum(n > 0 for n in case.sizes)) * case.n * case.k
    moved = (weights + case.total * (case.n + case.k)) * BYTES
    return max(moved / MEMORY, 2 * case.total * case.n * case.k / COMPUTE)


def forward(x, w, offs):
    """The program that is compiled: (T, K), (G, N, K) -> (T, N)."""
    import torch.nn.functional as F

    return F.grouped_mm(x, w.transpose(-2, -1), offs=offs)


def gradient(y, x, offs):
    """Of the weights: (T, N), (T, K) -> (G, N, K)."""
    import torch.nn.functional as F

    return F.grouped_mm(y.transpose(-2, -1), x, offs=offs)


PROGRAMS: dict[str, Callable] = {"forward": forward, "gradient": gradient}


def compiled(kind: str, backends: str) -> Callable:
    import torch

    options = {"max_autotune": True, "max_autotune_gemm_backends": backends}
    return torch.compile(PROGRAMS[kind], dynamic=False, options=options)


def backends(kind: str) -> str:
    """Whose candidates are tuned together: gradients are compared with ATen's alone."""
    return ALL if kind == "forward" else WITHOUT_TRITON


def shapes(case: Case, kind: str) -> list[tuple[int, ...]]:
    """Of the program's two operands."""
    x, y, w = (case.total, case.k), (case.total, case.n), (case.groups, case.n, case.k)
    return [x, w] if kind == "forward" else [y, x]


def operands(case: Case, kind: str) -> tuple[Any, ...]:
    """The program's arguments: normal numbers, scaled so that results are about 1, and offs."""
    import torch

    rand = lambda size: torch.randn(size, device="cuda", dtype=torch.bfloat16)
    first, second = (rand(size) for size in shapes(case, kind))
    second *= (case.k if kind == "forward" else case.tokens) ** -0.5
    return first, second, offs_of(case, kind)


def without_memory(case: Case, kind: str) -> tuple[Any, ...]:
    """Arguments that a program can be compiled for, and not run on."""
    import torch

    made = [torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in shapes(case, kind)]
    for tensor in made:
        tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    return *made, offs_of(case, kind)


def ends(case: Case, kind: str) -> list[int]:
    step = STEP if kind == "gradient" else 1
    return [*(round(x / step) * step for x in case.offs[:-1]), case.total]


def offs_of(case: Case, kind: str) -> Any:
    import torch

    return torch.tensor(ends(case, kind), device="cuda", dtype=torch.int32)


def run(case: Case, kind: str, rounds: int, gpu: Turn) -> list[dict[str, Any]]:
    """Compiles, checks and times one size for all shares; a row of figures each.

    Tuning knows the sizes and not how tokens will be shared out: one choice serves all."""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)
    gpu.seconds = 0.0
    first, second, offs = operands(case, kind)
    program: dict[str, Callable] = {
        "forward": lambda offs: torch._grouped_mm(first, second.transpose(-2, -1), offs),
        "gradient": lambda offs: torch._grouped_mm(first.transpose(-2, -1), second, offs),
    }
    ways: dict[str, Callable] = {"ATen": program[kind]}
    seconds = {}
    for name, whose in {"with us": backends(kind), **({"Triton": TRITON} if kind == "forward" else {})}.items():
        start = time.perf_counter()
        function = compiled(kind, whose)
        try:
            function(first, second, offs)
            torch.cuda.synchronize()
        finally:
            gpu.end()
        seconds[name] = round(time.perf_counter() - start, 2)
        ways[name] = lambda offs, function=function: function(first, second, offs)
    tuned = round(gpu.seconds, 2)
    ours, entry = best_of_ours(case, kind)
    if ours is not None:
        a, b = (first, second.transpose(-2, -1)) if kind == "forward" else (first.transpose(-2, -1), second)
        shape = (case.total, case.n) if kind == "forward" else (case.groups, case.n, case.k)
        out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        ways["ours"] = lambda offs: ours[1](a, b, offs, out=out)
    rows = []
    with gpu:
        for share in SHARES:
            c = Case(case.groups, case.tokens, share, case.n, case.k)
            offs = offs_of(c, kind)
            errors = {name: error(c, kind, first, second, way(offs)) for name, way in ways.items()}
            us = times({name: lambda way=way, offs=offs: way(offs) for name, way in ways.items()}, c, kind, rounds)
            best = min((x for x in ("ATen", "Triton") if x in us), key=lambda name: us[name])
            row: dict[str, Any] = {"kind": kind, "G": c.groups, "tokens": c.tokens, "share": share, "N": c.n, "K": c.k}
            row |= {"floor us": round(floor_us(c, kind), 1), "us": {n: round(t, 2) for n, t in us.items()}}
            row |= {f"{n} ratio": round(us[best] / us[n], 4) for n in ("ours", "with us") if n in us}
            row |= {"with us / ATen": round(us["ATen"] / us["with us"], 4), "best other": best, "errors": errors}
            row |= {"winner": entry.winner if entry else None, "ours": ours[0] if ours else None}
            rows.append(row | {"compile s": seconds, "candidates": len(entry.timings) if entry else 0})
    for row in rows:
        row["GPU s"] = {"tuning": tuned, "measuring": round(gpu.seconds - tuned, 2)}
    return rows


def times(ways: dict[str, Callable], case: Case, kind: str, rounds: int) -> dict[str, float]:
    """Microseconds of a call by replaying graphs in turn, more often where it is near or unsteady. Weights alone are
    more than L2 holds."""
    from ._gpu_replay import repeated, samples_us

    graphs = [repeated(way, floor_us(case, kind)) for way in ways.values()]
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + AGAIN):
        for name, more in zip(ways, samples_us(graphs, rounds, mixed=True)):
            seen[name] += more
        us = {name: statistics.median(samples) for name, samples in seen.items()}
        low, high = ({n: statistics.quantiles(x)[i] for n, x in seen.items()} for i in (0, 2))
        others = min(t for n, t in us.items() if n in ("ATen", "Triton"))
        steady = all(high[n] - low[n] < SPREAD * us[n] for n in ways)
        if steady and abs(others / us.get("ours", us["with us"]) - 1) > NEAR:
            break
    return us


def error(case: Case, kind: str, first: Any, second: Any, result: Any) -> float:
    """Relative to a f64 reference in the Frobenius norm: of the first rows of every group, or of its gradient."""
    import torch

    wrong, whole = (torch.zeros((), device="cuda", dtype=torch.float64) for _ in range(2))
    for g, (begin, end) in enumerate(pairwise([0, *ends(case, kind)])):
        if kind == "forward":
            part = slice(begin, min(end, begin + ROWS_CHECKED))
            exact, got = first[part].double() @ second[g].t().double(), result[part]
        else:
            exact = first[begin:end, :ROWS_CHECKED].t().double() @ second[begin:end].double()
            got = result[g, :ROWS_CHECKED]
        wrong += (got.double() - exact).square().sum()
        whole += exact.square().sum()
    return float((wrong / whole) ** 0.5)


def best_of_ours(case: Case, kind: str) -> tuple[tuple[str, Callable] | None, Any]:
    """((name, callable), entry): the winner, if it is one of ours, else our fastest as the plugin measured it alone."""
    from inductor_plugin import grouped, kernels

    sizes = {"m": case.n, "n": case.k, "k": 0} if kind == "gradient" else {"m": 0, "n": case.n, "k": case.k}
    wanted = {"form": FORMS[kind], "groups": case.groups, "tokens": case.total, **sizes}
    for entry in entries():
        p = entry.key.problem
        if entry.key.op != grouped.OP or any(p[x] != value for x, value in wanted.items()):
            continue
        ours = [t for t in entry.timings.values() if t.config is not None and t.microseconds and not t.quarantined]
        if not ours:
            return None, entry
        best = min(ours, key=lambda t: (t.name != entry.winner, t.microseconds))
        problem = grouped.PROBLEM(**{k: v for k, v in p.items() if k != grouped.RUN_TIME_SIZE})
        spec = kernels.Spec(entry.key.op, "sm90a", problem, best.config, best.artefact or "")
        return (best.name.removeprefix("flykernels "), kernels.callable_for(spec)), entry
    return None, None


def named(text: str) -> tuple[str, Case]:
    """(forward or gradient, the balanced case) of a NAME."""
    kind, *numbers = text.split(",")
    groups, tokens, n, k = map(int, numbers[:4])
    return kind, Case(groups, tokens, "balanced", n, k)


def rows(names: Sequence[str], gpu: Turn, until: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Of each size in turn; {"failed": why} for one that was not measured."""
    for name in names:
        if time.time() > until:
            return
        kind, case = named(name)
        try:
            yield from run(case, kind, rounds, gpu)
        except Exception as e:
            yield {"failed": f"{name}: {type(e).__name__}: {str(e)[:300]}"}
        finally:
            gpu.end()


def main(lock: Path, until: float, rounds: int, names: Sequence[str]) -> None:
    import inductor_plugin

    inductor_plugin.enable()
    gpu = Turn(lock)
    gpu.around_tuning()
    for row in rows(names, gpu, until, rounds):
        print(json.dumps(row, default=str), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
