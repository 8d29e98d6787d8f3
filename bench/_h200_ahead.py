"""Compiles ahead what the bench will tune: a process that builds every candidate of some cases, and measures none.

    python -m bench._h200_ahead KIND,M,N,K ... grouped,G,TOKENS,N,K ...

Kernels of Triton's go to Inductor's cache and ours to our store, where the bench, which runs meanwhile, finds them. Its
tuning is the same, only sooner. (Tuning time is measured elsewhere, from empty caches: see _h200_layers.)
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any


def without_measuring() -> None:
    """Makes Inductor and our plugin take every candidate for equally fast, and remember nothing but what was built."""
    import torch._functorch.config
    import torch._inductor.config as config
    from torch._inductor import select_algorithm

    from inductor_plugin import choices, runoff, settings
    from tuning_cache import Timing

    config.autotune_local_cache = False
    config.fx_graph_cache = False  # the bench would take over whole graphs, and with them choices that nobody measured
    torch._functorch.config.enable_autograd_cache = False
    alike = lambda candidates, *_, **__: dict.fromkeys(candidates, 1.0)
    select_algorithm.AlgorithmSelectorCache.make_benchmark_fn = classmethod(lambda *_, **__: alike)  # type: ignore

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


def main(named: list[str]) -> None:
    import torch

    import inductor_plugin

    from . import _h200_gemm as gemm
    from . import _h200_grouped as grouped

    inductor_plugin.enable()
    without_measuring()
    for text in named:
        kind, *sizes = text.split(",")
        if kind == "grouped":
            g, tokens, n, k = map(int, sizes)
            case = grouped.Case(g, tokens, "balanced", n, k)
            given, make = grouped.operands(case), grouped.compiled
        else:
            dense = gemm.Case(kind, *map(int, sizes))
            given = gemm.operands(dense, 1)[0][:4]
            make = lambda backends, kind=kind: gemm.compiled(gemm.function_of(kind), backends)
        for backends in (gemm.ALL, gemm.WITHOUT if kind in ("gelu", "residual") else "TRITON"):
            torch._dynamo.reset()
            try:
                make(backends)(*given)
            except Exception as e:
                print(f"{text}: not built ahead: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        del given
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
