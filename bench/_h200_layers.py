"""Models on the H200: decoder layers of Llama-3-8B's shape, and a sentence encoder of MiniLM-L6's; tokens a second.

    python -m bench._h200_layers WHAT NAME FOLDER

Each way of compiling is a process of its own that begins with empty caches: how long it takes is tuning time, start-up
(which it is through before it is told to go) not counted. Then the ways take turns on the GPU within one process, a
captured graph each: the other way comes out of Inductor's cache there. Weights are random, shapes are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _h200_time as timing

WAYS = {"max-autotune": "ATEN,TRITON", "with us": "ATEN,TRITON,FLYKERNELS"}
LAYERS = 4  # enough weights that no layer's are in L2 when its turn comes
SAMPLE_US, ROUNDS = 20_000.0, 11
ENDING = 20.0  # seconds that a process may take to end
CACHE = 512  # tokens that each sequence has already, in the KV cache


@dataclass(frozen=True)
class Shape:
    """Llama 3 8B (Meta, model card and config.json)."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    inner: int = 14336
    eps: float = 1e-5
    theta: float = 500_000.0


@dataclass(frozen=True)
class Setting:
    """batch sequences, each with `tokens` new ones; `cached` before them."""

    name: str
    batch: int
    tokens: int
    cached: int

    @property
    def count(self) -> int:
        return self.batch * self.tokens


SETTINGS = (
    Setting("decode 1", 1, 1, CACHE), Setting("decode 16", 16, 1, CACHE), Setting("decode 128", 128, 1, CACHE),
    Setting("prefill 2048", 1, 2048, 0),
)  # fmt: skip


def decoder(setting: Setting, shape: Shape) -> Any:
    """The layers; they take (batch, tokens, hidden)."""
    import torch
    import torch.nn.functional as F

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
            linear = lambda n, k: torch.nn.Parameter(torch.randn(n, k) * k**-0.5, requires_grad=False)
            self.qkv, self.out = linear(q + 2 * kv, shape.hidden), linear(shape.hidden, q)
            self.gate, self.up = linear(shape.inner, shape.hidden), linear(shape.inner, shape.hidden)
            self.down = linear(shape.hidden, shape.inner)
            ones = lambda: torch.nn.Parameter(torch.ones(shape.hidden), requires_grad=False)
            self.before, self.between = ones(), ones()
            room = (setting.batch, shape.kv_heads, setting.cached + setting.tokens, shape.head)
            self.register_buffer("keys", torch.randn(room))
            self.register_buffer("values", torch.randn(room))

        def forward(self, x, cos, sin):
            x = x + self.attention(F.rms_norm(x, (shape.hidden,), self.before, shape.eps), cos, sin)
            y = F.rms_norm(x, (shape.hidden,), self.between, shape.eps)
            return x + F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down)

        def attention(self, x, cos, sin):
            batch, tokens, _ = x.shape
            q, kv = shape.heads, shape.kv_heads
            heads = F.linear(x, self.qkv).view(batch, tokens, q + 2 * kv, shape.head).transpose(1, 2)
            q, k, v = heads.split((q, kv, kv), dim=1)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            if setting.cached:
                self.keys[:, :, setting.cached :] = k
                self.values[:, :, setting.cached :] = v
                k, v = self.keys, self.values
            y = F.scaled_dot_product_attention(q, k, v, is_causal=not setting.cached, enable_gqa=True)
            return F.linear(y.transpose(1, 2).reshape(batch, tokens, shape.hidden), self.out)

    def rotated(x, cos, sin):
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
            place = torch.arange(setting.cached, setting.cached + setting.tokens)
            angle = place[:, None] * shape.theta ** (-torch.arange(0, shape.head, 2) / shape.head)
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
            return x

    with torch.device("cuda"):
        torch.manual_seed(0)
        return Decoder().to(torch.bfloat16).eval()


ENCODER = Setting("MiniLM 32 x 32", 32, 32, 0)
TUNED = SETTINGS[1]  # whose tuning time is compared


def encoder() -> Any:
    """MiniLM-L6-v2 with mean pooling as the demo has it, over token ids and a mask: transformers' BERT of its shape
    (model card: 6 layers, hidden 384, 12 heads, inner 1536, 30522 words), random weights."""
    import torch
    from transformers import BertConfig, BertModel

    shape = BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        max_position_embeddings=512,
    )  # fmt: skip

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = BertModel(shape, add_pooling_layer=False)

        def forward(self, ids, mask):
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            weight = mask.unsqueeze(-1).to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)

    with torch.device("cuda"):
        torch.manual_seed(0)
        return Encoder().to(torch.bfloat16).eval().requires_grad_(False)


def model_of(setting: Setting) -> tuple[Any, tuple]:
    """(model, inputs)."""
    import torch

    if setting is ENCODER:
        ids = torch.randint(1000, 30000, (setting.batch, setting.tokens), device="cuda")
        mask = torch.arange(setting.tokens, device="cuda") < torch.randint(8, 33, (setting.batch, 1), device="cuda")
        return encoder(), (ids, mask.long())
    x = torch.randn(setting.batch, setting.tokens, Shape().hidden, device="cuda", dtype=torch.bfloat16)
    return decoder(setting, Shape()), (x,)


class Served:
    """A model compiled one way, as a captured graph.

    seconds  that compiling took, tuning and all
    error    of the result to eager's, relative, in the Frobenius norm"""

    def __init__(self, model: Any, given: tuple, expected: Any, backends: str):
        import torch

        torch._dynamo.reset()
        options = {"max_autotune": True, "max_autotune_gemm_backends": backends}
        way = torch.compile(model, dynamic=False, options=options)
        start = time.perf_counter()
        way(*given)
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        way(*given)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = way(*given)
        self.graph.replay()
        torch.cuda.synchronize()
        self.error = ((self.y.double() - expected).norm() / expected.norm()).item()

    def sample(self, replays: int) -> float:
        """Microseconds of a replay."""
        from ._gpu_replay import elapsed

        return elapsed(lambda: [self.graph.replay() for _ in range(replays)]) / replays


def fresh_caches(folder: Path, ours: Path) -> None:
    """Inductor's caches, Triton's among them, and ours in these folders, and nothing in memory."""
    from torch._inductor.utils import clear_caches

    os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["FLYKERNELS_CACHE_DIR"] = str(folder), str(ours)
    os.environ["TRITON_CACHE_DIR"] = str(
        folder / "triton"
    )  # else Inductor keeps the first that it has made in a process
    clear_caches()


class Ours:
    """Takes the time that the plugin's parts of compiling a model take, from now on in this process."""

    def __init__(self) -> None:
        from inductor_plugin import choices, fused_choice, kernels, private, runoff

        parts = (
            ("offering", choices, "offer"), ("measuring", choices.Choice, "benchmark"),
            ("last round", runoff, "settle"),
            ("fused ones", private, "benchmark_apart"), ("fused ones", runoff, "among_ours"),
            ("fused ones", fused_choice, "_epilogue_microseconds"),
        )  # fmt: skip
        self.built: list[tuple[float, float]] = []  # begin and end, of whichever thread
        self.waited = dict.fromkeys((part for part, *_ in parts), 0.0)  # seconds of the thread that compiles
        self.within = False
        for part, owner, name in parts:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        kernels._build = self._building(kernels._build)  # type: ignore[assignment]

    def _timed(self, function: Callable, part: str) -> Callable:
        def timed(*given: Any, **named: Any) -> Any:
            if self.within:
                return function(*given, **named)
            self.within, start = True, time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.within = False
                self.waited[part] += time.perf_counter() - start

        return timed

    def _building(self, function: Callable) -> Callable:
        def build(spec: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(spec)
            finally:
                self.built.append((start, time.perf_counter()))

        return build

    def seconds(self) -> dict[str, float]:
        """From the first to the last build, which Inductor's own go on beside, and of each part."""
        building = max((e for _, e in self.built), default=0.0) - min((s for s, _ in self.built), default=0.0)
        return {part: round(s, 2) for part, s in {"building": building, **self.waited}.items()}


def alone(setting: Setting, folder: Path) -> dict[str, Any]:
    """Inductor without us, from empty caches."""
    made = _served(setting, folder, "max-autotune")[1]
    return {"setting": setting.name, "seconds": made.seconds, "error": made.error}


def side_by_side(setting: Setting, folder: Path) -> dict[str, Any]:
    """With us from empty caches, then in turns with what `alone` has left in its own."""
    import torch

    from inductor_plugin.counters import counters

    ours = Ours()
    model, first = _served(setting, folder, "with us")
    spent = {"benchmarks": counters["benchmarks"], "compiles": counters["compiles"], **ours.seconds()}
    served = {"with us": first, "max-autotune": _served(setting, folder, "max-autotune", model)[1]}
    with torch.no_grad():
        replays = max(1, round(SAMPLE_US / served["max-autotune"].sample(3)))
        timed = timing.Timed({way: [] for way in served})
        for turn in range(ROUNDS + 1):
            for way in random.sample(list(served), len(served)):
                us = served[way].sample(replays)
                if turn:
                    timed.samples[way].append(us)
    rate = {way: setting.count / timed.us(way) * 1e6 for way in served}
    return {
        "setting": setting.name, "tokens/s": rate, "us": {way: timed.us(way) for way in served},
        "ratio": timed.ratio("max-autotune", "with us"), "seconds": first.seconds, "spent on ours": spent,
        "from the cache s": served["max-autotune"].seconds, "errors": {w: v.error for w, v in served.items()},
        "ours": products_of_ours(setting),
    }  # fmt: skip


def from_cache(setting: Setting, folder: Path, inductor: str) -> dict[str, Any]:
    """What a model that was compiled with us costs in another process. inductor: its cache that is used."""
    from torch._inductor.runtime.benchmarking import benchmarker

    from inductor_plugin.counters import counters

    timed, kind = [], type(benchmarker)
    original = kind.benchmark_gpu  # whoever measures on the GPU, measures with this
    kind.benchmark_gpu = lambda self, *a, **k: timed.append(1) or original(self, *a, **k)
    made = _served(setting, folder, "with us", inductor=inductor)[1]
    return {
        "seconds": made.seconds, "error": made.error, "measured": len(timed), "benchmarks": counters["benchmarks"],
        "compiles": counters["compiles"], "from_cache": counters["from cache"],
    }  # fmt: skip


def _served(
    setting: Setting, folder: Path, way: str, known: Any = None, inductor: str | None = None
) -> tuple[Any, Served]:
    """((model, inputs, eager's result), the model compiled that way), as soon as it is told to go, with this process's
    caches in folders of the setting's and the way's own. known: the first of a call before, which began already."""
    import torch

    fresh_caches(folder / setting.name / (inductor or way), folder / setting.name / "ours")
    with torch.no_grad():
        if known is None:
            model, given = model_of(setting)
            known = model, given, model(*given).double()
            torch.cuda.synchronize()
            print("ready", flush=True)
            sys.stdin.readline()
        return known, Served(*known, WAYS[way])


class Waiting:
    """A process of this module that is past its start-up, or soon, and waits."""

    def __init__(self, what: str, setting: Setting, folder: Path):
        self.what, self.setting = what, setting
        self.words = folder / f"{setting.name}, {what}.log"
        folder.mkdir(parents=True, exist_ok=True)
        with self.words.open("w") as words:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench._h200_layers", what, setting.name, str(folder)],
                cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True,
            )  # fmt: skip

    def go(self) -> dict[str, Any]:
        """What it finds out. RuntimeError with its last words if it fails."""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(OSError):  # it has ended already: there are no lines
            self.process.stdin.write("go\n")
            self.process.stdin.close()
        for line in self.process.stdout:
            if line.startswith("{"):
                self.end(ENDING)
                return json.loads(line)
        self.process.wait()
        last = self.words.read_text()[-3000:]
        raise RuntimeError(f"{self.what}, {self.setting.name}: the process failed:\n{last}")

    def end(self, seconds: float = 0.0) -> None:
        """Ends it, or waits so long for it to end."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def rows(settings: Sequence[Setting], folder: Path) -> Iterator[dict[str, Any]]:
    """Of each setting what `alone` and `side_by_side` find. While one process compiles, the next one starts up."""
    jobs = [(what, setting) for setting in settings for what in ("alone", "side by side")]
    waiting = [Waiting(*jobs[0], folder)]
    try:
        for i, (what, _) in enumerate(jobs):
            if i + 1 < len(jobs):
                waiting.append(Waiting(*jobs[i + 1], folder))
            found = waiting.pop(0).go()
            if what == "alone":
                before = found
            else:
                seconds = {"max-autotune": before["seconds"], "with us": found.pop("seconds")}
                yield {**found, "compile s": seconds, "added": seconds["with us"] / seconds["max-autotune"] - 1}
    finally:
        for process in waiting:
            process.end()


def products_of_ours(setting: Setting) -> dict[str, str]:
    """Each product of as many rows as the model's, and its winner."""
    from ._h200_gemm import entries

    found = [e for e in entries() if e.key.problem["m"] == setting.count]
    size = lambda p: "x".join(str(p[x]) for x in ("m", "n", "k"))
    return {f"{e.key.op} {size(e.key.problem)}": str(e.winner) for e in sorted(found, key=lambda e: str(e.key))}


def setting_of(name: str) -> Setting:
    return next(s for s in (*SETTINGS, ENCODER) if s.name == name)


def main(what: str, name: str, folder: Path) -> dict[str, Any]:
    """what: "alone", "side by side", or the folder of Inductor's cache to start with."""
    import inductor_plugin

    inductor_plugin.enable()
    done = {"alone": alone, "side by side": side_by_side}
    if what in done:
        return done[what](setting_of(name), folder)
    return from_cache(setting_of(name), folder, what)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))), flush=True)
    os._exit(0)  # without the seconds of waiting for helpers, which end by themselves
