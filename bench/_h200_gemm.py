"""dense15 on the H200: plain products and products with an epilogue, ours beside ATen's and Inductor's own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _h200_time as timing

SIZES_M = (16, 64, 256, 1024, 4096)
SIZES_NK = ((4096, 4096), (14336, 4096), (4096, 14336))
ALL = "ATEN,TRITON,FLYKERNELS"
WITHOUT = "ATEN,TRITON"
ANEW = "ATen, C anew"  # into memory allocated for it, as what is compiled writes
BYTES = 2  # of a bf16
LEAST, NEAR = 0.99, 0.02  # as fast as the others, as autotuned: figures so near to it take more rounds


@dataclass(frozen=True)
class Case:
    """What is computed: x (M, K) bf16, w (N, K) bf16 as a Linear layer holds it, then what `kind` says."""

    kind: str
    m: int
    n: int
    k: int

    @property
    def memory_us(self) -> float:
        """Of memory traffic at the ceiling measured on this machine: 4.25 TB/s."""
        moved = (self.m * self.k + self.n * self.k + self.m * self.n * (2 if self.kind == "residual" else 1)) * BYTES
        return moved / 4.25e6

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.m * self.n * self.k

    @property
    def floor_us(self) -> float:
        """Of memory traffic and of arithmetic at the ceilings measured on this machine: the latter 790 TFLOP/s."""
        return max(self.memory_us, self.operations / 790e6)

    @property
    def set_bytes(self) -> int:
        return (self.m * self.k + self.n * self.k + 2 * self.m * self.n) * BYTES


def cases(kind: str) -> list[Case]:
    return [Case(kind, m, n, k) for n, k in SIZES_NK for m in SIZES_M]


def function_of(kind: str) -> Callable:
    """The program that is compiled, of (x, w, bias, residual)."""
    import torch.nn.functional as F

    return {
        "mm": lambda x, w, bias, residual: x @ w.t(),
        "gelu": lambda x, w, bias, residual: F.gelu(F.linear(x, w, bias), approximate="tanh"),
        "residual": lambda x, w, bias, residual: F.linear(x, w) + residual,
    }[kind]


def by_aten(kind: str) -> dict[str, Callable]:
    """ATen's own ways, of (x, w, bias, residual, out): the operators one by one, and the one that does it at once."""
    import torch

    function = function_of(kind)
    return {
        "mm": {
            "ATen": lambda x, w, bias, residual, out: torch.mm(x, w.t(), out=out),
            ANEW: lambda x, w, bias, residual, out: torch.mm(x, w.t()),
        },
        "gelu": {
            "ATen": lambda x, w, bias, residual, out: function(x, w, bias, residual),
            "ATen at once": lambda x, w, bias, residual, out: torch._addmm_activation(bias, x, w.t(), use_gelu=True),
        },
        "residual": {
            "ATen": lambda x, w, bias, residual, out: function(x, w, bias, residual),
            "ATen at once": lambda x, w, bias, residual, out: torch.addmm(residual, x, w.t(), out=out),
        },
    }[kind]


def operands(case: Case, sets: int) -> list[tuple]:
    """Sets of (x, w, bias, residual, out) of standard normal numbers, scaled so that results are about 1."""
    import torch

    rand = lambda *size: torch.randn(size, device="cuda", dtype=torch.bfloat16)
    m, n, k = case.m, case.n, case.k
    return [
        (rand(m, k), rand(n, k) * k**-0.5, rand(n), residual := rand(m, n), torch.empty_like(residual))
        for _ in range(sets)
    ]


def compiled(function: Callable, backends: str) -> Callable:
    import torch

    options = {"max_autotune": True, "max_autotune_gemm_backends": backends}
    return torch.compile(function, dynamic=False, options=options)


def run(case: Case, states=timing.STATES, forms=timing.FORMS, least: float | None = LEAST) -> dict[str, Any]:
    """Compiles, checks and times one case; a row of figures.

    least: the bar of what was chosen, near to which more rounds are taken; None if there is none"""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)
    sets = operands(case, timing.copies(case.set_bytes))
    function = function_of(case.kind)
    seconds = {}
    ways: dict[str, Callable] = {}
    theirs = {"Triton": "TRITON"} if case.kind == "mm" else {"Inductor": WITHOUT}
    for name, backends in {"with us": ALL, **theirs}.items():
        start = time.perf_counter()
        way = compiled(function, backends)
        way(*sets[0][:4])
        seconds[name] = round(time.perf_counter() - start, 2)
        ways[name] = lambda i, way=way: way(*sets[i][:4])
    for name, call in by_aten(case.kind).items():
        ways[name] = lambda i, call=call: call(*sets[i])
    ours, entry = best_of_ours(case)
    if ours is not None:
        name, call = ours
        ways["ours"] = way_of_ours(case, call, sets)
    errors = {n: error(case, sets[0], way(0)) for n, way in ways.items()}
    others = [w for w in ways if w not in ("with us", "ours", ANEW)]
    compiled_others = [w for w in ways if w not in ("with us", "ours") and (w != "ATen" or ANEW not in ways)]
    chosen = lambda timed: timed.ratio(timed.fastest(*compiled_others), "with us")
    near = lambda timed: least is not None and abs(chosen(timed) - least) < NEAR
    found = timing.measure(ways, len(sets), states, forms, unsure=near)
    row: dict[str, Any] = {
        "kind": case.kind,
        "M": case.m,
        "N": case.n,
        "K": case.k,
        "floor us": round(case.floor_us, 1),
    }
    for (state, form), timed in found.items():
        best = timed.fastest(*others)
        row[f"{state} {form}"] = {
            "us": {n: round(timed.us(n), 2) for n in ways}, "best other": best,
            "with us ratio": round(chosen(timed), 4), "rounds": timed.rounds,
            **({"ours ratio": round(timed.ratio(best, "ours"), 4)} if "ours" in ways else {}),
        }  # fmt: skip
    row |= {"winner": entry.winner if entry else None, "ours": ours[0] if ours else None, "errors": errors}
    row |= {"compile s": seconds, "candidates": len(entry.timings) if entry else 0}
    return row


def error(case: Case, given: tuple, result: Any) -> float:
    """Relative to a f64 reference of the first rows, in the Frobenius norm."""
    x, w, bias, residual, _ = given
    rows = min(case.m, 256)
    x, residual = x[:rows].double(), residual[:rows].double()
    exact = function_of(case.kind)(x, w.double(), bias.double(), residual)
    return float(((result[:rows].double() - exact).norm() / exact.norm()).item())


def entries() -> Iterator[Any]:
    from inductor_plugin import settings
    from tuning_cache import Entry

    for path in (Path(settings.store().directories[0]) / "entries").glob("*/*.json"):
        yield Entry.from_json(path.read_text())


def way_of_ours(case: Case, call: Callable, sets: list) -> Callable[[int], Any]:
    """What runs `best_of_ours`' callable on a set of `operands`."""
    added = {"mm": lambda s: (), "gelu": lambda s: (s[2],), "residual": lambda s: (s[3],)}[case.kind]
    return lambda i: call(sets[i][0], sets[i][1].t(), *added(sets[i]), out=sets[i][4])


def best_of_ours(case: Case) -> tuple[tuple[str, Callable] | None, Any]:
    """((name, callable), entry): the winner, if it is one of ours, else our fastest as the plugin measured it alone."""
    from inductor_plugin import kernels, runoff
    from templates.gemm.problem import GemmProblem

    wanted = {"mm": ("none", "none", False), "gelu": ("row", "gelu_tanh", False), "residual": ("none", "none", True)}[
        case.kind
    ]
    for entry in entries():
        p = entry.key.problem
        if tuple(p[x] for x in ("m", "n", "k", "bias", "activation", "residual")) != (case.m, case.n, case.k, *wanted):
            continue
        ours = [t for t in entry.timings.values() if t.config is not None and t.microseconds and not t.quarantined]
        if not ours:
            return None, entry
        level = runoff.comparable(entry.key, {t.name: t.microseconds for t in ours})
        best = min(ours, key=lambda t: (t.name != entry.winner, level[t.name], t.microseconds))
        problem = GemmProblem(**{k: v for k, v in p.items() if k not in ("m", "batch")})
        spec = kernels.Spec(entry.key.op, "sm90a", problem, best.config, best.artefact or "")
        return (best.name.removeprefix("flykernels "), kernels.callable_for(spec)), entry
    return None, None


if __name__ == "__main__":
    import sys

    import inductor_plugin

    inductor_plugin.enable()
    for kind, m, n, k in (a.split(",") for a in sys.argv[1:]):
        print(json.dumps(run(Case(kind, int(m), int(n), int(k)))), flush=True)
