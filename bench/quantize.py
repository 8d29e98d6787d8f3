"""MX quantisers: on a CPU against the torch expression they replace, on a GPU against what a copy moves.

On a CPU contestants take turns in every round; a ratio is the median of the rounds' own ratios. On a GPU a kernel's
bytes (X once, every result once) a second stand beside those of torch's copy of X, in the same rounds. Launches take
turns with several sets of results, so that none finds in the L2 cache what the one before it wrote there.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import cycle, product
from multiprocessing import get_context

import torch

from bench.common import Report, geomean, parser
from flykernels.codeobject import CodeObject
from flykernels.microscaling import BLOCK, FORMATS
from flykernels.targets import sm90a, x86
from templates.quantize.arguments import outputs, shapes
from templates.quantize.build import build, default
from templates.quantize.gpu import GpuConfig
from templates.quantize.problem import INPUTS, QuantizeProblem

CPU_SHAPES = ((512, 4096), (2048, 4096))
GPU_SHAPES = ((2048, 4096), (16384, 4096), (16384, 8192))
FORMAT_NAMES = ("f8E4M3FN", "f8E5M2", "f4E2M1FN")
ORIENTATIONS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
CPU_BAR = 3.0  # times the torch expression
COPY_BAR = 0.85  # of what a copy moves a second, at the largest shape
COPY_SHAPE = GPU_SHAPES[-1]
BURST = 10  # launches timed together
SETS = 8  # of results: at COPY_SHAPE their scales alone are more than L2 holds


def main(argv: list[str]) -> int:
    """Measures, prints and judges; 0 if the bars are met."""
    options = parser("quantize", __doc__.split("\n", 1)[0])
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--rounds", type=int, default=9, help="rounds of each measurement (default 9)")
    options.add_argument("--sweep", action="store_true", help="GPU: all configurations, not only the default")
    options.add_argument("--dtype", choices=INPUTS, nargs="*", default=INPUTS, help="GPU: of X")
    options.add_argument("--format", choices=FORMAT_NAMES, nargs="*", default=FORMAT_NAMES)
    options = options.parse_args(argv)
    return (on_cpu if options.device == "cpu" else on_gpu)(options)


# -- the torch expression
def expression(x: torch.Tensor, p: QuantizeProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of blocks along rows, mode "floor", as one writes it in torch; finite numbers."""
    kind = p.output_type
    blocks = x.unflatten(-1, (-1, BLOCK)).float()
    amax = blocks.abs().amax(-1, keepdim=True)
    byte = ((amax.view(torch.int32) >> 23) - FORMATS[kind].largest_exponent).clamp(min=0)
    scaled = (
        (blocks * ((254 - byte) << 23).view(torch.float32)).clamp(-kind.largest, kind.largest).flatten(-2).contiguous()
    )
    scales = byte.squeeze(-1).to(torch.uint8)
    if p.per_byte == 1:
        return scaled.to(getattr(torch, kind.torch)), scales
    code = torch.bucketize(scaled.abs(), HALFWAY.to(x.device)).to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 3)
    return code[..., 0::2] | code[..., 1::2] << 4, scales


# Where e2m1's codes change, ties towards the even code: a tie that goes up is moved to the next number below.
HALFWAY = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
HALFWAY[1::2] = torch.nextafter(HALFWAY[1::2], torch.zeros(3))


def replaced(x: torch.Tensor, p: QuantizeProblem) -> list[torch.Tensor]:
    """All results of a problem by the expression, columns by way of the transposed X."""
    out: list[torch.Tensor] = []
    for wanted, lines in ((p.rows, x), (p.columns, x.t())):
        out += expression(lines, p) if wanted else ()
    return out


def made(p: QuantizeProblem, m: int, device: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(*shape, dtype=torch.uint8, device=device) for name, shape in shapes(p, m).items()}


def check(p: QuantizeProblem, x: torch.Tensor, out: dict[str, torch.Tensor]) -> None:
    """Ours and the expression agree, byte by byte. AssertionError if not."""
    for name, want in zip(outputs(p), replaced(x, p), strict=True):
        assert torch.equal(out[name], want.view(torch.uint8)), f"{name} differs: {p}"


def turns(calls: dict[str, Callable[[], object]], rounds: int, seconds: Callable) -> dict[str, list[float]]:
    """Seconds of each call in each round, all taking turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            spent = seconds(call)
            if i:  # the first round warms up
                found[name].append(spent)
    return found


# -- CPU
def on_cpu(options) -> int:
    from flykernels.launch import host

    report, ratios = Report("quantize", "measured on CPU"), []

    def seconds(call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    for (m, n), (which, sides), format in product(CPU_SHAPES, ORIENTATIONS.items(), options.format):
        p = QuantizeProblem(n=n, format=format, rows=sides[0], columns=sides[1], consumer="gfx950")
        kernel = host.load(build(p, default(p, x86), x86))
        x, out = torch.randn(m, n).bfloat16(), made(p, m, "cpu")
        addresses = [x.data_ptr(), *(out[name].data_ptr() for name in outputs(p)), m, n]
        ours = lambda kernel=kernel, addresses=addresses: kernel(*addresses)
        found = turns({"torch": lambda x=x, p=p: replaced(x, p), "ours": ours}, options.rounds, seconds)
        check(p, x, out)
        ratio = statistics.median(a / b for a, b in zip(found["torch"], found["ours"], strict=True))
        ratios.append(ratio)
        us = {name: statistics.median(times) * 1e6 for name, times in found.items()}
        moved = x.nbytes + sum(t.nbytes for t in out.values())
        report.row(
            M=m, N=n, format=format, blocks=which, torch_us=us["torch"], ours_us=us["ours"],
            GBps=moved / us["ours"] / 1e3, ratio=ratio,
        )  # fmt: skip
    report.bar("least ratio to the torch expression", min(ratios), at_least=CPU_BAR)
    report.bar("geomean", geomean(ratios), at_least=CPU_BAR)
    report.note(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; bf16 input, mode floor, eager expression"
    )
    return report.close(options.json)


# -- GPU
def configurations(p: QuantizeProblem, all_of_them: bool) -> list[GpuConfig]:
    """The default first; of all of them all others begin when it does."""
    own = default(p, sm90a)
    if not all_of_them:
        return [own]
    starts = [replace(own, overlap=start) for start in ("none", "late", "early")]
    ways = [replace(config, kept=True, overlap=own.overlap) for config in ways_to_spread(p)]
    return list(dict.fromkeys([own, *starts, replace(own, kept=False), *ways]))


def ways_to_spread(p: QuantizeProblem) -> list[GpuConfig]:
    if p.rows and p.columns:
        ahead = (((4, 2), 2, 2), ((4, 2), 2, 4), ((8, 1), 2, 2), ((8, 2), 1, 2), ((4, 1), 4, 2))
        staged = product((((8, 2), 1), ((8, 1), 2), ((4, 2), 2)), (2, 4, 8))  # a third tile has no room
        found = [GpuConfig((8, 1), 4, 32, 8, 3)]
        if p.input_type.bytes == 2:
            found += [GpuConfig(w, 4, 32, 8, beside, 1, strip, True) for w, beside, strip in ahead]
            found += [GpuConfig(w, 4, 32, 8, beside, 1, s, staged=2) for (w, beside), s in staged]
        else:  # where codes are made of narrower numbers, the next tile has registers too
            ways = (False,) if p.per_byte == 1 else (False, True)
            found += [GpuConfig(w, 4, 32, 8, b, 1, s, way) for w, b, s in (*ahead, ((8, 2), 1, 4)) for way in ways]
        return found
    if p.columns:
        alone = (((8, 1), 3), ((16, 1), 2), ((4, 1), 6), ((4, 2), 4), ((8, 2), 2))
        return [GpuConfig(waves, 4, 32, 8, beside) for waves, beside in alone]
    cuts = (
        (1, 8, 4, 5),
        (1, 8, 2, 6),
        (1, 4, 4, 8),
        (2, 2, 4, 8),
        (1, 16, 2, 3),
        (1, 8, 8, 4),
        (1, 8, 4, 4),
        (1, 8, 4, 6),
    )
    return [GpuConfig((a, b), 1, 32, held, beside) for a, b, held, beside in cuts]


def in_turn(launch: Callable, addresses: list[list]) -> Callable[[], object]:
    """A launch with the next ones of the addresses every time."""
    each = cycle(addresses)
    return lambda: launch(*next(each))


def in_processes(work: list[tuple[QuantizeProblem, GpuConfig]]) -> dict[tuple, CodeObject]:
    """Each one's code object, compiled by as many processes as there are cores."""
    left = list(dict.fromkeys(work))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        return {w: CodeObject.from_bytes(made) for w, made in zip(left, pool.map(as_bytes, left), strict=True)}


def as_bytes(work: tuple) -> bytes:
    return build(*work, sm90a).to_bytes()


def on_gpu(options) -> int:
    from flykernels.launch.current import Launcher

    report = Report("quantize", "measured on H200")
    at_copy_shape: dict[tuple[str, str, str], tuple[float, dict[str, float]]] = {}
    wrong: list[str] = []

    def seconds(call) -> float:
        """Of one call among BURST in a row: what one leaves in the L2 cache to be written, it pays for itself."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        for _ in range(BURST):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / BURST

    cases = [
        (shape, which, QuantizeProblem(n=shape[1], dtype=dtype, format=format, rows=sides[0], columns=sides[1]))
        for shape in GPU_SHAPES[::-1]
        for dtype in (options.dtype if shape == COPY_SHAPE else options.dtype[:1])
        for format, (which, sides) in product(options.format, ORIENTATIONS.items())
    ]
    codes = in_processes([(p, config) for _, _, p in cases for config in configurations(p, options.sweep)])
    for (m, n), which, p in cases:
        dtype, format = p.dtype, p.format
        x = torch.randn(m, n, device="cuda").to(getattr(torch, p.input_type.torch))
        sets, copied = [made(p, m, "cuda") for _ in range(SETS)], torch.empty_like(x)
        out = sets[0]
        calls: dict[str, Callable[[], object]] = {"copy": lambda copied=copied, x=x: copied.copy_(x)}
        registers = {}
        for config in configurations(p, options.sweep):
            code = codes[p, config]
            launch = Launcher(code)
            addresses = [[x.data_ptr(), *(to[name].data_ptr() for name in outputs(p)), m, n] for to in sets]
            name = str(config)
            for t in out.values():
                t.fill_(0xA5)
            launch(*addresses[0])
            try:
                check(p, x, out)
            except AssertionError as e:
                wrong.append(f"{name}: {e}")
                continue
            calls[name] = in_turn(launch, addresses)
            registers[name] = f"{code.registers}" + (f", {code.spills} spilled" if code.spills else "")
        found = turns(calls, max(20, options.rounds), seconds)
        moved = x.nbytes + sum(t.nbytes for t in out.values())
        copy = statistics.median(found["copy"])
        ceiling = 2 * x.nbytes / copy
        parts = {name: moved / statistics.median(found[name]) / ceiling for name in registers}
        for name, part in parts.items():
            spent = statistics.median(found[name])
            report.row(
                M=m, N=n, dtype=dtype, format=format, blocks=which, config=name, registers=registers[name],
                us=spent * 1e6, TBps=moved / spent / 1e12, copy_TBps=ceiling / 1e12, part=part,
            )  # fmt: skip
        if (m, n) == COPY_SHAPE:
            at_copy_shape[dtype, format, which] = parts.get(str(default(p, sm90a)), 0.0), parts
    for (dtype, format, which), (of_default, parts) in at_copy_shape.items():
        what = f"{dtype} to {format}, {which} at {COPY_SHAPE[0]}x{COPY_SHAPE[1]}, part of the copy's rate"
        report.bar(what, of_default, at_least=COPY_BAR)
        if len(parts) > 1:
            best = max(parts, key=parts.__getitem__)
            report.bar(f"the same, best of {len(parts)}: {best}", parts[best])
    for text in wrong:
        report.note(text)
    report.bar("configurations that gave other bytes than the expression", len(wrong), at_most=0)
    report.note("Bytes moved: X once, each result once. copy: torch's copy_ of X, as many bytes read as written")
    return report.close(options.json)
