"""Compiles ahead what the bench will tune: processes that build every candidate, and measure none.

    python -m bench._h200_ahead WHAT ...

WHAT is KIND,M,N,K of one case, or grouped,KIND,G,TOKENS,N,K,PART,OF.

Kernels of Triton's go to Inductor's cache and ours to our store, where the bench, which runs meanwhile, finds them. Its
tuning is the same, only sooner. (Tuning time is measured elsewhere, from empty caches: see _h200_layers.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SINGLE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # Inductor compiles within the process, not in helpers of its own
SPARE = 2  # cores left to whoever measures


class Ahead:
    """Processes, one a core, that build what is named, in this order."""

    def __init__(self, names: Sequence[str]):
        count = max(1, len(os.sched_getaffinity(0)) - SPARE)
        self.running = [self._start(names[i::count]) for i in range(min(count, len(names)))]

    def _start(self, names: Sequence[str]) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "bench._h200_ahead", *names], cwd=ROOT, env={**os.environ, **SINGLE},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait(self) -> None:
        for process in self.running:
            process.wait()

    def stop(self) -> None:
        for process in self.running:
            process.terminate()
        self.wait()


class Built(BaseException):
    """All candidates are built: no need to go on compiling."""


def without_measuring() -> Callable:
    """Makes Inductor and our plugin take every candidate for equally fast, and remember nothing but what was built.

    What it gives does the last, for {candidate: anything}."""
    import torch._functorch.config
    import torch._inductor.config as config
    from torch._inductor import select_algorithm

    from inductor_plugin import choices, kernels, runoff, settings
    from inductor_plugin.families import OWN
    from templates.gemm.build import build_from_json
    from tuning_cache import Timing

    config.autotune_local_cache = False
    config.fx_graph_cache = False  # the bench would take over whole graphs, and with them choices that nobody measured
    torch._functorch.config.enable_autograd_cache = False
    alike = lambda candidates, *_, **__: dict.fromkeys(candidates, 1.0)
    select_algorithm.AlgorithmSelectorCache.make_benchmark_fn = classmethod(lambda *_, **__: alike)  # type: ignore

    def here(spec: kernels.Spec) -> Any:
        make = OWN[spec.op].build if spec.op in OWN else build_from_json
        return make(spec.problem, spec.config, spec.target)

    kernels._build = here

    def built(timings: dict, *_: Any) -> None:
        for choice in timings:
            if isinstance(choice, choices.Choice):
                spec = choices.with_artefact(replace(choice.spec, artefact=""))
                timing = Timing(spec.name, None, spec.config, spec.artefact or None)
                known = lambda entry, timing=timing: (
                    entry if timing.name in entry.timings else entry.with_timing(timing)
                )
                settings.store().update(choice.request.key, known)

    choices.record = built  # type: ignore[assignment]
    runoff.settle = lambda timings: timings
    return built


def part_of_a_grouped_product(name: str, part: int, of: int, built: Callable) -> None:
    """Builds every `of`-th candidate of a size, from number `part` on: nothing is allocated or run."""
    import torch
    from torch._inductor import select_algorithm

    from . import _h200_grouped as grouped

    def some(candidates: list) -> list:
        """At least two: an only candidate is not tuned, and so the program would go on, and run."""
        mine = candidates[part::of]
        return mine if len(mine) > 1 else list(dict.fromkeys([*mine, *candidates[:2]]))

    def enough(candidates, *_, **__):
        built(dict.fromkeys(candidates))
        raise Built

    kind, case = grouped.named(name)
    cache = select_algorithm.AlgorithmSelectorCache
    make, seen_by = cache.make_benchmark_fn, select_algorithm.get_algorithm_selector_cache().preprocessing_fns
    cache.make_benchmark_fn = classmethod(lambda *_, **__: enough)  # type: ignore[assignment]
    seen_by.append(some)
    torch._dynamo.reset()
    try:
        grouped.compiled(kind, grouped.backends(kind))(*grouped.without_memory(case, kind))
    except Built:
        return
    finally:
        seen_by.remove(some)
        cache.make_benchmark_fn = make  # type: ignore[assignment]


def build(text: str, built: Callable) -> None:
    """Builds what one argument names."""
    import torch

    from . import _h200_gemm as gemm

    kind, *rest = text.split(",")
    compiled = gemm.compiled
    if kind == "grouped":
        *name, part, of = rest
        return part_of_a_grouped_product(",".join(name), int(part), int(of), built)
    case = gemm.Case(kind, *map(int, rest))
    (given,) = gemm.operands(case, 1)
    function, given = gemm.function_of(kind), given[:4]
    ways = (gemm.ALL, gemm.WITHOUT if kind != "mm" else "TRITON")
    for backends in ways:
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(function, backends)(*given)
    del given
    torch.cuda.empty_cache()


def main(what: Sequence[str]) -> None:
    import inductor_plugin

    inductor_plugin.enable()
    built = without_measuring()
    for text in what:
        try:
            build(text, built)
        except Exception as e:
            print(f"{text}: not built ahead: {type(e).__name__}: {e}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
